"""How a compiled module is divided: collectives, tiles on devices, dimensions, mesh axes.

    for each in collectives(module):
        print(each.kind, each.bytes, each.count, module.frames(each.instruction))

Field numbers are those of `HloInstructionProto` in XLA's `xla/service/hlo.proto`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxprtool.ir.hlo.module import (
    HloModule,
    HloShape,
    Instruction,
    Message,
    executed,
    integer,
    integers,
    submessage,
    submessages,
)

# --- collectives ----------------------------------------------------------------------------------
# The collectives of a compiled module: how devices exchange values.

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
class HloCollective:
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


def collectives(module: HloModule) -> Iterator[HloCollective]:
    """Yield the collectives of a module, in the order of its computations."""
    for instruction, count in executed(module):
        kind = instruction.opcode.removesuffix(_START)
        if kind in KINDS:
            yield HloCollective(kind, result_shape(instruction).bytes, count, instruction)


def started_collective(module: HloModule, instruction: Instruction) -> Instruction | None:
    """Return the collective that an instruction is or completes; None for other instructions."""
    if instruction.opcode.endswith(_DONE):
        instruction = module.instructions[instruction.operands[0]]
    return instruction if instruction.opcode.removesuffix(_START) in KINDS else None


def moved_values(module: HloModule, collective: Instruction) -> list[tuple[Instruction, HloShape]]:
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
    for reader in module.elements.get(result.id, ()):
        if reader.op_name:
            elements.setdefault(reader.tuple_index, reader)
    kind = collective.opcode.removesuffix(_START)
    # An all-to-all may return a value in parts, one for each device.
    if not whole.parts or (kind == "all-to-all" and len(elements) < len(whole.parts)):
        return [(collective, whole)]
    for i, number in enumerate(collective.operands if kind in REDUCTIONS else ()):
        operand = module.instructions[number]
        if operand.op_name and operand.frame_id:
            elements.setdefault(i, operand)
    return [(elements.get(i, collective), shape) for i, shape in enumerate(whole.parts)]


def result_shape(instruction: Instruction) -> HloShape:
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
        return [tuple(integers(group, 1)) for group in lists]
    if ranged := submessage(fields, 92) or submessage(listed, 2):
        count, size = integer(ranged, 1), integer(ranged, 2)
        order = np.arange(count * size).reshape(integers(ranged, 3))
        rows = order.transpose(integers(ranged, 4)).reshape(count, size)
        return list(map(tuple, rows.tolist()))
    if by_axes := submessage(fields, 93):
        return _groups_along(submessage(by_axes, 1), submessages(by_axes, 2), devices)
    return [tuple(range(devices))]


def _groups_along(mesh: Message, axes: Sequence[Message], devices: int) -> list[tuple[int, ...]]:
    """Return the groups of devices that differ only along some axes of a mesh."""
    coordinates = mesh_coordinates(mesh, devices)
    outside = coordinates.copy()
    for axis in axes:
        part = axis_part(axis, mesh_sizes(mesh), coordinates)
        outside[:, part.axis] -= part.place * part.stride
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(outside.tolist()):
        groups.setdefault(tuple(place), []).append(device)
    return list(map(tuple, groups.values()))


def device_pairs(instruction: Instruction) -> list[tuple[int, int]]:
    """Return the sources and targets of a collective permutation."""
    return [(integer(pair, 1), integer(pair, 2)) for pair in submessages(instruction.fields, 52)]


# --- device tiles ---------------------------------------------------------------------------------
# How an instruction's array is cut into tiles, and which device holds which tile.
#
#     tiles = device_tiles(instruction, 8)[0]
#     tiles.parts, tiles.of_device[3]
#
# XLA writes a sharding as an array of device numbers, or, in JAX 0.12, by the axes of a mesh. Both
# are read as the tile that each device holds: names in the module are not always those of the
# user's mesh, and `ir.hlo.partitions` finds these. Devices are numbered as in the module, from 0.
# Field numbers are those of `OpSharding` and `NamedShardingProto` in XLA's `xla/xla_data.proto`.

#: The kinds of `OpSharding`, and of the devices of its last dimensions.
_REPLICATED, _TUPLE, _OTHER, _MANUAL, _UNREDUCED = 0, 2, 3, 4, 6


@dataclass(frozen=True, eq=False)
class DeviceTiles:
    """The tiles of an array.

    Attributes:
        parts: The number of tiles along each dimension.
        of_device: The position of the tile that each device holds, with shape (devices, rank).
        is_local: Whether the shape is that of a device's part along some axes of the mesh, as in
            the body of a `shard_map`.
        terms: The number of terms of an unreduced array: its value is their sum.
        term_of: The term that each device holds; None for an array with a single term.
    """

    parts: tuple[int, ...]
    of_device: np.ndarray
    is_local: bool = False
    terms: int = 1
    term_of: np.ndarray | None = None

    @property
    def copies(self) -> int:
        """The number of devices that hold the same values."""
        return len(self.of_device) // (prod(self.parts) * self.terms)

    def is_as(self, other: DeviceTiles) -> bool:
        """Return True if each device holds the same tile of both arrays."""
        is_alike = self.parts == other.parts and np.array_equal(self.of_device, other.of_device)
        if self.term_of is None or other.term_of is None:
            return is_alike and self.terms == other.terms
        return is_alike and np.array_equal(self.term_of, other.term_of)


def device_tiles(instruction: Instruction, devices: int) -> tuple[DeviceTiles | None, ...]:
    """Return the tiles of an instruction's result, or of each array in it.

    An array without a sharding is replicated, as in XLA's partitioner. The tiles of an array on a
    single device are None.
    """
    leaves = tuple(_leaves(instruction.shape))
    fields = submessage(instruction.fields, 40)
    shardings = submessages(fields, 5) if integer(fields, 1) == _TUPLE else [fields] * len(leaves)
    pairs = zip(shardings, leaves, strict=True)
    return tuple(_tiles(sharding, len(shape.sizes), devices) for sharding, shape in pairs)


def _leaves(shape: HloShape) -> Iterator[HloShape]:
    if shape.dtype != "tuple":
        yield shape
    for part in shape.parts:
        yield from _leaves(part)


def _tiles(fields: Message, rank: int, devices: int) -> DeviceTiles | None:
    kind = integer(fields, 1)
    if 14 in fields:
        return _by_axes(submessage(fields, 14), rank, devices)
    if kind in (_REPLICATED, _MANUAL):
        return _whole(rank, devices, kind == _MANUAL)
    if kind == _UNREDUCED:
        return replace(_whole(rank, devices, False), terms=devices, term_of=np.arange(devices))
    if kind != _OTHER:
        return None
    parts = integers(fields, 3)
    if reshaped := integers(fields, 9):
        order = np.arange(devices).reshape(reshaped).transpose(integers(fields, 10))
    else:
        order = np.array(integers(fields, 4))
    numbers = order.reshape(parts)
    of_device, term_of = np.zeros((devices, rank), int), np.zeros(devices, int)
    kinds = integers(fields, 8)
    summed = rank + kinds.index(_UNREDUCED) if _UNREDUCED in kinds else None
    for place in np.ndindex(numbers.shape):
        of_device[numbers[place]] = place[:rank]
        if summed is not None:
            term_of[numbers[place]] = place[summed]
    tiles = DeviceTiles(tuple(parts[:rank]), of_device, _MANUAL in kinds)
    return tiles if summed is None else replace(tiles, terms=parts[summed], term_of=term_of)


def _whole(rank: int, devices: int, is_local: bool) -> DeviceTiles:
    return DeviceTiles((1,) * rank, np.zeros((devices, rank), int), is_local)


def _by_axes(fields: Message, rank: int, devices: int) -> DeviceTiles | None:
    """Return the tiles of a sharding that names the axes of a mesh for each dimension.

    A mesh without axes means all devices, or the one that it lists. Unreduced axes number terms.
    """
    is_local = 7 in fields
    mesh = submessage(fields, 2)
    sizes = mesh_sizes(mesh)
    if not sizes:
        return None if integers(mesh, 2) else _whole(rank, devices, is_local)
    coordinates = mesh_coordinates(mesh, devices)
    parts, columns = [1] * (rank + 1), np.zeros((devices, rank + 1), int)
    axes_of = [submessages(entry, 1) for entry in submessages(fields, 3)]
    axes_of += [[]] * (rank - len(axes_of))
    for dimension, axes in enumerate([*axes_of, submessages(fields, 5)]):
        for axis in axes:
            part = axis_part(axis, sizes, coordinates)
            columns[:, dimension] = columns[:, dimension] * part.size + part.place
            parts[dimension] *= part.size
    *parts, terms = parts
    term_of = columns[:, rank] if terms > 1 else None
    return DeviceTiles(tuple(parts), columns[:, :rank], is_local, terms, term_of)


def mesh_sizes(mesh: Message) -> list[int]:
    """Return the sizes of the axes in a `MeshProto`."""
    return [integer(axis, 2) for axis in submessages(mesh, 1)]


def mesh_coordinates(mesh: Message, devices: int) -> np.ndarray:
    """Return the index of each device along each axis in a `MeshProto`, (devices, axes).

    The devices are listed, or, in JAX 0.10, a transposed range, or they are in order.
    """
    sizes = mesh_sizes(mesh)
    coordinates = np.zeros((devices, len(sizes)), int)
    order = integers(mesh, 2) or range(prod(sizes))
    if ranged := submessage(mesh, 3):
        numbers = np.arange(prod(sizes)).reshape(integers(ranged, 1))
        order = numbers.transpose(integers(ranged, 2)).ravel().tolist()
    for place, device in zip(np.ndindex(*sizes), order, strict=True):
        coordinates[device] = place
    return coordinates


class AxisPart(NamedTuple):
    """An axis in an `AxisRef`, or a part of it.

    Attributes:
        axis: The number of the axis.
        size: The size of the part.
        stride: The distance of neighbours in the part along the axis.
        place: The index of each device in the part.
    """

    axis: int
    size: int
    stride: int
    place: np.ndarray


def axis_part(reference: Message, sizes: Sequence[int], coordinates: np.ndarray) -> AxisPart:
    """Return the axis, or the part of one, that an `AxisRef` refers to in a mesh."""
    axis, part = integer(reference, 1), submessage(reference, 2)
    pre_size, size = (integer(part, 1), integer(part, 2)) if part else (1, sizes[axis])
    stride = sizes[axis] // (pre_size * size)
    return AxisPart(axis, size, stride, coordinates[:, axis] // stride % size)


# --- dimensions -----------------------------------------------------------------------------------
# Relate the dimensions of an operation's operands to those of its result.
#
#     found = reading(dot, 0, lhs.shape)
#     found.dimensions   # (0, None): rows stay rows, columns are summed over
#     found.crossing     # {1}
#
# The sharding that an operation needs of an operand follows from this and the sharding of its
# result. Field numbers are those of XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`.


@dataclass(frozen=True)
class Reading:
    """How an operation reads an operand.

    Attributes:
        dimensions: For each dimension of the operand, the dimension of the result with the same
            indices, or None.
        crossing: The dimensions of the operand along which an element of the result needs elements
            at other indices: those that are summed over, sorted, or shifted.
    """

    dimensions: tuple[int | None, ...]
    crossing: frozenset[int]


def reading(consumer: Instruction, position: int, operand: HloShape) -> Reading | None:
    """Return how an operation reads an operand.

    Args:
        consumer: The operation.
        position: The position of the operand.
        operand: The shape of the operand.

    Returns:
        The reading; None for an operand that is a tuple, and for operations that call others, such
        as loops. A tuple reads each element as it is.
    """
    if consumer.opcode in _WITHOUT or operand.dtype == "tuple":
        return None
    rule = _RULES.get(consumer.opcode, _elementwise)
    return rule(consumer, position, operand)


def contracted(consumer: Instruction) -> list[tuple[int, int]]:
    """Return the dimensions of both operands that a matrix product sums over together."""
    if consumer.opcode != "dot":
        return []
    numbers = submessage(consumer.fields, 30)
    return list(zip(integers(numbers, 1), integers(numbers, 2), strict=True))


_WITHOUT = frozenset({"while", "call", "conditional", "opt-barrier", "fusion", "parameter"})


def _alike(rank: int, crossing: Iterable[int] = ()) -> Reading:
    return Reading(tuple(range(rank)), frozenset(crossing))


def _elementwise(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    """Return the reading of an elementwise operation. An unknown operation mixes all dimensions."""
    if _shape(consumer, position).sizes == operand.sizes:
        return _alike(len(operand.sizes))
    return _unknown(consumer, position, operand)


def _unknown(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    rank = len(operand.sizes)
    is_alike = _shape(consumer, position).sizes == operand.sizes
    return Reading(tuple(range(rank)) if is_alike else (None,) * rank, frozenset(range(rank)))


def _shape(consumer: Instruction, position: int) -> HloShape:
    """Return the shape of the result; if there are several, of the one for the operand."""
    parts = consumer.shape.parts
    return parts[min(position, len(parts) - 1)] if parts else consumer.shape


def _broadcast(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    return Reading(tuple(integers(consumer.fields, 14)), frozenset())


def _transpose(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    places = integers(consumer.fields, 14)
    return Reading(tuple(map(places.index, range(len(places)))), frozenset())


def _reshape(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    """Return the reading of a reshape: of dimensions that merge or split, the major one stays."""
    result = consumer.shape.sizes
    dims: list[int | None] = [None] * len(operand.sizes)
    sources = [i for i, size in enumerate(operand.sizes) if size > 1]
    targets = [i for i, size in enumerate(result) if size > 1]
    while sources and targets:
        source, target = sources.pop(0), targets.pop(0)
        dims[source] = target
        left, right = operand.sizes[source], result[target]
        while left != right:
            if left < right:
                left *= operand.sizes[sources.pop(0)]
            else:
                right *= result[targets.pop(0)]
    return Reading(tuple(dims), frozenset(i for i, dim in enumerate(dims) if dim is None))


def _reduce(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    gone = integers(consumer.fields, 14)
    if not operand.sizes:  # the value to start from
        return _alike(0)
    return _numbered(len(operand.sizes), [i for i in range(len(operand.sizes)) if i not in gone])


def _numbered(rank: int, kept: Sequence[int], crossing: Iterable[int] = ()) -> Reading:
    """Return the reading of an operand whose kept dimensions are those of the result in order."""
    dims = tuple(kept.index(i) if i in kept else None for i in range(rank))
    return Reading(dims, frozenset(crossing) | {i for i in range(rank) if i not in kept})


def _dot(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    numbers, rank = submessage(consumer.fields, 30), len(operand.sizes)
    contracted, batch = (integers(numbers, field + position) for field in (1, 3))
    free = [i for i in range(rank) if i not in contracted and i not in batch]
    start = len(consumer.shape.sizes) - len(free) if position else len(batch)
    dims: list[int | None] = [None] * rank
    for place, i in enumerate(batch):
        dims[i] = place
    for place, i in enumerate(free):
        dims[i] = start + place
    return Reading(tuple(dims), frozenset(contracted))


def _convolution(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    numbers = submessage(consumer.fields, 16)
    dims: list[int | None] = [None] * len(operand.sizes)
    if position:  # the kernel
        dims[integer(numbers, 4)] = integer(numbers, 10)
        return Reading(tuple(dims), frozenset(range(len(dims))) - {integer(numbers, 4)})
    dims[integer(numbers, 7)] = integer(numbers, 9)
    for source, target in zip(integers(numbers, 11), integers(numbers, 12), strict=True):
        dims[source] = target
    return Reading(tuple(dims), frozenset(range(len(dims))) - {integer(numbers, 7)})


def _window(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    sizes = [integer(dimension, 1) for dimension in submessages(submessage(consumer.fields, 15), 1)]
    if len(operand.sizes) != len(sizes):  # the value to start from
        return _alike(len(operand.sizes))
    return _alike(len(sizes), (i for i, size in enumerate(sizes) if size > 1))


def _reading_along(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    """Return the reading of an operation that mixes along the dimensions that it names."""
    return _alike(len(operand.sizes), integers(consumer.fields, 14))


def _pad(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    if position:  # the value to pad with
        return _alike(0)
    edges = submessages(submessage(consumer.fields, 21), 1)
    return _alike(len(operand.sizes), (i for i, edge in enumerate(edges) if any(_values(edge))))


def _values(fields: Message) -> list[int]:
    return [integer(fields, number) for number in (1, 2, 3)]


def _slice(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    """Return the reading of a slice, or of an update of a slice."""
    rank = len(operand.sizes)
    if rank != len(consumer.shape.sizes):  # an index
        return _alike(0)
    sizes = zip(operand.sizes, consumer.shape.sizes, strict=True)
    return _alike(rank, (i for i, (size, other) in enumerate(sizes) if size != other))


def _fourier(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    rank = len(operand.sizes)
    return _alike(rank, range(rank - len(integers(consumer.fields, 32)), rank))


def _matrices(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    rank = len(operand.sizes)
    return _alike(rank, range(rank - 2, rank))


def _gather(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    numbers, rank = submessage(consumer.fields, 33), len(operand.sizes)
    offsets, collapsed = integers(numbers, 1), integers(numbers, 2)
    batch = [i for i in range(len(consumer.shape.sizes)) if i not in offsets]
    vector = integer(numbers, 4)
    dims: list[int | None] = [None] * rank
    if position:
        for source, target in zip((i for i in range(rank) if i != vector), batch, strict=True):
            dims[source] = target
        return Reading(tuple(dims), frozenset())
    slices = integers(consumer.fields, 34)
    batching = dict(zip(integers(numbers, 5), integers(numbers, 6), strict=True))
    for source, index in batching.items():
        dims[source] = batch[index - (index > vector)]
    kept = (i for i in range(rank) if i not in collapsed and i not in batching)
    for source, target in zip(kept, offsets, strict=True):
        dims[source] = target
    crossing = (i for i in range(rank) if i not in batching and slices[i] != operand.sizes[i])
    return Reading(tuple(dims), frozenset(crossing))


def _scatter(consumer: Instruction, position: int, operand: HloShape) -> Reading:
    """Return the reading of a scatter. It sums over updates and indices, except along windows."""
    numbers, rank = submessage(consumer.fields, 48), len(operand.sizes)
    inserted, batching = integers(numbers, 2), integers(numbers, 5)
    count = (len(consumer.operands) - 1) // 2
    if position < count:
        return _alike(rank, integers(numbers, 3))
    dims: list[int | None] = [None] * rank
    if position > count:
        whole = len(_shape(consumer, position - count - 1).sizes)
        kept = (i for i in range(whole) if i not in inserted and i not in batching)
        for source, target in zip(integers(numbers, 1), kept, strict=True):
            dims[source] = target
    return Reading(tuple(dims), frozenset(i for i, dim in enumerate(dims) if dim is None))


_Rule = Callable[[Instruction, int, HloShape], Reading]

_RULES: dict[str, _Rule] = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "bitcast": _reshape,
    "reduce": _reduce,
    "dot": _dot,
    "convolution": _convolution,
    "reduce-window": _window,
    "select-and-scatter": _window,
    "sort": _reading_along,
    "concatenate": _reading_along,
    "reverse": _reading_along,
    "pad": _pad,
    "slice": _slice,
    "dynamic-slice": _slice,
    "dynamic-update-slice": _slice,
    "fft": _fourier,
    "cholesky": _matrices,
    "triangular-solve": _matrices,
    "gather": _gather,
    "scatter": _scatter,
    "custom-call": _unknown,
    "topk": _unknown,
    "rng-bit-generator": _unknown,
}


# --- mesh axes ------------------------------------------------------------------------------------
# The axes of the user's mesh along which arrays are cut, or devices exchange values.
#
#     axes = MeshAxes({"data": 2, "model": 4})
#     axes.spec(tiles), axes.of_groups([(0, 1, 2, 3), (4, 5, 6, 7)])
#
# XLA has several notations, and invents names for axes. So the axes are found from the devices
# alone: each axis is split into factors of prime size, and the factors that distinguish the tiles,
# or the members of a group, are joined again. A part of an axis is written as in Shardy:
# `model:(1)2` are the two halves of `model`, `model:(2)2` the members of a half. Smaller factors
# come first: of an axis of size 6, halves and the thirds of a half are found, but no thirds of the
# axis.

#: The axes that cut each dimension of an array, the major one first.
Spec: TypeAlias = tuple[tuple[str, ...], ...]


class _Factor(NamedTuple):
    """A part of an axis.

    Attributes:
        axis: The axis.
        before: The product of the sizes of the parts before it.
        size: Its size.
        of: The size of the axis.
    """

    axis: str
    before: int
    size: int
    of: int

    def __str__(self) -> str:
        return self.axis if self.size == self.of else f"{self.axis}:({self.before}){self.size}"


class MeshAxes:
    """The axes of a mesh.

    Args:
        shape: The size of each axis.
        devices: The number of each device in the module, in the order of the mesh; by default from
            0 on.
    """

    def __init__(self, shape: Mapping[str, int], devices: Sequence[int] | None = None):
        self.shape = {str(axis): size for axis, size in shape.items()}
        self._factors = [part for axis, size in self.shape.items() for part in _factors(axis, size)]
        sizes = [factor.size for factor in self._factors]
        places = np.array(list(np.ndindex(*sizes)), int).reshape(-1, len(sizes))
        numbers = np.arange(len(places)) if devices is None else np.array(devices)
        # The index of each device along each factor.
        self._places = np.zeros_like(places)
        self._places[numbers] = places
        self._first = int(numbers[0])
        # For each factor, the device after the first along it.
        strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
        self._next = [int(numbers[stride]) for stride in strides]

    @property
    def devices(self) -> int:
        return len(self._places)

    def size(self, axis: str) -> int:
        """Return the size of an axis, or of a part of one: 2 for `model:(1)2`."""
        name, _, part = axis.rpartition(":")
        return int(part.partition(")")[2]) if name in self.shape else self.shape[axis]

    def spec(self, tiles: DeviceTiles) -> Spec | None:
        """Return the axes that cut each dimension; None if axes cannot describe the tiles."""
        if len(tiles.of_device) != self.devices:
            return None
        columns = zip(tiles.parts, tiles.of_device.T, strict=True)
        cuts = [self._of_column(parts, column) for parts, column in columns]
        return None if None in cuts else tuple(axes for axes in cuts if axes is not None)

    def unreduced(self, tiles: DeviceTiles) -> tuple[str, ...]:
        """Return the axes along which an unreduced array is a sum over devices; () for others."""
        if tiles.term_of is None:
            return ()
        return self._of_column(tiles.terms, tiles.term_of) or ()

    def of_groups(self, groups: Collection[Sequence[int]]) -> tuple[str, ...] | None:
        """Return the axes along which the devices of a group differ; None if these are not axes."""
        first = next((group for group in groups if self._first in group), ())
        inside = [i for i, device in enumerate(self._next) if device in first]
        outside = [i for i in range(len(self._factors)) if i not in inside]
        members: dict[tuple[int, ...], set[int]] = {}
        for device, place in enumerate(self._places):
            members.setdefault(tuple(place[outside]), set()).add(device)
        if set(map(frozenset, members.values())) != set(map(frozenset, groups)):
            return None
        return _joined([self._factors[i] for i in inside])

    def of_pairs(self, pairs: Iterable[tuple[int, int]]) -> tuple[str, ...]:
        """Return the axes along which the sources and targets of a permutation differ."""
        moved = np.zeros(len(self._factors), bool)
        for source, target in pairs:
            moved |= self._places[source] != self._places[target]
        return tuple(dict.fromkeys(self._factors[i].axis for i in np.flatnonzero(moved)))

    def _of_column(self, parts: int, column: np.ndarray) -> tuple[str, ...] | None:
        """Return the axes whose indices number the tiles of a dimension, the major one first."""
        strides = np.array([column[device] for device in self._next], int) - column[self._first]
        used = sorted(np.flatnonzero(strides), key=lambda i: -strides[i])
        is_all = prod(self._factors[i].size for i in used) == parts
        if not (is_all and np.array_equal(column, self._places @ strides)):
            return None
        return _joined([self._factors[i] for i in used])


def spec_text(spec: Spec, **sums: Sequence[str]) -> str:
    """Return a spec as JAX writes it: `P('data', None, ('x', 'y'))`, `P(None, unreduced={'x'})`.

    Args:
        spec: The axes that cut each dimension.
        **sums: The `unreduced` and the `reduced` axes.
    """
    entries = [repr(axes[0] if len(axes) == 1 else axes or None) for axes in spec]
    noted = [f"{word}={{{', '.join(map(repr, axes))}}}" for word, axes in sums.items() if axes]
    while not noted and entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries + noted)})"


def _factors(axis: str, size: int) -> Iterable[_Factor]:
    before, divisor = 1, 2
    while before < size:
        while size // before % divisor:
            divisor += 1
        yield _Factor(axis, before, divisor, size)
        before *= divisor


def _joined(factors: Iterable[_Factor]) -> tuple[str, ...]:
    """Return factors as text, with adjacent factors of an axis joined."""
    joined: list[_Factor] = []
    for factor in factors:
        last = joined[-1] if joined else None
        if last and last.axis == factor.axis and last.before * last.size == factor.before:
            joined[-1] = last._replace(size=last.size * factor.size)
        else:
            joined.append(factor)
    return tuple(map(str, joined))
