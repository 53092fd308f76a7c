"""Check `batch`: does it return the program that `jax.vmap` returns?

    prove_mapped(program, mapping, args) -> Outcome

batches a program and compares it with `jax.make_jaxpr(jax.vmap(...))` of the same program:

*   If JAX raises, ours must raise an error of the same family, and only then.
*   The same results are mapped, and all types, weak types and effects are equal.
*   If the two are equal up to the names of variables, nothing else is checked. Otherwise both are
    compiled as one program and run on distinct batch elements. Values agree up to rounding.
*   Ours moves no more bytes and, when simplified, has no more equations (`Cost`).

The mapped arguments are stacks of an example and variants of it (`stacked`).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.equivalence import equivalent
from jaxprtool.ir.program import Program, type_check
from jaxprtool.passes import Pipeline
from jaxprtool.passes.mapping.batch import Batch
from jaxprtool.passes.mapping.batch.axes import Axis
from jaxprtool.passes.mapping.batch.body import batch_body
from tests.programs.interpreter import Cond, Scan, bodies, read
from tests.programs.recorder import Event, Recording, recording
from tests.programs.values import bits_agree, first_value_difference, on_device, values_agree

#: The deliberate errors of `jax.vmap`. Ours must raise one of the same.
FAMILIES = (NotImplementedError, ValueError, TypeError)

#: Messages of `jax.vmap` when it fails because of a bug of its own: for refs of which some are
#: mapped, or along other dimensions than the first.
FAULTS = ("Triggering __jax_array__()", "Invalid shape for `")

#: The passes applied to ours before its equations are counted.
_SIMPLIFY = Pipeline.parse("simplify")

#: Primitives that move data and compute nothing.
MOVES = frozenset(["transpose", "broadcast_in_dim", "copy", "copy_p"])


@dataclass(frozen=True)
class Mapping:
    """An axis for each flat argument and result, as `jax.vmap` takes them, and the axis size."""

    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    size: int
    axis_name: Any = None

    def stack(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments for the batched program, from an example for the program."""
        pairs = zip(args, self.in_axes, strict=True)
        return [x if axis is None else stacked(x, axis, self.size) for x, axis in pairs]


@dataclass(frozen=True)
class Cost:
    """The equations at all depths, a body once per call, and the bytes that moves write."""

    equations: int
    moved: int

    def exceeds(self, other: Cost) -> bool:
        """Return True if either number is larger."""
        return self.equations > other.equations or self.moved > other.moved


@dataclass(frozen=True)
class Outcome:
    """How ours and JAX's were found to agree, and the cost of both, if both are programs.

    For `ours`, equations are counted after `batch, simplify`. Bytes, and `program`, are those after
    `batch`.
    """

    how: str
    ours: Cost | None = None
    theirs: Cost | None = None
    program: Program | None = None

    @property
    def is_worse(self) -> bool:
        """Return True if ours costs more than JAX's."""
        return self.ours is not None and self.theirs is not None and self.ours.exceeds(self.theirs)


# --- ours and JAX's -----------------------------------------------------------------------------


def flat(program: Program) -> Program:
    """Return the program with its flat arguments in a tuple and its flat results in another."""
    in_tree = jax.tree.structure((tuple(program.arg_names), {}))
    return program.replace(in_tree=in_tree, out_tree=jax.tree.structure(program.out_names))


def ours(program: Program, mapping: Mapping) -> Program:
    """Return a flat program batched by our pass."""
    return Batch(mapping.in_axes, mapping.out_axes, mapping.size, mapping.axis_name)(program)


def our_mapped_results(program: Program, mapping: Mapping) -> list[bool]:
    """Return which results depend on the mapped axis, by our analysis."""
    ndims = (len(aval.shape) for aval in program.in_avals)
    pairs = zip(mapping.in_axes, ndims, strict=True)
    dims = [None if axis is None else axis % (ndim + 1) for axis, ndim in pairs]
    axis = Axis(mapping.axis_name, mapping.size)
    with jaxcompat.axes_bound(axes_outside(program, mapping)):
        _, out_dims = batch_body(program.jaxpr, dims, axis)
    return [dim is not None for dim in out_dims]


def theirs(program: Program, mapping: Mapping) -> tuple[Program, list[bool]]:
    """Return the program of `jax.vmap` of a flat program, and which results are mapped."""
    is_mapped: list[bool] = []

    def observed(*args: Any) -> tuple[Any, ...]:
        results = jaxcompat.jaxpr_as_fun(program.jaxpr)(*args)
        is_mapped[:] = [getattr(x, "batch_dim", None) is not None for x in results]
        return tuple(results)

    mapped = jax.vmap(
        observed,
        in_axes=mapping.in_axes,
        out_axes=mapping.out_axes,
        axis_name=mapping.axis_name,
        axis_size=mapping.size,
    )
    outside = axes_outside(program, mapping)
    with jaxcompat.axes_bound(outside):
        jaxpr = jax.make_jaxpr(mapped)(*_specs(program, mapping))
    return program.replace(jaxpr=jaxpr, axis_env=outside), is_mapped


def axes_outside(program: Program, mapping: Mapping) -> tuple[tuple[Any, int], ...]:
    """Return the named axes of the program that the mapping does not bind."""
    return tuple(axis for axis in program.axis_env if axis[0] != mapping.axis_name)


def _specs(program: Program, mapping: Mapping) -> Iterator[Any]:
    for aval, axis in zip(program.in_avals, mapping.in_axes, strict=True):
        shape = list(aval.shape)
        if axis is not None:
            shape.insert(axis % (len(shape) + 1), mapping.size)
        yield jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def prove_mapped(program: Program, mapping: Mapping, args: Sequence[Any]) -> Outcome:
    """Batch a program and compare with JAX's. `args` are flat example arguments.

    Raises AssertionError with the difference. An outcome that `is_worse` does not raise.
    """
    program = flat(program)
    expected = _result(theirs, program, mapping)
    result = _result(ours, program, mapping)
    if isinstance(expected, Exception):
        return Outcome(_same_error(result, expected))
    if isinstance(result, Exception):
        raise AssertionError("raised, but jax.vmap does not") from result
    reference, expected_mapped = expected
    mapped = our_mapped_results(program, mapping)
    assert mapped == expected_mapped, f"mapped results: {mapped}, JAX's {expected_mapped}"
    type_check(result)
    how = same_programs(result, reference, mapping.stack(args))
    ours_cost = replace(cost(result.jaxpr), equations=cost(_SIMPLIFY(result).jaxpr).equations)
    return Outcome(how, ours_cost, cost(reference.jaxpr), result)


def _result(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return error


def _same_error(result: Any, expected: Exception) -> str:
    is_fault = any(text in str(expected) for text in FAULTS)
    if is_fault or not isinstance(expected, FAMILIES):
        assert not isinstance(result, Exception) or isinstance(result, JaxprToolError)
        return f"JAX fails with {type(expected).__name__}: {str(expected)[:60]}"
    family = next(kind for kind in FAMILIES if isinstance(expected, kind))
    if not isinstance(result, Exception):
        raise AssertionError(f"jax.vmap raises, ours does not: {expected!r}"[:600])
    if not isinstance(result, family):
        raise AssertionError(f"jax.vmap raises {expected!r}, ours {result!r}"[:800]) from result
    return f"raises {family.__name__}, as JAX"


# --- two programs -------------------------------------------------------------------------------


def same_programs(ours: Program, theirs: Program, args: Sequence[Any]) -> str:
    """Raise AssertionError unless two flat programs are equal. Return how this was found."""
    for what, field in (("arguments", "in_avals"), ("results", "out_avals")):
        got, expected = ([_type(aval) for aval in getattr(p, field)] for p in (ours, theirs))
        assert got == expected, f"types of the {what}: {got}, JAX's {expected}"
    got, expected = (_lasting_effects(p.jaxpr) for p in (ours, theirs))
    assert got == expected, f"effects: {got}, JAX's {expected}"
    if are_equivalent(ours.jaxpr, theirs.jaxpr):
        return "the same program"
    if theirs.axis_env:
        return "not run: axes are free"
    return _same_values(ours.jaxpr, theirs.jaxpr, args)


def _type(aval: Any) -> str:
    weak = ", weakly typed" if getattr(aval, "weak_type", False) else ""
    return f"{aval.str_short(short_dtypes=True)}{weak}"


def are_equivalent(p: Any, q: Any) -> bool:
    """Return True if two jaxprs are equal up to names. False if a custom rule cannot be read."""
    try:
        return equivalent(p, q)
    except UnsupportedError:
        return False


def _lasting_effects(jaxpr: Any) -> list[str]:
    return sorted(str(e) for e in jaxpr.effects if not jaxcompat.is_removable_effect(e))


def _same_values(ours: Any, theirs: Any, args: Sequence[Any]) -> str:
    # JAX 0.12 cannot make a ref of a constant that is not on a device.
    closed = [p.replace(consts=[*map(jnp.asarray, p.consts)]) for p in (ours, theirs)]
    functions = [jaxcompat.jaxpr_as_fun(jaxpr) for jaxpr in closed]
    if _lasting_effects(ours):
        (got, seen), (expected, seen_by_jax) = (_recorded(each, args) for each in functions)
        _same_events(seen, seen_by_jax)
    else:
        got, expected = jax.jit(lambda *xs: [function(*xs) for function in functions])(*args)
    if first_value_difference(expected, got, bits_agree) is None:
        return "the same bits"
    fault = first_value_difference(expected, got, values_agree)
    assert fault is None, f"results, JAX's before and ours after: {fault}"
    return "the same but for rounding"


def _recorded(function: Any, args: Sequence[Any]) -> tuple[list[Any], Recording]:
    # Not compiled as a whole, as XLA's CSE could change the order of callbacks.
    try:
        return _seen(function, args)
    except AttributeError:  # JAX 0.12 cannot make a ref of a literal, one operation at a time
        return _seen(jax.jit(function), args)


def _seen(function: Any, args: Sequence[Any]) -> tuple[list[Any], Recording]:
    with recording() as record:
        results = jax.block_until_ready(function(*args))
    return results, record


def _same_events(ours: Recording, theirs: Recording) -> None:
    """Compare the values of callbacks. Ordered ones must come in the same order."""
    ordered = [[event.tag for event in each.events if event.ordered] for each in (ours, theirs)]
    assert ordered[0] == ordered[1], f"ordered callbacks: {ordered[0]}, JAX's {ordered[1]}"
    values: list[dict[int, list[Any]]] = [defaultdict(list), defaultdict(list)]
    for seen, each in zip(values, (ours, theirs), strict=True):
        for event in sorted(each.events, key=_turn):
            seen[event.tag].append(event.value)
    for tag in values[0].keys() | values[1].keys():
        fault = first_value_difference(values[1][tag], values[0][tag], values_agree)
        assert fault is None, f"what callback {tag} saw, JAX's before and ours after: {fault}"
    printed = [sorted(each.printed.getvalue().splitlines()) for each in (ours, theirs)]
    assert printed[0] == printed[1], f"printed: {printed[0]}, JAX's {printed[1]}"


def _turn(event: Event) -> list[Any]:
    """Return the sort key of an event: for unordered ones their values, if comparable."""
    numbers = np.nan_to_num(event.value.astype(complex)).ravel()
    return [] if event.ordered else [*numbers.real, *numbers.imag]


# --- the cost of a program ------------------------------------------------------------------------


def cost(jaxpr: Any) -> Cost:
    """Return the cost of a jaxpr: a scan's body times its length, the largest branch of a cond."""
    equations = moved = 0
    for eqn in jaxpr.eqns:
        structured = read(eqn)
        inside = [cost(body) for body in bodies(eqn)]
        equations += 1 + sum(body.equations for body in inside)
        bytes_of = [body.moved for body in inside]
        if isinstance(structured, Cond):
            moved += max(bytes_of, default=0)
        else:
            times = structured.length if isinstance(structured, Scan) else 1
            moved += times * sum(bytes_of)
        if eqn.primitive.name in MOVES:
            moved += sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.outvars)
    return Cost(equations, moved)


# --- batch elements -------------------------------------------------------------------------------


def stacked(x: Any, axis: int, size: int) -> Any:
    """Return `size` variants of `x` along `axis`: first `x`, all distinct if the type allows it."""
    x = on_device(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = stacked(jax.random.key_data(x), axis % (x.ndim + 1), size)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    example = np.asarray(x)
    lanes = [_lane(example, k) for k in range(size)]
    if lanes:
        return on_device(np.stack(lanes, axis))
    shape = list(example.shape)
    shape.insert(axis % (example.ndim + 1), 0)
    return jnp.zeros(shape, example.dtype)


def _lane(x: np.ndarray, k: int) -> np.ndarray:
    """Return a variant of `x`: an index stays near one, a positive matrix stays positive."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return (x + np.asarray(k / 4, x.dtype)).astype(x.dtype)
    rolled = np.roll(x, k)
    if k == 0 or not np.array_equal(rolled, x):
        return rolled
    if x.dtype == bool:
        return x ^ bool(k % 2)
    return (x.astype(np.int64) + k).astype(x.dtype)


# --- choices of mappings --------------------------------------------------------------------------


def mappings(program: Program, rng: random.Random, count: int) -> list[Mapping]:
    """Yield ways to map a program: over all arguments, over one, and over some, at random axes.

    The first is over all at axis 0, the second over one argument. A result that is not mapped is
    requested as unmapped, or broadcast. If `count` is 1, one of these three is drawn.
    """
    number = len(program.in_avals)
    if count == 1:
        return [rng.choice(mappings(program, rng, 3))]
    every = Mapping((0,) * number, (0,) * len(program.out_avals), 2)
    chosen = [every] if number else [_drawn(program, rng, [])]
    while len(chosen) < count:
        picked = [rng.randrange(number)] if number else []
        if len(chosen) > 1:
            picked = [i for i in range(number) if rng.random() < 0.6]
        chosen.append(_drawn(program, rng, picked))
    return chosen


def _drawn(program: Program, rng: random.Random, picked: Sequence[int]) -> Mapping:
    """Draw a mapping of the arguments `picked`. The axes of results follow our analysis."""

    def axis(aval: Any) -> int:
        ndim = len(aval.shape)
        return rng.choice([0, ndim, -1, rng.randint(-ndim - 1, ndim)])

    size = rng.choice([2, 2, 2, 3, 3, 1, 0])
    ins = tuple(axis(a) if i in picked else None for i, a in enumerate(program.in_avals))
    outs = tuple(map(axis, program.out_avals))
    mapped = _result(our_mapped_results, program, Mapping(ins, outs, size))
    if isinstance(mapped, Exception):
        return Mapping(ins, outs, size)
    wanted = (
        out if is_mapped or rng.random() < 0.5 else None
        for out, is_mapped in zip(outs, mapped, strict=True)
    )
    return Mapping(ins, tuple(wanted), size)
