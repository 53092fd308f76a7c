"""What is in memory while a body runs: one walk over its schedule, for peaks and for curves.

A result of the body has room from the start, in which another value may lie until the result is
made. A kernel that is computed element by element may write where an operand lies which it is the
last to read. A call that XLA keeps, a loop and a branch need what their bodies do as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

from jaxprtool import jaxcompat
from jaxprtool.analysis.kernels import Kernels, Node, Opens
from jaxprtool.analysis.memory.schedule import Buffer, Rounds, Schedule, rounds, writes_in_place
from jaxprtool.analysis.stats import count_equations
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr

#: Calls within calls may be equations without end: of more, they are not opened.
MOST = 300_000

#: A value of less than this part of all is not asked which room it can lie in.
_SMALL = 1 / 5000

_NO_ROOMS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class Lodger:
    """A value that lies in the room of a result that is made later."""

    buffer: Buffer
    result: Buffer


@dataclass(frozen=True)
class Inner:
    """The body that needs most of those of an equation."""

    number: int
    memory: BodyMemory


@dataclass(frozen=True)
class BodyMemory:
    """What a body needs besides its arguments and the room of its results.

    Attributes:
        schedule: What runs when.
        outside: The values that lie in no room of a result.
        lodgers: Those that do.
        inner: What the bodies of an equation need, by when it runs.
        needs: The bytes that are needed, by time.
        replaced: The bytes of an operand in whose place a kernel writes, by when it runs.
        at: When most are needed; None if nothing is computed.
    """

    schedule: Schedule
    outside: tuple[Buffer, ...]
    lodgers: tuple[Lodger, ...]
    inner: Mapping[int, Inner]
    needs: tuple[int, ...]
    replaced: Mapping[int, int]
    at: int | None

    @property
    def peak(self) -> int:
        """The most bytes that are needed."""
        return 0 if self.at is None else self.needs[self.at]

    def node(self, time: int) -> Node:
        """Return the equation that runs at a time."""
        return self.schedule.kernels.nodes[self.schedule.order[time]]


class Bodies:
    """What bodies need, each walked once: equations may share them.

    Args:
        opened: Whether calls that XLA keeps are taken for calls that it inlines.
    """

    def __init__(self, opened: bool = False) -> None:
        self._opens: Opens = "all" if opened else "inlined"
        self._known: dict[tuple[Jaxpr, Rounds | None], BodyMemory] = {}

    def memory(
        self,
        jaxpr: AnyJaxpr,
        rounds: Rounds | None = None,
        donated: Mapping[int, int] = _NO_ROOMS,
    ) -> BodyMemory:
        """Return what a body needs.

        Args:
            jaxpr: The body.
            rounds: How values go round, if it is the body of a loop.
            donated: The arguments in whose memory results are written: the position of each, by
                that of the result.
        """
        body = jaxcompat.open_jaxpr(jaxpr)
        if (body, rounds) not in self._known:
            opens = self._opens if count_equations(body) <= MOST else "none"
            schedule = Schedule(Kernels(body, opens), rounds)
            self._known[body, rounds] = self._walked(schedule, donated)
        return self._known[body, rounds]

    def _walked(self, schedule: Schedule, donated: Mapping[int, int]) -> BodyMemory:
        free_from, late = _donated(schedule, donated)
        outside, lodgers = _placed(schedule, [*schedule.temporaries, *late], free_from)
        made, freed = defaultdict[int, int](int), defaultdict[int, int](int)
        last = defaultdict[int, set[int]](set)
        for buffer in outside:
            made[buffer.start] += buffer.size
            freed[buffer.end] += buffer.size
            if buffer.start < buffer.end:
                last[buffer.end].add(buffer.size)
        live, needs = 0, list[int]()
        inside, replaced = dict[int, Inner](), dict[int, int]()
        for time, number in enumerate(schedule.order):
            node, new = schedule.kernels.nodes[number], made[time]
            needs.append(live + new)
            if new and new in last[time] and writes_in_place(node):
                replaced[time] = new
                needs[-1] = live
            if node.held is not None:
                inside[time] = self._inner(node)
                needs[-1] += inside[time].memory.peak
            live += new - freed[time]
        at = max(range(len(needs)), key=needs.__getitem__) if needs else None
        return BodyMemory(
            schedule, tuple(outside), tuple(lodgers), inside, tuple(needs), replaced, at
        )

    def _inner(self, node: Node) -> Inner:
        assert node.held is not None
        bodies = zip(node.held.bodies, node.held.regions, strict=True)
        inner = (
            Inner(number, self.memory(body, rounds(node.held, region)))
            for number, (body, region) in enumerate(bodies)
        )
        return max(inner, key=lambda each: each.memory.peak)


def _donated(schedule: Schedule, donated: Mapping[int, int]) -> tuple[dict[int, int], list[Buffer]]:
    """Return since when the rooms of results are free, and copies of those made before that."""
    constants, given = len(schedule.kernels.jaxpr.constvars), schedule.kernels.given
    arguments = {given[out]: constants + argument for out, argument in donated.items()}
    free_from, late = dict[int, int](), list[Buffer]()
    for result in schedule.results:
        if result.value in arguments:
            last = free_from[result.value] = schedule.last_read[arguments[result.value]]
            if result.start < last or (result.start == last and not schedule.in_place(result)):
                late.append(Buffer(result.value, result.size, result.start, last))
    return free_from, late


def _placed(
    schedule: Schedule, temporaries: list[Buffer], free_from: Mapping[int, int]
) -> tuple[list[Buffer], list[Lodger]]:
    """Return the values that fit in no room of a result that is made later, and those that do."""
    least = _SMALL * sum(buffer.size for buffer in temporaries)
    rooms = [
        _Room(result, free_from.get(result.value, -1), schedule.in_place(result), [])
        for result in schedule.results
        if result.size >= least
    ]
    rooms.sort(key=lambda room: -room.result.size)
    outside, lodgers = [], []
    for buffer in sorted(temporaries, key=lambda buffer: -buffer.size):
        fits = (room for room in _large(rooms, buffer.size) if room.takes(buffer))
        room = next(fits, None) if buffer.size >= least else None
        if room is None:
            outside.append(buffer)
        else:
            room.held.append(buffer)
            lodgers.append(Lodger(buffer, room.result))
    return outside, lodgers


def _large(rooms: list[_Room], size: int) -> Iterator[_Room]:
    return takewhile(lambda room: room.result.size >= size, rooms)


@dataclass(slots=True)
class _Room:
    """The room of a result.

    Attributes:
        result: The result.
        free_from: When the last use of what is there before it is.
        in_place: Whether the result can be written where an operand lies.
        held: The values that lie there before the result is made.
    """

    result: Buffer
    free_from: int
    in_place: bool
    held: list[Buffer]

    def takes(self, buffer: Buffer) -> bool:
        """Return True if a value that is small enough finds the room free."""
        start = self.result.start
        becomes = self.in_place and buffer.end == start and buffer.size == self.result.size
        return (
            (buffer.end < start or becomes)
            and buffer.start > self.free_from
            and all(other.end < buffer.start or other.start > buffer.end for other in self.held)
        )
