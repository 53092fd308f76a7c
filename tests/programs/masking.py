"""Checks that a masked program equals, at every size, the program traced at that size.

Padding of the arguments, tangents and cotangents is filled with several kinds of junk. Programs run
one equation at a time, so that results do not depend on XLA's fusion, in StableHLO's reference
interpreter, which does not compile each equation for each size. XLA compiles and runs every third
masked program as a whole.
"""

from __future__ import annotations

import itertools
import re
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
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program, type_check
from jaxprtool.ir.specialization import specialized
from jaxprtool.ir.symbols import names_of, value_of
from jaxprtool.loading.trace import trace
from jaxprtool.passes.mapping.mask import Mask
from tests.programs.directions import (
    Derivative,
    SecondDerivative,
    function_of,
    is_inexact,
    places,
    random_direction,
)
from tests.programs.gradients import NO_DERIVATIVE, NO_DERIVATIVE_OF_REFS, has_refs
from tests.programs.interpreter import evaluate
from tests.programs.padding import KINDS, cut, padded, with_specials
from tests.programs.promises import NOT_AS_PROMISED, keeps_promises
from tests.programs.recorder import recording
from tests.programs.rounding import differences_but_for_rounding
from tests.programs.stepwise import interpret
from tests.programs.symbolic import Sizes, SymbolicProgram
from tests.programs.values import bits_agree, on_host, value_difference, values_agree

#: The largest size of a symbol.
BOUND = 4

#: The number of size choices for a program with several symbols.
MOST_SIZES = 7

#: XLA's errors for sizes that JAX has not checked, such as those of a `reduce` of several, and
#: JAX's for programs that it can trace but not lower, such as derivatives of the largest complex
#: number.
NOT_RUN = (TypeError, ValueError, jax.errors.JaxRuntimeError)

_MEETS_PADDING = ("conv_general_dilated", "cumlogsumexp", "triangular_solve")

Apply = Callable[[Any, Sequence[Any]], Sequence[Any]]


def prove_masked(found: SymbolicProgram, seed: int, *, bound: int = BOUND) -> Counter[str]:
    """Return the outcome for a masked program at every size from 0 to a bound.

    Every third program, by the seed, is also mapped over its sizes, compiled, and masked after
    differentiation.

    Raises:
        AssertionError: If a value, a logical size or a derivative is wrong.
    """
    with found.setting(), recording():
        try:
            proof = _Proof(found, dict.fromkeys(found.program.symbols, bound), seed)
        except UnsupportedError as error:
            return Counter({"programs": 1, f"refused: {refusal(error)}": 1})
        outcomes = Counter({"programs": 1}) + proof.at_sizes()
        if proof.is_thorough:
            outcomes += proof.mapped() + proof.compiled() + _derivative_first(found, seed)
    return outcomes


def refusal(error: UnsupportedError) -> str:
    """Return the reason why a program is refused, without the source location."""
    text = re.sub(r" at \S+:\d+", "", error.message.partition(": ")[2] or error.message)
    return re.sub(r"\b\d+\b", "N", text)[:120]


def choices_of_sizes(bounds: Mapping[str, int], seed: int) -> list[dict[str, int]]:
    """Return every choice of sizes, or a sample with the smallest and largest if there are many."""
    every = [
        dict(zip(bounds, sizes, strict=True))
        for sizes in itertools.product(*(range(n + 1) for n in bounds.values()))
    ]
    if len(bounds) == 1:
        return every
    order = np.random.RandomState(seed).permutation(len(every))
    ends = [every[0], dict(bounds)]
    return [*ends, *(every[i] for i in order if every[i] not in ends)][:MOST_SIZES]


def count_masks(program: Program) -> int:
    """Count the `select_n` of a program, at all depths, that choose between two values.

    A select of a value and the same value under stop_gradient is not counted, as XLA removes it.
    """
    found = 0
    stopped: dict[int, Any] = {}
    for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr)):
        if eqn.primitive.name == "stop_gradient":
            stopped[id(eqn.outvars[0])] = eqn.invars[0]
        elif eqn.primitive.name == "select_n":
            found += len({id(stopped.get(id(x), x)) for x in eqn.invars[1:]}) > 1
    return found


# --- programs -------------------------------------------------------------------------------------


class _Masked:
    """A masked program, called with flat arguments, and sizes by name."""

    def __init__(self, original: Program, bounds: Mapping[str, int]):
        made = Mask(dict(bounds))(original)
        type_check(made)
        self.original, self.program, self.names = original, made, sorted(bounds)
        types = jax.tree.unflatten(made.in_tree, made.in_avals)
        args, kwargs = types
        sizes = args[len(args) - len(bounds) :]
        assert [f"{v.dtype}{list(v.shape)}" for v in sizes] == ["int32[]"] * len(bounds), sizes
        self.in_avals = jax.tree.leaves((args[: len(args) - len(bounds)], kwargs))

    def flat(self, args: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
        """Return the flat arguments of the masked program."""
        positional, keywords = jax.tree.unflatten(self.original.in_tree, list(args))
        flat: list[Any] = jax.tree.leaves(((*positional, *sizes), keywords))
        return flat

    def function(self, args: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
        return function_of(self.program)(self.flat(args, sizes))

    def sizes_of(self, sizes: Sizes) -> list[np.int32]:
        return [np.int32(sizes[name]) for name in self.names]

    def split(self, outs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results, and their logical sizes. None for those that are not padded."""
        if not any(map(self.varies, self.original.out_avals)):
            assert self.program.out_tree == self.original.out_tree
            return list(outs), [None] * len(outs)
        result, sizes = jax.tree.unflatten(self.program.out_tree, outs)
        flatten = self.original.out_tree.flatten_up_to
        return flatten(result), flatten(sizes)

    def varies(self, aval: Any) -> bool:
        return not names_of(tuple(getattr(aval, "shape", ()))).isdisjoint(self.names)

    def cut(self, outs: Sequence[Any], reference: _Reference) -> list[Any]:
        """Return the results, cut to their logical sizes, which are checked."""
        found = []
        for x, sizes, aval, y in zip(
            *self.split(outs), self.original.out_avals, reference.values, strict=True
        ):
            assert (sizes is not None) == self.varies(aval), f"{aval} has the sizes {sizes}"
            if sizes is not None:
                sizes = tuple(map(int, sizes))
                assert sizes == y.shape, f"{aval} has the sizes {sizes}, at that size {y.shape}"
            found.append(cut(x, y.shape))
        return found


@dataclass(frozen=True)
class _Reference:
    """The program at some sizes, its arguments, and their results."""

    sizes: dict[str, int]
    program: Program
    args: list[Any]
    values: list[Any]

    @property
    def has_empty_convolution(self) -> bool:
        """Return True if the result of some convolution is empty.

        JAX then takes the derivative by its kernel to be constant. A masked program cannot: the
        second derivative is NaN if the mean of no elements follows, as it is with a `dot_general`
        in place of the convolution.
        """
        return any(
            eqn.primitive.name == "conv_general_dilated" and 0 in eqn.outvars[0].aval.shape
            for eqn in equations(jaxcompat.open_jaxpr(self.program.jaxpr))
        )

    def evaluate(self, apply: Apply = interpret) -> list[Any]:
        return evaluate(self.program.jaxpr, self.args, apply)


# --- the proof ------------------------------------------------------------------------------------


class _Proof:
    """A program, masked, and its references at sizes up to the bounds."""

    def __init__(self, found: SymbolicProgram, bounds: Mapping[str, int], seed: int):
        self.found, self.bounds, self.seed = found, bounds, seed
        self.rng = np.random.RandomState(seed)
        self.masked = _Masked(found.program, bounds)
        self.outcomes: Counter[str] = Counter()

    @property
    def is_thorough(self) -> bool:
        return self.seed % 3 == 0

    @property
    def no_derivative(self) -> tuple[type[Exception], ...]:
        """Return the errors that JAX may raise if there is no derivative."""
        refs = has_refs(self.found.program.jaxpr)
        return NO_DERIVATIVE + (NO_DERIVATIVE_OF_REFS if refs else ())

    @property
    def _has_effects(self) -> bool:
        return bool(jaxcompat.open_jaxpr(self.masked.program.jaxpr).effects)

    @property
    def _takes_no_specials(self) -> bool:
        """Return True if infinite values meet padding in an equation where results may differ.

        XLA may or may not multiply them by the zeros that pad a convolution, or by those of an
        identity in a triangular solve, depending on its blocks. A `cumlogsumexp` has no derivative
        there with several rows, but has one with a single row.
        """
        eqns = equations(jaxcompat.open_jaxpr(self.found.program.jaxpr))
        return any(eqn.primitive.name in _MEETS_PADDING for eqn in eqns)

    @cached_property
    def references(self) -> list[_Reference]:
        return list(self._references())

    def _references(self) -> Iterator[_Reference]:
        for i, sizes in enumerate(choices_of_sizes(self.bounds, self.seed)):
            program = self._program_at(sizes)
            if program is None:
                continue
            args = [on_host(x) for x in self.found.arguments(sizes)]
            if i % 2 and not self._takes_no_specials:
                args = [with_specials(x, self.rng) for x in args]
            try:
                values = [on_host(x) for x in evaluate(program.jaxpr, args, interpret)]
            except NOT_RUN:
                self.outcomes["not run at that size"] += 1
                continue
            if not keeps_promises(self.found.program, sizes, args):
                self.outcomes[NOT_AS_PROMISED] += 1
                continue
            yield _Reference(sizes, program, args, values)

    def _program_at(self, sizes: Sizes) -> Program | None:
        """Return the program traced at sizes, or specialized if JAX traces size 0 differently."""
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
                flat = self.masked.flat(args, sizes)
                outs = evaluate(self.masked.program.jaxpr, flat, interpret)
                how = self._same(f"padded with {kind}", reference, outs)
                self.outcomes[how] += 1

    def _padded(self, reference: _Reference, kind: str) -> tuple[list[Any], list[np.int32]]:
        avals = self.masked.in_avals
        pairs = zip(reference.args, avals, strict=True)
        args = [padded(x, aval.shape, kind, self.rng) for x, aval in pairs]
        return args, self.masked.sizes_of(reference.sizes)

    def _same(self, what: str, reference: _Reference, outs: Sequence[Any]) -> str:
        try:
            return compare(reference.evaluate, reference.values, self.masked.cut(outs, reference))
        except AssertionError as error:
            raise AssertionError(f"at {reference.sizes}, {what}: {error}") from None

    # --- derivatives ------------------------------------------------------------------------------

    def _derivatives(self) -> str:
        """Compare derivatives in one mode. Return the mode, or why there is none."""
        at, outs = places(self.found.program)
        if not (at and outs and self.references):
            return "nothing to differentiate"
        if self._same_derivative(Derivative("reverse", at, outs)):
            if self.seed % 3 == 1 and self._same_derivative(SecondDerivative("second", at, outs)):
                return "reverse, twice"
            return "reverse"
        if self._same_derivative(Derivative("forward", at, outs)):
            return "forward"
        return "not differentiable"

    def _same_derivative(self, derivative: Derivative) -> bool:
        """Compare derivatives at all sizes, and mapped over them. Return False if there is none."""
        lanes, checks, of_masked = [], [], None
        # Largest first: at sizes 0 and 1 there may be a derivative that other sizes lack.
        for reference in sorted(self.references, key=lambda each: -sum(each.sizes.values())):
            if derivative.mode == "second" and reference.has_empty_convolution:
                self.outcomes["no second derivative of an empty convolution"] += 1
                continue
            rng = np.random.RandomState(self.seed)
            directed = derivative.directed(reference.args, reference.values)
            directions = [random_direction(x, rng) for x in directed]
            try:
                check = _DerivativeCheck(derivative, reference, directions)
            except self.no_derivative:
                return False
            for kind in KINDS:
                given = (*self._padded(reference, kind), self._junky(derivative, directions, kind))
                if of_masked is None:
                    of_masked = jax.make_jaxpr(self._of_masked(derivative))(*given)
                flat = jax.tree.leaves(given)
                check(f"padded with {kind}", evaluate(of_masked, flat, interpret))
            lanes.append(jax.tree.leaves(given))
            checks.append(check)
        if self.is_thorough and not self._has_effects:
            stacked = list(map(_stacked, zip(*lanes, strict=True)))
            mapped = jax.make_jaxpr(jax.vmap(jaxcompat.jaxpr_as_fun(of_masked)))(*stacked)
            outs = evaluate(mapped, stacked, interpret)
            for i, check in enumerate(checks):
                check("mapped", [x[i] for x in outs])
        return True

    def _junky(self, derivative: Derivative, directions: Sequence[Any], kind: str) -> list[Any]:
        avals = derivative.directed(self.masked.in_avals, self._result_avals())
        pairs = zip(directions, avals, strict=True)
        return [padded(x, aval.shape, kind, self.rng) for x, aval in pairs]

    def _result_avals(self) -> list[Any]:
        return self.masked.split(self.masked.program.out_avals)[0]

    def _of_masked(self, derivative: Derivative) -> Callable[..., list[Any]]:
        def of_masked(args: Any, sizes: Any, directions: Any) -> list[Any]:
            def function(xs: Any) -> list[Any]:
                return self.masked.split(self.masked.function(xs, sizes))[0]

            return derivative(function, args, directions)

        return of_masked

    # --- other ways to run it ---------------------------------------------------------------------

    def mapped(self) -> Counter[str]:
        """Compare the batch elements of the masked program mapped over sizes."""
        if not self.references or self._has_effects:
            return Counter()
        lanes = [self._padded(reference, "nan") for reference in self.references]
        stacked = [
            _stacked(each) for each in zip(*(self.masked.flat(*x) for x in lanes), strict=True)
        ]
        try:
            function = jax.vmap(jaxcompat.jaxpr_as_fun(self.masked.program.jaxpr))
            jaxpr = jax.make_jaxpr(function)(*stacked)
        except NO_DERIVATIVE:  # JAX has no batching rule for some primitives
            return Counter({"not mapped": 1})
        outs = evaluate(jaxpr, stacked, interpret)
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


class _DerivativeCheck:
    """The derivative of a reference, to compare with another derivative."""

    def __init__(self, derivative: Derivative, reference: _Reference, directions: list[Any]):
        given = reference.args, directions

        def at_size(args: list[Any], directions: list[Any]) -> list[Any]:
            return derivative(function_of(reference.program), args, directions)

        self.mode = derivative.mode
        self.what = f"{derivative.mode} derivative, at {reference.sizes}"
        self.jaxpr, self.flat = jax.make_jaxpr(at_size)(*given), jax.tree.leaves(given)
        self.values = self.evaluate()

    def evaluate(self, apply: Apply = interpret) -> list[Any]:
        return evaluate(self.jaxpr, self.flat, apply)

    def __call__(self, what: str, got: Sequence[Any]) -> None:
        corners = [cut(x, y.shape) for x, y in zip(got, self.values, strict=True)]
        try:
            compare(self.evaluate, self.values, corners)
        except AssertionError as error:
            raise AssertionError(f"{self.what}, {what}: {error}") from None
        if self.mode == "reverse":
            for x, corner in zip(got, corners, strict=True):
                rest = np.array(x)
                rest[tuple(map(slice, corner.shape))] = 0
                assert not rest.any(), f"{self.what}, {what}: not 0 in the padding of an argument"


def _stacked(rows: Sequence[Any]) -> Any:
    if jnp.issubdtype(rows[0].dtype, jax.dtypes.extended):
        return jnp.stack(rows)
    return np.stack(list(map(np.asarray, rows)))


def compare(again: Callable[..., list[Any]], before: Sequence[Any], after: Sequence[Any]) -> str:
    """Return "exact" or "to rounding". `again` recomputes the expected values."""
    pairs = list(zip(before, after, strict=True))
    if all(value_difference("", a, b, bits_agree) is None for a, b in pairs):
        return "exact"
    faults = [value_difference(f"value {i}", a, b, values_agree) for i, (a, b) in enumerate(pairs)]
    inexact = [i for i, (a, _) in enumerate(pairs) if is_inexact(a)]
    wrong = [i for i, fault in enumerate(faults) if fault is not None]
    if wrong and set(wrong) <= set(inexact):
        far = differences_but_for_rounding(
            lambda apply: [again(apply)[i] for i in wrong],
            *zip(*(pairs[i] for i in wrong), strict=True),
            interpret,
        )
        wrong = [wrong[i] for i in far]
    for i in wrong:
        fault = faults[i]
        details = "".join(f", {name} {text}" for name, text in fault.details) if fault else ""
        raise AssertionError(f"{fault}{details}")
    return "to rounding"


# --- masked after differentiation -----------------------------------------------------------------


def _derivative_first(found: SymbolicProgram, seed: int) -> Counter[str]:
    """Return the outcome for the masked derivative, if JAX can trace it with symbols."""
    derivative = Derivative("reverse", *places(found.program))
    if not (derivative.at and derivative.outs):
        return Counter()

    def arguments(sizes: Sizes) -> list[Any]:
        avals = derivative.directed([], found.program.out_avals)
        shapes = (tuple(value_of(n, sizes) for n in aval.shape) for aval in avals)
        types = map(jax.ShapeDtypeStruct, shapes, (aval.dtype for aval in avals))
        rng = np.random.RandomState(seed)
        return [*found.arguments(sizes), *(random_direction(each, rng) for each in types)]

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


def _traced(derivative: Derivative, program: Program) -> Program:
    """Return the program of a derivative, of flat arguments and directions."""

    def differentiated(args: list[Any], directions: list[Any]) -> list[Any]:
        return derivative(function_of(program), args, directions)

    directed = derivative.directed(program.in_avals, program.out_avals)
    types = (list(map(_struct, avals)) for avals in (program.in_avals, directed))
    return trace(differentiated, *types)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
