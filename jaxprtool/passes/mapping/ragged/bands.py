"""Bands of pairs of rows: each row with the rows near enough to be of the same example.

If examples have at most `longest` rows, two rows of one example are less than `longest` apart. So
rows are cut into blocks, and each row is paired with the window of its block: the block itself, and
`reach` rows before and after it. Pairs are then `[N, width]`, as in local attention, instead of
`[N, N]`. If `longest` is not known, or there are few rows, there is one block of all rows, which is
also its window.

The windows at either end extend beyond the rows. These positions hold a fill value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

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
        own = jnp.moveaxis(jnp.diagonal(within, 0, first + 1, second + 1), -1, first + 1)
        return self.merged(own, first)

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
