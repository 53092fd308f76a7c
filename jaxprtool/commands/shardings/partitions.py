"""The result of XLA's partitioner: collectives by source line, and the shardings of values.

found = jaxprtool.shardings(program)
found.collectives[0].line, found.collectives[0].reason, found.values[0].spec
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from jaxprtool.analysis.devices import DeviceSpec, Interconnect, bytes_sent
from jaxprtool.commands.shardings.reasons import (
    LAYOUT,
    MAPPED,
    ExplainedEdge,
    Moved,
    OperationPlace,
    Reasons,
    ShardedModule,
    own_frames,
    unreduced_sum,
)
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.hlo import partitions as hlo
from jaxprtool.ir.hlo.module import (
    CALLS,
    Computation,
    HloModule,
    HloShape,
    Instruction,
    executed,
    instruction_flops,
    integer,
    integers,
)
from jaxprtool.ir.hlo.origins import InsertedCopy
from jaxprtool.ir.hlo.partitions import (
    REDUCTIONS,
    DeviceTiles,
    collectives,
    device_tiles,
    spec_text,
)
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The share of the memory on a device above which a value is large.
LARGE = 0.01

#: Who asked for a collective: the program, by `psum` in `shard_map`, or XLA's partitioner.
Source: TypeAlias = Literal["program", "partitioner"]


@document(also=("rematerializes",), optional=("way_spec",))
@dataclass(frozen=True)
class Reason:
    """Why the partitioner added a collective: an operation needs a value in another spec.

    Attributes:
        operand: The value that moves: the path of an argument, or an operation and its line.
        operand_spec: Its spec; "one device" if only one device has it, as the result of a callback.
        consumer: The operation that needs it in another spec, and its line.
        consumer_spec: The spec in which that operation needs the value; for a reduction, the spec
            of its result. For an operation that reads across devices along a dimension, as a sort
            or a shift does, it is the spec of the operand.
        way_spec: An intermediate spec, in which devices hold more of the value than the operation
            needs, if XLA found no direct way; else "".
    """

    operand: str
    operand_spec: str
    consumer: str
    consumer_spec: str
    way_spec: str = ""

    @property
    def rematerializes(self) -> bool:
        """Whether each device holds the whole value on the way from one spec to the other.

        XLA calls it an involuntary full rematerialization.
        """
        return self.way_spec == "P()"

    @property
    def mixes(self) -> bool:
        """Whether the operation reads across devices, however the value is sharded."""
        return self.operand_spec == self.consumer_spec


@document(
    names={"line": "place"},
    without=("frames", "overlapping"),
    also=("sent_bytes",),
    optional=("reason", "seconds", "overlap_seconds", "avoided_by"),
)
@dataclass(frozen=True)
class Collective:
    """A value that devices exchange.

    XLA may merge the moves of several values in one operation; each is listed separately.

    Attributes:
        kind: The kind: `all-reduce`.
        axes: The axes of the mesh along which devices exchange values; None if the groups of
            devices are not along axes.
        devices: The number of devices in a group.
        bytes: The bytes of the result on one device.
        count: How often it runs in a call; None if a loop around it has an unknown trip count.
        line: The user's line that needs the value, followed by the library's; "" if unknown.
        value: The value that moves: the path of an argument, or an operation and its line.
        source: Who asked for it: "program" or "partitioner".
        reason: Why the partitioner added it; None if unknown, or if the program asked for it.
        merged: The number of values that the operation moves.
        operation: The name of XLA's operation.
        overlapping: The FLOPs of independent matrix products on a device that could run at the same
            time, in one run, by element type.
        frames: The call stack of the line, the innermost frame first.
        seconds: A lower bound of the time of all runs; None without an interconnect.
        overlap_seconds: The part of `seconds` in which independent products could run; None
            without a device.
        avoided_by: The sharding constraint with which the compiled program does not have it, and
            the bytes that each device sends then, which are fewer; "" if none was tried or found.
    """

    kind: str
    axes: tuple[str, ...] | None
    devices: int
    bytes: int
    count: int | None
    line: Place
    value: str
    source: Source
    reason: Reason | None
    merged: int
    operation: str
    overlapping: Mapping[str, int]
    frames: tuple[UserFrame, ...] = ()
    seconds: float | None = None
    overlap_seconds: float | None = None
    avoided_by: str = ""

    @property
    def reduces(self) -> bool:
        """Whether it is a reduction, such as a sum."""
        return self.kind in REDUCTIONS

    @property
    def sent_bytes(self) -> int:
        """A lower bound of the bytes that each device sends, in all runs.

        An all-reduce sends almost twice its result, a reduce-scatter almost its operand. A loop
        with an unknown trip count runs once. The result of a `ragged-all-to-all` is an upper bound.
        """
        sent = bytes_sent(self.kind, self.bytes, self.devices)
        runs = 1 if self.count is None else self.count
        return round(self.bytes if sent is None else sent) * runs


@document(names={"line": "place"}, without=("tiles",), also=("replicated",))
@dataclass(frozen=True)
class ShardedValue:
    """An argument, a result, or a large value of a program.

    Attributes:
        name: Its path, or its operation and line.
        kind: "argument", "result" or "value".
        type: The type of the global array, as XLA writes it.
        shape: The shape of the global array.
        shape_per_device: Its shape on each device, with padding.
        spec: Its spec; "" if no spec describes its sharding.
        unreduced: The axes along which each device holds a term of the value, which is their sum.
        bytes: The bytes of the global array.
        bytes_per_device: Its bytes on each device, with padding.
        copies: The number of devices that hold the same part, and of an unreduced value the same
            term.
        padded_bytes: The bytes of padding on all devices, in one copy.
        count: The number of values with the same name, type and spec.
        line: The user's line; "" for arguments.
        tiles: The part that each device holds.
    """

    name: str
    kind: Literal["argument", "result", "value"]
    type: str
    shape: tuple[int, ...]
    shape_per_device: tuple[int, ...]
    spec: str
    unreduced: tuple[str, ...]
    bytes: int
    bytes_per_device: int
    copies: int
    padded_bytes: int
    count: int
    line: Place
    tiles: DeviceTiles

    @property
    def replicated(self) -> bool:
        """Whether each device holds all of it."""
        return self.copies == len(self.tiles.of_device)

    @property
    def terms(self) -> dict[int, int] | None:
        """The term of the sum that each device holds; None unless the value is unreduced."""
        terms = self.tiles.term_of
        return None if terms is None else dict(enumerate(terms.tolist()))

    @property
    def ranges(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The range of indices that each device holds, for each dimension."""
        sizes = list(zip(self.shape, self.shape_per_device, strict=True))
        ranges = {}
        for device, place in enumerate(self.tiles.of_device.tolist()):
            starts = [(i * part, size) for i, (size, part) in zip(place, sizes, strict=True)]
            parts = zip(starts, self.shape_per_device, strict=True)
            ranges[device] = tuple(
                (min(start, size), min(start + part, size)) for (start, size), part in parts
            )
        return ranges


@document(names={"line": "place"})
@dataclass(frozen=True)
class RepeatedWork:
    """An operation of which each device computes more than its share.

    Attributes:
        line: The user's line.
        operation: The operation and its line.
        times: How many times its share each device computes: the number of devices if each
            computes all of it.
        flops: For a matrix product or a convolution, its FLOPs on each device in a call; else 0.
        elements: The elements of its results on each device in a call.
        count: The number of such operations of the line.
    """

    line: Place
    operation: str
    times: float
    flops: int
    elements: int
    count: int


@document(names={"line": "place"})
@dataclass(frozen=True)
class Constraint:
    """A sharding constraint with which the compiled program moves fewer bytes.

    Attributes:
        line: The line of the operation that computes the value.
        value: The operation and its line.
        spec: The spec for `with_sharding_constraint`; "" if the constraint is removed.
        replaces: Whether the operation is a constraint already, and only its spec changes.
        replaced: The spec that such a constraint has in the source; else "".
        sent_bytes: The bytes that each device sends in a call with this constraint.
        memory_bytes: The bytes of memory on each device with this constraint.
    """

    line: Place
    value: str
    spec: str
    replaces: bool
    replaced: str
    sent_bytes: int
    memory_bytes: int

    @property
    def change(self) -> str:
        """The change of the source: `with_sharding_constraint(…, P('x')) instead of P()`."""
        if not self.spec:
            return f"without the constraint {self.replaced}"
        value = "…" if self.replaces else self.value
        instead = f" instead of {self.replaced}" if self.replaces else ""
        return f"with_sharding_constraint({value}, {self.spec}){instead}"


@document(also=("sent_bytes",), optional=("compute_seconds", "constraints"))
@dataclass(frozen=True)
class Shardings(Printed):
    """The collectives and the shardings of values in a partitioned program.

    Attributes:
        name: The name of the program.
        devices: The number of devices.
        platform: Their platform, whose compiler partitioned the program.
        mesh: The size of each axis of the mesh.
        memory_bytes: The bytes of memory of the compiled program on each device.
        products: The FLOPs of matrix products on each device, by element type.
        collectives: The values that devices exchange, those with the most bytes sent first.
        values: Arguments, results and large values, the largest on a device first.
        repeated: Large products, convolutions, sorts, factorizations and the like of which each
            device computes more than its share, the largest first.
        products_share: The part of `products` that would be left if no device computed more than
            its share.
        compute_seconds: A lower bound of the time of the products on a device; None without a
            device.
        constraints: Constraints that help, each tried alone, the best first; None if none were
            tried.
        tried: The number of constraints that were compiled.
        copies: The copies that XLA inserted on each device, those of most bytes first.
    """

    name: str
    devices: int
    platform: str
    mesh: Mapping[str, int]
    memory_bytes: int
    products: Mapping[str, int]
    collectives: tuple[Collective, ...]
    values: tuple[ShardedValue, ...]
    repeated: tuple[RepeatedWork, ...] = ()
    products_share: float = 1.0
    compute_seconds: float | None = None
    constraints: tuple[Constraint, ...] | None = None
    tried: int = 0
    copies: tuple[InsertedCopy, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """The bytes that each device sends in a call."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def is_large_copy(self, value: ShardedValue) -> bool:
        """Return True if each device holds all of a value that takes 1 % of its memory."""
        return value.replicated and value.bytes_per_device > self.memory_bytes * LARGE


# --- values ---------------------------------------------------------------------------------------
# The shardings of the arguments, the results and the large values of a program.
#
# A value is large if it takes more than a hundredth of the memory on a device. Since XLA fuses most
# values, a value counts only if the compiled module has an operation of its name, its lines and its
# size on a device.

#: Operations that compute nothing: they pass values on, or return constants.
_NOT_MADE = frozenset(
    {"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "iota", "broadcast"}
)


def found_values(
    whole: ShardedModule,
    final: HloModule,
    memory_bytes: int,
    reduced: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[ShardedValue, ...]:
    """Return the arguments, the results and the large values, the largest on a device first.

    Args:
        whole: The module before the partitioner.
        final: The module that runs.
        memory_bytes: The memory of the program on a device.
        reduced: The axes that the types of arguments and results name as reduced, by name. XLA
            does not know them.
    """
    parameters = (op for op in whole.module.entry.instructions if op.opcode == "parameter")
    named = ((op, whole.name(op)) for op in parameters)
    arguments = (
        _described(whole, op, name, "argument", whole.tiles(op), reduced.get(name, ()))
        for op, name in named
    )
    results = (
        _described(whole, value, name, "result", whole.result_tiles[name], reduced.get(name, ()))
        for name, value in whole.results.items()
    )
    returned = {whole.maker(value).id for value in whole.results.values()}
    values = [value for value in (*arguments, *results) if value is not None]
    values += _large(whole, final, memory_bytes, returned)
    return tuple(sorted(values, key=lambda value: -value.bytes_per_device * value.count))


def _large(
    whole: ShardedModule, final: HloModule, memory_bytes: int, returned: set[int]
) -> Iterator[ShardedValue]:
    """Yield the large values that are not arguments or results; equal ones of a line once."""
    computed = set(_made(final, final.entry))
    counts, first = Counter[tuple[str, ...]](), dict[tuple[str, ...], ShardedValue]()
    for op in whole.module.instructions.values():
        if op.opcode in _NOT_MADE or op.id in returned or not _is_moved(whole, op):
            continue
        value = _described(whole, op, whole.name(op), "value", whole.tiles(op))
        if value is None or value.bytes_per_device <= memory_bytes * LARGE:
            continue
        local = str(_local(op.shape, value.tiles))
        if any((place, local) in computed for place in whole.places(op)):
            key = value.name, value.type, value.spec
            first.setdefault(key, value)
            counts[key] += 1
    yield from (
        ShardedValue(**{**vars(value), "count": counts[key]}) for key, value in first.items()
    )


def _is_moved(whole: ShardedModule, instruction: Instruction) -> bool:
    """Return True unless an instruction is a copy with the sharding of its operand."""
    if instruction.opcode != "copy":
        return True
    before, after = whole.tiles(next(whole.operands(instruction))), whole.tiles(instruction)
    return before is None or after is None or not before.is_as(after)


def _made(module: HloModule, computation: Computation) -> Iterator[tuple[OperationPlace, str]]:
    """Yield the place and the type of each value that a compiled module computes.

    Values inside a fusion are left out: they are not written to memory.
    """
    for op in computation.instructions:
        if op.opcode not in _NOT_MADE:
            place = OperationPlace(op.path, own_frames(module, op))
            yield from ((place, str(shape)) for shape in op.shape.parts or (op.shape,))
        if op.opcode in CALLS:
            for number in op.calls:
                yield from _made(module, module.computations[number])


def _local(shape: HloShape, tiles: DeviceTiles) -> HloShape:
    """Return the shape on a device, with padding."""
    pairs = zip(shape.sizes, tiles.parts, strict=True)
    return HloShape(shape.dtype, tuple(-(-size // parts) for size, parts in pairs))


def _described(
    whole: ShardedModule,
    instruction: Instruction,
    name: str,
    kind: Literal["argument", "result", "value"],
    tiles: DeviceTiles | None,
    reduced: Sequence[str] = (),
) -> ShardedValue | None:
    """Return a value; None if it is not an array, or is in the body of a `shard_map`."""
    if tiles is None or tiles.is_local:
        return None
    shape = instruction.shape
    local = _local(shape, tiles)
    return ShardedValue(
        name,
        kind,
        str(shape),
        shape.sizes,
        local.sizes,
        whole.text_of(tiles, reduced),
        whole.axes.unreduced(tiles),
        shape.bytes,
        local.bytes,
        tiles.copies,
        local.bytes * prod(tiles.parts) - shape.bytes,
        1,
        UNKNOWN if kind == "argument" else whole.line(instruction),
        tiles,
    )


# --- collectives ----------------------------------------------------------------------------------
# The collectives of a partitioned program by source line, and the reason for each.

#: Operations that pass their operand on: their readers count as its readers.
_PASSED_ON = LAYOUT | {"get-tuple-element"}


class _MovedPart(NamedTuple):
    """A value that a collective moves: its metadata, and its result on one device."""

    place: OperationPlace
    shape: HloShape


def found_collectives(
    whole: ShardedModule, parts: ShardedModule, final: HloModule
) -> tuple[Collective, ...]:
    """Return the collectives of a partitioned module, the one that sends most first.

    Args:
        whole: The module before the partitioner.
        parts: The module after it.
        final: The module that runs.
    """
    reader = _CollectiveDescriber(whole, parts, final)
    listed = [collective for one in hlo.collectives(final) for collective in reader.read(one)]
    return tuple(sorted(listed, key=lambda collective: -collective.sent_bytes))


class _CollectiveDescriber:
    """Describes the collectives of a module."""

    def __init__(self, whole: ShardedModule, parts: ShardedModule, final: HloModule):
        self._whole, self._final = whole, final
        self._reasons = Reasons(whole)
        self._moves = Moves(whole, parts)
        self._independent = independent_products(final)
        # The values that the program moves, by place: `psum` of a tree moves many from one.
        self._asked = defaultdict[OperationPlace, list[tuple[Instruction, HloShape]]](list)
        # The sums of unreduced values, by place.
        self._sums = defaultdict[OperationPlace, list[ExplainedEdge]](list)
        for collective in hlo.collectives(whole.module):
            if why := unreduced_sum(whole, collective.instruction):
                self._sums[_place(whole.module, collective.instruction)].append(why)
                continue
            shape = collective.instruction.shape
            results = shape.parts or (shape,)
            moved = list(zip(whole.operands(collective.instruction), results, strict=False))
            for place in whole.places(collective.instruction):
                self._asked[place] += moved

    def read(self, collective: hlo.HloCollective) -> Iterator[Collective]:
        """Yield the values that a collective moves."""
        axes, devices = self._groups(collective)
        parts = self._parts(collective)
        for part in parts:
            asked = self._asked_value(part)
            why = None
            if (sums := self._sums.get(part.place)) and collective.kind in hlo.REDUCTIONS:
                why = sums.pop(0) if len(sums) > 1 else sums[0]
            elif asked is None and axes:
                readers = self._readers(collective) if len(parts) == 1 else frozenset()
                moved = Moved(collective.kind, axes, *part, self._dimension(collective), readers)
                why = self._reasons.of(self._moves.located(moved, collective.instruction))
            frames = (self._frames(why) if why else ()) or part.place.frames
            yield Collective(
                collective.kind,
                axes,
                devices,
                part.shape.bytes,
                collective.count,
                self._whole.line_of(frames),
                self._value(why, asked, part),
                "partitioner" if asked is None else "program",
                None if why is None else self._reason(why),
                len(parts),
                collective.instruction.name,
                self._independent.get(collective.instruction.name, {}),
                frames,
            )

    def _asked_value(self, part: _MovedPart) -> Instruction | None:
        """Return the next value that the program moves at a place; None if it moves none."""
        if part.place not in self._asked:
            return None
        moved = self._asked[part.place]
        alike = [pair for pair in moved if pair[1].sizes == part.shape.sizes] or moved
        if len(alike) > 1:
            moved.remove(alike[0])
        return alike[0][0]

    def _dimension(self, collective: hlo.HloCollective) -> int | None:
        """Return the dimension along which a collective concatenates parts."""
        if collective.kind != "all-gather":
            return None
        return next(iter(integers(collective.instruction.fields, 14)), None)

    def _readers(self, collective: hlo.HloCollective) -> frozenset[OperationPlace]:
        """Return the places of the operations that read the result of a collective."""
        result = self._final.ends.get(collective.instruction.id, collective.instruction)
        values, places = [result], set[OperationPlace]()
        while values:
            for user in self._users[values.pop().id]:
                if user.opcode in _PASSED_ON:
                    values.append(user)
                    continue
                inside = (user, *self._final.inside(user))
                places |= {_place(self._final, op) for op in inside}
        return frozenset(places)

    @cached_property
    def _users(self) -> dict[int, list[Instruction]]:
        """The readers of each value in the module that runs, by the value's number."""
        users = defaultdict[int, list[Instruction]](list)
        for instruction in self._final.instructions.values():
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users

    def _groups(self, collective: hlo.HloCollective) -> tuple[tuple[str, ...] | None, int]:
        """Return the axes that a collective is along, and the number of devices in a group."""
        axes = self._whole.axes
        if collective.kind == "collective-permute":
            along = axes.of_pairs(hlo.device_pairs(collective.instruction))
            return along, prod(axes.shape[axis] for axis in along)
        groups = hlo.device_groups(collective.instruction, axes.devices)
        return axes.of_groups(groups), max(map(len, groups))

    def _parts(self, collective: hlo.HloCollective) -> list[_MovedPart]:
        """Return the values that a collective moves: several, if XLA merged operations."""
        return [
            _MovedPart(_place(self._final, value), shape)
            for value, shape in hlo.moved_values(self._final, collective.instruction)
        ]

    def _value(self, why: ExplainedEdge | None, asked: Instruction | None, part: _MovedPart) -> str:
        """Return the name of the value that moves."""
        if why is not None:
            return self._whole.value_name(why.edge.operand)
        if asked is not None:
            return self._whole.value_name(asked)
        return part.place.path.rpartition("/")[2]

    def _frames(self, why: ExplainedEdge) -> tuple[UserFrame, ...]:
        """Return the call stack of a consumer, or that of its operand if XLA added the consumer."""
        edge = why.edge
        stacks = (self._whole.places(end)[0].frames for end in (edge.consumer, edge.operand))
        return next(filter(None, stacks), ())

    def _reason(self, why: ExplainedEdge) -> Reason:
        whole, edge = self._whole, why.edge
        operand = whole.value_name(edge.operand)
        consumer = whole.reader_name(edge.consumer, edge.position)
        before = whole.spec_text(edge.operand) if why.before is None else spec_text(why.before)
        needed = spec_text(why.needed)
        way = "" if why.way is None else spec_text(why.way)
        return Reason(operand, before, consumer, needed, way)


def _place(module: HloModule, instruction: Instruction) -> OperationPlace:
    return OperationPlace(instruction.path, own_frames(module, instruction))


# --- moves ----------------------------------------------------------------------------------------
# What each collective moves: read from the module after the partitioner.
#
# In the module that runs, operations are fused, and some have lost their names. Right after the
# partitioner each operation still has the path and the lines of the operation that it is a part of.

#: The operations that the partitioner adds around collectives.
_AROUND = LAYOUT | {"dynamic-slice", "slice", "get-tuple-element"}

#: The maximum number of operations through which a value is followed.
_STEPS = 32


class Moves:
    """Finds the operations that compute, and that read, what collectives move.

    Args:
        whole: The module before the partitioner.
        parts: The module after it.
    """

    def __init__(self, whole: ShardedModule, parts: ShardedModule):
        self._whole, self._parts = whole, parts
        self._at = defaultdict[tuple[str, OperationPlace], list[Instruction]](list)
        for collective in hlo.collectives(parts.module):
            for place in parts.places(collective.instruction):
                self._at[collective.kind, place].append(collective.instruction)
        self._originals = defaultdict[tuple[str, OperationPlace], set[int]](set)
        for instruction in whole.module.instructions.values():
            for place in whole.places(instruction):
                self._originals[instruction.opcode, place].add(instruction.id)

    def located(self, moved: Moved, collective: Instruction) -> Moved:
        """Return what a collective moves with its makers and readers, if they are found.

        Args:
            moved: What it moves.
            collective: The collective in the module that runs.
        """
        partitioned = self._partitioned(moved, collective)
        if partitioned is None:
            return moved
        moved = replace(moved, readers=moved.readers | set(self._readers(partitioned)))
        return self._with_makers(moved, partitioned)

    def _partitioned(self, moved: Moved, collective: Instruction) -> Instruction | None:
        """Return the collective right after the partitioner; of several, that of its channel."""
        listed = self._at[moved.kind, moved.place]
        alike = [op for op in listed if hlo.result_shape(op).bytes == moved.shape.bytes]
        same_channel = (op for op in alike if _channel(op) == _channel(collective))
        best = next(same_channel, None) or next(iter(alike), None)
        if best is not None and len(alike) > 1:
            listed.remove(best)
        return best

    def _with_makers(self, moved: Moved, collective: Instruction) -> Moved:
        """Return what moves with its makers, and the axes along which it was gathered before."""
        value, shape, gathered = collective, None, set[str]()
        for _ in range(_STEPS):
            value = self._parts.maker(next(self._parts.operands(value)))
            if value.opcode == "all-gather":
                axes = self._parts.axes
                gathered |= set(axes.of_groups(hlo.device_groups(value, axes.devices)) or ())
            elif makers := self._original(value):
                shape = shape or value.shape
                return replace(
                    moved, makers=frozenset(makers), made=shape, gathered=frozenset(gathered)
                )
            elif value.opcode == "dynamic-slice":  # a device's part of a value that all compute
                shape = shape or value.shape
            elif not (value.opcode in LAYOUT or value.opcode in hlo.KINDS):
                return moved
        return moved

    def _readers(self, collective: Instruction) -> Iterator[OperationPlace]:
        """Yield the places of the operations that read what was moved."""
        values, seen = [collective], {collective.id}
        while values:
            for user in self._parts.users[values.pop().id]:
                if user.id in seen:
                    continue
                seen.add(user.id)
                is_added = user.opcode in _AROUND or user.opcode in hlo.KINDS
                if is_added and not self._original(user):
                    values.append(user)
                else:
                    yield from self._parts.places(user)

    def _original(self, part: Instruction) -> set[int]:
        """Return the operations before the partitioner that an operation is a part of."""
        if self._parts.is_argument(part):
            entry = self._whole.module.entry.instructions
            number = part.parameter_number
            return {
                op.id for op in entry if op.opcode == "parameter" and op.parameter_number == number
            }
        places = self._parts.places(part)
        return {n for place in places if place.path for n in self._originals[part.opcode, place]}


def _channel(collective: Instruction) -> int:
    return integer(collective.fields, 26)


# --- times ----------------------------------------------------------------------------------------
# Lower bounds of the times of the collectives and the products of a partitioned program.
#
# found = timed(shardings, interconnect, device)
# found.collectives[0].seconds, found.compute_seconds

#: The names of `DeviceSpec.products` for element types that XLA names otherwise.
_NAMES = {"s8": "i8", "f8e4m3fn": "f8_e4m3fn", "f8e5m2": "f8_e5m2"}


def with_link_times(
    facts: Shardings, link: Interconnect | None, device: DeviceSpec | None
) -> Shardings:
    """Return sharding facts with times.

    Args:
        facts: The facts.
        link: The interconnect of the devices; without it, collectives have no time.
        device: The device; without it, products have no time.
    """
    compute = None if device is None else _seconds(facts.products, device)
    collectives = tuple(_timed(collective, link, device) for collective in facts.collectives)
    return replace(facts, compute_seconds=compute, collectives=collectives)


def _timed(
    collective: Collective, link: Interconnect | None, device: DeviceSpec | None
) -> Collective:
    if link is None:
        return collective
    once = link.seconds(collective.kind, collective.bytes, collective.devices)
    if once is None:
        return collective
    runs = 1 if collective.count is None else collective.count
    if device is None:
        return replace(collective, seconds=once * runs)
    hidden = min(once, _seconds(collective.overlapping, device))
    return replace(collective, seconds=once * runs, overlap_seconds=hidden * runs)


def _seconds(products: Mapping[str, int], device: DeviceSpec) -> float:
    """Return a lower bound of the time of matrix products on a device."""
    return sum(flops / device.rate(_NAMES.get(name, name)) for name, flops in products.items())


# --- overlap --------------------------------------------------------------------------------------
# Find the matrix products that can run at the same time as a collective.
#
# They are in the same function of the compiled module, and neither need the collective's result nor
# compute what it needs. On a GPU or TPU, collectives can run in the background; XLA for the CPU
# runs one operation after the other.


def independent_products(module: HloModule) -> dict[str, Counter[str]]:
    """Return the FLOPs of the independent products of each collective.

    Args:
        module: A compiled module.

    Returns:
        The FLOPs in one run of the collective's function by element type, by the collective's name.
    """
    wanted = {collective.instruction.id for collective in collectives(module)}
    by_name: dict[str, Counter[str]] = {}
    for computation in module.computations.values():
        if any(instruction.id in wanted for instruction in computation.instructions):
            by_name |= _in(module, computation, wanted)
    return by_name


def _in(module: HloModule, computation: Computation, wanted: set[int]) -> dict[str, Counter[str]]:
    """Return the FLOPs of independent products for the collectives in one function.

    A set of products is an integer with a bit for each, so that unions are fast.
    """
    products: list[tuple[int, Counter[str]]] = []
    before: dict[int, int] = {}
    for instruction in computation.instructions:  # operands come first
        bits = 0
        for operand in instruction.operands:
            bits |= before.get(operand, 0)
        if flops := instruction_flops(module, instruction):
            bits |= 1 << len(products)
            products.append((instruction.id, flops))
        before[instruction.id] = bits
    after = _read_later(computation, {number: 1 << i for i, (number, _) in enumerate(products)})
    dtypes = {dtype for _, flops in products for dtype in flops}
    counts = {dtype: np.array([flops[dtype] for _, flops in products]) for dtype in dtypes}
    by_name = {}
    for instruction in computation.instructions:
        if instruction.id in wanted:
            free = ~_chosen(before[instruction.id] | after.get(instruction.id, 0), len(products))
            sums = {dtype: int(flops[free].sum()) for dtype, flops in counts.items()}
            by_name[instruction.name] = +Counter(sums)
    return by_name


def _chosen(bits: int, count: int) -> np.ndarray:
    """Return which of the first bits of a number are set."""
    data = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), np.uint8)
    return np.unpackbits(data, count=count, bitorder="little").astype(bool)


def _read_later(computation: Computation, bits: Mapping[int, int]) -> dict[int, int]:
    """Return the products that depend on each instruction."""
    after: dict[int, int] = {}
    for instruction in reversed(computation.instructions):
        reached = after.get(instruction.id, 0) | bits.get(instruction.id, 0)
        for operand in instruction.operands:
            after[operand] = after.get(operand, 0) | reached
    return after


# --- repeated work --------------------------------------------------------------------------------
# Find the operations of which each device computes more than its share.
#
# The partitioner cannot split every operation: it gathers the operands of a grouped convolution or
# a factorization, and each device computes all of it. Work is compared right before and after the
# partitioner, where operations still have the same paths and lines.

#: Products, whose work is counted in FLOPs.
_PRODUCTS = frozenset({"dot", "convolution"})

#: Other operations that compute more than one operation for each element of their result.
_OTHERS = frozenset({
    "fft", "sort", "topk", "cholesky", "triangular-solve", "reduce-window", "select-and-scatter",
    "scatter", "gather", "custom-call",
})  # fmt: skip

#: The least number of times its share that counts: padding is not repeated work.
_LEAST = 1.5


@dataclass
class _OperationWork:
    """The work of the operations with the same path and call stack.

    Attributes:
        original: The first of them, before the partitioner.
        whole: The work of all devices, each loop counted once.
        part: The work of each device, each loop counted once.
        flops: The FLOPs of products on each device in a call.
        elements: The elements of the results on each device in a call.
    """

    original: Instruction
    whole: int = 0
    part: int = 0
    flops: int = 0
    elements: int = 0


def repeated_work(
    whole: ShardedModule, parts: ShardedModule
) -> tuple[tuple[RepeatedWork, ...], float]:
    """Return the large operations of which each device computes more than its share.

    Args:
        whole: The module before the partitioner.
        parts: The module after it.

    Returns:
        The operations, those with most FLOPs first; and the part of the FLOPs of all products on a
        device that would be left if no device computed more than its share.
    """
    devices = whole.axes.devices
    works = _works(whole, parts)
    times = [work.part * devices / work.whole for work in works]
    flops = sum(work.flops for work in works)
    shares = sum(work.flops / max(n, 1.0) for work, n in zip(works, times, strict=True))
    most = max((work.elements for work in works), default=0)
    rows: dict[object, RepeatedWork] = {}
    for work, n in zip(works, times, strict=True):
        is_large = work.flops > flops * LARGE if work.flops else work.elements > most * LARGE
        if n < _LEAST or not is_large:
            continue
        line = whole.line(work.original).user
        key = line, whole.name(work.original), round(n, 2)
        row = rows.get(key, RepeatedWork(*key, 0, 0, 0))
        rows[key] = replace(
            row,
            flops=row.flops + work.flops,
            elements=row.elements + work.elements,
            count=row.count + 1,
        )
    listed = sorted(rows.values(), key=lambda row: (-row.flops, -row.elements))
    return tuple(listed), shares / flops if flops else 1.0


def _works(whole: ShardedModule, parts: ShardedModule) -> list[_OperationWork]:
    """Return the work of products and other large operations outside of `shard_map`."""
    works: dict[object, _OperationWork] = {}
    local = set()
    for instruction, _ in executed(whole.module):
        if _amount(whole, instruction):
            key = instruction.opcode, instruction.path, whole.frames(instruction)
            works.setdefault(key, _OperationWork(instruction)).whole += _amount(whole, instruction)
            tiles = device_tiles(instruction, whole.axes.devices)
            if any(array is not None and array.is_local for array in tiles):
                local.add(key)
    for instruction, count in executed(parts.module):
        key = instruction.opcode, instruction.path, parts.frames(instruction)
        if key in works and (amount := _amount(parts, instruction)):
            runs = 1 if count is None else count
            work = works[key]
            work.part += amount
            work.flops += sum(instruction_flops(parts.module, instruction).values()) * runs
            work.elements += _elements(instruction.shape) * runs
    return [work for key, work in works.items() if key not in local and work.part]


def _amount(module: ShardedModule, instruction: Instruction) -> int:
    """Return the work of an operation in FLOPs or elements; 0 if it is not a large one."""
    if instruction.opcode in _PRODUCTS:
        return sum(instruction_flops(module.module, instruction).values())
    target = instruction.custom_call_target
    if instruction.opcode not in _OTHERS or target in MAPPED or "callback" in target:
        return 0
    if instruction.opcode == "scatter":
        return _elements(list(module.operands(instruction))[-1].shape)
    return _elements(instruction.shape)


def _elements(shape: HloShape) -> int:
    return sum(map(_elements, shape.parts)) if shape.parts else prod(shape.sizes)
