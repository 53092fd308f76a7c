"""The first round of a loop in which two variants part.

Rounds are compiled for any number of them, and start from carries that are known: a search by
halves runs no round more than twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxprtool.execute.compare.judging import Judge
from jaxprtool.execute.compare.pieces import Machine
from jaxprtool.ir.dtypes import as_array
from jaxprtool.ir.interpret import row_of
from jaxprtool.ir.structured import Scan, While
from jaxprtool.jaxcompat import ClosedJaxpr, jaxpr_as_fun

#: More rounds than any loop has.
_ALL = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Round:
    """A round in which two variants part.

    Attributes:
        number: Its number, from 0; of a scan, that of the row it reads.
        bodies: The body that parts, of each variant.
        arguments: What each body is given in it.
    """

    number: int
    bodies: tuple[ClosedJaxpr, ClosedJaxpr]
    arguments: tuple[list[Any], list[Any]]


class _Rounds:
    """The rounds of a variant's loop.

    Args:
        machine: What runs them.
        loop: The loop.
        operands: What it is given.
    """

    def __init__(self, machine: Machine, loop: Scan | While, operands: Sequence[Any]):
        self._machine, self.loop = machine, loop
        operands = list(map(as_array, operands))
        self._scan = loop if isinstance(loop, Scan) else None
        first = len(loop.consts) if isinstance(loop, Scan) else len(loop.cond_consts)
        second = len(loop.carry) if isinstance(loop, Scan) else len(loop.body_consts)
        parts = operands[:first], operands[first : first + second], operands[first + second :]
        if isinstance(loop, Scan):
            self._consts, self.start, self._xs = parts
            self._deciding: list[Any] = []
        else:
            self._deciding, self._consts, self.start = parts
            self._xs = []
        self._compiled: Callable[..., Any] | None = None

    def run(self, number: int, carry: Sequence[Any], stop: int) -> tuple[int, list[Any]]:
        """Run the rounds from `number` on to `stop`, or until the loop ends.

        Returns how many rounds have been run in all, and the carry then.
        """
        if self._machine.op_by_op:
            return self._one_by_one(number, list(carry), stop)
        with self._machine.running():
            if self._compiled is None:
                self._compiled = jax.jit(self._whole)
            state = self._compiled(np.int32(number), np.int32(stop), list(carry), self._rest())
        return int(state[0]), list(state[1])

    def _rest(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self._deciding, self._consts, self._xs

    def _whole(self, first: Any, stop: Any, carry: Any, rest: Any) -> Any:
        deciding, consts, xs = rest

        def more(state: Any) -> Any:
            number, carry = state
            going = number < stop
            if self._scan is not None:
                return going & (number < self._scan.length)
            assert isinstance(self.loop, While)
            (again,) = jaxpr_as_fun(self.loop.cond)(*deciding, *carry)
            return going & again

        def one(state: Any) -> Any:
            number, carry = state
            rows = [_row(x, self.place(number)) for x in xs]
            outs = jaxpr_as_fun(self.loop.body)(*consts, *carry, *rows)
            return number + 1, list(outs[: len(carry)])

        return jax.lax.while_loop(more, one, (first, carry))

    def _one_by_one(self, number: int, carry: list[Any], stop: int) -> tuple[int, list[Any]]:
        while number < stop:
            if self._scan is not None and number == self._scan.length:
                break
            if isinstance(self.loop, While):
                (more,) = self._machine.run(self.loop.cond, [*self._deciding, *carry])
                if not more:
                    break
            outs = self._machine.run(self.loop.body, self.given(number, carry))
            number, carry = number + 1, outs[: len(carry)]
        return number, carry

    def given(self, number: int, carry: Sequence[Any]) -> list[Any]:
        """Return what the body is given in a round."""
        with self._machine.running():
            rows = [row_of(x, self.place(number)) for x in self._xs]
        return [*self._consts, *carry, *rows]

    def asked(self, carry: Sequence[Any]) -> list[Any]:
        """Return what the condition of a while loop is given."""
        return [*self._deciding, *carry]

    def place(self, number: Any) -> Any:
        """Return which row a round of a scan reads."""
        if self._scan is not None and self._scan.reverse:
            return self._scan.length - 1 - number
        return number


def _row(x: Any, place: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(x, place, keepdims=False)


def first_round(
    judge: Judge,
    machines: tuple[Machine, Machine],
    loops: tuple[Scan | While, Scan | While],
    operands: tuple[Sequence[Any], Sequence[Any]],
    results: tuple[Sequence[Any], Sequence[Any]],
) -> Round | None:
    """Return the first round in which two loops part; None if no round does by itself.

    Args:
        judge: Tells which values are others.
        machines: What runs each.
        loops: The two loops.
        operands: What each is given.
        results: What each gives.
    """
    last = _first_row(judge, loops[0], results)
    a = _Rounds(machines[0], loops[0], operands[0])
    b = _Rounds(machines[1], loops[1], operands[1])
    sides = a, b
    ends = [each.run(0, each.start, _ALL if last is None else last) for each in sides]
    count = min(number for number, _ in ends)
    uneven = ends[0][0] != ends[1][0]
    if uneven:
        ends = [each.run(0, each.start, count) for each in sides]
    carries = [carry for _, carry in ends]
    if not _part(judge, carries):
        if last is None and not uneven:
            return None
        return _deciding(count, sides, carries) if uneven else _body(count, sides, carries)
    known, carries = 0, [a.start, b.start]
    wrong = count
    while wrong - known > 1:
        middle = (known + wrong) // 2
        tried = [
            each.run(known, carry, middle)[1] for each, carry in zip(sides, carries, strict=True)
        ]
        if _part(judge, tried):
            wrong = middle
        else:
            known, carries = middle, tried
    return _body(known, sides, carries)


def _body(number: int, sides: tuple[_Rounds, _Rounds], carries: Sequence[Any]) -> Round:
    a, b = sides
    given = a.given(number, carries[0]), b.given(number, carries[1])
    return Round(a.place(number), (a.loop.body, b.loop.body), given)


def _deciding(number: int, sides: tuple[_Rounds, _Rounds], carries: Sequence[Any]) -> Round:
    a, b = sides
    assert isinstance(a.loop, While) and isinstance(b.loop, While)
    return Round(number, (a.loop.cond, b.loop.cond), (a.asked(carries[0]), b.asked(carries[1])))


def _part(judge: Judge, carries: Sequence[Sequence[Any]]) -> bool:
    return any(judge.differ(*pair) for pair in zip(*carries, strict=True))


def _first_row(
    judge: Judge, loop: Scan | While, results: tuple[Sequence[Any], Sequence[Any]]
) -> int | None:
    """Return the number of the first round whose row of a stacked result is another."""
    if not isinstance(loop, Scan):
        return None
    count = len(loop.carry)
    found = []
    for pair in zip(*(each[count:] for each in results), strict=True):
        wrong = judge.wrong(*pair)
        rows = np.flatnonzero(wrong.any(axis=tuple(range(1, wrong.ndim))))
        if len(rows):
            found.append(loop.length - 1 - int(rows[-1]) if loop.reverse else int(rows[0]))
    return min(found, default=None)
