"""Proves that a masked program computes at every size what the program traced at that size does.

The arguments are padded with junk of several kinds, and so are tangents and cotangents. Programs
are run one equation at a time: sizes are arguments of a masked program, so that its equations are
compiled once for all sizes, and results do not depend on what XLA fuses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import CheckError, JaxprToolError, UnsupportedError
from jaxprtool.ir.program import Program, type_check
from jaxprtool.ir.specialization import specialized
from jaxprtool.ir.symbols import names_of
from jaxprtool.loading.trace import trace
from tests.programs.gradients import NO_DERIVATIVE
from tests.programs.interpreter import bind, evaluate
from tests.programs.recorder import recording
from tests.programs.rounding import differences_but_for_rounding
from tests.programs.symbolic import Sizes, SymbolicProgram
from tests.programs.values import bits_agree, value_difference, values_agree

#: What is in the padding.
KINDS = ("numbers", "nan", "infinite")

#: The largest size of a symbol.
BOUND = 4

#: Of a program with several symbols, so many choices of sizes are tried.
MOST_SIZES = 7

Apply = Callable[[Any, Sequence[Any]], Sequence[Any]]


def prove_masked(found: SymbolicProgram, seed: int, *, bound: int = BOUND) -> Counter[str]:
    """Return what came of a masked program at every size from 0 to a bound.

    Every third program, by the seed, is also mapped over its sizes, compiled, and masked after it
    is differentiated.

    Raises:
        AssertionError: If a value, a logical size or a derivative is wrong.
    """
    with found.setting(), recording():
        try:
            proof = _Proof(found, dict.fromkeys(found.program.symbols, bound), seed)
        except UnsupportedError as error:
            return Counter({"programs": 1, f"refused: {refusal(error)}": 1})
        outcomes = Counter({"programs": 1}) + proof.at_sizes()
        if seed % 3 == 0:
            outcomes += proof.mapped() + proof.compiled() + _derivative_first(found, seed)
    return outcomes


def refusal(error: UnsupportedError) -> str:
    """Return the reason for which a program is refused, without the place in the source."""
    return error.message.partition(": ")[2].partition(" at ")[0][:100]


def choices_of_sizes(bounds: Mapping[str, int], seed: int) -> list[dict[str, int]]:
    """Return every choice of sizes; of several symbols a sample, with the smallest and largest."""
    every = [
        dict(zip(bounds, sizes, strict=True))
        for sizes in itertools.product(*(range(n + 1) for n in bounds.values()))
    ]
    if len(bounds) == 1:
        return every
    order = np.random.RandomState(seed).permutation(len(every))
    ends = [every[0], dict(bounds)]
    return [*ends, *(every[i] for i in order if every[i] not in ends)][:MOST_SIZES]


# --- padding ------------------------------------------------------------------------------------


def padded(x: Any, shape: Sequence[int], kind: str, rng: np.random.RandomState) -> Any:
    """Return an array in the corner of a larger one that is else full of junk."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        data = padded(data, (*shape, *data.shape[x.ndim :]), kind, rng)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if tuple(shape) == x.shape:
        return x
    full = junk(tuple(shape), x.dtype, kind, rng)
    full[tuple(map(slice, x.shape))] = np.asarray(x)
    return full if x.dtype == jax.dtypes.float0 else jnp.asarray(full)


def junk(shape: tuple[int, ...], dtype: Any, kind: str, rng: np.random.RandomState) -> np.ndarray:
    """Return numbers, NaN or infinities; of integers any, the largest or the smallest."""
    if dtype in (bool, jax.dtypes.float0):
        values = rng.randint(2, size=shape) if kind == "numbers" else np.full(shape, kind == "nan")
        return values.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        low, high = (int(f(dtype)) for f in (_lowest, _highest))
        if kind == "numbers":
            return rng.randint(max(low, -9), min(high, 9) + 1, size=shape).astype(dtype)
        return np.full(shape, high if kind == "nan" else low).astype(dtype)
    parts = rng.normal(size=(2, *shape)) * 10
    if kind != "numbers":
        parts = np.where(parts < 0, -1.0, 1.0) * (np.nan if kind == "nan" else np.inf)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return (parts[0] + 1j * parts[1] if is_complex else parts[0]).astype(dtype)


def _lowest(dtype: Any) -> Any:
    return jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return jnp.iinfo(dtype).max


# --- programs -------------------------------------------------------------------------------------


class _Masked:
    """A masked program, called with flat arguments, and sizes by name."""

    def __init__(self, original: Program, bounds: Mapping[str, int]):
        options = ", ".join(f"{name}={bound}" for name, bound in bounds.items())
        made = original.apply(f"mask({options})")
        assert isinstance(made, Program)
        type_check(made)
        self.original, self.program, self.names = original, made, sorted(bounds)
        types = jax.tree.unflatten(made.in_tree, made.in_avals)
        args, kwargs = types
        sizes = args[len(args) - len(bounds) :]
        assert [f"{v.dtype}{list(v.shape)}" for v in sizes] == ["int32[]"] * len(bounds), sizes
        self.in_avals = jax.tree.leaves((args[: len(args) - len(bounds)], kwargs))

    def flat(self, args: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
        """The flat arguments of the masked program."""
        positional, keywords = jax.tree.unflatten(self.original.in_tree, list(args))
        flat: list[Any] = jax.tree.leaves(((*positional, *sizes), keywords))
        return flat

    def function(self, args: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
        return _function(self.program)(self.flat(args, sizes))

    def sizes_of(self, sizes: Sizes) -> list[np.int32]:
        return [np.int32(sizes[name]) for name in self.names]

    def split(self, outs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results, and their logical sizes; None for those that are not padded."""
        if not any(map(self.varies, self.original.out_avals)):
            assert self.program.out_tree == self.original.out_tree
            return list(outs), [None] * len(outs)
        result, sizes = jax.tree.unflatten(self.program.out_tree, outs)
        flatten = self.original.out_tree.flatten_up_to
        return flatten(result), flatten(sizes)

    def varies(self, aval: Any) -> bool:
        return not names_of(tuple(getattr(aval, "shape", ()))).isdisjoint(self.names)

    def cut(self, outs: Sequence[Any], reference: _Reference) -> list[Any]:
        """The results, cut to what their logical sizes are asserted to be."""
        found = []
        for x, sizes, aval, y in zip(
            *self.split(outs), self.original.out_avals, reference.values, strict=True
        ):
            assert (sizes is not None) == self.varies(aval), f"{aval} has the sizes {sizes}"
            if sizes is not None:
                sizes = tuple(map(int, sizes))
                assert sizes == y.shape, f"{aval} has the sizes {sizes}, at that size {y.shape}"
            found.append(_cut(x, y.shape))
        return found


def _cut(x: Any, shape: tuple[int, ...]) -> Any:
    if x.shape == shape:
        return x
    assert len(x.shape) == len(shape) and all(map(int.__ge__, x.shape, shape)), (x.shape, shape)
    is_plain = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return (np.asarray(x) if is_plain else x)[tuple(map(slice, shape))]


@dataclass(frozen=True)
class _Reference:
    """The program at some sizes, arguments, and what it computes of them."""

    sizes: dict[str, int]
    program: Program
    args: list[Any]
    values: list[Any]

    def evaluate(self, apply: Apply = bind) -> list[Any]:
        return evaluate(self.program.jaxpr, self.args, apply)


# --- derivatives ----------------------------------------------------------------------------------


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _places(program: Program) -> tuple[list[int], list[int]]:
    """Which arguments, and which results, are inexact."""
    ins, outs = (
        [i for i, aval in enumerate(avals) if _is_inexact(aval)]
        for avals in (program.in_avals, program.out_avals)
    )
    return ins, outs


def _function(program: Program) -> Callable[[Sequence[Any]], list[Any]]:
    """A program as a function of the list of its flat arguments."""
    return lambda args: list(jaxcompat.jaxpr_as_fun(program.jaxpr)(*args))


@dataclass(frozen=True)
class _Derivative:
    """A derivative of a function of flat arguments and results, along given directions.

    In reverse mode directions are those of the inexact results, and there is a value for each
    inexact argument; forwards the other way round.
    """

    mode: str
    at: list[int]
    outs: list[int]

    def __call__(
        self, function: Callable[..., list[Any]], args: list[Any], directions: list[Any]
    ) -> list[Any]:
        def restricted(*xs: Any) -> list[Any]:
            full = list(args)
            for i, x in zip(self.at, xs, strict=True):
                full[i] = x
            results = function(full)
            return [jnp.asarray(results[i]) for i in self.outs]

        primals = [jnp.asarray(args[i]) for i in self.at]
        if self.mode == "reverse":
            return list(jax.vjp(restricted, *primals)[1](directions))
        return list(jax.jvp(restricted, primals, directions)[1])

    def directed(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The values that have a direction."""
        reverse = self.mode == "reverse"
        return [(results if reverse else args)[i] for i in (self.outs if reverse else self.at)]

    def derived(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The values that there is a derivative for."""
        return _Derivative(_OTHER[self.mode], self.at, self.outs).directed(args, results)


_OTHER = {"reverse": "forward", "forward": "reverse"}


def _direction(x: Any, rng: np.random.RandomState) -> Any:
    value = rng.uniform(0.5, 1.5, x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        value = value + 1j * rng.uniform(0.5, 1.5, x.shape)
    return jnp.asarray(value, x.dtype)


# --- the proof ------------------------------------------------------------------------------------


class _Proof:
    """A program, masked, and what it is at sizes up to the bounds."""

    def __init__(self, found: SymbolicProgram, bounds: Mapping[str, int], seed: int):
        self.found, self.bounds, self.seed = found, bounds, seed
        self.rng = np.random.RandomState(seed)
        self.masked = _Masked(found.program, bounds)
        self.outcomes: Counter[str] = Counter()

    @cached_property
    def references(self) -> list[_Reference]:
        return list(self._references())

    def _references(self) -> Iterator[_Reference]:
        for sizes in choices_of_sizes(self.bounds, self.seed):
            program = self._program_at(sizes)
            if program is not None:
                args = [jnp.asarray(x) for x in self.found.arguments(sizes)]
                values = [jnp.asarray(x) for x in evaluate(program.jaxpr, args)]
                yield _Reference(sizes, program, args, values)

    def _program_at(self, sizes: Sizes) -> Program | None:
        """The program traced at sizes, or specialized where JAX traces something else for 0."""
        if all(sizes.values()):
            try:
                return self.found.traced_at(sizes)
            except JaxprToolError:
                self.outcomes["not traced at that size"] += 1
                return None
        program = self.found.program
        try:
            program = program.replace(jaxpr=specialized(program.jaxpr, sizes))
            type_check(program)
        except (UnsupportedError, CheckError, ZeroDivisionError):
            self.outcomes["not defined at size 0"] += 1
            return None
        return program

    def at_sizes(self) -> Counter[str]:
        """Compare values, logical sizes and derivatives at all sizes."""
        self.compare_values()
        self.outcomes[self._derivatives()] += 1
        return self.outcomes

    def compare_values(self) -> None:
        """Compare values and logical sizes at all sizes."""
        for reference in self.references:
            self.outcomes["sizes"] += 1
            for kind in KINDS:
                args, sizes = self._padded(reference, kind)
                outs = evaluate(self.masked.program.jaxpr, self.masked.flat(args, sizes))
                how = self._same(f"padded with {kind}", reference, outs)
                self.outcomes[how] += 1

    def _padded(self, reference: _Reference, kind: str) -> tuple[list[Any], list[np.int32]]:
        avals = self.masked.in_avals
        pairs = zip(reference.args, avals, strict=True)
        args = [padded(x, aval.shape, kind, self.rng) for x, aval in pairs]
        return args, self.masked.sizes_of(reference.sizes)

    def _same(self, what: str, reference: _Reference, outs: Sequence[Any]) -> str:
        try:
            return _compare(reference.evaluate, reference.values, self.masked.cut(outs, reference))
        except AssertionError as error:
            raise AssertionError(f"at {reference.sizes}, {what}: {error}") from None

    # --- derivatives ------------------------------------------------------------------------------

    def _derivatives(self) -> str:
        """Compare derivatives in one mode; returns which, or that there is none."""
        at, outs = _places(self.found.program)
        if not (at and outs and self.references):
            return "nothing to differentiate"
        for mode in ("reverse", "forward"):
            derivative = _Derivative(mode, at, outs)
            if self._same_derivative(derivative):
                return mode
        return "not differentiable"

    def _same_derivative(self, derivative: _Derivative) -> bool:
        jaxpr: Any = None
        for reference in self.references:
            rng = np.random.RandomState(self.seed)
            directed = derivative.directed(reference.args, reference.values)
            directions = [_direction(x, rng) for x in directed]
            given = reference.args, directions
            try:
                expected = jax.make_jaxpr(
                    lambda args, vs, p=reference.program: derivative(
                        _function(p), args, vs
                    )
                )(*given)
            except NO_DERIVATIVE:
                return False
            flat = jax.tree.leaves(given)
            for kind in KINDS:
                args, sizes = self._padded(reference, kind)
                avals = derivative.directed(self.masked.in_avals, self._result_avals())
                pairs = zip(directions, avals, strict=True)
                junky = [padded(x, aval.shape, kind, self.rng) for x, aval in pairs]
                if jaxpr is None:
                    jaxpr = self._derivative_of_masked(derivative, args, sizes, junky)
                got = evaluate(jaxpr, jax.tree.leaves((args, sizes, junky)))
                shapes = derivative.derived(reference.args, reference.values)
                got = [_cut(x, y.shape) for x, y in zip(got, shapes, strict=True)]

                def again(apply: Apply = bind, expected: Any = expected, flat: Any = flat) -> Any:
                    return evaluate(expected, flat, apply)

                try:
                    _compare(again, again(), got)
                except AssertionError as error:
                    where = f"{derivative.mode} derivative, at {reference.sizes}, padded with {kind}"
                    raise AssertionError(f"{where}: {error}") from None
        return True

    def _result_avals(self) -> list[Any]:
        return self.masked.split(self.masked.program.out_avals)[0]

    def _derivative_of_masked(self, derivative: _Derivative, *given: Any) -> Any:
        def of_masked(args: Any, sizes: Any, directions: Any) -> list[Any]:
            def function(xs: Any) -> list[Any]:
                return self.masked.split(self.masked.function(xs, sizes))[0]

            return derivative(function, args, directions)

        return jax.make_jaxpr(of_masked)(*given)

    # --- in other orders --------------------------------------------------------------------------

    def mapped(self) -> Counter[str]:
        """Compare the lanes of the masked program mapped over sizes."""
        if not self.references or jaxcompat.open_jaxpr(self.masked.program.jaxpr).effects:
            return Counter()
        lanes = [self._padded(reference, "nan") for reference in self.references]
        stacked = [_stacked(each) for each in zip(*(self.masked.flat(*x) for x in lanes))]
        try:
            function = jax.vmap(jaxcompat.jaxpr_as_fun(self.masked.program.jaxpr))
            jaxpr = jax.make_jaxpr(function)(*stacked)
        except NO_DERIVATIVE:  # nor has JAX a rule to map some
            return Counter({"not mapped": 1})
        outs = evaluate(jaxpr, stacked)
        for i, reference in enumerate(self.references):
            self._same("mapped", reference, [x[i] for x in outs])
        return Counter({"mapped": 1})

    def compiled(self) -> Counter[str]:
        """Compare one size with the masked program compiled as a whole."""
        if not self.references:
            return Counter()
        reference = self.references[self.seed % len(self.references)]
        args, sizes = self._padded(reference, "infinite")
        jitted = jax.jit(jaxcompat.jaxpr_as_fun(self.masked.program.jaxpr))
        self._same("compiled", reference, jitted(*self.masked.flat(args, sizes)))
        return Counter({"compiled": 1})


def _stacked(rows: Sequence[Any]) -> Any:
    if jnp.issubdtype(rows[0].dtype, jax.dtypes.extended):
        return jnp.stack(rows)
    return jnp.asarray(np.stack(list(map(np.asarray, rows))))


def _compare(again: Callable[..., list[Any]], before: Sequence[Any], after: Sequence[Any]) -> str:
    """Return "exact" or "to rounding"; `again` gives the values before by a way to round."""
    pairs = list(zip(before, after, strict=True))
    if all(value_difference("", a, b, bits_agree) is None for a, b in pairs):
        return "exact"
    faults = [value_difference(f"value {i}", a, b, values_agree) for i, (a, b) in enumerate(pairs)]
    inexact = [i for i, (a, _) in enumerate(pairs) if _is_inexact(a)]
    wrong = [i for i, fault in enumerate(faults) if fault is not None]
    if wrong and set(wrong) <= set(inexact):
        far = differences_but_for_rounding(
            lambda apply: [again(apply)[i] for i in wrong], *zip(*(pairs[i] for i in wrong))
        )
        wrong = [wrong[i] for i in far]
    for i in wrong:
        fault = faults[i]
        details = "".join(f", {name} {text}" for name, text in fault.details) if fault else ""
        raise AssertionError(f"{fault}{details}")
    return "to rounding"


# --- masked after it is differentiated ------------------------------------------------------------


def _derivative_first(found: SymbolicProgram, seed: int) -> Counter[str]:
    """What comes of the program of a derivative, masked, where JAX can trace it with symbols."""
    derivative = _Derivative("reverse", *_places(found.program))
    if not (derivative.at and derivative.outs):
        return Counter()

    def arguments(sizes: Sizes) -> list[Any]:
        avals = derivative.directed([], found.traced_at(sizes).out_avals)
        rng = np.random.RandomState(seed)
        return [*found.arguments(sizes), *(_direction(aval, rng) for aval in avals)]

    try:
        derived = replace(
            found,
            program=_traced(derivative, found.program),
            traced_at=lambda sizes: _traced(derivative, found.traced_at(sizes)),
            arguments=arguments,
        )
        proof = _Proof(derived, dict.fromkeys(derived.program.symbols, BOUND), seed)
    except UnsupportedError as error:
        return Counter({f"derivative refused: {refusal(error)}": 1})
    except JaxprToolError:
        return Counter({"derivative not traced with symbols": 1})
    try:
        proof.compare_values()
    except AssertionError as error:
        raise AssertionError(f"differentiated, then masked: {error}") from None
    return Counter({"derivative masked": 1})


def _traced(derivative: _Derivative, program: Program) -> Program:
    """The program of a derivative: of flat arguments and directions."""

    def differentiated(args: list[Any], directions: list[Any]) -> list[Any]:
        return derivative(_function(program), args, directions)

    directed = derivative.directed(program.in_avals, program.out_avals)
    return trace(differentiated, *(list(map(_struct, each)) for each in (program.in_avals, directed)))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
