"""Add up the memory that a body needs over time, in one walk over its schedule.

A result of the body is allocated from the start; until the result is computed, its memory (its
"room") may hold another value. An elementwise kernel may write to the memory of an operand that it
reads last. A call that XLA keeps, a loop and a branch also need the memory of their bodies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType

from jaxprtool.analysis.kernels import Kernels, Node, Opens
from jaxprtool.analysis.memory.schedule import (
    Buffer,
    LoopValues,
    Schedule,
    loop_values_of,
)
from jaxprtool.analysis.memory.workspaces import workspace
from jaxprtool.ir.dataflow.slicing import Run

#: No room is searched for a value of less than this fraction of all bytes.
_SMALL = 1 / 5000

_NO_ROOMS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class ValueInRoom:
    """A value in the room of a result that is computed later."""

    buffer: Buffer
    result: Buffer


@dataclass(frozen=True)
class Inner:
    """The body of an equation that needs the most memory, and its number."""

    number: int
    memory: BodyMemory


@dataclass(frozen=True)
class BodyMemory:
    """The memory that a body needs besides its arguments and results.

    Attributes:
        schedule: The schedule of its kernels.
        outside: The values that are not in the room of a result.
        in_rooms: The values that are in the room of a result.
        inner: The memory of the bodies of equations, by the time when the equation runs.
        workspaces: The bytes that kernels need besides their operands and results, by the time.
        needs: The bytes needed at each time.
        replaced: The bytes of the operand that a kernel overwrites, by the time when it runs.
        at: The time of the peak; None if nothing is computed.
    """

    schedule: Schedule
    outside: tuple[Buffer, ...]
    in_rooms: tuple[ValueInRoom, ...]
    inner: Mapping[int, Inner]
    workspaces: Mapping[int, int]
    needs: tuple[int, ...]
    replaced: Mapping[int, int]
    at: int | None

    @property
    def peak(self) -> int:
        """The most bytes needed at a time."""
        return 0 if self.at is None else self.needs[self.at]

    def node(self, time: int) -> Node:
        """Return the node that runs at a time."""
        return self.schedule.kernels.nodes[self.schedule.order[time]]


class Bodies:
    """The memory of bodies. Each is walked once, since equations may share them.

    Args:
        opened: Whether to treat calls that XLA keeps as if it inlined them.
    """

    def __init__(self, opened: bool = False) -> None:
        self._opens: Opens = "all" if opened else "inlined"
        self._known: dict[tuple[Run, LoopValues | None], BodyMemory] = {}
        #: The number of equations of each primitive whose own memory is unknown, or a part of it.
        self.unknown: Counter[str] = Counter()

    def memory(
        self,
        live: Run,
        loop_values: LoopValues | None = None,
        donated: Mapping[int, int] = _NO_ROOMS,
    ) -> BodyMemory:
        """Return the memory that a body needs.

        Args:
            live: The live part of the body.
            loop_values: How values pass between iterations, if it is the body of a loop.
            donated: The position of the argument in whose memory a result is written, by the
                position of the result.
        """
        if (live, loop_values) not in self._known:
            schedule = Schedule(Kernels(live.jaxpr, self._opens, live=live), loop_values)
            self._known[live, loop_values] = self._walked(schedule, donated)
        return self._known[live, loop_values]

    def _walked(self, schedule: Schedule, donated: Mapping[int, int]) -> BodyMemory:
        free_from, late = _donated(schedule, donated)
        outside, in_rooms = _placed(schedule, [*schedule.temporaries, *late], free_from)
        made, freed = defaultdict[int, int](int), defaultdict[int, int](int)
        last = defaultdict[int, set[int]](set)
        for buffer in outside:
            made[buffer.start] += buffer.size
            freed[buffer.end] += buffer.size
            if buffer.start < buffer.end:
                last[buffer.end].add(buffer.size)
        live, needs = 0, list[int]()
        inside, replaced = dict[int, Inner](), dict[int, int]()
        workspaces = dict[int, int]()
        for time, number in enumerate(schedule.order):
            node, new = schedule.kernels.nodes[number], made[time]
            needs.append(live + new)
            if new and new in last[time] and schedule.writes_in_place(node):
                replaced[time] = new
                needs[-1] = live
            if node.held is not None:
                inside[time] = self._inner(node)
                needs[-1] += inside[time].memory.peak
            elif extra := self._workspace(node, schedule.kernels):
                workspaces[time] = extra
                needs[-1] += extra
            live += new - freed[time]
        at = max(range(len(needs)), key=needs.__getitem__) if needs else None
        return BodyMemory(
            schedule,
            tuple(outside),
            tuple(in_rooms),
            inside,
            workspaces,
            tuple(needs),
            replaced,
            at,
        )

    def _workspace(self, node: Node, kernels: Kernels) -> int:
        """Return the bytes that a kernel needs besides its operands and results."""
        if node.kind != "equation":
            return 0
        needed = workspace(node.eqn)
        name = node.eqn.primitive.name if needed is None else needed.not_counted
        if name:
            self.unknown[name] += 1
        if needed is None:
            return 0
        return needed.bytes + (_copies(node, kernels) if needed.by_columns else 0)

    def _inner(self, node: Node) -> Inner:
        assert node.held is not None and node.live is not None
        bodies = zip(node.live, node.held.regions, strict=True)
        inner = (
            Inner(number, self.memory(live, loop_values_of(node.held, region)))
            for number, (live, region) in enumerate(bodies)
        )
        return max(inner, key=lambda each: each.memory.peak)


def _copies(node: Node, kernels: Kernels) -> int:
    """Return the bytes of the copies by columns of a kernel's matrices."""
    given = [v for v in node.reads[:1] if kernels.defined_by[v] < 0]
    asked = [v for v in node.makes if v in kernels.results]
    return max(sum(kernels.sizes[v] for v in values) for values in (given, asked))


def _donated(schedule: Schedule, donated: Mapping[int, int]) -> tuple[dict[int, int], list[Buffer]]:
    """Return when the memory of donated arguments is free, and copies of results computed before.

    A result that is computed while its donated argument is still needed lives in a copy until then.
    """
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
) -> tuple[list[Buffer], list[ValueInRoom]]:
    """Place values in the rooms of results, the largest first. Return the rest and those placed."""
    least = _SMALL * sum(buffer.size for buffer in temporaries)
    rooms = [
        _Room(result, free_from.get(result.value, -1), schedule.in_place(result), [])
        for result in schedule.results
        if result.size >= least
    ]
    rooms.sort(key=lambda room: -room.result.size)
    outside, in_rooms = [], []
    for buffer in sorted(temporaries, key=lambda buffer: -buffer.size):
        fits = (room for room in _large(rooms, buffer.size) if room.takes(buffer))
        room = next(fits, None) if buffer.size >= least else None
        if room is None:
            outside.append(buffer)
        else:
            room.held.append(buffer)
            in_rooms.append(ValueInRoom(buffer, room.result))
    return outside, in_rooms


def _large(rooms: list[_Room], size: int) -> Iterator[_Room]:
    return takewhile(lambda room: room.result.size >= size, rooms)


@dataclass(slots=True)
class _Room:
    """The memory of a result, which may hold other values before the result is computed.

    Attributes:
        result: The result.
        free_from: The time of the last use of a donated argument there; -1 without one.
        in_place: Whether the result can be written to the memory of an operand.
        held: The values placed there.
    """

    result: Buffer
    free_from: int
    in_place: bool
    held: list[Buffer]

    def takes(self, buffer: Buffer) -> bool:
        """Return True if the room is free during the lifetime of a value."""
        start = self.result.start
        reuses_it = self.in_place and buffer.end == start and buffer.size == self.result.size
        return (
            (buffer.end < start or reuses_it)
            and buffer.start > self.free_from
            and all(other.end < buffer.start or other.start > buffer.end for other in self.held)
        )
