"""The axes of the user's mesh along which arrays are cut, or devices exchange values.

    axes = MeshAxes({"data": 2, "model": 4})
    axes.spec(tiles), axes.of_groups([(0, 1, 2, 3), (4, 5, 6, 7)])

XLA has several notations, and invents names for axes. So the axes are found from the devices alone:
each axis is split into factors of prime size, and the factors that distinguish the tiles, or the
members of a group, are joined again. A part of an axis is written as in Shardy: `model:(1)2` are
the two halves of `model`, `model:(2)2` the members of a half. Smaller factors come first: of an
axis of size 6, halves and the thirds of a half are found, but no thirds of the axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxprtool.ir.hlo.device_tiles import DeviceTiles

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
        sizes = [each.size for each in self._factors]
        places = np.array(list(np.ndindex(*sizes)), int).reshape(-1, len(sizes))
        numbers = np.arange(len(places)) if devices is None else np.array(devices)
        # The index of each device along each factor.
        self._places = np.zeros_like(places)
        self._places[numbers] = places
        self._first = int(numbers[0])
        # For each factor, the device after the first along it.
        strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
        self._next = [int(numbers[each]) for each in strides]

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
        found = [self._of_column(parts, column) for parts, column in columns]
        return None if None in found else tuple(each for each in found if each is not None)

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
        strides = np.array([column[each] for each in self._next], int) - column[self._first]
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
    for each in factors:
        last = joined[-1] if joined else None
        if last and last.axis == each.axis and last.before * last.size == each.before:
            joined[-1] = last._replace(size=last.size * each.size)
        else:
            joined.append(each)
    return tuple(map(str, joined))
