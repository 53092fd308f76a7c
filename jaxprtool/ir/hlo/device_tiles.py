"""How an instruction's array is cut into tiles, and which device holds which tile.

    tiles = device_tiles(instruction, 8)[0]
    tiles.parts, tiles.of_device[3]

XLA writes a sharding as an array of device numbers, or, in JAX 0.12, by the axes of a mesh. Both
are read as the tile that each device holds: names in the module are not always those of the user's
mesh, and `ir.hlo.mesh_axes` finds these. Devices are numbered as in the module, from 0. Field
numbers are those of `OpSharding` and `NamedShardingProto` in XLA's `xla/xla_data.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from jaxprtool.ir.hlo.module import Instruction, Shape
from jaxprtool.ir.hlo.wire import Message, integer, integers, submessage, submessages

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
    given = submessages(fields, 5) if integer(fields, 1) == _TUPLE else [fields] * len(leaves)
    pairs = zip(given, leaves, strict=True)
    return tuple(_tiles(each, len(shape.sizes), devices) for each, shape in pairs)


def _leaves(shape: Shape) -> Iterator[Shape]:
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
    axes_of = [submessages(each, 1) for each in submessages(fields, 3)]
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
    return [integer(each, 2) for each in submessages(mesh, 1)]


def mesh_coordinates(mesh: Message, devices: int) -> np.ndarray:
    """Return the index of each device along each axis in a `MeshProto`, (devices, axes).

    The devices are listed, or, in JAX 0.10, a transposed range, or they are in order.
    """
    sizes = mesh_sizes(mesh)
    found = np.zeros((devices, len(sizes)), int)
    order = integers(mesh, 2) or range(prod(sizes))
    if ranged := submessage(mesh, 3):
        numbers = np.arange(prod(sizes)).reshape(integers(ranged, 1))
        order = numbers.transpose(integers(ranged, 2)).ravel().tolist()
    for place, device in zip(np.ndindex(*sizes), order, strict=True):
        found[device] = place
    return found


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
    before, size = (integer(part, 1), integer(part, 2)) if part else (1, sizes[axis])
    stride = sizes[axis] // (before * size)
    return AxisPart(axis, size, stride, coordinates[:, axis] // stride % size)
