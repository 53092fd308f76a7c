"""The memory that a program needs from its first equation to its last, as points of a curve."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from jaxprtool.analysis.memory.walk import BodyMemory
from jaxprtool.ir.frames import Frames
from jaxprtool.jaxcompat import JaxprEqn

#: A curve has so many points; of more, each is the highest of a stretch.
MOST_POINTS = 1000

#: Bodies are gone into unless that makes more points.
_MOST_GONE_INTO = 200_000


@dataclass(frozen=True)
class Point:
    """The memory that is needed when an equation runs.

    Attributes:
        position: The number of the equation in the order in which they run; those in the body of a
            loop count once.
        bytes: The bytes that are needed.
        primitive: Its primitive; "" before the first.
        source: The user's line that it comes from; "" if that is not known.
    """

    position: int
    bytes: int
    primitive: str
    source: str


def curve(memory: BodyMemory, base: int, frames: Frames) -> tuple[Point, ...]:
    """Return the curve of a program.

    Args:
        memory: What it needs beside arguments and results.
        base: The bytes of these.
        frames: Which lines are the user's.
    """
    runs, needs = list[_Run](), list[int]()
    _go(memory, base, (), runs, needs, _Sizes())
    stretch = -(-len(needs) // MOST_POINTS) or 1
    points = [Point(0, base, "", "")]
    for start in range(0, len(needs), stretch):
        place = max(range(start, min(start + stretch, len(needs))), key=needs.__getitem__)
        run = runs[bisect_right(runs, place, key=lambda run: run.start) - 1]
        node = run.memory.node(run.time + place - run.start)
        line = frames.line_of((*run.around, *node.calls, node.eqn))
        points.append(Point(place + 1, needs[place], node.eqn.primitive.name, line))
    return tuple(points)


class _Run(NamedTuple):
    """Equations of a body that run one after the other.

    Attributes:
        start: The place of the first on the curve.
        memory: The body.
        time: When the first runs.
        around: The equations around them, the outermost first.
    """

    start: int
    memory: BodyMemory
    time: int
    around: tuple[JaxprEqn, ...]


def _go(
    memory: BodyMemory,
    base: int,
    around: tuple[JaxprEqn, ...],
    runs: list[_Run],
    needs: list[int],
    sizes: _Sizes,
) -> None:
    """Add what a body needs; bodies in it stand in the place of their equations."""
    goes_into = sizes.of(memory) <= _MOST_GONE_INTO
    start = 0
    for time, inner in memory.inner.items() if goes_into else ():
        if not inner.memory.needs:
            continue
        runs.append(_Run(len(needs), memory, start, around))
        needs += [base + need for need in memory.needs[start:time]]
        node, outside = memory.node(time), base + memory.needs[time] - inner.memory.peak
        _go(inner.memory, outside, (*around, *node.calls, node.eqn), runs, needs, sizes)
        start = time + 1
    runs.append(_Run(len(needs), memory, start, around))
    needs += [base + need for need in memory.needs[start:]]


class _Sizes:
    """How many points bodies have, those of their own bodies included."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, memory: BodyMemory) -> int:
        """Return the number of points of a body."""
        if id(memory) not in self._known:
            inside = (self.of(inner.memory) for inner in memory.inner.values())
            self._known[id(memory)] = len(memory.needs) + sum(inside)
        return self._known[id(memory)]
