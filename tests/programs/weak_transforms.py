"""Compare the weak types of results and gradients in transformations with JAX's.

Each proof makes a program by a pass and compares the weak types of its results, and of the
gradients by its arguments, with those of the reference: `jax.vmap` of the program, JAX's
derivatives, the program at its sizes, or the program before unzip. The types that a program
declares must be those that JAX's evaluator traces.

JAX's transposes of slices, pads and gathers return strongly typed gradients by weakly typed arrays.
A pass may look rows up differently, so a gradient may also be as weakly typed as its argument.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError, UnsupportedError
from jaxprtool.ir.program import Program, type_check
from jaxprtool.loading.trace import trace
from jaxprtool.passes import Pipeline
from jaxprtool.passes.mapping.batch import Batch, Tile
from jaxprtool.passes.mapping.mask import Mask
from jaxprtool.passes.mapping.ragged import RaggedBatch
from jaxprtool.passes.unzip import Unzip
from jaxprtool.sizes.mask import Specialize
from tests.programs.case import Case
from tests.programs.gradients import NO_DERIVATIVE, NO_DERIVATIVE_OF_REFS
from tests.programs.mapped import flat, mappings, ours, theirs
from tests.programs.sowing import sown
from tests.programs.symbolic import SymbolicProgram
from tests.programs.weakening import inexact, is_weak, weak_gradients, weak_results

#: The bound of each symbol, and the number of examples of other lengths.
BOUND = 4
LANES = 4

#: JAX's errors if it has no such program. A rule for an axis of size 0 raises IndexError.
REFUSED = (*NO_DERIVATIVE, *NO_DERIVATIVE_OF_REFS, JaxprToolError, IndexError)

Proof = Callable[[Case, random.Random], Counter[str]]


def _types(avals: Sequence[Any]) -> list[str]:
    return ["~" * is_weak(aval) + aval.str_short(short_dtypes=True) for aval in avals]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval))


def _check_declared(program: Program, what: str) -> None:
    type_check(program)
    declared, traced = [*map(is_weak, program.out_avals)], weak_results(program)
    assert declared == traced, f"{what}: results are declared {declared}, and are {traced}"


def _check_gradients(after: Program, before: Program, what: str, skipped: int = 0) -> str:
    """Compare the gradients by all inexact arguments of `after` except the first ones."""
    wanted, found = weak_gradients(before), weak_gradients(after)
    if wanted is None or found is None:
        return "no gradients"
    own = [is_weak(aval) for aval in after.in_avals if inexact(aval)]
    for i, (new, old, of_argument) in enumerate(
        zip(found[skipped:], wanted, own[skipped:], strict=True)
    ):
        assert new in (old, of_argument), f"{what}: gradient {i} is {new}, JAX's {old}"
    return "gradients"


# --- batch ----------------------------------------------------------------------------------------


def prove_batch(case: Case, rng: random.Random) -> Counter[str]:
    """Compare a program, mapped in two ways and by chunks, with `jax.vmap` of it."""
    outcomes: Counter[str] = Counter()
    with case.setting():
        program = flat(case.program())
        for mapping in mappings(program, rng, 2):
            try:
                expected, _ = theirs(program, mapping)
            except REFUSED:
                continue
            outcomes += _check_mapped("batch", ours(program, mapping), expected)
            options = mapping.in_axes, mapping.out_axes, mapping.size
            try:
                made = Batch(*options, chunk=1)(program)
            except JaxprToolError:
                continue
            outcomes += _check_mapped("chunk", made, expected)
    return outcomes


def _check_mapped(what: str, made: Program, expected: Program) -> Counter[str]:
    _check_declared(made, what)
    found, wanted = _types(made.out_avals), _types(expected.out_avals)
    assert found == wanted, f"{what}: {found}, JAX's {wanted}"
    return Counter({what: 1, f"{what}: {_check_gradients(made, expected, what)}": 1})


def prove_tile(case: Case, rng: random.Random) -> Counter[str]:
    """Compare a program tiled along first axes with `jax.vmap` between reshapes."""
    with case.setting():
        program = flat(case.program())
        pairs = program.in_avals, program.out_avals
        in_axes, out_axes = (tuple(0 if a.shape else None for a in avals) for avals in pairs)

        def tiled(*args: Any) -> list[Any]:
            cut = [x if axis is None else _tiles(x) for x, axis in zip(args, in_axes, strict=True)]
            outs = jax.vmap(_function(program), in_axes, out_axes)(*cut)
            pairs = zip(outs, out_axes, strict=True)
            return [x if axis is None else lax.collapse(x, 0, 2) for x, axis in pairs]

        try:
            made = Tile(_TILES, None, in_axes, out_axes)(program)
            expected = trace(tiled, *_args(made))
        except REFUSED:
            return Counter({"refused": 1})
        return _check_mapped("tile", made, expected)


_TILES = 3


def _tiles(x: Any) -> Any:
    return lax.reshape(x, (_TILES, x.shape[0] // _TILES, *x.shape[1:]))


# --- derivatives ----------------------------------------------------------------------------------


def prove_derivatives(case: Case, rng: random.Random) -> Counter[str]:
    """Compare derivatives by passes with those by JAX's functions."""
    outcomes: Counter[str] = Counter()
    with case.setting():
        program = flat(case.program())
        for name, (pipelines, derivative) in _DERIVATIVES.items():
            try:
                types = _tangents(program, name)
                expected = trace(derivative(_function(program)), _args(program), types)
            except REFUSED:
                continue
            if _runs_no_more(expected):
                continue
            for text in pipelines:
                found = _results(Pipeline.parse(text)(program), len(program.out_avals))
                wanted = _types(expected.out_avals)
                assert found == wanted[-len(found) :], f"{text}: {found}, JAX's {wanted}"
                outcomes[text] += 1
    return outcomes


def _function(program: Program) -> Callable[..., tuple[Any, ...]]:
    return lambda *args: tuple(jaxcompat.jaxpr_as_fun(program.jaxpr)(*args))


def _args(program: Program) -> tuple[Any, ...]:
    return tuple(map(_struct, program.in_avals))


def _tangents(program: Program, name: str) -> tuple[Any, ...]:
    if name == "vjp":
        return tuple(_struct(aval.to_ct_aval()) for aval in program.out_avals)
    tangents = tuple(_struct(aval.to_tangent_aval()) for aval in program.in_avals)
    if name != "transpose":
        return tangents
    # The linear function may return weakly typed tangents of strongly typed results.
    pushed = trace(_linearize(_function(program)), _args(program), tangents).out_avals
    return tuple(map(_struct, pushed[len(program.out_avals) :]))


def _vjp(function: Any) -> Any:
    def both(args: Any, cotangents: Any) -> Any:
        out, pull = jax.vjp(function, *args)
        return out, pull(cotangents)

    return both


def _linearize(function: Any) -> Any:
    def both(args: Any, tangents: Any) -> Any:
        out, push = jax.linearize(function, *args)
        return out, push(*tangents)

    return both


def _transpose(function: Any) -> Any:
    def both(args: Any, cotangents: Any) -> Any:
        tangents = [_struct(jax.typeof(x).to_tangent_aval()) for x in args]
        out, push = jax.linearize(function, *args)
        return out, jax.linear_transpose(push, *tangents)(cotangents)

    return both


_DERIVATIVES: dict[str, tuple[tuple[str, ...], Any]] = {
    "jvp": (("jvp",), lambda f: lambda primals, tangents: jax.jvp(f, primals, tangents)),
    "linearize": (("linearize",), _linearize),
    "vjp": (("vjp",), _vjp),
    "transpose": (("linearize, backward.linear_transpose(argnums=1)",), _transpose),
}


def _results(made: Any, count: int) -> list[str]:
    """Return the types of the results of a derivative, or of both halves without residuals."""
    if isinstance(made, Program):
        _check_declared(made, made.name)
        return _types(made.out_avals)
    for half in made.values():
        _check_declared(half, half.name)
    return _types([*made["forward"].out_avals[:count], *made["backward"].out_avals])


def _runs_no_more(program: Program) -> bool:
    """Return True for forward mode of a custom_vjp function, which JAX can only trace."""
    return any(eqn.primitive.name == "custom_lin" for eqn in program.jaxpr.eqns)


# --- sizes ----------------------------------------------------------------------------------------


def prove_sizes(found: SymbolicProgram) -> Counter[str]:
    """Compare a program with symbols, specialized, masked and ragged, with that traced at sizes."""
    outcomes: Counter[str] = Counter()
    with found.setting():
        program = found.program
        for sizes in found.choices[:2]:
            try:
                expected = found.traced_at(sizes)
            except JaxprToolError:
                continue
            made = Specialize(dict(sizes))(program)
            outcomes += _check_sized("specialize", made, made.out_avals, expected)
        try:
            made = Mask(dict.fromkeys(program.symbols, BOUND))(program)
        except (UnsupportedError, ArgumentsError):
            outcomes["mask refused"] += 1
        else:
            outs = jax.tree.unflatten(made.out_tree, made.out_avals)
            outs = outs if made.out_tree == program.out_tree else outs[0]
            outcomes += _check_sized("mask", made, jax.tree.leaves(outs), program)
        for name in program.symbols:
            for layout in (None, "packed", "padded"):
                try:
                    made = RaggedBatch(name, LANES, layout, BOUND)(program)
                except JaxprToolError:
                    outcomes["ragged refused"] += 1
                    continue
                outcomes += _check_sized("ragged", made, made.out_avals, program)
    return outcomes


def _check_sized(what: str, made: Program, outs: Any, expected: Program) -> Counter[str]:
    _check_declared(made, what)
    results, wanted = ([*map(is_weak, avals)] for avals in (outs, expected.out_avals))
    assert results == wanted, f"{what}: results are {results}, JAX's {wanted}"
    return Counter({what: 1, f"{what}: {_gradients_at_sizes(made, expected, what)}": 1})


def _gradients_at_sizes(made: Program, expected: Program, what: str) -> str:
    try:
        return _check_gradients(made, expected, what)
    except jax.errors.InconclusiveDimensionOperation:
        return "no gradients with symbols"


# --- unzip ----------------------------------------------------------------------------------------


def prove_unzip(case: Case, rng: random.Random, key_args: Callable[..., Any]) -> Counter[str]:
    """Compare the programs by `unzip`, of a program with sown values, with that program."""
    with case.setting():
        program = case.program()
        if not program.in_avals:
            return Counter({"no arguments": 1})
        keys, early = key_args(program, rng)
        program = sown(program, early, rng)
        try:
            unzipped = Unzip(key_args=tuple(keys))(program)
        except UnsupportedError:
            return Counter({"refused": 1})
        init, apply = unzipped["init"], unzipped["apply"]
        for half in unzipped.values():
            _check_declared(half, half.name)
        count = len(init.out_avals)
        pairs = (init.out_avals, apply.in_avals[:count]), (program.out_avals, apply.out_avals)
        for before, after in pairs:
            assert _types(before) == _types(after), f"{_types(before)}, {_types(after)} after"
        return Counter({"unzip": 1, _late_gradients(program, apply, early, count): 1})


def _late_gradients(program: Program, apply: Program, early: Sequence[int], count: int) -> str:
    """Compare the gradients by the arguments that both programs have."""
    wanted, found = weak_gradients(program), weak_gradients(apply)
    if wanted is None or found is None:
        return "no gradients"
    at = [i for i, aval in enumerate(program.in_avals) if inexact(aval)]
    before = [weak for i, weak in zip(at, wanted, strict=True) if i not in early]
    after = found[sum(map(inexact, apply.in_avals[:count])) :]
    assert before == after, f"unzip: gradients are {after}, {before} before"
    return "unzip: gradients"
