"""The curve of a program's memory, from its first equation to its last."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from jaxprtool.analysis.memory.walk import BodyMemory
from jaxprtool.ir.source.frames import Frames
from jaxprtool.jaxcompat import JaxprEqn

#: The maximum number of points of a curve. If there are more, each point is the highest of a
#: stretch.
MOST_POINTS = 1000

#: The maximum number of points of a body whose inner bodies are shown on the curve.
_MOST_GONE_INTO = 200_000


@dataclass(frozen=True)
class Point:
    """The memory needed while an equation runs.

    Attributes:
        position: The number of the equation in the schedule, from 1. The body of a loop counts
            once.
        bytes: The bytes needed.
        primitive: The primitive of the equation; "" before the first.
        source: The user's line of the equation; "" if unknown.
    """

    position: int
    bytes: int
    primitive: str
    source: str


def curve(memory: BodyMemory, base: int, frames: Frames) -> tuple[Point, ...]:
    """Return the curve of a program.

    Args:
        memory: The memory of its temporaries.
        base: The bytes of its arguments, constants and results.
        frames: Reads source lines.
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
    """A run of consecutive kernels of a body.

    Attributes:
        start: The index of the first kernel on the curve.
        memory: The body.
        time: The time of the first kernel in the body.
        around: The equations around the body, the outermost first.
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
    """Append the curve of a body, with inner bodies in place of the equations that hold them."""
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
    """The number of points of each body, including those of its inner bodies."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, memory: BodyMemory) -> int:
        """Return the number of points of a body."""
        if id(memory) not in self._known:
            inside = (self.of(inner.memory) for inner in memory.inner.values())
            self._known[id(memory)] = len(memory.needs) + sum(inside)
        return self._known[id(memory)]
