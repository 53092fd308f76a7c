"""How values of a ragged program are held, and how large they are.

In the program that is rewritten a value is that of one example, and its type may mention a ragged
symbol, the length of the example. In the new program it is there for all examples, the *lanes*:

| held as   | array                                                                     |
| --------- | ------------------------------------------------------------------------- |
| Shared    | that of every lane, which is the same                                     |
| Lanes     | one for each lane: `[B, ...]`                                             |
| Packed    | the rows of all lanes one after the other, along its one ragged axis      |
| Pairs     | each row with those near it (`bands`): `[..., N, ..., width, ...]`        |
| Stacked   | each lane padded: `[B, ..., bound, ...]`, with what is known of the padding |

There may be more packed rows than lanes have together: `x[1:]` of examples that may be empty has as
many rows as `x`. Rows left over are equal to the first row, so that nothing is computed of them
that is not computed of a row that counts, and no result depends on them. In the same way a pair of
a row and what is not of its lane holds what the row, paired with itself, does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.symbols import names_of, value_of
from jaxprtool.jaxcompat import Aval
from jaxprtool.passes.mask.sizes import Bounds, UnboundedSize
from jaxprtool.passes.mask.values import Facts
from jaxprtool.passes.ragged.bands import Band


@dataclass(frozen=True)
class Shared:
    """A value that is the same in all lanes."""


@dataclass(frozen=True)
class Lanes:
    """A value for each lane, along the first axis."""


@dataclass(frozen=True)
class Packed:
    """The rows of all lanes.

    Attributes:
        axis: The ragged axis, which is where it is in one example.
        size: Its size in one example.
    """

    axis: int
    size: Any


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows, of which those of one lane count: the scores of attention.

    Attributes:
        axes: The two ragged axes, which are where they are in one example. Along the second are the
            rows of a window.
        size: The size of both in one example.
    """

    axes: tuple[int, int]
    size: Any


@dataclass(frozen=True)
class Stacked:
    """A value for each lane, padded along its ragged axes.

    Attributes:
        facts: What is known of one lane.
    """

    facts: Facts


Kind: TypeAlias = Shared | Lanes | Packed | Pairs | Stacked


@dataclass(frozen=True, eq=False)
class Value:
    """An operand as a rule has it: an array, how it holds the value, and the shape of one lane."""

    array: Any
    kind: Kind
    shape: tuple[Any, ...]

    @property
    def is_packed(self) -> bool:
        """True if it holds the rows of all lanes."""
        return isinstance(self.kind, Packed)

    @property
    def axis(self) -> int:
        """The ragged axis of a packed value."""
        assert isinstance(self.kind, Packed)
        return self.kind.axis

    @property
    def size(self) -> Any:
        """The size of a packed value along its ragged axis, in one lane."""
        assert isinstance(self.kind, Packed)
        return self.kind.size


Layout: TypeAlias = Literal["packed", "padded"]


class Sizes:
    """The sizes of a ragged program, and how values are to be held.

    Attributes:
        lanes: The number of lanes.
        rows: The number of rows that there are altogether, by ragged symbol.
        bounds: How long one lane can be, by ragged symbol.
        full: The ragged symbols whose rows all belong to a lane.
        layout: "packed" if no value may be padded, "padded" if all are, None if that is chosen.
        lengths_aval: The type of the lengths of all lanes.
    """

    def __init__(
        self,
        lanes: Any,
        rows: Mapping[str, Any],
        longest: Mapping[str, Any],
        full: frozenset[str],
        layout: Layout | None = None,
    ) -> None:
        self.lanes = lanes
        self.rows = dict(rows)
        self.bounds = Bounds(longest)
        self.full = full
        self.layout = layout
        self.lengths_aval = jax.core.ShapedArray((lanes,), jnp.int32)
        self._counts: dict[Any, Any] = {}
        self._exact: dict[Any, bool] = {}
        self._bands: dict[Any, Band] = {}
        self._ragged: dict[tuple[Any, ...], Kind] = {}

    def axes(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """Return the ragged axes of one lane."""
        return self.bounds.axes(shape)

    def count(self, size: Any) -> Any:
        """Return how many rows are held of a size; None if it cannot be packed.

        It can if it is a sum of a multiple of one ragged symbol and of what is not ragged.
        """
        if not self.bounds.is_masked(size):
            return size
        if size not in self._counts:
            self._counts[size] = self._counted(size)
        return self._counts[size]

    def _counted(self, size: Any) -> Any:
        found = self.names(size)
        if len(found) != 1:
            return None
        (name,) = found
        for _, factors in jaxcompat.dimension_terms(size):
            mentioned = [f for f in factors if f[0] == name]
            others = [f for f in factors if f[0] != name]
            hidden = any(not isinstance(base, str) and name in _inside(base) for base, _ in others)
            if hidden or any(exponent != 1 for _, exponent in mentioned):
                return None
        constant = value_of(size, {name: 0})
        slope = value_of(size, {name: 1}) - constant
        if isinstance(slope, int) and slope < 1:
            return None
        more = jax.core.max_dim(constant, 0)
        return slope * self.rows[name] + more * self.lanes

    def names(self, size: Any) -> list[str]:
        """Return the ragged symbols that a size mentions."""
        return [name for name in self.bounds if name in names_of(size)]

    def is_exact(self, size: Any) -> bool:
        """Return True if all the rows that are held of a size belong to a lane."""
        if size not in self._exact:
            (name,) = self.names(size)
            constant = value_of(size, {name: 0})
            self._exact[size] = name in self.full and isinstance(constant, int) and constant >= 0
        return self._exact[size]

    def canonical(self, aval: Aval, *, shared: bool = False) -> Kind:
        """Return how a value of a type is held where it may not depend on what it is computed of.

        Args:
            aval: The type of one lane.
            shared: Whether it is the same in all lanes, if its type is.
        """
        shape = tuple(getattr(aval, "shape", ()))
        if not self.axes(shape):
            return Shared() if shared else Lanes()
        return self.held(shape)

    def held(self, shape: tuple[Any, ...]) -> Kind:
        """Return how a value is held whose lanes are of a ragged shape."""
        if shape not in self._ragged:
            self._ragged[shape] = self._held(shape, self.axes(shape))
        return self._ragged[shape]

    def _held(self, shape: tuple[Any, ...], axes: tuple[int, ...]) -> Kind:
        size = shape[axes[0]]
        if self.count(size) is not None:
            if len(axes) == 1:
                return Packed(axes[0], size)
            if len(axes) == 2 and shape[axes[1]] == size and self.pairs_rows(size):
                return Pairs((axes[0], axes[1]), size)
        return Stacked(Facts(shape, (None,) * len(shape), active=True))

    def pairs_rows(self, size: Any) -> bool:
        """Return True if what has two axes of a size is held as pairs of rows, and not padded.

        What is computed of it takes operations, and memory, in proportion to its elements: those
        of a band of pairs, or of all lanes. Where that cannot be told, lanes are padded.
        """
        if self.layout is not None:
            return self.layout == "packed"
        bound = self.bounds.padded(size)
        try:
            return bool(self.count(size) * self.band(size).width < self.lanes * bound * bound)
        except jax.errors.InconclusiveDimensionOperation:
            return False

    def band(self, size: Any) -> Band:
        """Return which of the rows of a size are paired."""
        if size not in self._bands:
            try:
                longest = self.bounds.padded(size)
            except UnboundedSize:
                longest = None
            self._bands[size] = Band.of(self.count(size), longest)
        return self._bands[size]

    def shape(self, kind: Kind, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the array that holds a value whose lanes are of a shape."""
        if isinstance(kind, Shared):
            return tuple(shape)
        if isinstance(kind, Packed | Pairs):
            counts = list(map(self.count, shape))
            if isinstance(kind, Pairs):
                counts[kind.axes[1]] = self.band(kind.size).width
            return tuple(counts)
        return (self.lanes, *self.bounds.shape(shape))

    def aval(self, kind: Kind, aval: Aval) -> Aval:
        """Return the type of the array that holds a value whose lanes are of a type."""
        return aval if isinstance(kind, Shared) else aval.update(shape=self.shape(kind, aval.shape))


def _inside(base: Any) -> set[str]:
    return set().union(*map(names_of, base[1:]))
