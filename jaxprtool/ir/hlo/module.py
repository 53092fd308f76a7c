"""The operations of a compiled module: names, lines, trip counts, products; and how it is read.

    module = compiled_module(jax.jit(f).lower(x).compile())
    for op in module.entry.instructions:
        print(op.opcode, op.op_name, module.frames(op))

Field numbers are those of XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`. They are the same
in all supported releases of jaxlib.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from jaxprtool.ir import source_text
from jaxprtool.ir.backends import cached_method
from jaxprtool.jaxcompat.source_locations import UserFrame

# --- module ---------------------------------------------------------------------------------------
# The operations of a compiled module, with the names and source lines that JAX gave them.

#: `PrimitiveType` of xla_data.proto: the name and the bits of each element type.
_ELEMENTS: dict[int, tuple[str, int]] = {
    1: ("pred", 8), 2: ("s8", 8), 3: ("s16", 16), 4: ("s32", 32), 5: ("s64", 64),
    6: ("u8", 8), 7: ("u16", 16), 8: ("u32", 32), 9: ("u64", 64),
    10: ("f16", 16), 11: ("f32", 32), 12: ("f64", 64), 15: ("c64", 64), 16: ("bf16", 16),
    17: ("token", 0), 18: ("c128", 128), 19: ("f8e5m2", 8), 20: ("f8e4m3fn", 8), 21: ("s4", 4),
    22: ("u4", 4), 23: ("f8e4m3b11fnuz", 8), 24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8),
    26: ("s2", 2), 27: ("u2", 2), 28: ("f8e4m3", 8), 29: ("f8e3m4", 8), 30: ("s1", 1),
    31: ("u1", 1), 32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8),
}  # fmt: skip
_TUPLE = 13


@dataclass(frozen=True)
class HloShape:
    """The shape of a value: an array, or a tuple of shapes.

    Attributes:
        dtype: The element type in HLO's notation, such as `f32` or `pred`; "tuple" for tuples.
        sizes: The size of each dimension.
        parts: The shapes in a tuple.
        layout: The dimensions from the fastest varying to the slowest.
        tile: The sizes of a tile, which the fastest varying dimensions are padded to on a TPU.
        space: The number of its memory space: 0 for the device's main memory.
    """

    dtype: str
    sizes: tuple[int, ...] = ()
    parts: tuple[HloShape, ...] = ()
    layout: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def padded_bytes(self) -> int:
        """The size in bytes in memory, with the padding of tiles."""
        if not self.tile:
            return self.bytes
        sizes = [1] * (len(self.tile) - len(self.layout))
        sizes += [self.sizes[dimension] for dimension in reversed(self.layout)]
        for i, size in enumerate(reversed(self.tile), 1):
            sizes[-i] = -(-sizes[-i] // size) * size
        return (prod(sizes) * _BITS.get(self.dtype, 0) + 7) // 8

    @property
    def bytes(self) -> int:
        """The size in bytes; of a tuple, that of all its parts."""
        if self.parts:
            return sum(part.bytes for part in self.parts)
        return (prod(self.sizes) * _BITS.get(self.dtype, 0) + 7) // 8

    def at(self, index: Sequence[int]) -> HloShape:
        """Return the shape at an index into nested tuples."""
        return self.parts[index[0]].at(index[1:]) if index else self

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


_BITS = dict(_ELEMENTS.values())


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """An operation of a compiled module.

    Attributes:
        id: Its number, unique in the module.
        name: Its name, unique in the module, by which profiles and buffers refer to it.
        opcode: Its kind, such as `fusion` or `dot`.
        shape: The shape of its result.
        op_name: The path that JAX gave it: `jit(f)/transpose(jvp(Block))/dot_general`. It has
            several paths where XLA merged operations.
        frame_id: The number of its call stack; 0 if it has none. That of a line in a module without
            call stacks is negative.
        operands: The numbers of its operands.
        calls: The numbers of the computations that it calls: the body of a fusion or a loop.
        fields: The other fields of its message.
    """

    id: int
    name: str
    opcode: str
    shape: HloShape
    op_name: str
    frame_id: int
    operands: tuple[int, ...]
    calls: tuple[int, ...]
    fields: Message = field(repr=False)

    @property
    def path(self) -> str:
        """The path that JAX gave it, the first of several.

        XLA writes those of merged operations as `a/b;a/c`, and those of merged collectives as
        `a/(b:c)`.
        """
        around, is_merged, names = self.op_name.partition(";")[0].partition("/(")
        return f"{around}/{names.rstrip(')').partition(':')[0]}" if is_merged else around

    @property
    def custom_call_target(self) -> str:
        """The function that a custom call runs; "" for other instructions."""
        return text_field(self.fields, 28)

    @property
    def parameter_number(self) -> int:
        """The position of a parameter."""
        return integer(self.fields, 9)

    @property
    def tuple_index(self) -> int:
        """The element that a `get-tuple-element` returns."""
        return integer(self.fields, 13)


@dataclass(frozen=True, eq=False)
class Computation:
    """A function of a compiled module.

    Attributes:
        id: Its number, unique in the module.
        name: Its name.
        instructions: Its operations.
        root: The operation that computes its result.
    """

    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction


@dataclass(frozen=True, eq=False)
class HloModule:
    """A compiled module.

    Attributes:
        name: Its name.
        computations: Its functions by number.
        entry: The function that is run.
        schedule: The order in which the instructions of a function run, by the function's number;
            empty before XLA's optimizations.
        donated: The parameter that each result reuses, by the result's index.
        devices: The number of devices that it was compiled for.
        stack_frames: The call stacks of its instructions.
        lines: Files and lines, instead of call stacks, in a module of an older release.
        since: The time of the file that it was read from. Source files written later have changed.
        digests: The digests of source files, if it is of a recorded run that keeps them.
        source: The text or the `HloModuleProto` that it was read from.
    """

    name: str
    computations: dict[int, Computation]
    entry: Computation
    schedule: dict[int, tuple[int, ...]]
    donated: dict[tuple[int, ...], int]
    devices: int
    stack_frames: Message = field(repr=False)
    lines: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    since: float | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    source: bytes | str = field(kw_only=True, repr=False)

    @cached_property
    def instructions(self) -> dict[int, Instruction]:
        """All operations, by number."""
        return {
            i.id: i for computation in self.computations.values() for i in computation.instructions
        }

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """All operations, by name."""
        return {op.name: op for op in self.instructions.values()}

    @cached_property
    def is_tiled(self) -> bool:
        """Whether it is for a TPU, whose arrays consist of tiles."""
        return any(op.shape.tile for op in self.instructions.values())

    @cached_property
    def elements(self) -> dict[int, list[Instruction]]:
        """The instructions that read an element of a tuple, by the number of the tuple."""
        by_tuple: dict[int, list[Instruction]] = {}
        for op in self.instructions.values():
            if op.opcode == "get-tuple-element":
                by_tuple.setdefault(op.operands[0], []).append(op)
        return by_tuple

    @cached_property
    def ends(self) -> dict[int, Instruction]:
        """The ends of operations in the background, by the number of their start."""
        ends = (i for i in self.instructions.values() if i.opcode.endswith("-done"))
        return {end.operands[0]: end for end in ends}

    @cached_method
    def inside(self, instruction: Instruction) -> Counter[Instruction]:
        """Return how often a fusion runs each operation; for another instruction, itself."""
        if instruction.opcode not in ("fusion", "call"):
            return Counter((instruction,))
        inside = Counter[Instruction]()
        for number in instruction.calls:
            for op in self.computations[number].instructions:
                inside.update(self.inside(op))
        return inside

    def frames(self, instruction: Instruction) -> tuple[UserFrame, ...]:
        """Return the call stack of an operation, the innermost frame first."""
        return self._stack(instruction.frame_id)

    @cached_method
    def _stack(self, number: int) -> tuple[UserFrame, ...]:
        if number == 0:
            return ()
        if number < 0:
            file, line = self.lines[-number - 1]
            file = source_text.name_since(file, self.since, self.digests)
            return (UserFrame(file, line, "", 0, line, 0),)
        location, parent = self._frame_table[number - 1]
        return (self._locations[location - 1], *self._stack(parent))

    @cached_property
    def _frame_table(self) -> list[tuple[int, int]]:
        frames = submessages(self.stack_frames, 4)
        return [(integer(frame, 1), integer(frame, 2)) for frame in frames]

    @cached_property
    def _locations(self) -> list[UserFrame]:
        files, functions = (
            [name.decode(errors="replace") for name in self.stack_frames.get(number, ())]
            for number in (1, 2)
        )
        files = [source_text.name_since(file, self.since, self.digests) for file in files]
        locations = []
        for entry in submessages(self.stack_frames, 3):
            line, column, end_line, end_column = (integer(entry, n) for n in (3, 4, 5, 6))
            file, function = files[integer(entry, 1) - 1], functions[integer(entry, 2) - 1]
            locations.append(UserFrame(file, line, function, column, end_line or line, end_column))
        return locations


def compiled_module(compiled: Any) -> HloModule:
    """Return the module of a `jax.stages.Compiled`, after XLA's passes.

    A program over several devices has one module, which every device runs.
    """
    (module,) = compiled.runtime_executable().hlo_modules()
    return read_module(module.as_serialized_hlo_module_proto())


def module_name(data: bytes) -> str:
    """Return the name of a module from an `HloModuleProto`, without reading all of it."""
    return text_field(message(data), 1)


def read_module(data: bytes, since: float | None = None, text: str | None = None) -> HloModule:
    """Return a module from an `HloModuleProto`.

    Args:
        data: The proto.
        since: The time when the file that has it was written, if it was read from one.
        text: The text that the proto was parsed from, if any.
    """
    fields = message(data)
    reader = _Reader()
    parsed = map(reader.computation, submessages(fields, 3))
    computations = {computation.id: computation for computation in parsed}
    sequences = submessages(submessage(fields, 7), 1)
    assignment = submessage(fields, 15)  # replicas and partitions; missing before compilation
    return HloModule(
        text_field(fields, 1),
        computations,
        computations[integer(fields, 6)],
        {
            integer(sequence, 1): tuple(integers(submessage(sequence, 2), 1))
            for sequence in sequences
        },
        {
            tuple(integers(alias, 1)): integer(alias, 2)
            for alias in submessages(submessage(fields, 8), 1)
        },
        max(integer(assignment, 1) * integer(assignment, 2), 1),
        submessage(fields, 17),
        tuple(reader.lines),
        since,
        source=data if text is None else text,
    )


class _Reader:
    """Reads the functions of a module.

    Attributes:
        lines: The numbers of files and lines that instructions have instead of a call stack.
    """

    def __init__(self) -> None:
        self._shapes: dict[bytes, HloShape] = {}  # many values share few
        self.lines: dict[tuple[str, int], int] = {}

    def computation(self, fields: Message) -> Computation:
        """Return a function."""
        instructions = tuple(map(self._instruction, submessages(fields, 2)))
        root = integer(fields, 6)
        return Computation(
            integer(fields, 5),
            text_field(fields, 1),
            instructions,
            next(op for op in instructions if op.id == root),
        )

    def _instruction(self, fields: Message) -> Instruction:
        metadata, shape = submessage(fields, 7), fields[3][-1]
        if shape not in self._shapes:
            self._shapes[shape] = _shape(shape)
        return Instruction(
            integer(fields, 35),
            text_field(fields, 1),
            text_field(fields, 2),
            self._shapes[shape],
            text_field(metadata, 2),
            integer(metadata, 15) or self._line(metadata),
            tuple(integers(fields, 36)),
            tuple(integers(fields, 38)),
            fields,
        )

    def _line(self, metadata: Message) -> int:
        """Return the negative number of the line of an instruction; 0 if it has none."""
        file = text_field(metadata, 3)
        if not file:
            return 0
        return -self.lines.setdefault((file, integer(metadata, 4)), len(self.lines) + 1)


def _shape(data: bytes) -> HloShape:
    fields = message(data)
    kind = integer(fields, 2)
    if kind == _TUPLE:
        return HloShape("tuple", parts=tuple(map(_shape, fields.get(4, ()))))
    name, _ = _ELEMENTS.get(kind, (f"type{kind}", 0))
    layout = submessage(fields, 5)
    tiles = submessages(layout, 6)
    return HloShape(
        name,
        tuple(integers(fields, 3)),
        (),
        tuple(integers(layout, 1)),
        tuple(integers(tiles[0], 1)) if tiles else (),
        integer(layout, 8),
    )


# --- wire -----------------------------------------------------------------------------------------
# Read protocol buffers without their schema.
#
# XLA describes compiled modules and their memory in protocol buffers, and no package that we depend
# on has their descriptors. The readers of this folder name the numbers of the fields that they
# read, and the file of XLA's sources that declares them. The format is described at
# https://protobuf.dev/programming-guides/encoding/.

#: The fields of a message by number, each with its values in order: an integer, or the bytes of a
#: text, a message or packed numbers.
Message = dict[int, list[Any]]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def message(data: bytes) -> Message:
    """Return the fields of a message.

    Fixed-width numbers are returned as bytes.

    Raises:
        ValueError: If the data are not a message.
    """
    try:
        return _fields(data)
    except IndexError:
        raise ValueError("the message is cut off") from None


def _fields(data: bytes) -> Message:
    fields: Message = {}
    position, end = 0, len(data)
    while position < end:
        key = data[position]
        position += 1
        if key > 0x7F:
            key, position = _varint(data, position - 1)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value = data[position]
            position += 1
            if value > 0x7F:
                value, position = _varint(data, position - 1)
        else:
            if kind == _BYTES:
                size, position = _varint(data, position)
            elif kind == _FIXED64:
                size = 8
            elif kind == _FIXED32:
                size = 4
            else:
                raise ValueError(f"no wire type has number {kind}")
            value = data[position : position + size]
            position += size
        if (field := key >> 3) in fields:
            fields[field].append(value)
        else:
            fields[field] = [value]
    if position != end:
        raise ValueError("the message is cut off")
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def integer(fields: Message, number: int, default: int = 0) -> int:
    """Return an integer field; negative ones are read as 64 bits."""
    values = fields.get(number)
    if not values:
        return default
    value: int = values[-1]
    return value - (1 << 64) if value >= 1 << 63 else value


def text_field(fields: Message, number: int) -> str:
    """Return a text field, "" if it is missing."""
    values = fields.get(number)
    return values[-1].decode(errors="replace") if values else ""


def integers(fields: Message, number: int) -> list[int]:
    """Return a repeated integer field, packed or not."""
    numbers: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            numbers.append(value)
            continue
        position = 0
        while position < len(value):
            varint, position = _varint(value, position)
            numbers.append(varint)
    return [n - (1 << 64) if n >= 1 << 63 else n for n in numbers]


def submessage(fields: Message, number: int) -> Message:
    """Return a message field, empty if it is missing."""
    values = fields.get(number)
    return message(values[-1]) if values else {}


def submessages(fields: Message, number: int) -> list[Message]:
    """Return a repeated message field."""
    values: Sequence[bytes] = fields.get(number, ())
    return [message(value) for value in values]


# --- trip counts ----------------------------------------------------------------------------------
# The number of iterations of a loop in a compiled module.
#
# XLA for CPU and GPU states known trip counts in the module. XLA for TPU does not: there, loops are
# recognized that count up to a constant, as `scan` and `fori_loop` do. Field numbers are those of
# XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`.

#: Operations that pass on their operand.
_SAME = frozenset({"copy", "bitcast", "copy-start", "copy-done"})


def while_trip_count(module: HloModule, loop: Instruction) -> int | None:
    """Return the number of iterations of a `while`; None if it is unknown before the loop runs."""
    config = text_field(loop.fields, 43)
    count = json.loads(config).get("known_trip_count", {}) if config.startswith("{") else {}
    return int(count["n"]) if "n" in count else counted_trips(module, loop)


def executed(
    module: HloModule, computation: Computation | None = None, count: int | None = 1
) -> Iterator[tuple[Instruction, int | None]]:
    """Yield the instructions of a module, and how often each runs in a call of the module.

    The count is the product of the trip counts of the loops around it; None if one of these is
    known only when the loop runs. In a branch it is counted as if the branch were taken.

    Args:
        module: The module.
        computation: A function of it; by default the one that is run.
        count: How often that function runs.
    """
    for op in (computation or module.entry).instructions:
        yield op, count
        inner = count
        if op.opcode == "while":
            trips = while_trip_count(module, op)
            inner = None if trips is None or count is None else count * trips
        # The end of an operation in the background names the computation that its start runs.
        for number in () if op.opcode in ("async-update", "async-done") else op.calls:
            yield from executed(module, module.computations[number], inner)


def counted_trips(module: HloModule, loop: Instruction) -> int | None:
    """Return the iterations of a loop that counts from a constant up to a constant, or None."""
    body, condition = (module.computations[number] for number in loop.calls[:2])
    compare = condition.root
    if compare.opcode != "compare" or text_field(compare.fields, 63) != "LT":
        return None
    counter, limit = (module.instructions[number] for number in compare.operands)
    end = _constant(module, limit)
    index = _carried(module, counter)
    if index is None or end is None or body.root.opcode != "tuple":
        return None
    start = _constant(module, _element(module, module.instructions[loop.operands[0]], index))
    step = _step(module, _element(module, body.root, index), index)
    if start is None or not step or step < 0:
        return None
    return max(0, -(-(end - start) // step))


def _element(module: HloModule, value: Instruction, index: int) -> Instruction:
    """Return an element of a tuple; the value itself if it is not made as one."""
    return module.instructions[value.operands[index]] if value.opcode == "tuple" else value


def _step(module: HloModule, value: Instruction, index: int) -> int | None:
    """Return the constant that is added to an element of a loop's carry, or None."""
    value = _passed(module, value)
    if value.opcode != "add":
        return None
    operands = [_passed(module, module.instructions[number]) for number in value.operands]
    counters = [_carried(module, operand) == index for operand in operands]
    if counters == [True, False]:
        return _constant(module, operands[1])
    return _constant(module, operands[0]) if counters == [False, True] else None


def _carried(module: HloModule, value: Instruction) -> int | None:
    """Return the index of a value in a loop's carry, in the body or the condition, or None."""
    if value.opcode != "get-tuple-element":
        return None
    is_carry = module.instructions[value.operands[0]].opcode == "parameter"
    return value.tuple_index if is_carry else None


def _constant(module: HloModule, value: Instruction) -> int | None:
    """Return the value of an integer constant, or None."""
    value = _passed(module, value)
    if value.opcode != "constant" or value.shape.sizes or value.shape.dtype not in ("s32", "s64"):
        return None
    literal = submessage(value.fields, 8)
    (number,) = integers(literal, 4) or integers(literal, 5) or [0]
    return number


def _passed(module: HloModule, value: Instruction) -> Instruction:
    """Return the value that a chain of copies and bitcasts starts from."""
    while value.opcode in _SAME and value.operands:
        value = module.instructions[value.operands[0]]
    return value


#: Instructions whose computations run step by step and have buffers of their own.
CALLS = frozenset({"while", "conditional", "call"})

#: Instructions that run no kernel.
NO_KERNEL = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "add-dependency", "optimization-barrier", "domain", "partition-id", "replica-id",
})  # fmt: skip

#: The number of operations of a kernel that `kernel_contents` lists.
_LISTED = 4


def kernel_contents(module: HloModule, kernel: Instruction) -> str:
    """Return what a kernel computes: `dot`, `add, tanh, multiply`, or what a custom call runs."""
    if kernel.custom_call_target:
        return f"custom-call {kernel.custom_call_target}"
    opcodes = {op.opcode: None for op in module.inside(kernel) if op.opcode not in NO_KERNEL}
    listed = [opcode for opcode in opcodes if opcode != "broadcast"]
    listed = listed or list(opcodes) or [kernel.opcode]
    return ", ".join(listed[:_LISTED]) + (", …" if len(listed) > _LISTED else "")


# --- products -------------------------------------------------------------------------------------
# The floating-point operations of matrix products and convolutions in a compiled module.
#
# Field numbers are those of XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`.


def product_flops(module: HloModule, computation: Computation | None = None) -> Counter[str]:
    """Return the operations of products in a call, by the element type of the first operand.

    A loop with an unknown trip count is counted once; all branches are counted.

    Args:
        module: The module.
        computation: A function of it; by default the one that is run.
    """
    total = Counter[str]()
    for op in (computation or module.entry).instructions:
        total += instruction_flops(module, op)
    return total


def instruction_flops(module: HloModule, instruction: Instruction) -> Counter[str]:
    """Return the operations of the products in an instruction, by their element type."""
    if instruction.opcode in ("dot", "convolution"):
        first, second = (module.instructions[number] for number in instruction.operands[:2])
        if instruction.opcode == "dot":
            dimensions = integers(submessage(instruction.fields, 30), 1)
            terms = prod(first.shape.sizes[dimension] for dimension in dimensions)
        else:
            features = integer(submessage(instruction.fields, 16), 4)
            terms = prod(second.shape.sizes) // second.shape.sizes[features]
        return Counter({first.shape.dtype: 2 * prod(instruction.shape.sizes) * terms})
    if instruction.opcode in ("async-update", "async-done") or not instruction.calls:
        return Counter()
    times = (while_trip_count(module, instruction) or 1) if instruction.opcode == "while" else 1
    total = Counter[str]()
    for number in instruction.calls:
        total += product_flops(module, module.computations[number])
    return Counter({dtype: flops * times for dtype, flops in total.items()})
