"""Masking of gathers and scatters: indices are compared with logical sizes.

For an index in the padding of the indices, a gather reads any element in bounds. A scatter must
write nothing: such indices are set out of bounds, and their updates dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.slicing import overhang, pad_end
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules, refusal
from jaxprtool.passes.mapping.mask.values import Filled, Padded

#: An index that is out of bounds, and does not overflow if the size of an array is added.
_OUTSIDE = np.iinfo(np.int32).max // 2

_CLIP, _DROP, _PROMISE = (
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
)


def _limits(context: MaskContext, limits: Sequence[Any], like: Any) -> Any:
    """Return the largest valid index of each component, broadcast to the shape of the indices."""
    parts = [lax.reshape(jnp.asarray(context.size(n), like.dtype), (1,)) for n in limits]
    vector = lax.concatenate(parts, 0)
    return lax.broadcast_in_dim(vector, like.shape, (like.ndim - 1,))


def _wide(indices: Any) -> Any:
    """Return indices of a type of at least 32 bits, which can represent all sizes."""
    if indices.dtype.itemsize < 4:
        return lax.convert_element_type(indices, np.int32)
    return indices


def _clipped(context: MaskContext, indices: Any, limits: Sequence[Any]) -> Any:
    most = _limits(context, limits, indices)
    return lax.min(lax.max(indices, lax.full_like(indices, 0)), most)


def _or_outside(context: MaskContext, indices: Any, limits: Sequence[Any]) -> Any:
    """Return indices in which every component of an index out of bounds is `_OUTSIDE`."""
    most = _limits(context, limits, indices)
    fits = lax.bitwise_and(indices >= lax.full_like(indices, 0), indices <= most)
    fits = lax.reduce_and(fits, [indices.ndim - 1])
    fits = lax.broadcast_in_dim(fits, indices.shape, tuple(range(indices.ndim - 1)))
    return lax.select(fits, indices, lax.full_like(indices, _OUTSIDE))


# --- gather ---------------------------------------------------------------------------------------


@rule(mask_rules, "gather")
def _gather(context: MaskContext, eqn: JaxprEqn, x: Padded, indices: Padded) -> Any:
    params, bounds = eqn.params, context.bounds
    numbers, sizes, mode = (params[k] for k in ("dimension_numbers", "slice_sizes", "mode"))
    if mode not in (_CLIP, _DROP, _PROMISE):
        raise refusal(eqn, f"the index mode {mode} is not supported")
    # The largest valid starts.
    ends = [x.shape[d] - sizes[d] for d in numbers.start_index_map]
    junk = context.axes(indices)
    at = context.filled(indices, dict.fromkeys(junk, 0) if mode == _PROMISE else {})
    # JAX would compare indices with the size of the padded array.
    logical = any(_is_masked(context, x.shape[d], sizes[d]) for d in numbers.start_index_map)
    if logical and mode != _PROMISE:
        at = (_clipped if mode == _CLIP else _or_outside)(context, _wide(at), ends)
    room = [overhang(bounds, *pair) for pair in zip(x.shape, sizes, strict=True)]
    made = context.bind(
        eqn,
        pad_end(x.array, room),
        at,
        indices_are_sorted=params["indices_are_sorted"] and at is indices.array,
        unique_indices=params["unique_indices"] and not junk,
    )
    shape = eqn.outvars[0].aval.shape
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(x.ndim) if d not in dropped]
    whole = {
        axis: d
        for d, axis in zip(windows, sorted(numbers.offset_dims), strict=True)
        if sizes[d] == x.shape[d]
    }
    batch_dims = [i for i in range(len(shape)) if i not in numbers.offset_dims]
    paired = [batch_dims[i] for i in numbers.start_indices_batching_dims]
    mixed = [i for i in range(len(shape)) if i not in whole and i not in paired]
    made = context.isolate_cotangent(made, shape, mixed, active=x.active)
    if any(room) or mode == _DROP:
        return made
    return Filled(made, {axis: x.fill(d) for axis, d in whole.items()})


def _is_masked(context: MaskContext, *sizes: Any) -> bool:
    return any(map(context.bounds.is_masked, sizes))


# --- scatter --------------------------------------------------------------------------------------


@rule(
    mask_rules,
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
)
def _scatter(
    context: MaskContext, eqn: JaxprEqn, x: Padded, indices: Padded, updates: Padded
) -> Any:
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    if mode not in (_CLIP, _DROP, _PROMISE):
        raise refusal(eqn, f"the index mode {mode} is not supported")
    dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [d for d in range(x.ndim) if d not in dropped]
    axes = dict(zip(windows, numbers.update_window_dims, strict=True))
    sizes = {d: updates.shape[axes[d]] if d in axes else 1 for d in range(x.ndim)}
    mapped = numbers.scatter_dims_to_operand_dims
    part = [d for d in axes if _is_masked(context, sizes[d]) and sizes[d] != x.shape[d]]
    masked_axes = [
        i for i in context.axes(indices) if i not in numbers.scatter_indices_batching_dims
    ]
    at, changed = indices.array, {}
    if part or masked_axes or any(_is_masked(context, x.shape[d], sizes[d]) for d in mapped):
        ends = [x.shape[d] - sizes[d] for d in mapped]
        at = _wide(at)
        if mode == _CLIP and ends:
            at = _clipped(context, at, ends)
        elif mode == _DROP and ends:
            at = _or_outside(context, at, ends)
        for axis in masked_axes:
            valid = lax.broadcast_in_dim(context.valid(indices.shape[axis]), at.shape, (axis,))
            at = lax.select(valid, at, lax.full_like(at, _OUTSIDE))
        for d in part:
            at, numbers = _row_by_row(context, at, numbers, d, axes[d], sizes[d], updates.ndim)
        changed = {"mode": _DROP, "indices_are_sorted": False, "dimension_numbers": numbers}
    made = context.bind(eqn, x, at, updates, **changed)
    full = {d for d in axes if sizes[d] == x.shape[d]} | {*numbers.operand_batching_dims}
    return Filled(made, {d: x.fill(d) for d in range(x.ndim) if d not in full})


def _row_by_row(
    context: MaskContext, at: Any, numbers: Any, dim: int, axis: int, size: Any, ndim: int
) -> tuple[Any, Any]:
    """Turn an axis of the windows of a scatter into an axis of indices: one update for each row.

    Updates in the padding along it are then dropped like those of other indices in the padding.

    Args:
        context: The context of the rule.
        at: The indices.
        numbers: The dimension numbers of the scatter.
        dim: The axis of the operand.
        axis: The axis of the updates.
        size: The logical size of the window along it.
        ndim: The rank of the updates.

    Returns:
        The new indices and dimension numbers.
    """
    batch_dims = [i for i in range(ndim) if i not in numbers.update_window_dims]
    place = sum(i < axis for i in batch_dims)
    shape = (*at.shape[:place], context.bounds.padded(size), *at.shape[place:])
    kept = tuple(i for i in range(len(shape)) if i != place)
    at = lax.broadcast_in_dim(at, shape, kept)
    mapped = numbers.scatter_dims_to_operand_dims
    if dim not in mapped:
        zeros = lax.full((*shape[:-1], 1), 0, at.dtype)
        at, mapped = lax.concatenate([at, zeros], len(shape) - 1), (*mapped, dim)
    row = lax.broadcasted_iota(at.dtype, at.shape, place)
    component = lax.broadcasted_iota(np.int32, at.shape, at.ndim - 1) == mapped.index(dim)
    at = at + lax.select(component, row, lax.full_like(row, 0))
    valid = lax.broadcast_in_dim(context.valid(size), at.shape, (place,))
    at = lax.select(valid, at, lax.full_like(at, _OUTSIDE))
    batching_dims = (i + (i >= place) for i in numbers.scatter_indices_batching_dims)
    return at, lax.ScatterDimensionNumbers(
        update_window_dims=tuple(i for i in numbers.update_window_dims if i != axis),
        inserted_window_dims=tuple(sorted((*numbers.inserted_window_dims, dim))),
        scatter_dims_to_operand_dims=mapped,
        operand_batching_dims=numbers.operand_batching_dims,
        scatter_indices_batching_dims=tuple(batching_dims),
    )
