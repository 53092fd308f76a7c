"""Conversions between packed rows and padded examples."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxprtool.jaxcompat import is_symbolic_dimension
from jaxprtool.passes.mapping.mask.values import is_number
from jaxprtool.passes.mapping.ragged.table import RaggedContext, taken
from jaxprtool.passes.mapping.ragged.values import Value


def shared_to_batched(context: RaggedContext, x: Value) -> Any:
    """Repeat a shared value for each example: `[...]` to `[B, ...]`."""
    return lax.broadcast(x.array, (context.sizes.batch_size,))


def packed_to_stacked(context: RaggedContext, x: Value, padding: Any = 0) -> Any:
    """Return packed rows as padded examples, with the number `padding` in the padding."""
    axis, size = x.axis, x.size
    bound = context.sizes.bounds.padded(size)
    numbers = jnp.arange(bound, dtype=jnp.int32)
    rows = context.starts(size)[:, None] + numbers
    found = taken(x.array, rows, axis)
    padded = jnp.moveaxis(found, axis, 0)
    if not is_number(x.array):
        return padded
    valid = numbers < context.lengths(size)[:, None]
    within = lax.broadcast_in_dim(valid, padded.shape, (0, axis + 1))
    return lax.select(within, padded, lax.full_like(padded, padding))


def stacked_to_packed(context: RaggedContext, x: Value) -> Any:
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
    known = (*context.sizes.rows.values(), context.sizes.batch_size)

    def may_be_empty(size: Any) -> bool:
        return bool(size == 0) or (is_symbolic_dimension(size) and size not in known)

    empty = [axis for axis in axes if may_be_empty(padded.shape[axis])]
    if not empty:
        return padded
    none = [(0, int(i in empty), 0) for i in range(padded.ndim)]
    return lax.pad(padded, lax.full_like(padded, 0, shape=()), none)
