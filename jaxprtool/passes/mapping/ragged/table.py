"""The open table of rules for packed rows, and the layouts, sizes and bands of values.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
from jax import lax
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import as_weak_as, named
from jaxprtool.ir.ragged import row_positions
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.symbols import names_of, value_of
from jaxprtool.jaxcompat import Aval, JaxprEqn, is_symbolic_dimension
from jaxprtool.passes.mapping import RuleContext
from jaxprtool.passes.mapping.mask.table import (
    Bounds,
    Facts,
    UnboundedSize,
    computed,
    is_numeric_type,
)

# --- values ---------------------------------------------------------------------------------------
# The layouts of the values of a ragged program, and their sizes.


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
class RaggedOperand:
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
        names = self.names(size)
        if len(names) != 1:
            return None
        (name,) = names
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


# --- table ----------------------------------------------------------------------------------------
# The open table of rules for packed rows, and the context argument of rules.
#
#     @rule("ragged", "my_primitive")
#     def _(context, eqn, x):
#         return context.bind(eqn, x)
#
# A rule applies an equation to all examples, with JAX's functions. Its operands are `Shared`,
# `Batched` or `Packed` values (see `values`). A result with a ragged axis is returned packed along
# the same axis, any other result by examples, `[B, ...]`. If the rule returns None, the operands
# are padded, and the masking rule of the primitive is applied to each example.
#
# Spare rows may not influence a result. A rule whose results have spare rows must make them equal
# to the first row, with `RaggedContext.spared`.

#: `rule(context, eqn, *operands) -> result`, or a sequence of results if the primitive has several.
RaggedRule = Callable[..., Any]

#: The open table of rules by primitive.
ragged_rules: RuleTable[RaggedRule] = RuleTable()

#: The facts about a size, in the order in which they are computed from each other.
FACTS = ("value", "lengths", "starts", "examples", "batch_indices", "positions")


class RaggedContext(RuleContext):
    """The context of a rule while it is traced: the lengths of examples and the positions of rows.

    In the shapes below, B is the number of examples, and N is the number of packed rows of a size.

    Attributes:
        sizes: The sizes of the program.
    """

    operand = RaggedOperand

    def __init__(
        self, sizes: Sizes, symbols: Mapping[str, Any], facts: dict[tuple[str, Any], Any]
    ) -> None:
        super().__init__(symbols, facts)
        self.sizes = sizes

    # --- sizes ----------------------------------------------------------------------------------

    def symbol(self, name: str) -> Any:
        """Return the value of a ragged symbol in each example: `i32[B]`."""
        return self._symbols[name]

    def held_size(self, size: Any) -> Any:
        return self.sizes.count(size) if jaxcompat.is_symbolic_dimension(size) else size

    def value(self, size: Any) -> Any:
        """Return the value of a size in each example: `i32[B]`. That of `n - 1` may be negative."""
        return self.fact("value", size)

    def lengths(self, size: Any) -> Any:
        """Return the number of rows of each example: `i32[B]`."""
        return self.fact("lengths", size)

    def starts(self, size: Any) -> Any:
        """Return the index of the first row of each example: `i32[B]`."""
        return self.fact("starts", size)

    def examples(self, size: Any) -> Any:
        """Return the example of each row, and B for a spare row: `i32[N]`."""
        return self.fact("examples", size)

    def batch_indices(self, size: Any) -> Any:
        """Return the example of each row, and that of the first row for a spare row: `i32[N]`."""
        return self.fact("batch_indices", size)

    def positions(self, size: Any) -> Any:
        """Return the position of each row in its example, from 0: `i32[N]`."""
        return self.fact("positions", size)

    def _value(self, size: Any) -> Any:
        names = self.sizes.names(size)

        def one(*values: Any) -> Any:
            return jnp.asarray(computed(size, dict(zip(names, values, strict=True))), jnp.int32)

        return jax.vmap(one)(*(self._symbols[name] for name in names))

    def _lengths(self, size: Any) -> Any:
        return jnp.maximum(self.value(size), 0)

    def _starts(self, size: Any) -> Any:
        return lax.cumsum(self.lengths(size)) - self.lengths(size)

    def _examples(self, size: Any) -> Any:
        return row_positions(self.lengths(size), self.sizes.count(size)).examples

    def _batch_indices(self, size: Any) -> Any:
        examples = self.examples(size)
        if self.sizes.is_exact(size):
            return examples
        return jnp.minimum(self.spared(examples, 0, size), self.sizes.batch_size - 1)

    def _positions(self, size: Any) -> Any:
        numbers = jnp.arange(self.sizes.count(size), dtype=jnp.int32)
        return self.spared(numbers - self.at_rows(self.starts(size), size), 0, size)

    # --- rows -----------------------------------------------------------------------------------

    def real(self, size: Any) -> Any:
        """Return True for each row that belongs to an example, and is not spare: `bool[N]`."""
        return self.examples(size) < self.sizes.batch_size

    def spared(self, array: Any, axis: int, size: Any) -> Any:
        """Return packed rows, with the spare ones made equal to the first."""
        if self.sizes.is_exact(size):
            return array
        return select(self.real(size), axis, array, lax.slice_in_dim(array, 0, 1, axis=axis))

    def at_rows(self, array: Any, size: Any) -> Any:
        """Return the value of its example for each row: `[B, ...]` to `[N, ...]`."""
        return taken(array, self.batch_indices(size))

    def along(self, x: RaggedOperand, shape: tuple[Any, ...], axis: int) -> Any:
        """Return an operand of an elementwise equation as an array that fits packed operands.

        Args:
            x: The operand. If batched, it is a scalar, or has size 1 along the ragged axis.
            shape: The shape of the result in one example.
            axis: The ragged axis of the result, the first one if it has two.
        """
        if not isinstance(x.kind, Batched):
            return x.array
        rows = self.at_rows(x.array, shape[axis])
        if x.shape:
            return jnp.moveaxis(jnp.squeeze(rows, axis + 1), 0, axis)
        whole = self.sizes.shape(self.sizes.held(shape), shape)
        return lax.broadcast_in_dim(rows, whole, (axis,))


def taken(array: Any, indices: Any, axis: int = 0) -> Any:
    """Return the elements at indices along an axis. Indices out of bounds are clipped.

    Along an axis of size 0, as in a batch of no examples, the result is zeros.
    """
    array = jnp.asarray(array)
    if array.shape[axis] == 0:
        return jnp.zeros(
            (*array.shape[:axis], *indices.shape, *array.shape[axis + 1 :]), array.dtype
        )
    where = (*(slice(None),) * axis, indices)
    return array.at[where].get(mode="clip", wrap_negative_indices=False)


def select(mask: Any, axis: int, array: Any, other: Any) -> Any:
    """Return `array` where a mask along an axis is True, and `other` elsewhere.

    Args:
        mask: A vector, for the elements along the axis.
        axis: The axis of `array`.
        array: The array.
        other: An array or a number that is broadcast to the shape of `array`.
    """
    within = lax.broadcast_in_dim(mask, array.shape, (axis,))
    other = jnp.broadcast_to(other, array.shape).astype(array.dtype)
    return lax.select(within, array, as_weak_as(other, jax.typeof(array)))


def broadcast_unsorted(array: Any, shape: Sequence[Any], dims: Sequence[int]) -> Any:
    """Return `lax.broadcast_in_dim(array, shape, dims)`, where `dims` need not be sorted."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    return lax.broadcast_in_dim(jnp.transpose(array, order), shape, sorted(dims))


def ragged_error(eqn: JaxprEqn, reason: str, hint: str | None = None) -> UnsupportedError:
    """Return the error for an equation that cannot be computed for examples of several lengths."""
    return UnsupportedError(f"{named(eqn)} cannot be made ragged: {reason}", hint)


# --- bands ----------------------------------------------------------------------------------------
# Bands of pairs of rows: each row with the rows near enough to be of the same example.
#
# If examples have at most `longest` rows, two rows of one example are less than `longest` apart. So
# rows are cut into blocks, and each row is paired with the window of its block: the block itself,
# and `reach` rows before and after it. Pairs are then `[N, width]`, as in local attention, instead
# of `[N, N]`. If `longest` is not known, or there are few rows, there is one block of all rows,
# which is also its window.
#
# The windows at either end extend beyond the rows. These positions hold a fill value.

#: Products of blocks with fewer rows are too small to be fast.
SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class Band:
    """The blocks that rows are cut into, and the windows of these.

    Attributes:
        rows: The number of rows, N.
        block: The number of rows in a block. The last block may have fewer.
        reach: The number of rows in a window before its block, and after it: a multiple of `block`.
    """

    rows: Any
    block: Any
    reach: int

    @classmethod
    def of(cls, rows: Any, longest: Any) -> Band:
        """Return the band for examples of at most `longest` rows; `longest` is None if unknown."""
        if not isinstance(longest, int):
            return cls(rows, rows, 0)
        block = max(SMALLEST_BLOCK, -(-longest // 2))
        reach = -(-max(longest - 1, 0) // block) * block
        if isinstance(rows, int) and rows <= block + 2 * reach:
            return cls(rows, rows, 0)
        return cls(rows, block, reach)

    @property
    def is_whole(self) -> bool:
        """True if every row is paired with every row."""
        return self.block is self.rows or bool(self.block == self.rows)

    @property
    def width(self) -> Any:
        """The number of rows in a window."""
        return self.block + 2 * self.reach

    def starts(self) -> Any:
        """Return the first row of the window of each row: `i32[N]`. It may be negative."""
        numbers = jnp.arange(self.rows, dtype=jnp.int32)
        return numbers * 0 if self.is_whole else numbers // self.block * self.block - self.reach

    def columns(self) -> Any:
        """Return the indices of the rows that each row is paired with: `i32[N,width]`."""
        return self.starts()[:, None] + jnp.arange(self.width, dtype=jnp.int32)

    def blocks(self, array: Any, axis: int, fill: Any = 0) -> Any:
        """Cut rows into blocks: `[..., N, ...]` to `[..., blocks, block, ...]`."""
        if self.is_whole:
            return jnp.expand_dims(array, axis)
        count = (self.rows + self.block - 1) // self.block
        array = _padded(array, axis, 0, count * self.block - self.rows, fill)
        shape = array.shape
        return array.reshape(*shape[:axis], count, self.block, *shape[axis + 1 :])

    def windows(self, array: Any, axis: int, fill: Any = 0) -> Any:
        """Return the window of each block: `[..., N, ...]` to `[..., blocks, width, ...]`."""
        blocks = self.blocks(array, axis, fill)
        count, reach = blocks.shape[axis], self.reach // self.block if self.reach else 0
        blocks = _padded(blocks, axis, reach, reach, fill)
        parts = [lax.slice_in_dim(blocks, i, i + count, axis=axis) for i in range(2 * reach + 1)]
        return jnp.concatenate(parts, axis + 1) if reach else blocks

    def merged(self, array: Any, axis: int) -> Any:
        """Undo `blocks`: `[..., blocks, block, ...]` to `[..., N, ...]`."""
        if self.is_whole:
            return jnp.squeeze(array, axis)
        shape = array.shape
        rows = array.reshape(*shape[:axis], shape[axis] * self.block, *shape[axis + 2 :])
        return _padded(rows, axis, 0, self.rows - rows.shape[axis], 0)

    def summed(self, array: Any, axis: int) -> Any:
        """Sum the elements of each row over all windows, the transpose of `windows`.

        The shape changes from `[..., blocks, width, ...]` to `[..., N, ...]`.
        """
        reach = self.reach // self.block if self.reach else 0
        count = array.shape[axis]
        parts = [
            lax.slice_in_dim(array, i * self.block, (i + 1) * self.block, axis=axis + 1)
            for i in range(2 * reach + 1)
        ]
        shifted = [_padded(part, axis, i, 2 * reach - i, 0) for i, part in enumerate(parts)]
        total = sum(shifted[1:], shifted[0])
        return self.merged(lax.slice_in_dim(total, reach, reach + count, axis=axis), axis)

    # --- pairs ----------------------------------------------------------------------------------

    def at_second(self, array: Any, axes: tuple[int, int], fill: Any = 0) -> Any:
        """Return pairs, each of which holds the second one of its two rows.

        Args:
            array: The rows, along the second axis. The size along the first axis is 1.
            axes: The two axes.
            fill: The value at positions of a window beyond the rows.
        """
        first, second = axes
        if self.is_whole:
            windows, count = array, self.rows
        else:
            windows = jnp.moveaxis(self.windows(array, second, fill), second, first)
            first, count = first + 1, self.block
        shape = (*windows.shape[:first], count, *windows.shape[first + 1 :])
        pairs = jnp.broadcast_to(windows, shape)
        return pairs if self.is_whole else self.merged(pairs, axes[0])

    def own(self, array: Any, axes: tuple[int, int]) -> Any:
        """Return the pair of each row with itself, along the first axis."""
        first, second = axes
        if self.is_whole:
            return jnp.moveaxis(jnp.diagonal(array, 0, first, second), -1, first)
        blocks = self.blocks(array, first)
        within = lax.slice_in_dim(blocks, self.reach, self.reach + self.block, axis=second + 1)
        diagonal = jnp.moveaxis(jnp.diagonal(within, 0, first + 1, second + 1), -1, first + 1)
        return self.merged(diagonal, first)

    def exchanged(self, array: Any, axes: tuple[int, int]) -> Any:
        """Return the transpose: the pair (j, i) at (i, j). A pair outside the band is arbitrary."""
        if self.is_whole:
            return jnp.swapaxes(array, *axes)
        rows, columns = jnp.arange(self.rows, dtype=jnp.int32)[:, None], self.columns()
        return _looked_up(array, axes, columns, rows - self.starts().at[columns].get(mode="clip"))

    def cut(self, array: Any, axes: tuple[int, int]) -> Any:
        """Return the pairs within the band: `[N, N]` to `[N, width]` along the two axes."""
        if self.is_whole:
            return array
        rows = jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        return _looked_up(array, axes, rows, self.columns())

    def whole(self, array: Any, axes: tuple[int, int]) -> Any:
        """Undo `cut`, with zeros outside the band: `[N, width]` to `[N, N]` along the two axes."""
        if self.is_whole:
            return array
        pairs = jnp.moveaxis(array, axes, (0, 1))
        none = jnp.zeros((self.rows, self.rows, *pairs.shape[2:]), array.dtype)
        rows = jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        at = none.at[rows, self.columns()]
        return jnp.moveaxis(at.set(pairs, mode="drop", wrap_negative_indices=False), (0, 1), axes)


def _looked_up(array: Any, axes: tuple[int, int], first: Any, second: Any) -> Any:
    """Return the elements at indices along two axes. Indices out of bounds are clipped."""
    at = jnp.moveaxis(array, axes, (0, 1)).at[first, second]
    return jnp.moveaxis(at.get(mode="clip", wrap_negative_indices=False), (0, 1), axes)


def _padded(array: Any, axis: int, low: int, high: Any, fill: Any) -> Any:
    """Pad an array along an axis; negative padding crops it, at sizes that may be symbolic."""
    if low == 0 and high == 0:
        return array
    padding = [(low, high, 0) if i == axis else (0, 0, 0) for i in range(array.ndim)]
    return lax.pad(array, lax.full_like(array, fill, shape=()), padding)


# --- stacked --------------------------------------------------------------------------------------
# Conversions between packed rows and padded examples.


def shared_to_batched(context: RaggedContext, x: RaggedOperand) -> Any:
    """Repeat a shared value for each example: `[...]` to `[B, ...]`."""
    return lax.broadcast(x.array, (context.sizes.batch_size,))


def packed_to_stacked(context: RaggedContext, x: RaggedOperand, padding: Any = 0) -> Any:
    """Return packed rows as padded examples, with the number `padding` in the padding."""
    axis, size = x.axis, x.size
    bound = context.sizes.bounds.padded(size)
    numbers = jnp.arange(bound, dtype=jnp.int32)
    rows = context.starts(size)[:, None] + numbers
    gathered = taken(x.array, rows, axis)
    padded = jnp.moveaxis(gathered, axis, 0)
    if not is_numeric_type(x.array):
        return padded
    valid = numbers < context.lengths(size)[:, None]
    within = lax.broadcast_in_dim(valid, padded.shape, (0, axis + 1))
    return lax.select(within, padded, lax.full_like(padded, padding))


def stacked_to_packed(context: RaggedContext, x: RaggedOperand) -> Any:
    """Return padded examples as packed rows."""
    (axis,) = context.sizes.axes(x.shape)
    size = x.shape[axis]
    padded = with_a_row(context, jnp.moveaxis(x.array, axis + 1, 1), 0, 1)
    rows = padded.at[context.batch_indices(size), context.positions(size)].get(mode="clip")
    return jnp.moveaxis(rows, 0, axis)


def with_a_row(context: RaggedContext, padded: Any, *axes: int) -> Any:
    """Return padded examples with one element along each of `axes` that may be empty.

    A gather with clipped indices needs at least one element.
    """
    nonempty = (*context.sizes.rows.values(), context.sizes.batch_size)

    def may_be_empty(size: Any) -> bool:
        return bool(size == 0) or (is_symbolic_dimension(size) and size not in nonempty)

    empty = [axis for axis in axes if may_be_empty(padded.shape[axis])]
    if not empty:
        return padded
    none = [(0, int(i in empty), 0) for i in range(padded.ndim)]
    return lax.pad(padded, lax.full_like(padded, 0, shape=()), none)
