"""Packed rules for `gather` and `dynamic_slice`, of rows and within rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.ragged.layout import first_rows, shifted
from jaxprtool.passes.mapping.ragged.table import RaggedContext, ragged_rules, taken
from jaxprtool.passes.mapping.ragged.values import Batched, Shared, Value


@rule(ragged_rules, "gather")
def _gather(context: RaggedContext, eqn: JaxprEqn, x: Value, indices: Value) -> Any:
    numbers = eqn.params["dimension_numbers"]
    if isinstance(x.kind, Batched):
        return None
    if indices.is_packed and indices.axis == len(indices.shape) - 1:
        return None  # the ragged axis is that of the components of an index
    if not x.is_packed:
        cut = context.sizes.axes(eqn.params["slice_sizes"])
        return _shared_window(context, eqn, x, indices) if cut else context.bind(eqn, x, indices)
    axis = x.axis
    if axis in numbers.operand_batching_dims:
        at = numbers.operand_batching_dims.index(axis)
        same = indices.is_packed and numbers.start_indices_batching_dims[at] == indices.axis
        return context.bind(eqn, x, indices) if same else None
    if axis not in numbers.start_index_map:  # the same elements of every row
        is_batched = isinstance(indices.kind, Batched) or indices.is_packed
        return None if is_batched else context.bind(eqn, x, indices)
    if eqn.params["slice_sizes"][axis] == 1:
        return _rows(context, eqn, x, indices)
    return _window(context, eqn, x, indices)


def _rows(context: RaggedContext, eqn: JaxprEqn, x: Value, indices: Value) -> Any:
    """Gather single rows: convert positions in an example to indices of packed rows."""
    numbers, size = eqn.params["dimension_numbers"], x.size
    if numbers.operand_batching_dims:
        return None
    array = indices.array
    if indices.is_packed:
        axis = indices.axis
        batch_indices = lax.broadcast_in_dim(
            context.batch_indices(indices.size), array.shape[:-1], (axis,)
        )
    else:
        if not isinstance(indices.kind, Batched):
            array = lax.broadcast(array, (context.sizes.batch_size,))
        batch_indices = lax.broadcasted_iota(jnp.int32, array.shape[:-1], 0)
        offsets = tuple(dim + 1 for dim in numbers.offset_dims)
        numbers = numbers._replace(offset_dims=offsets)
    part = numbers.start_index_map.index(x.axis)
    positions = array[..., part].astype(jnp.int32)
    lengths = context.lengths(size)[batch_indices]
    rows = context.starts(size)[batch_indices] + jnp.clip(positions, 0, lengths - 1)
    if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        rows = jnp.where((positions >= 0) & (positions < lengths), rows, -1)
    is_part = lax.broadcasted_iota(jnp.int32, array.shape, array.ndim - 1) == part
    found = jnp.where(is_part, rows[..., None].astype(array.dtype), array)
    changes = {"indices_are_sorted": False, "unique_indices": False}
    return context.bind(eqn, x, found, dimension_numbers=numbers, **changes)


def _window(context: RaggedContext, eqn: JaxprEqn, x: Value, indices: Value) -> Any:
    """Read one window of rows, as in `x[1:]`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    axis = x.axis
    simple = numbers.start_index_map == (axis,) and not numbers.collapsed_slice_dims
    if not (_is_whole(x, sizes, axis) and simple) or indices.shape != (1,):
        return None
    if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        return None
    start = indices.array[..., 0].astype(jnp.int32)
    if not context.sizes.axes([sizes[axis]]):
        start = jnp.clip(start, 0, context.lengths(x.size) - sizes[axis])
        return first_rows(context, x, start, sizes[axis])
    if isinstance(indices.kind, Batched):
        start = context.at_rows(start, sizes[axis])
    return shifted(context, x, start, sizes[axis])


def _shared_window(context: RaggedContext, eqn: JaxprEqn, x: Value, indices: Value) -> Any:
    """Read a window of a shared value that is as long as the example, as in `table[:n]`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    (axis, *others) = context.sizes.axes(sizes)
    simple = numbers.start_index_map == (axis,) and not numbers.collapsed_slice_dims
    shared = isinstance(indices.kind, Shared) and indices.shape == (1,)
    if others or not (_is_whole(x, sizes, axis) and simple and shared):
        return None
    if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        return None
    size = sizes[axis]
    last = x.shape[axis] - context.lengths(size)
    starts = jnp.clip(indices.array[0].astype(jnp.int32), 0, last)
    rows = context.at_rows(starts, size) + context.positions(size)
    return taken(x.array, rows, axis)


def _is_whole(x: Value, sizes: Sequence[Any], axis: int) -> bool:
    """Return True if a slice of these sizes covers all of `x` along all axes but one."""
    pairs = zip(sizes, x.shape, strict=True)
    return all(size == n for i, (size, n) in enumerate(pairs) if i != axis)


@rule(ragged_rules, "dynamic_slice")
def _dynamic_slice(context: RaggedContext, eqn: JaxprEqn, x: Value, *starts: Value) -> Any:
    if not x.is_packed or len(starts) != len(x.shape):
        return None
    axis, sizes = x.axis, eqn.params["slice_sizes"]
    if not _is_whole(x, sizes, axis):
        return None
    if context.sizes.axes([sizes[axis]]):
        return x.array if sizes[axis] == x.size else None
    most = context.lengths(x.size) - sizes[axis]
    start = jnp.clip(starts[axis].array.astype(jnp.int32), 0, most)
    return first_rows(context, x, start, sizes[axis])
