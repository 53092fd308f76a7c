"""The collectives of a compiled module: how devices exchange values.

    for each in collectives(module):
        print(each.kind, each.bytes, each.count, module.frames(each.instruction))

Field numbers are those of `HloInstructionProto` in XLA's `xla/service/hlo.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxprtool.ir.hlo.device_tiles import axis_part, mesh_coordinates, mesh_sizes
from jaxprtool.ir.hlo.module import Instruction, Module, Shape
from jaxprtool.ir.hlo.trip_counts import executed
from jaxprtool.ir.hlo.wire import Message, integer, integers, submessage, submessages

#: The opcodes of collectives. Those that run in the background start with `KIND-start`.
KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

#: Collectives that sum values over devices.
REDUCTIONS = frozenset({"all-reduce", "reduce-scatter"})

_START, _DONE = "-start", "-done"


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of a compiled module.

    Attributes:
        kind: Its opcode: `all-reduce`.
        bytes: The bytes of its result on one device. If XLA merged collectives, the sum over their
            results.
        count: How often it runs in a call of the module: the product of the trip counts of the
            loops around it. None if one of these is known only when the loop runs. In a branch it
            is counted as if the branch were taken.
        instruction: The instruction.
    """

    kind: str
    bytes: int
    count: int | None
    instruction: Instruction


def collectives(module: Module) -> Iterator[Collective]:
    """Yield the collectives of a module, in the order of its computations."""
    for each, count in executed(module):
        kind = each.opcode.removesuffix(_START)
        if kind in KINDS:
            yield Collective(kind, result_shape(each).bytes, count, each)


def started(module: Module, instruction: Instruction) -> Instruction | None:
    """Return the collective that an instruction is or completes; None for other instructions."""
    if instruction.opcode.endswith(_DONE):
        instruction = module.instructions[instruction.operands[0]]
    return instruction if instruction.opcode.removesuffix(_START) in KINDS else None


def moved_values(module: Module, collective: Instruction) -> list[tuple[Instruction, Shape]]:
    """Return the values that a collective moves: several, if XLA merged operations.

    Args:
        module: The module.
        collective: An instruction that `collectives` yields.

    Returns:
        For each value, the instruction with its name and source lines, and its shape. For a merged
        operation, these are the instructions that read the elements of its result. No instruction
        reads a result of the program: there a reduction gives its operand, which has the same line.
    """
    whole = result_shape(collective)
    result = module.ends.get(collective.id, collective)
    elements: dict[int, Instruction] = {}
    for each in module.elements.get(result.id, ()):
        if each.op_name:
            elements.setdefault(each.tuple_index, each)
    kind = collective.opcode.removesuffix(_START)
    # An all-to-all may return a value in parts, one for each device.
    if not whole.parts or (kind == "all-to-all" and len(elements) < len(whole.parts)):
        return [(collective, whole)]
    for i, number in enumerate(collective.operands if kind in REDUCTIONS else ()):
        operand = module.instructions[number]
        if operand.op_name and operand.frame_id:
            elements.setdefault(i, operand)
    return [(elements.get(i, collective), shape) for i, shape in enumerate(whole.parts)]


def result_shape(instruction: Instruction) -> Shape:
    """Return the shape of a collective's result.

    `KIND-start` returns its operand and the result; `all-reduce-start` returns only the result.
    """
    opcode, shape = instruction.opcode, instruction.shape
    if opcode.endswith(_START) and opcode != "all-reduce-start":
        return shape.parts[1]
    return shape


def device_groups(instruction: Instruction, devices: int) -> list[tuple[int, ...]]:
    """Return the groups of devices that exchange values in a collective.

    Groups are written as lists of devices, as a transposed range, or by the axes of a mesh. No
    groups means one group of all devices. A collective permutation has no groups.
    """
    fields = instruction.fields
    legacy, listed = submessages(fields, 49), submessage(fields, 87)
    if lists := legacy or submessages(listed, 1):
        return [tuple(integers(each, 1)) for each in lists]
    if ranged := submessage(fields, 92) or submessage(listed, 2):
        count, size = integer(ranged, 1), integer(ranged, 2)
        order = np.arange(count * size).reshape(integers(ranged, 3))
        rows = order.transpose(integers(ranged, 4)).reshape(count, size)
        return list(map(tuple, rows.tolist()))
    if by_axes := submessage(fields, 93):
        return _along(submessage(by_axes, 1), submessages(by_axes, 2), devices)
    return [tuple(range(devices))]


def _along(mesh: Message, axes: Sequence[Message], devices: int) -> list[tuple[int, ...]]:
    """Return the groups of devices that differ only along some axes of a mesh."""
    coordinates = mesh_coordinates(mesh, devices)
    outside = coordinates.copy()
    for each in axes:
        part = axis_part(each, mesh_sizes(mesh), coordinates)
        outside[:, part.axis] -= part.place * part.stride
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(outside.tolist()):
        groups.setdefault(tuple(place), []).append(device)
    return list(map(tuple, groups.values()))


def device_pairs(instruction: Instruction) -> list[tuple[int, int]]:
    """Return the sources and targets of a collective permutation."""
    return [(integer(each, 1), integer(each, 2)) for each in submessages(instruction.fields, 52)]
