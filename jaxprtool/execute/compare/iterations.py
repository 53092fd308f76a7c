"""The first iteration of a loop in which two variants diverge.

Iterations are compiled for a dynamic count and start from known carries, so that the binary search
runs no iteration more than twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxprtool.execute.compare.body_runs import Executor
from jaxprtool.execute.compare.comparator import Comparator
from jaxprtool.execute.stepping.iterations import Progress, advanced, started
from jaxprtool.ir.basics.dtypes import as_array
from jaxprtool.ir.core.structured import Scan, While
from jaxprtool.ir.evaluation.interpret import LoopOperands, row_of, slice_number
from jaxprtool.jaxcompat import ClosedJaxpr

#: An upper bound on the iterations of a loop.
_ALL = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Iteration:
    """An iteration in which two variants diverge.

    Attributes:
        number: Its number, from 0; for a scan, the index of the row it reads.
        bodies: The diverging body of each variant.
        arguments: The arguments of each body.
    """

    number: int
    bodies: tuple[ClosedJaxpr, ClosedJaxpr]
    arguments: tuple[list[Any], list[Any]]


class _Iterations:
    """The iterations of a variant's loop.

    Args:
        executor: Runs the iterations.
        loop: The loop.
        operands: Its operands.
    """

    def __init__(self, executor: Executor, loop: Scan | While, operands: Sequence[Any]):
        self._executor, self.loop = executor, loop
        self.operands = LoopOperands.of(loop, map(as_array, operands))
        self._compiled = jax.jit(self._until)

    def run(self, number: int, carry: Sequence[Any], stop: int) -> tuple[int, list[Any]]:
        """Run the iterations from `number` on to `stop`, or until the loop ends.

        Returns the total number of iterations run, and the carry after them.
        """
        run = self._one_by_one if self._executor.op_by_op else self._compiled
        with self._executor.running():
            end = run(self.operands, np.int32(number), list(carry), np.int32(stop))
        return int(end.number), list(end.carry)

    def _until(self, given: LoopOperands, number: Any, carry: list[Any], stop: Any) -> Progress:
        return jax.lax.while_loop(  # type: ignore[no-any-return]
            lambda progress: progress.more & (progress.number < stop),
            lambda progress: advanced(self.loop, given, progress),
            started(self.loop, given, number, carry),
        )

    def _one_by_one(self, given: LoopOperands, number: Any, carry: Any, stop: Any) -> Progress:
        progress = started(self.loop, given, number, carry, self._executor.run)
        while progress.more and progress.number < stop:
            progress = advanced(self.loop, given, progress, self._executor.run, row_of)
        return progress

    def given(self, number: int, carry: Sequence[Any]) -> list[Any]:
        """Return the arguments of the body in an iteration."""
        with self._executor.running():
            rows = [row_of(x, slice_number(self.loop, number)) for x in self.operands.xs]
        return [*self.operands.consts, *carry, *rows]


def first_iteration(
    comparator: Comparator,
    executors: tuple[Executor, Executor],
    loops: tuple[Scan | While, Scan | While],
    operands: tuple[Sequence[Any], Sequence[Any]],
    results: tuple[Sequence[Any], Sequence[Any]],
) -> Iteration | None:
    """Return the first iteration in which two loops diverge, or None.

    Args:
        comparator: Determines which values differ.
        executors: The executor of each.
        loops: The two loops.
        operands: The operands of each.
        results: The results of each.
    """
    last = _first_row(comparator, loops[0], results)
    a = _Iterations(executors[0], loops[0], operands[0])
    b = _Iterations(executors[1], loops[1], operands[1])
    runs, starts = (a, b), [a.operands.carry, b.operands.carry]
    stop = _ALL if last is None else last
    ends = [each.run(0, start, stop) for each, start in zip(runs, starts, strict=True)]
    count = min(number for number, _ in ends)
    uneven = ends[0][0] != ends[1][0]
    if uneven:
        ends = [each.run(0, start, count) for each, start in zip(runs, starts, strict=True)]
    carries = [carry for _, carry in ends]
    if not _diverge(comparator, carries):
        if last is None and not uneven:
            return None
        return _condition(count, runs, carries) if uneven else _body(count, runs, carries)
    known, wrong, carries = 0, count, starts
    while wrong - known > 1:
        middle = (known + wrong) // 2
        middles = [
            each.run(known, carry, middle)[1] for each, carry in zip(runs, carries, strict=True)
        ]
        if _diverge(comparator, middles):
            wrong = middle
        else:
            known, carries = middle, middles
    return _body(known, runs, carries)


def _body(number: int, runs: tuple[_Iterations, _Iterations], carries: Sequence[Any]) -> Iteration:
    a, b = runs
    given = a.given(number, carries[0]), b.given(number, carries[1])
    return Iteration(slice_number(a.loop, number), (a.loop.body, b.loop.body), given)


def _condition(
    number: int, runs: tuple[_Iterations, _Iterations], carries: Sequence[Any]
) -> Iteration:
    a, b = runs
    assert isinstance(a.loop, While) and isinstance(b.loop, While)
    given = [*a.operands.cond_consts, *carries[0]], [*b.operands.cond_consts, *carries[1]]
    return Iteration(number, (a.loop.cond, b.loop.cond), given)


def _diverge(comparator: Comparator, carries: Sequence[Sequence[Any]]) -> bool:
    return any(comparator.differ(*pair) for pair in zip(*carries, strict=True))


def _first_row(
    comparator: Comparator, loop: Scan | While, results: tuple[Sequence[Any], Sequence[Any]]
) -> int | None:
    """Return the number of the first iteration with a differing row in a stacked result."""
    if not isinstance(loop, Scan):
        return None
    count = len(loop.carry)
    found = []
    for pair in zip(*(each[count:] for each in results), strict=True):
        wrong = comparator.wrong(*pair)
        rows = np.flatnonzero(wrong.any(axis=tuple(range(1, wrong.ndim))))
        if len(rows):
            found.append(loop.length - 1 - int(rows[-1]) if loop.reverse else int(rows[0]))
    return min(found, default=None)
