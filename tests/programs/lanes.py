"""Checks that each batch element of a ragged program equals the program traced at its length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.errors import (
    ArgumentsError,
    CheckError,
    JaxprToolError,
    UnsupportedError,
    UserFunctionError,
)
from jaxprtool.ir.program import Program, type_check
from jaxprtool.ir.specialization import specialized
from jaxprtool.ir.symbols import names_of, value_of
from jaxprtool.passes.mapping.batch.axes import BatchError
from jaxprtool.passes.mapping.ragged import Layout, RaggedBatch, table
from tests.programs.directions import function_of, places, random_direction
from tests.programs.gradients import NO_DERIVATIVE
from tests.programs.interpreter import evaluate
from tests.programs.masking import NOT_RUN, compare, refusal
from tests.programs.promises import NOT_AS_PROMISED, keeps_promises
from tests.programs.recorder import recording
from tests.programs.stepwise import interpret
from tests.programs.symbolic import Sizes, SymbolicProgram
from tests.programs.values import on_host

#: The lengths to draw from; one is zero if the program supports it.
LENGTHS = (0, 1, 2, 3, 4)

#: The number of examples.
LANES = 4


def prove_ragged(found: SymbolicProgram, seed: int) -> Counter[str]:
    """Return the outcome for examples of random lengths, for each symbol of a program.

    Values are compared with those of the program traced at each length, or specialized if the
    length is 0, and derivatives with the sum of their derivatives. Every third program is only
    padded, and another third only packed if possible.

    Raises:
        AssertionError: If a value or a derivative is wrong.
    """
    outcomes = Counter({"programs": 1})
    with found.setting(), recording():
        for name in found.program.symbols:
            try:
                proof = _Proof(found, name, seed)
            except (UnsupportedError, ArgumentsError, BatchError) as error:
                outcomes[f"refused: {refusal(error)}"] += 1
                continue
            outcomes += proof.outcomes
    return outcomes


def _ragged(program: Program, name: str, layout: Layout | None) -> tuple[Program, Layout | None]:
    """Return the ragged program, partly padded if it cannot be packed completely.

    Blocks are small, so that pairs of rows have several.
    """
    try:
        with mock.patch.object(table, "SMALLEST_BLOCK", 2):
            return RaggedBatch(name, LANES, layout, max(LENGTHS))(program), layout
    except UnsupportedError:
        if layout != "packed":
            raise
        return _ragged(program, name, None)


@dataclass(frozen=True)
class _Lane:
    """One example: its length, the program at that length, its arguments and its results."""

    length: int
    program: Program
    args: list[Any]
    values: list[Any]


class _Proof:
    """A program that is ragged along one symbol, and the examples."""

    def __init__(self, found: SymbolicProgram, name: str, seed: int):
        self.found, self.name = found, name
        self.rng = np.random.RandomState(seed)
        self.others = {n: size for n, size in found.choices[0].items() if n != name}
        self.outcomes: Counter[str] = Counter()
        self.shared = [on_host(x) for x in found.arguments(found.choices[0])]
        made, layout = _ragged(found.program, name, (None, "packed", "padded")[seed % 3])
        type_check(made)
        lanes = [lane for n in self._lengths() if (lane := self._lane(n))]
        if not any(lane.length for lane in lanes):
            return
        while len(lanes) < LANES:
            lanes.append(lanes[0])
        self.lanes = lanes
        self.lengths = np.array([lane.length for lane in lanes], np.int32)
        self.args = [self._joined(i, [lane.args[i] for lane in lanes]) for i in self._arguments()]
        self.program = made.at([np.shape(x) for x in self._flat(self.args)])
        self._compare_values()
        self.outcomes[f"lanes, {layout or 'chosen'}"] += LANES
        self.outcomes[self._compare_derivatives()] += 1

    def _lengths(self) -> list[int]:
        return [0, *self.rng.choice(LENGTHS[1:], LANES - 1).tolist()]

    def _arguments(self) -> range:
        return range(len(self.found.program.in_avals))

    def _axis(self, aval: Any) -> int | None:
        """Return the ragged axis of a type."""
        shape = getattr(aval, "shape", ())
        return next((i for i, n in enumerate(shape) if self.name in names_of(n)), None)

    def _sizes(self, length: int) -> Sizes:
        return {n: length if n == self.name else self.others[n] for n in self.found.program.symbols}

    def _lane(self, length: int) -> _Lane | None:
        """Return one example with unique rows; None if the program is not defined at its length."""
        sizes, program = self._sizes(length), self.found.program
        try:
            if all(sizes.values()):
                program = self.found.traced_at(sizes)
            else:
                program = program.replace(jaxpr=specialized(program.jaxpr, sizes))
                type_check(program)
        except (JaxprToolError, CheckError, ZeroDivisionError):
            self.outcomes["not defined at that length"] += 1
            return None
        own = [on_host(x) for x in self.found.arguments(sizes)]
        shift = int(self.rng.randint(4))
        axes = map(self._axis, self.found.program.in_avals)
        # The random values of a shared argument depend on the length.
        args = [
            shared if axis is None else _numpy(x).roll(x, shift, axis)
            for x, shared, axis in zip(own, self.shared, axes, strict=True)
        ]
        try:
            values = evaluate(program.jaxpr, args, interpret)
        except NOT_RUN:
            self.outcomes["not run at that length"] += 1
            return None
        if not keeps_promises(self.found.program, sizes, args):
            self.outcomes[NOT_AS_PROMISED] += 1
            return None
        return _Lane(length, program, args, values)

    def _joined(self, place: int, each: Sequence[Any]) -> Any:
        axis = self._axis(self.found.program.in_avals[place])
        return each[0] if axis is None else _numpy(*each).concatenate(each, axis)

    def _flat(self, args: Sequence[Any]) -> list[Any]:
        """Return the flat arguments of the ragged program."""
        positional, keywords = jax.tree.unflatten(self.found.program.in_tree, list(args))
        flat: list[Any] = jax.tree.leaves(((*positional, self.lengths), keywords))
        return flat

    def _of_lanes(self, outs: Sequence[Any]) -> list[list[Any]]:
        """Return the results of each example."""
        found: list[list[Any]] = [[] for _ in self.lanes]
        for x, aval in zip(outs, self.found.program.out_avals, strict=True):
            axis, start = self._axis(aval), 0
            for number, lane in enumerate(self.lanes):
                if axis is None:
                    found[number].append(x if x.ndim == len(aval.shape) else x[number])
                    continue
                count = max(value_of(aval.shape[axis], self._sizes(lane.length)), 0)
                rows = (slice(None),) * axis + (slice(start, start + count),)
                found[number].append(x[rows])
                start += count
        return found

    def _compare_values(self) -> None:
        outs = evaluate(self.program.jaxpr, self._flat(self.args), interpret)
        for number, (lane, results) in enumerate(
            zip(self.lanes, self._of_lanes(outs), strict=True)
        ):
            again = _again(lane.program.jaxpr, lane.args)
            self._same(f"lane {number}", again, lane.values, results)

    def _same(self, what: str, again: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
        try:
            compare(again, [on_host(x) for x in before], after)
        except AssertionError as error:
            raise AssertionError(
                f"{self.name}, lengths {self.lengths.tolist()}, {what}: {error}\n{self.program}"
            ) from None

    # --- derivatives ----------------------------------------------------------------------------

    def _compare_derivatives(self) -> str:
        """Compare derivatives in reverse mode, and return the outcome."""
        at, outs = places(self.found.program)
        if not (at and outs):
            return "nothing to differentiate"

        def derivative(
            function: Callable[..., Any], args: Sequence[Any], directions: Sequence[Any]
        ) -> list[Any]:
            def of(*xs: Any) -> list[Any]:
                given = list(args)
                for i, x in zip(at, xs, strict=True):
                    given[i] = x
                results = function(given)
                return [results[i] for i in outs]

            return list(jax.vjp(of, *(args[i] for i in at))[1](list(directions)))

        rng = np.random.RandomState(len(at))
        directions = [[random_direction(lane.values[i], rng) for i in outs] for lane in self.lanes]

        def by_loop(args: Any, directions: Any) -> list[Any]:
            each = [
                derivative(function_of(lane.program), xs, ds)
                for lane, xs, ds in zip(self.lanes, args, directions, strict=True)
            ]
            pairs = zip(at, zip(*each, strict=True), strict=True)
            shared = [self._axis(self.found.program.in_avals[i]) is None for i in at]
            return [
                sum(parts) if flag else self._joined(i, parts)
                for (i, parts), flag in zip(pairs, shared, strict=True)
            ]

        def of_all(args: Any, directions: Any) -> list[Any]:
            run = function_of(self.program)
            return derivative(lambda xs: run(self._flat(xs)), args, directions)

        given = [lane.args for lane in self.lanes], directions
        try:
            loop = jax.make_jaxpr(by_loop)(*given)
            flat = jax.tree.leaves(given)
            expected = evaluate(loop, flat, interpret)
        except NO_DERIVATIVE:
            return "not differentiable in reverse"
        joined = [self._directions(i, [each[k] for each in directions]) for k, i in enumerate(outs)]
        mine = (self.args, joined)
        try:
            of_all_lanes = jax.make_jaxpr(of_all)(*mine)
        except UserFunctionError as error:
            # JAX compares sizes in some derivatives, so the result may not hold for all sizes.
            if not (self.others and "does not differentiate with respect to" in error.message):
                raise
            return "not differentiable with two symbols"
        found = evaluate(of_all_lanes, jax.tree.leaves(mine), interpret)
        self._same("derivative", _again(loop, flat), expected, found)
        return "differentiated"

    def _directions(self, place: int, each: Sequence[Any]) -> Any:
        """Return the direction of a batched result: that of each example, zero for unused rows."""
        axis, wanted = (
            self._axis(self.found.program.out_avals[place]),
            self.program.out_avals[place],
        )
        if axis is not None:
            joined = _numpy(*each).concatenate(each, axis)
            missing = wanted.shape[axis] - joined.shape[axis]
            widths = [(0, missing if i == axis else 0) for i in range(joined.ndim)]
            return _numpy(joined).pad(joined, widths)
        return sum(each) if wanted.ndim == each[0].ndim else _numpy(*each).stack(each)


def _numpy(*arrays: Any) -> Any:
    """Return NumPy if it supports all arrays, since JAX compiles each step; else JAX's module."""
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


def _again(jaxpr: Any, args: Sequence[Any]) -> Callable[..., list[Any]]:
    return lambda apply=interpret: evaluate(jaxpr, args, apply)
