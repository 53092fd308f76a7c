"""The layouts of the values of a ragged program, and their sizes.

The program to rewrite computes one example. Its types may mention a ragged symbol, the length of
the example. The new program computes all examples at once. A `Kind` states how the
value of all examples is laid out in one array:

| kind      | array                                                                            |
| --------- | -------------------------------------------------------------------------------- |
| Shared    | the value itself, which is the same in all examples                              |
| Batched   | one value per example, without a ragged axis: `[B, ...]`                         |
| Packed    | the rows of all examples, concatenated along the one ragged axis                 |
| Pairs     | each row paired with the rows near it (`bands`): `[..., N, ..., width, ...]`     |
| Stacked   | each example padded: `[B, ..., bound, ...]`, and the known values of the padding |
| RowsFirst | a stack of Batched or Stacked values, as a scan takes it: `[length, B, ...]`     |

B is the number of examples and N the number of stored rows. N may exceed the number of rows in use:
`x[1:]` of examples that may be empty is stored in as many rows as `x`. The *spare rows* at the
end are copies of the first row. So an operation on them produces no NaN or error that the first row
does not produce, and no result depends on them. For the same reason, a pair of rows of two
different examples holds a copy of the pair of its first row with itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.shapes.symbols import names_of, value_of
from jaxprtool.jaxcompat import Aval
from jaxprtool.passes.mapping.mask.sizes import Bounds, UnboundedSize
from jaxprtool.passes.mapping.mask.values import Facts
from jaxprtool.passes.mapping.ragged.bands import Band


@dataclass(frozen=True)
class Shared:
    """A value that is the same in all examples."""


@dataclass(frozen=True)
class Batched:
    """A value for each example, along the first axis."""


@dataclass(frozen=True)
class Packed:
    """The rows of all examples, concatenated.

    Attributes:
        axis: The ragged axis. It is the same in the array as in one example.
        size: The size of this axis in one example.
    """

    axis: int
    size: Any


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows, such as the scores of attention. Pairs of two examples influence no result.

    Attributes:
        axes: The two ragged axes. They are the same in the array as in one example, but in the
            array the second one runs over a window of rows (see `bands`).
        size: The size of both axes in one example.
    """

    axes: tuple[int, int]
    size: Any


@dataclass(frozen=True)
class Stacked:
    """A value for each example, padded along its ragged axes.

    Attributes:
        facts: The known values of the padding of one example.
    """

    facts: Facts


@dataclass(frozen=True)
class RowsFirst:
    """The values of all iterations of a scan, with the axis of examples behind that of iterations.

    Only the operands and results of a scan have this layout.

    Attributes:
        kind: The layout with the axis of examples first.
    """

    kind: Batched | Stacked


Kind: TypeAlias = Shared | Batched | Packed | Pairs | Stacked | RowsFirst


@dataclass(frozen=True, eq=False)
class Value:
    """An operand as it is passed to a rule.

    Attributes:
        array: The array that holds the value of all examples.
        kind: The layout of the array.
        shape: The shape of the value in one example.
    """

    array: Any
    kind: Kind
    shape: tuple[Any, ...]

    @property
    def is_packed(self) -> bool:
        """True if the value is packed."""
        return isinstance(self.kind, Packed)

    @property
    def axis(self) -> int:
        """The ragged axis of a packed value."""
        assert isinstance(self.kind, Packed)
        return self.kind.axis

    @property
    def size(self) -> Any:
        """The size of a packed value along its ragged axis in one example."""
        assert isinstance(self.kind, Packed)
        return self.kind.size


Layout: TypeAlias = Literal["packed", "padded"]


class Sizes:
    """The sizes of a ragged program, and the layout of its values.

    Attributes:
        batch_size: The number of examples.
        rows: The number of packed rows of all examples together, by ragged symbol.
        bounds: The largest length of one example, by ragged symbol.
        full: The ragged symbols without spare rows: each of their rows belongs to an example.
        layout: "packed" if no value may be padded, "padded" if every value is, None to choose the
            smaller layout for each value.
        lengths_aval: The type of the lengths of all examples, `i32[B]`.
    """

    def __init__(
        self,
        batch_size: Any,
        rows: Mapping[str, Any],
        longest: Mapping[str, Any],
        full: frozenset[str],
        layout: Layout | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.rows = dict(rows)
        self.bounds = Bounds(longest)
        self.full = full
        self.layout = layout
        self.lengths_aval = jax.core.ShapedArray((batch_size,), jnp.int32)
        self._counts: dict[Any, Any] = {}
        self._exact: dict[Any, bool] = {}
        self._bands: dict[Any, Band] = {}
        self._ragged: dict[tuple[Any, ...], Kind] = {}

    def axes(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """Return the ragged axes of a shape."""
        return self.bounds.axes(shape)

    def count(self, size: Any) -> Any:
        """Return the number of packed rows that hold a ragged size, or None if it cannot be packed.

        A size can be packed if it is `k * n + c`, for one ragged symbol n, k >= 1, and c without
        ragged symbols. A size that is not ragged is returned as it is.
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
            # Such as `floordiv(n, 2)`, which is not linear in n.
            hidden = any(not isinstance(base, str) and name in _inside(base) for base, _ in others)
            if hidden or any(exponent != 1 for _, exponent in mentioned):
                return None
        constant = value_of(size, {name: 0})
        slope = value_of(size, {name: 1}) - constant
        if isinstance(slope, int) and slope < 1:
            return None
        # A negative constant removes no row from an empty example, so no rows are subtracted.
        more = jax.core.max_dim(constant, 0)
        return slope * self.rows[name] + more * self.batch_size

    def names(self, size: Any) -> list[str]:
        """Return the ragged symbols that a size mentions."""
        return [name for name in self.bounds if name in names_of(size)]

    def is_exact(self, size: Any) -> bool:
        """Return True if a size that can be packed has no spare rows."""
        if size not in self._exact:
            (name,) = self.names(size)
            constant = value_of(size, {name: 0})
            self._exact[size] = name in self.full and isinstance(constant, int) and constant >= 0
        return self._exact[size]

    def canonical(self, aval: Aval, *, shared: bool = False) -> Kind:
        """Return the layout that depends only on the type of a value, not on how it is computed.

        Rules, branches and loops use it, where several equations must agree on one layout.

        Args:
            aval: The type of the value in one example.
            shared: True if a value without ragged axes is the same in all examples.
        """
        shape = tuple(getattr(aval, "shape", ()))
        if not self.axes(shape):
            return Shared() if shared else Batched()
        return self.held(shape)

    def held(self, shape: tuple[Any, ...]) -> Kind:
        """Return the layout of a value with this ragged shape in one example."""
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
        """Return True if a value with two axes of this size is held as pairs, and not padded.

        The layout with fewer elements is chosen, since both time and memory are proportional to
        them. If the two numbers cannot be compared, examples are padded.
        """
        if self.layout is not None:
            return self.layout == "packed"
        bound = self.bounds.padded(size)
        try:
            return bool(self.count(size) * self.band(size).width < self.batch_size * bound * bound)
        except jax.errors.InconclusiveDimensionOperation:
            return False

    def band(self, size: Any) -> Band:
        """Return the band that states which rows of a size are paired."""
        if size not in self._bands:
            try:
                longest = self.bounds.padded(size)
            except UnboundedSize:
                longest = None
            self._bands[size] = Band.of(self.count(size), longest)
        return self._bands[size]

    def shape(self, kind: Kind, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the array that holds a value with this shape in one example."""
        if isinstance(kind, Shared):
            return tuple(shape)
        if isinstance(kind, RowsFirst):
            batch_size, rows, *rest = self.shape(kind.kind, shape)
            return (rows, batch_size, *rest)
        if isinstance(kind, Packed | Pairs):
            counts = list(map(self.count, shape))
            if isinstance(kind, Pairs):
                counts[kind.axes[1]] = self.band(kind.size).width
            return tuple(counts)
        return (self.batch_size, *self.bounds.shape(shape))

    def aval(self, kind: Kind, aval: Aval) -> Aval:
        """Return the type of the array that holds a value with this type in one example."""
        return aval if isinstance(kind, Shared) else aval.update(shape=self.shape(kind, aval.shape))


def _inside(base: Any) -> set[str]:
    """Return the symbols in the operands of an operation such as `floordiv`."""
    return set().union(*map(names_of, base[1:]))
