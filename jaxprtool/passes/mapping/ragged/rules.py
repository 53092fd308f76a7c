"""Packed rules for elementwise equations, movement, indexing, products, reductions and scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.lax import GatherScatterMode

from jaxprtool import jaxcompat
from jaxprtool.ir.regions import Scan
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import DIM_AS_VALUE, Aval, JaxprEqn, is_symbolic_dimension
from jaxprtool.passes.cleanup.cse import cse_body
from jaxprtool.passes.mapping import Rewritten
from jaxprtool.passes.mapping.batch.axes import Axis
from jaxprtool.passes.mapping.batch.body import batch_body
from jaxprtool.passes.mapping.mask import MaskDomain, has_while
from jaxprtool.passes.mapping.mask.reductions import largest, least
from jaxprtool.passes.mapping.mask.table import Facts, guard_derivative, is_float, is_numeric_type
from jaxprtool.passes.mapping.ragged.table import (
    Batched,
    Packed,
    RaggedContext,
    RaggedOperand,
    Shared,
    broadcast_unsorted,
    ragged_rules,
    select,
    taken,
)

# --- layout ---------------------------------------------------------------------------------------
# Packed rules for elementwise equations, and for those that only move elements.


def ragged_axis(context: RaggedContext, shape: Sequence[Any]) -> int:
    """Return the ragged axis of a shape that has one."""
    (axis,) = context.sizes.axes(shape)
    return axis


@rule(ragged_rules, "elementwise")
def _elementwise(context: RaggedContext, eqn: JaxprEqn, *operands: RaggedOperand) -> Any:
    shapes = [tuple(v.aval.shape) for v in eqn.outvars]
    if not all(map(context.sizes.axes, shapes)):
        return None
    axis = ragged_axis(context, shapes[0])
    arrays = [x.array if x.is_packed else context.along(x, shapes[0], axis) for x in operands]
    return context.bind(eqn, *arrays)


@rule(ragged_rules, DIM_AS_VALUE)
def _dim_as_value(context: RaggedContext, eqn: JaxprEqn) -> Any:
    return context.value(eqn.params["dim"]).astype(eqn.outvars[0].aval.dtype)


@rule(ragged_rules, "iota")
def _iota(context: RaggedContext, eqn: JaxprEqn) -> Any:
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    axis = ragged_axis(context, shape)
    if dimension != axis:
        return context.bind(eqn)
    numbers = context.positions(shape[axis]).astype(eqn.params["dtype"])
    return lax.broadcast_in_dim(numbers, packed_shape(context, shape), (axis,))


def packed_shape(context: RaggedContext, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape of the packed array for examples of a shape."""
    axis = ragged_axis(context, shape)
    return context.sizes.shape(Packed(axis, shape[axis]), shape)


@rule(ragged_rules, "broadcast_in_dim")
def _broadcast_in_dim(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    if not isinstance(x.kind, Batched):
        return context.bind(eqn, x)
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    axis = ragged_axis(context, shape)
    rows = context.at_rows(x.array, shape[axis])
    places = [axis, *dims]
    if axis in dims:  # of size 1
        at = dims.index(axis)
        rows, places = jnp.squeeze(rows, at + 1), [axis, *dims[:at], *dims[at + 1 :]]
    return broadcast_unsorted(rows, packed_shape(context, shape), places)


@rule(ragged_rules, "reshape")
def _reshape(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    """Reshape packed rows if neither their number nor the size before the ragged axis changes."""
    shape = eqn.outvars[0].aval.shape
    if not x.is_packed or not context.sizes.axes(shape) or eqn.params["dimensions"] is not None:
        return None
    leading = math.prod(x.shape[: x.axis])
    if leading != math.prod(shape[: ragged_axis(context, shape)]):
        return None
    new = packed_shape(context, shape)
    return context.bind(eqn, x) if math.prod(new) == math.prod(x.array.shape) else None


@rule(ragged_rules, "transpose", "squeeze")
def _moved(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    return context.bind(eqn, x)


@rule(ragged_rules, "split", "unstack")
def _split(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    return None if eqn.params["axis"] == x.axis else context.bind(eqn, x)


@rule(ragged_rules, "stack")
def _stack(context: RaggedContext, eqn: JaxprEqn, *operands: RaggedOperand) -> Any:
    return context.bind(eqn, *operands)


@rule(ragged_rules, "tile")
def _tile(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    return context.bind(eqn, x) if x.is_packed and eqn.params["reps"][x.axis] == 1 else None


# --- along the ragged axis ----------------------------------------------------------------------


def rows_at(context: RaggedContext, x: RaggedOperand, positions: Any, size: Any) -> Any:
    """Return rows of a packed value by their position in the example.

    Args:
        context: The context of the rule.
        x: The packed value.
        positions: For each row of the result, the position in its example of the row to take:
            `i32[N]`. A position outside the example returns an arbitrary row.
        size: The size of the result along the ragged axis, in one example.

    Returns:
        An array of the N packed rows of `size`.
    """
    rows = context.at_rows(context.starts(x.size), size) + positions
    return taken(x.array, rows, x.axis)


def shifted(context: RaggedContext, x: RaggedOperand, offset: Any, size: Any) -> Any:
    """Return packed rows of a size, where row i of an example is row `i + offset` of `x`."""
    return rows_at(context, x, context.positions(size) + offset, size)


@rule(ragged_rules, "rev")
def _rev(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    axis, size = x.axis, x.size
    dims = eqn.params["dimensions"]
    array = x.array
    if axis in dims:
        last = context.at_rows(context.lengths(size), size) - 1
        array = rows_at(context, x, last - context.positions(size), size)
    return lax.rev(array, [d for d in dims if d != axis])


@rule(ragged_rules, "slice")
def _slice(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    if not x.is_packed:
        return None
    axis, size = x.axis, x.size
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    if strides[axis] != 1 or is_symbolic_dimension(start[axis]):
        return None
    others = {
        "start_indices": _with(start, axis, 0),
        "limit_indices": _with(limit, axis, x.array.shape[axis]),
    }
    kept = RaggedOperand(context.bind(eqn, x, **others), x.kind, x.shape)
    if start[axis] == 0 and limit[axis] == size:
        return kept.array
    out = eqn.outvars[0].aval.shape[axis]
    if context.sizes.axes([out]):
        return shifted(context, kept, start[axis], out)
    return first_rows(context, kept, start[axis], out)


def _with(values: Sequence[Any], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def first_rows(context: RaggedContext, x: RaggedOperand, start: Any, count: Any) -> Any:
    """Return `count` rows of each example from position `start` on: `[B, ..., count, ...]`.

    Args:
        context: The context of the rule.
        x: The packed value.
        start: The first position, of all examples, or of each: `i32[B]`.
        count: The number of rows, the same in all examples.
    """
    axis = x.axis
    first = context.starts(x.size) + start
    rows = first[:, None] + jnp.arange(count, dtype=jnp.int32)
    return jnp.moveaxis(taken(x.array, rows, axis), axis, 0)


@rule(ragged_rules, "concatenate")
def _concatenate(context: RaggedContext, eqn: JaxprEqn, *operands: RaggedOperand) -> Any:
    """Gather each row of the result from the operand that its position falls into."""
    shape, dimension = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    axis = ragged_axis(context, shape)
    if dimension != axis:
        return context.bind(eqn, *operands)
    size = shape[axis]
    batch_indices, left = context.batch_indices(size), context.positions(size)
    # `left` is the position of each row, relative to the operand. If it is negative, the row is one
    # of an earlier operand.
    result = None
    for x in operands:
        if x.is_packed:
            length = context.lengths(x.size)[batch_indices]
            part = rows_at(context, x, left, size)
        else:
            length = x.shape[axis]
            part = _static_rows(x, left, batch_indices, axis)
        result = part if result is None else select(left >= 0, axis, part, result)
        left = left - length
    return result


def _static_rows(x: RaggedOperand, positions: Any, batch_indices: Any, axis: int) -> Any:
    """Return rows, by position, of a value that is shared or batched."""
    if not isinstance(x.kind, Batched):
        return taken(x.array, positions, axis)
    rows = jnp.moveaxis(x.array, axis + 1, 1)
    return jnp.moveaxis(rows.at[batch_indices, positions].get(mode="clip"), 0, axis)


@rule(ragged_rules, "pad")
def _pad(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, value: RaggedOperand) -> Any:
    if not x.is_packed or isinstance(value.kind, Batched):
        return None
    axis, config = x.axis, eqn.params["padding_config"]
    low, high, within = config[axis]
    if within != 0 or is_symbolic_dimension(low):
        return None
    array = lax.pad(x.array, value.array, _with(config, axis, (0, 0, 0)))
    if low == high == 0:
        return array
    size = eqn.outvars[0].aval.shape[axis]
    if not context.sizes.axes([size]):
        return None
    positions = context.positions(size) - low
    rows = rows_at(context, RaggedOperand(array, x.kind, x.shape), positions, size)
    length = context.at_rows(context.lengths(x.size), size)
    return select((positions >= 0) & (positions < length), axis, rows, value.array)


# --- indexing -------------------------------------------------------------------------------------
# Packed rules for `gather` and `dynamic_slice`, of rows and within rows.


@rule(ragged_rules, "gather")
def _gather(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, indices: RaggedOperand) -> Any:
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


def _rows(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, indices: RaggedOperand) -> Any:
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
    row_indices = jnp.where(is_part, rows[..., None].astype(array.dtype), array)
    changes = {"indices_are_sorted": False, "unique_indices": False}
    return context.bind(eqn, x, row_indices, dimension_numbers=numbers, **changes)


def _window(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, indices: RaggedOperand) -> Any:
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


def _shared_window(
    context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, indices: RaggedOperand
) -> Any:
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


def _is_whole(x: RaggedOperand, sizes: Sequence[Any], axis: int) -> bool:
    """Return True if a slice of these sizes covers all of `x` along all axes but one."""
    pairs = zip(sizes, x.shape, strict=True)
    return all(size == n for i, (size, n) in enumerate(pairs) if i != axis)


@rule(ragged_rules, "dynamic_slice")
def _dynamic_slice(
    context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, *starts: RaggedOperand
) -> Any:
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


# --- products -------------------------------------------------------------------------------------
# Packed rule for `dot_general`.


@rule(ragged_rules, "dot_general")
def _dot_general(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, y: RaggedOperand) -> Any:
    """Compute one product for the rows of all examples, unless a factor is batched."""
    if isinstance(x.kind, Batched) or isinstance(y.kind, Batched):
        return None
    contracted, _ = eqn.params["dimension_numbers"]
    if any(v.is_packed and v.axis in dims for v, dims in zip((x, y), contracted, strict=True)):
        return _summed(context, eqn, x, y)
    return context.bind(eqn, x, y)


def _summed(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, y: RaggedOperand) -> Any:
    """Return a product that sums over rows, as a segment sum, if one factor is a vector.

    A product of two matrices, `x.T @ y`, takes less memory with padded examples.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    if batch[0] or len(contracted[0]) > 1 or min(len(x.shape), len(y.shape)) > 1:
        return None
    kind = eqn.params["preferred_element_type"] or eqn.outvars[0].aval.dtype
    one, many = (x, y) if len(x.shape) == 1 else (y, x)
    axis = many.axis
    weights = lax.broadcast_in_dim(one.array.astype(kind), many.array.shape, (axis,))
    return segment_sum(context, weights * many.array.astype(kind), axis, many.size)


# --- reductions -----------------------------------------------------------------------------------
# Packed rules for reductions, scans and sorts over the rows of examples, by segment operations.


def segment_sum(context: RaggedContext, array: Any, axis: int, size: Any) -> Any:
    """Return the sum of the rows of each example: `[B, ...]`."""
    return jax.ops.segment_sum(
        jnp.moveaxis(array, axis, 0),
        context.examples(size),
        context.sizes.batch_size,
        indices_are_sorted=True,
    )


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 4))
def _extreme(is_max: bool, axes: tuple[int, ...], rows: Any, examples: Any, batch_size: int) -> Any:
    """Return the largest, or least, element of each example, over its rows and some axes of a row.

    JAX has no derivative of `segment_max`. This one is shared by all elements equal to the result.
    """
    reduce = jax.ops.segment_max if is_max else jax.ops.segment_min
    within = (lax.reduce_max if is_max else lax.reduce_min)(rows, axes) if axes else rows
    return reduce(within, examples, batch_size, indices_are_sorted=True)


@_extreme.defjvp
def _extreme_jvp(
    is_max: bool, axes: tuple[int, ...], batch_size: int, primals: Any, tangents: Any
) -> Any:
    rows, examples = primals
    best = _extreme(is_max, axes, rows, examples, batch_size)
    at_rows = jnp.expand_dims(taken(best, examples), axes)
    is_best = (rows == at_rows).astype(rows.dtype)

    def total(array: Any) -> Any:
        within = array.sum(axes) if axes else array
        return jax.ops.segment_sum(within, examples, batch_size, indices_are_sorted=True)

    return best, total(tangents[0] * is_best) / jnp.maximum(total(is_best), 1)


def _rows_first(eqn: JaxprEqn, x: RaggedOperand) -> tuple[Any, tuple[int, ...]]:
    """Return an operand with its rows along axis 0, and the other axes to reduce."""
    others = tuple(axis + (axis < x.axis) for axis in eqn.params["axes"] if axis != x.axis)
    return jnp.moveaxis(x.array, x.axis, 0), others


@rule(ragged_rules, "reduce_sum")
def _sum(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    if x.axis not in eqn.params["axes"]:
        return context.bind(eqn, x)
    rows, others = _rows_first(eqn, x)
    within = context.bind(eqn, rows, axes=others) if others else rows
    return segment_sum(context, within, 0, x.size)


#: True for a reduction that is a maximum, False for a minimum.
_LOGICAL = {"reduce_or": True, "reduce_and": False}
_IS_MAX = {"reduce_max": True, "reduce_min": False, **_LOGICAL}


@rule(ragged_rules, *_IS_MAX)
def _extremes(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    if x.axis not in eqn.params["axes"]:
        return context.bind(eqn, x)
    logical, name = x.array.dtype == bool, eqn.primitive.name
    if name in _LOGICAL and not logical:
        return None  # a bitwise reduction of integers
    rows, others = _rows_first(eqn, x)
    rows = rows.astype(jnp.int32) if logical else rows
    extremes = _extreme(
        _IS_MAX[name], others, rows, context.examples(x.size), context.sizes.batch_size
    )
    return extremes > 0 if logical else extremes  # if empty, the least or largest integer


@rule(ragged_rules, "argmax", "argmin")
def _arg(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    """Return the position of the first best row. As in JAX, NaN is better than any number."""
    axes, (axis, size) = eqn.params["axes"], (x.axis, x.size)
    if axis not in axes:
        return context.bind(eqn, x)
    rows = jnp.moveaxis(x.array, axis, 0)
    rows = rows.astype(jnp.int32) if rows.dtype == bool else rows
    examples, batch_size = context.examples(size), context.sizes.batch_size
    reduce = jax.ops.segment_max if eqn.primitive.name == "argmax" else jax.ops.segment_min
    best = reduce(rows, examples, batch_size, indices_are_sorted=True)
    is_best = (rows == context.at_rows(best, size)) | (rows != rows)
    positions = lax.broadcast_in_dim(context.positions(size), rows.shape, (0,))
    none = jnp.iinfo(jnp.int32).max
    first = jax.ops.segment_min(
        jnp.where(is_best, positions, none), examples, batch_size, indices_are_sorted=True
    )
    return jnp.where(first == none, 0, first).astype(eqn.params["index_dtype"])


#: For each cumulative primitive, its combining function and its identity element by dtype.
_SCANS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "cumsum": (jnp.add, lambda dtype: 0),
    "cumprod": (jnp.multiply, lambda dtype: 1),
    "cummax": (lax.max, least),
    "cummin": (lax.min, largest),
    "cumlogsumexp": (jnp.logaddexp, lambda dtype: -jnp.inf),
}


@rule(ragged_rules, *_SCANS)
def _segmented_scan(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    """Scan all rows as one segmented scan, which restarts where an example begins."""
    axis, size, reverse = x.axis, x.size, eqn.params["reverse"]
    if eqn.params["axis"] != axis:
        return context.bind(eqn, x)
    combine, start = _SCANS[eqn.primitive.name]
    identity = jnp.asarray(start(x.array.dtype), x.array.dtype)
    if is_symbolic_dimension(x.array.shape[axis]):  # not supported by `lax.associative_scan`
        return _doubled(context, x, combine, identity, reverse)
    positions = context.positions(size)
    ends = context.at_rows(context.lengths(size), size) - 1
    # A spare row has the position of the first row, which need not be an end.
    begins = (positions == (ends if reverse else 0)) | ~context.real(size)
    flags = lax.broadcast_in_dim(begins, x.array.shape, (axis,))

    def step(before: Any, after: Any) -> Any:
        (flag, value), (begins, new) = before, after
        # Replace the operand by the identity, not the result: its derivative could be NaN.
        return flag | begins, combine(
            lax.select(begins, lax.full_like(value, identity), value), new
        )

    scanned = lax.associative_scan(step, (flags, x.array), reverse=reverse, axis=axis)[1]
    return context.spared(scanned, axis, size)


def _doubled(
    context: RaggedContext,
    x: RaggedOperand,
    combine: Callable[[Any, Any], Any],
    identity: Any,
    reverse: bool,
) -> Any:
    """Scan a symbolic number of rows, by the algorithm of Hillis and Steele.

    In step k, each row is combined with the one 2**k rows before it, if that is in its example.
    """
    axis, size = x.axis, x.size
    longest = context.sizes.bounds.padded(size)
    steps = (longest - 1).bit_length() if isinstance(longest, int) else 31
    positions = context.positions(size)
    if reverse:
        ends = context.at_rows(context.lengths(size), size) - 1
        positions = jnp.where(context.real(size), ends - positions, 0)
    rows = jnp.arange(x.array.shape[axis], dtype=jnp.int32)

    def step(value: Any, shift: Any) -> Any:
        other = taken(value, rows + shift if reverse else rows - shift, axis)
        within = lax.broadcast_in_dim(positions >= shift, value.shape, (axis,))
        return combine(lax.select(within, other, lax.full_like(value, identity)), value), None

    shifts = 2 ** jnp.arange(steps, dtype=jnp.int32)
    scanned, _ = lax.scan(step, x.array, shifts)
    return context.spared(scanned, axis, size)


@rule(ragged_rules, "sort")
def _sort(context: RaggedContext, eqn: JaxprEqn, *operands: RaggedOperand) -> Any:
    """Sort the rows of all examples at once, with the example as the first key."""
    axis, size = operands[0].axis, operands[0].size
    if eqn.params["dimension"] != axis:
        return context.bind(eqn, *operands)
    first = lax.broadcast_in_dim(context.examples(size), operands[0].array.shape, (axis,))
    _, *results = lax.sort(
        (first, *(x.array for x in operands)),
        dimension=axis,
        is_stable=eqn.params["is_stable"],
        num_keys=eqn.params["num_keys"] + 1,
    )
    return [context.spared(result, axis, size) for result in results]


@rule(ragged_rules, "top_k")
def _top_k(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    along = eqn.params.get("axis", len(x.shape) - 1) % len(x.shape)
    return None if along == x.axis else context.bind(eqn, x)


# --- scans ----------------------------------------------------------------------------------------
# Packed rule for a scan over the rows of an example, which scans all examples at once.
#
# Padded, each example would take as many iterations as the longest one. Instead, the examples are
# distributed over fewer *slots*, longest first. A slot scans the rows of its examples one after the
# other, and restarts from the initial carry where the next example begins. Iterations are grouped
# into blocks, and a block is skipped if no slot has rows left.
#
# A slot without rows left repeats the first iteration of the first example. So it computes no NaN
# that a real iteration does not compute, and the body needs no masks to keep NaN out of
# derivatives.

#: The number of blocks of iterations, and the minimum number of iterations in a block.
_BLOCKS, _SHORTEST = 16, 4

#: The maximum number of elements of carries and per-example operands to store for each row,
#: relative to its own.
_MAX_EXTRA = 8


@rule(ragged_rules, "scan")
def _packed_scan(context: RaggedContext, eqn: JaxprEqn, *operands: RaggedOperand) -> Any:
    scan = Scan.of(eqn)
    batch_size = context.sizes.batch_size
    if not (isinstance(batch_size, int) and batch_size > 0 and _fits(scan, operands)):
        return None
    return _by_slots(context, scan, operands)


def _fits(scan: Scan, operands: Sequence[RaggedOperand]) -> bool:
    """Return True for a scan of numbers that does not need too much memory.

    Batched operands, and the carry, are stored for every row: see `_MAX_EXTRA`.
    """
    start = len(scan.consts) + len(scan.carry)
    rows = [v.aval for v in scan.body.invars[start:]]
    rows += [v.aval for v in scan.body.outvars[len(scan.carry) :]]
    if any(x.is_packed for x in operands[:start]) or has_while(scan.body):
        return False
    if not all(map(is_numeric_type, (*scan.body.in_avals, *scan.body.out_avals))):
        return False
    more = [v.aval for v, x in zip(scan.body.invars, operands, strict=True) if _is_batched(x)]
    more += [scan.body.outvars[i].aval for i in _stacked(scan)[0] if i < len(scan.carry)]
    extra, row_elements = _elements(more), _elements(rows)
    return not more or (
        isinstance(extra, int)
        and isinstance(row_elements, int)
        and extra <= _MAX_EXTRA * row_elements
    )


def _is_batched(x: RaggedOperand) -> bool:
    return isinstance(x.kind, Batched)


def _elements(avals: Sequence[Aval]) -> Any:
    return sum(math.prod(aval.shape) for aval in avals)


def _stacked(scan: Scan) -> tuple[list[int], list[int]]:
    """Return the results of the body to stack, and the position of each carry among them.

    A carry that is also stacked as a `y` is stacked once.
    """
    outs, count = scan.body.outvars, len(scan.carry)
    stacked, places = list(range(count, len(outs))), []
    for i in range(count):
        same = [k for k, j in enumerate(stacked) if outs[j] is outs[i]]
        places.append(same[0] if same else len(stacked))
        if not same:
            stacked.append(i)
    return stacked, places


class _SlotAssignment(NamedTuple):
    """The distribution of examples over slots.

    Attributes:
        slots: The slot of each example: `i32[B]`.
        starts: The iteration in which each example begins: `i32[B]`.
        iterations: The number of iterations in which some slot has a row: `i32[]`.
    """

    slots: Any
    starts: Any
    iterations: Any


def _slot_assignment(lengths: Any, width: int) -> _SlotAssignment:
    """Distribute examples over slots, longest first.

    In each turn, the half of the slots with the fewest rows so far gets one example each, and the
    slot with the fewest rows gets the longest. So two slots never differ by more rows than the
    longest example has.
    """
    half = max(1, width // 2)
    _, order = lax.sort_key_val(-lengths, lax.iota(np.dtype(np.int32), len(lengths)))
    longest_first = taken(lengths, order)
    counts, slots = jnp.zeros(width, lengths.dtype), lax.iota(np.dtype(np.int32), width)
    dealt = []
    for i in range(0, len(lengths), half):
        dealt_lengths = longest_first[i : i + half]
        counts, slots = lax.sort_key_val(counts, slots)
        dealt.append((slots[: len(dealt_lengths)], counts[: len(dealt_lengths)]))
        counts = counts.at[: len(dealt_lengths)].add(dealt_lengths)
    by_example = jnp.zeros((2, len(lengths)), lengths.dtype)
    assigned = jnp.stack([jnp.concatenate(parts) for parts in zip(*dealt, strict=True)])
    slots, starts = by_example.at[:, order].set(assigned)
    return _SlotAssignment(slots, starts, counts.max())


class _SlotShape(NamedTuple):
    """The shape of the scan over slots.

    Attributes:
        width: The number of slots.
        blocks: The number of blocks.
        block: The number of iterations in a block.
    """

    width: int
    blocks: Any
    block: Any


def _shape(context: RaggedContext, size: Any) -> _SlotShape:
    """Return the shape for examples of a size, with enough iterations for any lengths.

    By the bound in `_slot_assignment`, a slot has at most `rows / width + longest` rows.
    """
    sizes, batch_size = context.sizes, context.sizes.batch_size
    rows, longest = sizes.count(size), sizes.bounds.padded(size)
    width = -(-batch_size // 3)
    if isinstance(rows, int) and isinstance(longest, int):
        width = min(batch_size, max(width, 2 * rows // max(longest, 1)))
        most = min(rows, batch_size * longest)
        iterations = min(rows, longest + most // width if width < batch_size else longest)
        block = max(-(-iterations // _BLOCKS), _SHORTEST)
        return _SlotShape(width, -(-iterations // block), block)
    return _SlotShape(width, _BLOCKS, (longest + rows // width) // _BLOCKS + 1)


def _by_slots(context: RaggedContext, scan: Scan, operands: Sequence[RaggedOperand]) -> list[Any]:
    """Return the results of a scan, computed by slots."""
    size, count = scan.length, len(scan.carry)
    lengths, position = context.lengths(size), context.positions(size)
    shape = _shape(context, size)
    assignment = _slot_assignment(lengths, shape.width)
    slot = context.at_rows(assignment.slots, size)
    time = context.at_rows(assignment.starts, size) + position
    first = context.at_rows(lengths, size) - 1 if scan.reverse else jnp.zeros_like(position)
    index = _rows_of_iterations(context, size, shape, time, slot, first[0])

    masked = _masked(context, scan)
    inner = operands if context.sizes.is_exact(size) else _guarded(lengths, operands)
    rows = [position == first]
    rows += [context.at_rows(context.symbol(name), size) for name in masked.extras]
    rows += [_at_rows(context, x, size) for x in inner if not isinstance(x.kind, Shared)]
    xs = [taken(array, index) for array in rows]
    stacked, places = _stacked(scan)
    shared = [x.array for x in inner if isinstance(x.kind, Shared)]
    body = _slot_body(scan, operands, masked, stacked, shape.width)
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        outs = evaluate(*x, *shared, *carry)
        return outs[:count], outs[count:]

    init = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in body.outvars[:count]]
    ys = _scanned(scan, step, init, xs, shape, assignment.iterations)
    final = assignment.starts + (0 if scan.reverse else lengths - 1)
    carries = []
    for place, x in zip(places, operands[len(scan.consts) :], strict=False):
        last = ys[place].at[final, assignment.slots].get(mode="clip")
        initial = x.array if _is_batched(x) else lax.broadcast(x.array, lengths.shape)
        none = lax.broadcast_in_dim(lengths == 0, last.shape, (0,))
        carries.append(lax.select(none, initial, last))
    return [*carries, *(y.at[time, slot].get(mode="clip") for y in ys[: len(scan.ys)])]


def _rows_of_iterations(
    context: RaggedContext, size: Any, shape: _SlotShape, time: Any, slot: Any, first: Any
) -> Any:
    """Return the row of each slot in each iteration, `i32[iterations,width]`; `first` if none."""
    iterations = shape.blocks * shape.block
    if not context.sizes.is_exact(size):
        time = jnp.where(context.real(size), time, iterations)
    numbers = jnp.arange(context.sizes.count(size), dtype=jnp.int32)
    none = jnp.full((iterations, shape.width), first, jnp.int32)
    return none.at[time, slot].set(numbers, mode="drop")


def _at_rows(context: RaggedContext, x: RaggedOperand, size: Any) -> Any:
    return context.at_rows(x.array, size) if _is_batched(x) else x.array


def _guarded(lengths: Any, operands: Sequence[RaggedOperand]) -> Sequence[RaggedOperand]:
    """Return operands whose derivatives are zero if no example has a row.

    Then there is no real iteration to repeat, and the slots compute on arbitrary values.
    """
    some = lengths.sum() > 0
    return [
        replace(x, array=guard_derivative(some, x.array)) if is_float(x.array) else x
        for x in operands
    ]


def _masked(context: RaggedContext, scan: Scan) -> Rewritten[Facts]:
    """Return the body of the scan for one slot, in which other ragged axes are padded."""
    facts = [Facts.of(var, active=True) for var in scan.body.invars]
    return MaskDomain(context.sizes.bounds).masked(scan.body, facts, in_scan=True)


def _slot_body(
    scan: Scan,
    operands: Sequence[RaggedOperand],
    masked: Rewritten[Facts],
    stacked: Sequence[int],
    width: int,
) -> Any:
    """Return the jaxpr of one iteration of all slots.

    Its arguments are a flag for where an example begins, the symbols, the operands that are not
    shared, the shared ones, and the carry. Its results are the carry and the stacked results.
    """
    evaluate = jaxcompat.jaxpr_as_fun(masked.jaxpr)
    n, k, m = len(scan.consts), len(scan.consts) + len(scan.carry), len(masked.extras)
    by_row = [i for i, x in enumerate(operands) if not isinstance(x.kind, Shared)]
    shared = [i for i, x in enumerate(operands) if isinstance(x.kind, Shared)]

    def fun(begins: Any, *args: Any) -> list[Any]:
        values = dict(zip([*by_row, *shared], args[m:], strict=False))
        carried = enumerate(args[m + len(operands) :], n)
        carry = [lax.select(begins, values[i], x) for i, x in carried]
        consts, xs = ([values[i] for i in places] for places in (range(n), range(k, len(operands))))
        outs = evaluate(*args[:m], *consts, *carry, *xs)
        return [*outs[: k - n], *(outs[i] for i in stacked)]

    flag = jax.core.ShapedArray((), jnp.bool_)
    avals = [flag, *(v.aval for v in masked.jaxpr.invars[:m])]
    avals += [scan.body.in_avals[i] for i in (*by_row, *shared)]
    avals += scan.body.in_avals[n:k]
    one = jaxcompat.trace_in_setting(fun, avals, scan.eqn)
    dims: list[int | None] = [0] * (1 + m + len(by_row)) + [None] * len(shared) + [0] * (k - n)
    # Merge equal masks: JAX would store each of them in every iteration, for derivatives.
    return cse_body(batch_body(one, dims, Axis(None, width), [0] * len(one.outvars))[0])


def _scanned(
    scan: Scan,
    step: Callable[..., Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    shape: _SlotShape,
    iterations: Any,
) -> list[Any]:
    """Scan the iterations of slots; return the stacked results, zeros for a skipped block."""
    if isinstance(shape.blocks, int) and shape.blocks == 1:
        return list(lax.scan(step, init, xs, reverse=scan.reverse)[1])
    types = jax.eval_shape(step, init, [x[0] for x in xs])[1]

    def run(carry: Any, xs: Any) -> tuple[Any, Any]:
        return lax.scan(step, carry, xs, reverse=scan.reverse)

    def skip(carry: Any, xs: Any) -> tuple[Any, Any]:
        return carry, [jnp.zeros((shape.block, *y.shape), y.dtype) for y in types]

    def block(carry: Any, x: Any) -> tuple[Any, Any]:
        first, *xs = x
        return lax.cond(first < iterations, run, skip, carry, xs)

    firsts = jnp.arange(shape.blocks, dtype=jnp.int32) * shape.block
    cut = [x.reshape(shape.blocks, shape.block, *x.shape[1:]) for x in xs]
    ys = lax.scan(block, init, [firsts, *cut], reverse=scan.reverse)[1]
    return [y.reshape(-1, *y.shape[2:]) for y in ys]
