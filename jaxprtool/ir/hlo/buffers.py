"""The memory that XLA assigned to the values of a compiled module, and their live ranges.

    assignment = buffer_assignment(compiled, module)
    for allocation in assignment.allocations:
        print(allocation.size, [placed.buffer.instruction.name for placed in allocation.placed])

An allocation is one block of memory. XLA places buffers in it; buffers that are not needed at the
same time may share a place. Field numbers are those of `BufferAssignmentProto` in XLA's
`xla/service/hlo.proto`. Its traces of XLA's simulation of the heap (field 4) are written for TPUs.
They are missing in the CPU builds of jaxlib 0.10 and 0.12. Their field 5, which that file does not
declare, lists for each allocation the buffers that XLA considers live at its peak. With loops these
are too few, so `LiveRanges` finds the peak instead.
"""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from jaxprtool.ir.hlo.module import (
    CALLS,
    Computation,
    HloModule,
    HloShape,
    Instruction,
    Message,
    integer,
    integers,
    message,
    submessage,
    submessages,
)

# --- buffers --------------------------------------------------------------------------------------
# The memory that XLA assigned to the values of a compiled module.

#: A value or a part of one: the number of an instruction, and an index into its tuple.
Position: TypeAlias = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """A value in memory.

    Attributes:
        id: Its number.
        size: Its size in bytes.
        instruction: The instruction that defines it.
        index: Its index in the instruction's result, if that is a tuple.
    """

    id: int
    size: int
    instruction: Instruction
    index: tuple[int, ...]

    @property
    def shape(self) -> HloShape:
        """The shape of the value; that of a tuple for a table of pointers."""
        return self.instruction.shape.at(self.index)

    @property
    def position(self) -> Position:
        """The instruction's number, and the index."""
        return self.instruction.id, self.index


@dataclass(frozen=True, eq=False, slots=True)
class PlacedBuffer:
    """A buffer at its offset in an allocation, in bytes."""

    buffer: Buffer
    offset: int
    size: int

    def common(self, other: PlacedBuffer) -> int:
        """Return the number of bytes that two buffers of one allocation have in common."""
        end = min(self.offset + self.size, other.offset + other.size)
        return max(0, end - max(self.offset, other.offset))


@dataclass(frozen=True, eq=False, slots=True)
class Allocation:
    """A block of memory.

    Attributes:
        index: Its number.
        size: Its size in bytes.
        parameter: The number of the parameter of the module that it holds, or None.
        is_result: Whether it holds a result of the module. If it also holds a parameter, this is a
            donated argument.
        is_constant: Whether it holds a constant.
        is_local: Whether it is on the stack of a function such as the comparison of a sort. XLA
            does not count such memory.
        placed: The buffers in it.
        space: The number of its memory on a TPU: 0 for the main memory, others are on the chip or
            in the host.
    """

    index: int
    size: int
    parameter: int | None
    is_result: bool
    is_constant: bool
    is_local: bool
    placed: tuple[PlacedBuffer, ...]
    space: int = 0

    @property
    def is_temporary(self) -> bool:
        """Whether it is only needed while the module runs."""
        return self.parameter is None and not (self.is_result or self.is_constant or self.is_local)


@dataclass(frozen=True, eq=False, slots=True)
class HeapPeak:
    """The peak of XLA's simulation of an allocation whose place values share.

    Attributes:
        size: The bytes of the values that are live.
        running: The instruction that runs.
        live: The buffers that are live, of each group the one that is written last.
    """

    size: int
    running: Instruction
    live: tuple[PlacedBuffer, ...]


@dataclass(frozen=True, eq=False, slots=True)
class BufferAssignment:
    """The memory of a module.

    Attributes:
        allocations: The blocks of memory.
        groups: The number of the group of each buffer, by the buffer's number. Buffers of a group
            are one place that is updated: the carry of a loop before, in and after it.
        peaks: The peaks in XLA's simulation of allocations, by their number, where it is known.
    """

    allocations: tuple[Allocation, ...]
    groups: dict[int, int]
    peaks: Mapping[int, HeapPeak] = field(default_factory=dict)

    @property
    def main(self) -> list[Allocation]:
        """The blocks of the device's main memory that XLA counts."""
        return [each for each in self.allocations if not (each.is_local or each.space)]

    @property
    def reported_peak(self) -> tuple[int, int] | None:
        """The `peak_memory_in_bytes` that XLA reports, and the memory whose heap it counts.

        It is the memory of arguments, results and constants, and the peak of the largest heap of
        all memories. None without XLA's simulation.
        """
        if not self.peaks:
            return None
        spaces = {allocation.index: allocation.space for allocation in self.allocations}
        largest, space = max((peak.size, -spaces[index]) for index, peak in self.peaks.items())
        fixed = sum(each.size for each in self.main if not each.is_temporary)
        return fixed + largest, -space

    def buffers(self) -> Iterator[Buffer]:
        for allocation in self.allocations:
            for placed in allocation.placed:
                yield placed.buffer


def buffer_assignment(compiled: Any, module: HloModule) -> BufferAssignment | None:
    """Return the memory of a `jax.stages.Compiled`, whose module is given.

    It is None if the backend does not describe it, as for TPUs: these write it to a file.
    """
    analysis = compiled.memory_analysis()
    data = getattr(analysis, "serialized_buffer_assignment_proto", b"")
    return read_assignment(data, module) if data else None


def read_assignment(data: bytes, module: HloModule) -> BufferAssignment:
    """Return the memory of a module from a `BufferAssignmentProto`."""
    fields = message(data)
    buffers = {buffer.id: buffer for buffer in (_buffer(b, module) for b in submessages(fields, 1))}
    is_tpu = module.is_tiled
    allocations = tuple(_allocation(entry, buffers, is_tpu) for entry in submessages(fields, 3))
    groups = _groups(submessages(fields, 2), buffers)
    peaks: dict[int, HeapPeak] = {}
    by_number = {allocation.index: allocation for allocation in allocations}
    for trace in submessages(fields, 4) if is_tpu else ():
        heap = _Heap(trace, buffers)
        if heap.events:
            peaks[heap.allocation] = heap.peak(by_number[heap.allocation])
        groups |= {number: groups[first] for number, first in heap.groups.items()}
    return BufferAssignment(allocations, groups, peaks)


def _buffer(fields: Message, module: HloModule) -> Buffer:
    number, index = _position(submessage(fields, 3))
    return Buffer(integer(fields, 1), integer(fields, 2), module.instructions[number], index)


def _position(location: Message) -> Position:
    return integer(location, 4), tuple(integers(location, 3))


def _allocation(fields: Message, buffers: dict[int, Buffer], is_tpu: bool) -> Allocation:
    placed = tuple(
        PlacedBuffer(buffers[integer(entry, 1)], integer(entry, 2), integer(entry, 3))
        for entry in submessages(fields, 9)
    )
    return Allocation(
        integer(fields, 1),
        integer(fields, 2),
        integer(fields, 6) if integer(fields, 5) else None,
        bool(integer(fields, 7)),
        bool(integer(fields, 12)),
        bool(integer(fields, 3)),
        placed,
        # On a GPU, other numbers are parts of its main memory.
        integer(fields, 8) if is_tpu else 0,
    )


#: The kinds of events in XLA's simulation of a heap: a buffer gets a place, its place is free, or
#: it shares the place of another one.
_ALLOC, _FREE, _SHARE = 0, 1, 2


class _Heap:
    """XLA's simulation of the heap in an allocation, from a `HeapSimulatorTrace`.

    Attributes:
        allocation: The number of the allocation.
        events: The kind of each event, and the buffer.
        groups: The buffer that each buffer shares the place of, which may be itself.
    """

    def __init__(self, trace: Message, buffers: dict[int, Buffer]) -> None:
        self.allocation = integer(trace, 3)
        self.events: list[tuple[int, int]] = []
        self.groups: dict[int, int] = {}
        self._buffers = buffers
        for event in submessages(trace, 1):
            kind, number = integer(event, 1), integer(event, 2)
            if kind != _FREE:
                self.groups[number] = integer(event, 5) if kind == _SHARE else number
            self.events.append((kind, number))

    def peak(self, allocation: Allocation) -> HeapPeak:
        """Return its peak in an allocation."""
        size = most = at = 0
        for i, (change, _) in enumerate(self._changes()):
            size += change
            if size > most:
                most, at = size, i
        live = [members for _, members in islice(self._changes(), at + 1)][-1]
        placed = {each.buffer.id: each for each in allocation.placed}
        last = tuple(placed[members[-1]] for members in live.values() if members)
        return HeapPeak(most, self._buffers[self.events[at][1]].instruction, last)

    def _changes(self) -> Iterator[tuple[int, dict[int, list[int]]]]:
        """Yield the bytes that each event adds, and the live buffers by the first of a place."""
        live = defaultdict[int, list[int]](list)
        for kind, number in self.events:
            first = self.groups[number]
            before = bool(live[first])
            if kind == _FREE:
                live[first].remove(number)
            else:
                live[first].append(number)
            yield self._buffers[first].size * (bool(live[first]) - before), live


def _groups(aliases: list[Message], buffers: dict[int, Buffer]) -> dict[int, int]:
    """Return the smallest number of the buffers in each buffer's group."""
    by_position = {buffer.position: buffer.id for buffer in buffers.values()}
    groups = {number: number for number in buffers}
    for alias in aliases:
        number, other = integer(alias, 1), by_position[_position(submessage(alias, 2))]
        groups[number] = min(groups[number], other)
    return groups


# --- live ranges ----------------------------------------------------------------------------------
# The live ranges of the buffers of a compiled module.
#
# XLA does not state the live ranges on which its buffer assignment is based, but they follow from
# the schedule. A buffer is live from the instruction that writes it to the last that reads it.
# Tuples, `get-tuple-element` and bitcasts only pass a buffer on, and so do the parameters of a
# loop's body or of a branch, unless the loop writes a new value there. Times count instructions in
# execution order, those of a loop's body once.

#: Instructions whose result is an operand.
_SAME = frozenset({"bitcast", "optimization-barrier", "domain", "add-dependency"})

#: Instructions that only pass buffers on.
_PASSED_ON = _SAME | {"tuple", "get-tuple-element"}
#: The time of the end of a module.
END = sys.maxsize


class LiveSpan(NamedTuple):
    """The first and the last time at which a computation runs or a buffer is live."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class _Use:
    """The use of a place in an allocation by the buffers of a group, one after the other."""

    allocation: int
    held: list[tuple[LiveSpan, PlacedBuffer]]

    @cached_property
    def span(self) -> LiveSpan:
        """The time of the use."""
        return LiveSpan(self.held[0][0].start, max(span.end for span, _ in self.held))

    @property
    def size(self) -> int:
        """The bytes of the place."""
        return self.held[0][1].size

    def holds(self, time: int) -> PlacedBuffer:
        """Return the last buffer that was written there at a time."""
        return next(placed for span, placed in reversed(self.held) if span.start <= time)

    def written_over(self, others: Sequence[_Use]) -> int:
        """Return the bytes that this place shares with the places of other uses."""
        place = self.held[0][1]
        same = (use for use in others if use is not self and use.allocation == self.allocation)
        return sum(place.common(use.held[0][1]) for use in same)


class LiveRanges:
    """The live ranges of buffers.

    Args:
        module: A compiled module.
        assignment: Its memory.

    Attributes:
        time: The time of each instruction by number.
        readers: For each buffer by number, the last instruction that reads it. It is missing for a
            result of the module and for the carry of a loop.
    """

    def __init__(self, module: HloModule, assignment: BufferAssignment):
        self.time: dict[int, int] = {}
        self.readers: dict[int, Instruction] = {}
        self._module, self._assignment = module, assignment
        self._defined = {buffer.position: buffer for buffer in assignment.buffers()}
        self._spans: dict[int, LiveSpan] = {}
        self._callers: dict[int, Instruction] = {}
        self._homes: dict[int, int] = {}
        self._order()
        self._ends: dict[int, int] = {}
        for number in self._spans:
            self._read(module.computations[number])

    def at_peak(
        self, allocations: Sequence[Allocation]
    ) -> tuple[int, list[tuple[PlacedBuffer, int]]]:
        """Return the time at which most bytes of the allocations are in use, and what `live` does.

        They are those of XLA's simulation, if it has simulated the only allocation.
        """
        known = [self._assignment.peaks.get(allocation.index) for allocation in allocations]
        if len(known) == 1 and (peak := known[0]) is not None:
            time = self.time.get(peak.running.id, 0)
            return time, [(placed, placed.size) for placed in peak.live]
        time = self.peak(allocations)
        return time, self.live(allocations, time)

    def of(self, buffer: Buffer) -> LiveSpan:
        """Return the time from a buffer's definition to its last use."""
        instruction = buffer.instruction
        home = self._homes.get(instruction.id)
        start = self.time.get(instruction.id, 0)
        if home is not None and instruction.opcode == "parameter":
            start = self._spans[home].start
        return LiveSpan(start, max(start, self._ends.get(buffer.id, 0)))

    def peak(self, allocations: Sequence[Allocation]) -> int:
        """Return the time at which most bytes of the allocations are in use."""
        starts, ends = defaultdict[int, list[_Use]](list), defaultdict[int, list[_Use]](list)
        for use in self._uses(allocations):
            starts[use.span.start].append(use)
            ends[use.span.end].append(use)
        at = most = live = 0
        for time in sorted(starts.keys() | ends.keys()):
            live += sum(use.size for use in starts[time])
            used = live - sum(use.written_over(starts[time]) for use in ends[time])
            if used > most:
                at, most = time, used
            live -= sum(use.size for use in ends[time])
        return at

    def live(self, allocations: Sequence[Allocation], time: int) -> list[tuple[PlacedBuffer, int]]:
        """Return the buffers that are live at a time, with their bytes.

        If an instruction overwrites its operand, the shared bytes are counted for its result.
        """
        alive = [u for u in self._uses(allocations) if u.span.start <= time <= u.span.end]
        started = [use for use in alive if use.span.start == time]
        return [
            (use.holds(time), use.size - (use.written_over(started) if use.span.end == time else 0))
            for use in alive
        ]

    def _uses(self, allocations: Sequence[Allocation]) -> Iterator[_Use]:
        """Yield the uses of places. Adjacent live ranges of a group are one use."""
        for allocation in allocations:
            groups = defaultdict[int, list[tuple[LiveSpan, PlacedBuffer]]](list)
            for placed in allocation.placed:
                number = self._assignment.groups[placed.buffer.id]
                groups[number].append((self.of(placed.buffer), placed))
            for group in groups.values():
                adjacent: list[tuple[LiveSpan, PlacedBuffer]] = []
                end = 0
                for span, placed in sorted(group, key=lambda pair: pair[0]):
                    if adjacent and span.start > end:
                        yield _Use(allocation.index, adjacent)
                        adjacent = []
                    adjacent.append((span, placed))
                    end = max(end, span.end)
                yield _Use(allocation.index, adjacent)

    def caller(self, instruction: Instruction) -> Instruction | None:
        """Return the loop, branch or call whose computation an instruction is in, if any."""
        return self._callers.get(self._homes[instruction.id])

    def buffer_at(self, position: Position) -> Buffer | None:
        """Return the buffer that a value, or the part of one, lies in; None if it is unknown."""
        seen = None
        while position not in self._defined:
            if position == seen:
                return None
            seen, position = position, self.forwarded(position)
        return self._defined[position]

    def forwarded(self, position: Position) -> Position:
        """Return the value that a value passes on; itself if it is computed there."""
        number, index = position
        instruction = self._module.instructions[number]
        if instruction.opcode in _SAME:
            return instruction.operands[0], index
        if instruction.opcode == "get-tuple-element":
            return instruction.operands[0], (instruction.tuple_index, *index)
        if instruction.opcode.endswith("-done"):
            start = self._module.instructions[instruction.operands[0]]
            return start.id, (*_started(start), *index)
        is_start = instruction.opcode.endswith("-start") and instruction.operands
        if is_start and index and index[:1] != _started(instruction):
            return instruction.operands[0], index[1:]
        if instruction.opcode == "async-start" and index:
            return self._module.computations[instruction.calls[0]].root.id, index[1:]
        if instruction.opcode == "tuple" and index:
            return instruction.operands[index[0]], index[1:]
        if instruction.opcode == "while":
            return instruction.operands[0], index
        if instruction.opcode in CALLS:
            return self._module.computations[instruction.calls[0]].root.id, index
        if instruction.opcode == "parameter" and (home := self._homes.get(number)) is not None:
            caller = self._callers.get(home)
            if caller is not None:
                return _operand(caller, home, instruction.parameter_number), index
        return position

    def _order(self) -> None:
        """Number the instructions that run in execution order.

        Those of a computation that is called several times have the times of its last call.
        """
        module, lengths = self._module, dict[int, int]()
        # A module has its computations before those that call them.
        for number in module.computations:
            order = (module.instructions[n] for n in module.schedule.get(number, ()))
            lengths[number] = sum(1 + sum(1 + lengths[n] for n in _stepped(op)) for op in order)
        starts = {module.entry.id: 0}
        for number in reversed(module.computations):
            if number not in starts:
                continue
            clock = starts[number]
            for instruction in map(module.instructions.__getitem__, module.schedule[number]):
                self._homes[instruction.id] = number
                for called in _stepped(instruction):
                    if clock >= starts.get(called, 0):
                        starts[called], self._callers[called] = clock + 1, instruction
                    clock += 1 + lengths[called]
                clock += 1
                self.time[instruction.id] = clock
                for called in instruction.calls if instruction.opcode == "async-start" else ():
                    self.time[module.computations[called].root.id] = clock
            self._spans[number] = LiveSpan(starts[number], clock)
        self.time = dict(sorted(self.time.items(), key=itemgetter(1)))
        self._spans = dict(sorted(self._spans.items(), key=lambda item: item[1].end))

    def _read(self, computation: Computation) -> None:
        """Extend the live ranges of what a computation reads and returns."""
        for number in self._module.schedule[computation.id]:
            instruction = self._module.instructions[number]
            if instruction.opcode in _PASSED_ON:
                continue
            for operand in instruction.operands:
                for index in _indices(self._module.instructions[operand].shape):
                    self._extend((operand, index), self._use(instruction, index), instruction)
        for index in _indices(computation.root.shape):
            self._extend((computation.root.id, index), self._returned(computation), None)

    def _returned(self, computation: Computation) -> int:
        """Return the time until which the results of a computation are needed."""
        caller = self._callers.get(computation.id)
        if caller is None:
            return END
        is_body = caller.opcode == "while" and caller.calls[0] == computation.id
        return self.time[caller.id] if is_body else self._spans[computation.id].end

    def _use(self, instruction: Instruction, index: tuple[int, ...]) -> int:
        """Return the time until which an instruction reads the part of an operand."""
        if instruction.opcode in CALLS and (
            instruction.opcode != "while" or (instruction.id, index) in self._defined
        ):
            return self._spans[instruction.calls[0]].start
        return self.time[instruction.id]

    def _extend(self, position: Position, end: int, reader: Instruction | None) -> None:
        buffer = self.buffer_at(position)
        if buffer is None or end < self._ends.get(buffer.id, 0):
            return
        self._ends[buffer.id] = end
        if reader is None:
            self.readers.pop(buffer.id, None)
        else:
            self.readers[buffer.id] = reader


def _stepped(instruction: Instruction) -> tuple[int, ...]:
    """Return the computations that an instruction runs step by step."""
    return instruction.calls if instruction.opcode in CALLS else ()


def _operand(caller: Instruction, called: int, parameter: int) -> int:
    """Return the operand that a parameter of a called computation receives."""
    if caller.opcode == "conditional":
        return caller.operands[1 + caller.calls.index(called)]
    return caller.operands[parameter]


def _indices(shape: HloShape) -> Iterator[tuple[int, ...]]:
    """Yield the index of each shape in a shape, from its own index, (), on."""
    yield ()
    for i, part in enumerate(shape.parts):
        for index in _indices(part):
            yield (i, *index)


# --- buffers by the schedule ----------------------------------------------------------------------
# The memory that a module needs by its schedule, where XLA's assignment is not known, as for TPUs
# and for the text of a module.

#: Instructions that XLA computes in the memory of an operand of the same size that is not read
#: later: element by element, also in fusions.
_ELEMENTWISE = frozenset(
    (
        "abs",
        "add",
        "and",
        "bitcast",
        "ceil",
        "clamp",
        "compare",
        "convert",
        "copy",
        "cosine",
        "divide",
        "exponential",
        "exponential-minus-one",
        "floor",
        "is-finite",
        "log",
        "log-plus-one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "power",
        "remainder",
        "rsqrt",
        "select",
        "sign",
        "sine",
        "sqrt",
        "subtract",
        "tan",
        "tanh",
        "xor",
    )
)


#: The bytes to which XLA aligns the values that share a block of memory; on a GPU more.
_ALIGNMENT = 64

#: The bytes to which a TPU aligns its buffers.
_TPU_ALIGNMENT = 512


def scheduled_assignment(module: HloModule, in_main_memory: bool = True) -> BufferAssignment:
    """Return buffers for the values of a scheduled module, which share memory without gaps.

    A loop updates its carry in place, a donated argument becomes a result, and an instruction may
    overwrite an operand that is not read later. Values that are dead before a result is written
    share its memory. The other temporaries are one block, whose size is that of the values that are
    live at the peak.

    Args:
        module: The module.
        in_main_memory: Whether to leave out values in other memories, such as the VMEM of a TPU.
    """
    return _ScheduledBuffers(module, in_main_memory).assignment()


class _ScheduledBuffers:
    """Assigns the values of a module to places."""

    def __init__(self, module: HloModule, in_main_memory: bool) -> None:
        self._module, self._in_main_memory = module, in_main_memory
        self._buffers = [
            Buffer(number, op.shape.at(index).padded_bytes, op, index)
            for number, (op, index) in enumerate(self._values(module.entry, set()))
        ]
        self._group = {buffer.id: buffer.id for buffer in self._buffers}
        apart = (_allocation_of(buffer.id, [buffer], False) for buffer in self._buffers)
        self._ranges = LiveRanges(module, BufferAssignment(tuple(apart), self._group))

    def assignment(self) -> BufferAssignment:
        """Return the assignment."""
        entry = self._module.entry
        for index, number in self._module.donated.items():
            donor = next(op for op in entry.instructions if _is_parameter(op, number))
            self._unite((donor.id, ()), (entry.root.id, index))
        for number in self._ranges.time:
            self._update_in_place(self._module.instructions[number])
        return self._packed({buffer.id: self._root(buffer.id) for buffer in self._buffers})

    def _values(
        self, computation: Computation, seen: set[int]
    ) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
        """Yield the instructions that write to the main memory, with an index of the result.

        Those of a computation that is called several times are yielded once.
        """
        seen.add(computation.id)
        for number in self._module.schedule[computation.id]:
            op = self._module.instructions[number]
            is_called = op.opcode == "parameter" and computation is not self._module.entry
            if op.opcode in CALLS:
                for called in op.calls:
                    if called not in seen:
                        yield from self._values(self._module.computations[called], seen)
            elif not (op.opcode in _PASSED_ON or op.opcode.endswith("-done") or is_called):
                for index in _indices(op.shape):
                    shape = op.shape.at(index)
                    is_operand = op.opcode.endswith("-start") and index[:1] != _started(op)
                    is_on_chip = self._in_main_memory and shape.space
                    if not (is_operand or is_on_chip or shape.dtype in ("tuple", "token")):
                        yield op, index

    def _update_in_place(self, op: Instruction) -> None:
        """Unite the groups of values that an instruction has in one place."""
        if op.opcode == "while":
            body = self._module.computations[op.calls[0]]
            for index in _indices(op.shape):
                self._unite((op.operands[0], index), (body.root.id, index))
        elif op.opcode == "conditional":
            first, *others = (self._module.computations[number].root.id for number in op.calls)
            for index in _indices(op.shape):
                for other in others:
                    self._unite((first, index), (other, index))
        elif (operand := self._overwritten(op)) is not None:
            self._unite((operand, ()), (op.id, ()))

    def _overwritten(self, op: Instruction) -> int | None:
        """Return the operand whose place an instruction writes its result to, or None."""
        for position, number in enumerate(op.operands):
            buffer = self._ranges.buffer_at((number, ()))
            if (
                buffer is not None
                and not self._is_kept(buffer.instruction)
                and self._ranges.readers.get(buffer.id) is op
                and buffer.size == op.shape.padded_bytes
                and self._may_overwrite(op, position)
            ):
                return number
        return None

    def _is_kept(self, op: Instruction) -> bool:
        """Return True if the memory of a value may not change: a constant, or an argument.

        A TPU writes a constant where it is needed.
        """
        if op.opcode == "constant" and not op.shape.tile:
            return True
        is_argument = op.opcode == "parameter" and self._ranges.caller(op) is None
        return is_argument and op.parameter_number not in self._module.donated.values()

    def _may_overwrite(self, op: Instruction, position: int) -> bool:
        if op.opcode in ("dynamic-update-slice", "scatter", "sort"):
            return position == 0
        if op.opcode != "fusion":
            return op.opcode in _ELEMENTWISE - {"copy"}
        fused = self._module.computations[op.calls[0]]
        readers: defaultdict[int, list[Instruction]] = defaultdict(list)
        for inner in fused.instructions:
            for number in inner.operands:
                readers[number].append(inner)
        reached = [next(inner for inner in fused.instructions if _is_parameter(inner, position))]
        for value in reached:
            for reader in readers[value.id]:
                if reader.opcode in ("dynamic-slice", "slice"):
                    updates = [update for update in readers[value.id] if _updates(update, value)]
                    if not any(self._is_same_part(reader, update) for update in updates):
                        return False
                    continue
                if not _updates(reader, value) and reader.opcode not in _ELEMENTWISE:
                    return False
                if reader not in reached:
                    reached.append(reader)
        return True

    def _is_same_part(self, read: Instruction, update: Instruction) -> bool:
        """Return True if a slice has the elements that an update replaces, and is read first."""
        if update.opcode != "dynamic-update-slice":
            return False
        if read.opcode == "slice":  # of a place that XLA knows
            part = self._module.instructions[update.operands[1]].shape
            return read.shape.sizes == part.sizes
        return update.operands[2:] == read.operands[1:]

    def _root(self, number: int) -> int:
        while self._group[number] != number:
            number = self._group[number]
        return number

    def _unite(self, one: Position, other: Position) -> None:
        buffers = [self._ranges.buffer_at(position) for position in (one, other)]
        roots = sorted(self._root(buffer.id) for buffer in buffers if buffer is not None)
        if len(roots) == 2:
            self._group[roots[1]] = roots[0]

    def _packed(self, groups: dict[int, int]) -> BufferAssignment:
        """Return allocations for the arguments, results and constants, and one for the others."""
        root = self._module.entry.root
        positions = [(root.id, index) for index in _indices(root.shape)]
        results = {groups[b.id] for b in map(self._ranges.buffer_at, positions) if b is not None}
        members: defaultdict[int, list[Buffer]] = defaultdict(list)
        for buffer in self._buffers:
            members[groups[buffer.id]].append(buffer)
        allocations = tuple(
            _allocation_of(number, group, number in results) for number, group in members.items()
        )
        ranges = LiveRanges(self._module, BufferAssignment(allocations, groups))
        allocations = tuple(self._in_results(allocations, ranges))
        temporary = [allocation for allocation in allocations if allocation.is_temporary]
        fixed = [allocation for allocation in allocations if not allocation.is_temporary]
        live = ranges.live(temporary, ranges.peak(temporary))
        fixed.append(_block(temporary, _aligned(size for _, size in live)))
        if root.shape.parts:
            fixed.append(
                Allocation(-2, self._table_bytes(root.shape), None, True, False, False, ())
            )
        return BufferAssignment(tuple(fixed), groups)

    def _in_results(
        self, allocations: Sequence[Allocation], ranges: LiveRanges
    ) -> Iterator[Allocation]:
        """Yield allocations, with temporaries placed in the memory of results.

        XLA assigns places to the largest values first, to results before others of their size. A
        value gets the memory of a result if it fits there and is not needed at the same time.
        """
        taken: list[tuple[Allocation, list[LiveSpan], list[PlacedBuffer]]] = []
        for allocation in sorted(allocations, key=lambda a: (-a.size, not a.is_result)):
            spans = _united(ranges.of(placed.buffer) for placed in allocation.placed)
            if allocation.is_result:
                taken.append((allocation, spans, list(allocation.placed)))
                continue
            place = None
            if allocation.is_temporary:
                fitting = (t for t in reversed(taken) if _are_apart(spans, t[1]))
                place = next(fitting, None)
            if place is None:
                yield allocation
                continue
            for span in spans:
                insort(place[1], span)
            place[2].extend(allocation.placed)
        for allocation, _, placed in taken:
            yield replace(allocation, placed=tuple(placed))

    def _table_bytes(self, shape: HloShape) -> int:
        """Return the bytes of the table of the results, a pointer for each."""
        size = 8 * len(shape.parts)
        is_tiled = any(part.tile for part in shape.parts)
        return -(-size // _TPU_ALIGNMENT) * _TPU_ALIGNMENT if is_tiled else size


def _aligned(sizes: Iterable[int]) -> int:
    """Return the bytes of values side by side, the largest first, each at an aligned offset."""
    *others, last = sorted(sizes, reverse=True) or [0]
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in others) + last


def _united(spans: Iterable[LiveSpan]) -> list[LiveSpan]:
    """Return the times of spans as spans that are apart, in order."""
    united: list[LiveSpan] = []
    for span in sorted(spans):
        if united and span.start <= united[-1].end:
            span = LiveSpan(united[-1].start, max(united.pop().end, span.end))
        united.append(span)
    return united


def _are_apart(some: Sequence[LiveSpan], others: Sequence[LiveSpan]) -> bool:
    """Return True if values are not live at the time of others, whose spans are united."""
    for span in some:
        before = bisect_right(others, span.end, key=itemgetter(0))
        if before and others[before - 1].end >= span.start:
            return False
    return True


def _allocation_of(number: int, buffers: Sequence[Buffer], is_result: bool) -> Allocation:
    """Return the allocation of buffers in one place."""
    by_opcode = {buffer.instruction.opcode: buffer.instruction for buffer in buffers}
    parameter = by_opcode.get("parameter")
    return Allocation(
        number,
        max(buffer.size for buffer in buffers),
        None if parameter is None else parameter.parameter_number,
        is_result,
        "constant" in by_opcode,
        False,
        tuple(PlacedBuffer(buffer, 0, buffer.size) for buffer in buffers),
    )


def _block(allocations: Sequence[Allocation], size: int) -> Allocation:
    """Return one allocation of a size for values that share it."""
    placed, offset = [], 0
    for allocation in allocations:
        placed += [PlacedBuffer(p.buffer, offset, p.size) for p in allocation.placed]
        offset += allocation.size
    return Allocation(-1, size, None, False, False, False, tuple(placed))


def _updates(op: Instruction, value: Instruction) -> bool:
    return op.opcode in ("dynamic-update-slice", "scatter") and op.operands[0] == value.id


def _is_parameter(op: Instruction, number: int) -> bool:
    return op.opcode == "parameter" and op.parameter_number == number


def _started(op: Instruction) -> tuple[int, ...]:
    """Return the index of the result in what the start of an operation returns."""
    if op.opcode == "copy-start":
        return (0,)
    return (1,) if op.shape.parts and op.opcode != "all-reduce-start" else ()
