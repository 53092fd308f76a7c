"""The memory that a program needs from its first equation to its last, as points of a curve."""

from __future__ import annotations

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


class _Step(NamedTuple):
    """A point, with the equations around it and its own."""

    position: int
    bytes: int
    eqns: tuple[JaxprEqn, ...]


def curve(memory: BodyMemory, base: int, frames: Frames) -> tuple[Point, ...]:
    """Return the curve of a program.

    Args:
        memory: What it needs beside arguments and results.
        base: The bytes of these.
        frames: Which lines are the user's.
    """
    steps = list[_Step]()
    _go(memory, base, (), steps, _Sizes())
    stretch = -(-len(steps) // MOST_POINTS)
    highest = (
        max(steps[start : start + stretch], key=lambda step: step.bytes)
        for start in range(0, len(steps), stretch or 1)
    )
    points = (
        Point(step.position, step.bytes, step.eqns[-1].primitive.name, frames.line_of(step.eqns))
        for step in highest
    )
    return (Point(0, base, "", ""), *points)


def _go(
    memory: BodyMemory, base: int, around: tuple[JaxprEqn, ...], steps: list[_Step], sizes: _Sizes
) -> None:
    goes_into = sizes.of(memory) <= _MOST_GONE_INTO
    for time, need in enumerate(memory.needs):
        inner, node = memory.inner.get(time), memory.node(time)
        eqns = (*around, *node.calls, node.eqn)
        if inner is None or not inner.memory.needs or not goes_into:
            steps.append(_Step(len(steps) + 1, base + need, eqns))
        else:
            _go(inner.memory, base + need - inner.memory.peak, eqns, steps, sizes)


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
