"""The memory that XLA assigned to the values of a compiled module.

    assignment = buffer_assignment(compiled, module)
    for allocation in assignment.allocations:
        print(allocation.size, [placed.buffer.instruction.name for placed in allocation.placed])

An allocation is one block of memory. XLA places buffers in it; buffers that are not needed at the
same time may share a place. Field numbers are those of `BufferAssignmentProto` in XLA's
`xla/service/hlo.proto`. Its traces of XLA's simulation of the heap (field 4) are missing in the CPU
builds of jaxlib 0.10 and 0.12. Their field 5, which that file does not declare, lists for each
allocation the buffers that XLA considers live at its peak. With loops these are too few, so
`live_ranges` finds the peak instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.hlo.module import Instruction, Module, Shape
from jaxprtool.ir.hlo.wire import Message, integer, integers, message, submessage, submessages

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
    def shape(self) -> Shape:
        """The shape of the value; that of a tuple for a table of pointers."""
        return self.instruction.shape.at(self.index)

    @property
    def position(self) -> Position:
        """The instruction's number, and the index."""
        return self.instruction.id, self.index


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """A buffer at its offset in an allocation, in bytes."""

    buffer: Buffer
    offset: int
    size: int

    def common(self, other: Placed) -> int:
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
    """

    index: int
    size: int
    parameter: int | None
    is_result: bool
    is_constant: bool
    is_local: bool
    placed: tuple[Placed, ...]

    @property
    def is_temporary(self) -> bool:
        """Whether it is only needed while the module runs."""
        return self.parameter is None and not (self.is_result or self.is_constant or self.is_local)


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """The memory of a module.

    Attributes:
        allocations: The blocks of memory.
        groups: The number of the group of each buffer, by the buffer's number. Buffers of a group
            are one place that is updated: the carry of a loop before, in and after it.
    """

    allocations: tuple[Allocation, ...]
    groups: dict[int, int]

    def buffers(self) -> Iterator[Buffer]:
        for allocation in self.allocations:
            for placed in allocation.placed:
                yield placed.buffer


def buffer_assignment(compiled: Any, module: Module) -> Assignment:
    """Return the memory of a `jax.stages.Compiled`, whose module is given.

    Raises:
        UnsupportedError: If the backend does not describe it.
    """
    known = compiled.memory_analysis()
    data = getattr(known, "serialized_buffer_assignment_proto", b"")
    if not data:
        platform = compiled.runtime_executable().local_devices()[0].platform
        raise UnsupportedError(f"XLA does not describe the buffers of a program for {platform}")
    return read_assignment(data, module)


def read_assignment(data: bytes, module: Module) -> Assignment:
    """Return the memory of a module from a `BufferAssignmentProto`."""
    fields = message(data)
    buffers = {each.id: each for each in (_buffer(b, module) for b in submessages(fields, 1))}
    allocations = tuple(_allocation(each, buffers) for each in submessages(fields, 3))
    return Assignment(allocations, _groups(submessages(fields, 2), buffers))


def _buffer(fields: Message, module: Module) -> Buffer:
    number, index = _position(submessage(fields, 3))
    return Buffer(integer(fields, 1), integer(fields, 2), module.instructions[number], index)


def _position(location: Message) -> Position:
    return integer(location, 4), tuple(integers(location, 3))


def _allocation(fields: Message, buffers: dict[int, Buffer]) -> Allocation:
    placed = tuple(
        Placed(buffers[integer(each, 1)], integer(each, 2), integer(each, 3))
        for each in submessages(fields, 9)
    )
    return Allocation(
        integer(fields, 1),
        integer(fields, 2),
        integer(fields, 6) if integer(fields, 5) else None,
        bool(integer(fields, 7)),
        bool(integer(fields, 12)),
        bool(integer(fields, 3)),
        placed,
    )


def _groups(aliases: list[Message], buffers: dict[int, Buffer]) -> dict[int, int]:
    """Return the smallest number of the buffers in each buffer's group."""
    by_position = {each.position: each.id for each in buffers.values()}
    groups = {number: number for number in buffers}
    for each in aliases:
        number, other = integer(each, 1), by_position[_position(submessage(each, 2))]
        groups[number] = min(groups[number], other)
    return groups
