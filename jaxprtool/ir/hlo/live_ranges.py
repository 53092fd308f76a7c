"""The live ranges of the buffers of a compiled module.

XLA does not state the live ranges on which its buffer assignment is based, but they follow from the
schedule. A buffer is live from the instruction that writes it to the last that reads it. Tuples,
`get-tuple-element` and bitcasts only pass a buffer on, and so do the parameters of a loop's body or
of a branch, unless the loop writes a new value there. Times count instructions in execution order,
those of a loop's body once.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxprtool.ir.hlo.buffers import Allocation, Assignment, Buffer, Placed, Position
from jaxprtool.ir.hlo.module import Computation, Instruction, Module, Shape

#: Instructions whose result is an operand.
_SAME = frozenset({"bitcast", "optimization-barrier", "domain", "add-dependency"})

#: Instructions that only pass buffers on.
_PASSED_ON = _SAME | {"tuple", "get-tuple-element"}

#: Instructions whose computations run step by step and have buffers of their own.
CALLS = frozenset({"while", "conditional", "call"})

#: The time of the end of a module.
END = sys.maxsize


class Span(NamedTuple):
    """The first and the last time at which a computation runs or a buffer is live."""

    start: int
    end: int


@dataclass(frozen=True, eq=False)
class _Use:
    """The use of a place in an allocation by the buffers of a group, one after the other."""

    allocation: int
    held: list[tuple[Span, Placed]]

    @cached_property
    def span(self) -> Span:
        """The time of the use."""
        return Span(self.held[0][0].start, max(span.end for span, _ in self.held))

    @property
    def size(self) -> int:
        """The bytes of the place."""
        return self.held[0][1].size

    def holds(self, time: int) -> Placed:
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

    def __init__(self, module: Module, assignment: Assignment):
        self.time: dict[int, int] = {}
        self.readers: dict[int, Instruction] = {}
        self._module, self._assignment = module, assignment
        self._defined = {each.position: each for each in assignment.buffers()}
        self._spans: dict[int, Span] = {}
        self._callers: dict[int, Instruction] = {}
        self._homes: dict[int, int] = {}
        self._order(module.entry, 0)
        self._ends: dict[int, int] = {}
        for number in self._spans:
            self._read(module.computations[number])

    def of(self, buffer: Buffer) -> Span:
        """Return the time from a buffer's definition to its last use."""
        made = buffer.instruction
        home = self._homes.get(made.id)
        start = self.time.get(made.id, 0)
        if home is not None and made.opcode == "parameter":
            start = self._spans[home].start
        return Span(start, max(start, self._ends.get(buffer.id, 0)))

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

    def live(self, allocations: Sequence[Allocation], time: int) -> list[tuple[Placed, int]]:
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
            groups = defaultdict[int, list[tuple[Span, Placed]]](list)
            for placed in allocation.placed:
                number = self._assignment.groups[placed.buffer.id]
                groups[number].append((self.of(placed.buffer), placed))
            for group in groups.values():
                held: list[tuple[Span, Placed]] = []
                for span, placed in sorted(group, key=lambda each: each[0]):
                    if held and span.start > max(other.end for other, _ in held):
                        yield _Use(allocation.index, held)
                        held = []
                    held.append((span, placed))
                yield _Use(allocation.index, held)

    def caller(self, instruction: Instruction) -> Instruction | None:
        """Return the loop, branch or call whose computation an instruction is in, if any."""
        return self._callers.get(self._homes[instruction.id])

    def buffer_at(self, position: Position) -> Buffer | None:
        """Return the buffer that a value, or the part of one, lies in; None if it is unknown."""
        seen = None
        while position not in self._defined:
            if position == seen:
                return None
            seen, position = position, self._origin(position)
        return self._defined[position]

    def _origin(self, position: Position) -> Position:
        """Return the value that a value without its own buffer forwards."""
        number, index = position
        made = self._module.instructions[number]
        if made.opcode in _SAME:
            return made.operands[0], index
        if made.opcode == "get-tuple-element":
            return made.operands[0], (made.tuple_index, *index)
        if made.opcode == "tuple" and index:
            return made.operands[index[0]], index[1:]
        if made.opcode == "while":
            return made.operands[0], index
        if made.opcode in CALLS:
            return self._module.computations[made.calls[0]].root.id, index
        if made.opcode == "parameter" and (home := self._homes.get(number)) is not None:
            caller = self._callers.get(home)
            if caller is not None:
                return _operand(caller, home, made.parameter_number), index
        return position

    def _order(self, computation: Computation, clock: int) -> int:
        """Number a computation's instructions in execution order; return the time after it."""
        start = clock
        for number in self._module.schedule[computation.id]:
            made = self._module.instructions[number]
            self._homes[number] = computation.id
            if made.opcode in CALLS:
                for called in made.calls:
                    self._callers[called] = made
                    clock = self._order(self._module.computations[called], clock + 1)
            clock += 1
            self.time[number] = clock
        self._spans[computation.id] = Span(start, clock)
        return clock

    def _read(self, computation: Computation) -> None:
        """Extend the live ranges of what a computation reads and returns."""
        for number in self._module.schedule[computation.id]:
            made = self._module.instructions[number]
            if made.opcode in _PASSED_ON:
                continue
            for operand in made.operands:
                for index in _indices(self._module.instructions[operand].shape):
                    self._extend((operand, index), self._use(made, index), made)
        for index in _indices(computation.root.shape):
            self._extend((computation.root.id, index), self._returned(computation), None)

    def _returned(self, computation: Computation) -> int:
        """Return the time until which the results of a computation are needed."""
        caller = self._callers.get(computation.id)
        if caller is None:
            return END
        is_body = caller.opcode == "while" and caller.calls[0] == computation.id
        return self.time[caller.id] if is_body else self._spans[computation.id].end

    def _use(self, made: Instruction, index: tuple[int, ...]) -> int:
        """Return the time until which an instruction reads the part of an operand."""
        if made.opcode in CALLS and (made.opcode != "while" or (made.id, index) in self._defined):
            return self._spans[made.calls[0]].start
        return self.time[made.id]

    def _extend(self, position: Position, end: int, reader: Instruction | None) -> None:
        buffer = self.buffer_at(position)
        if buffer is None or end < self._ends.get(buffer.id, 0):
            return
        self._ends[buffer.id] = end
        if reader is None:
            self.readers.pop(buffer.id, None)
        else:
            self.readers[buffer.id] = reader


def _operand(caller: Instruction, called: int, parameter: int) -> int:
    """Return the operand that a parameter of a called computation receives."""
    if caller.opcode == "conditional":
        return caller.operands[1 + caller.calls.index(called)]
    return caller.operands[parameter]


def _indices(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Yield the index of each shape in a shape, from its own index, (), on."""
    yield ()
    for i, part in enumerate(shape.parts):
        for index in _indices(part):
            yield (i, *index)
