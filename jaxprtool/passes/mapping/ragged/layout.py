"""Packed rules for elementwise equations, and for those that only move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import DIM_AS_VALUE, JaxprEqn, is_symbolic_dimension
from jaxprtool.passes.mapping.ragged.table import (
    RaggedContext,
    broadcast_unsorted,
    ragged_rules,
    select,
    taken,
)
from jaxprtool.passes.mapping.ragged.values import Batched, Packed, Value


def ragged_axis(context: RaggedContext, shape: Sequence[Any]) -> int:
    """Return the ragged axis of a shape that has one."""
    (axis,) = context.sizes.axes(shape)
    return axis


@rule(ragged_rules, "elementwise")
def _elementwise(context: RaggedContext, eqn: JaxprEqn, *operands: Value) -> Any:
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
def _broadcast_in_dim(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
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
def _reshape(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    """Reshape packed rows if neither their number nor the size before the ragged axis changes."""
    shape = eqn.outvars[0].aval.shape
    if not x.is_packed or not context.sizes.axes(shape) or eqn.params["dimensions"] is not None:
        return None
    before = math.prod(x.shape[: x.axis])
    if before != math.prod(shape[: ragged_axis(context, shape)]):
        return None
    new = packed_shape(context, shape)
    return context.bind(eqn, x) if math.prod(new) == math.prod(x.array.shape) else None


@rule(ragged_rules, "transpose", "squeeze")
def _moved(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    return context.bind(eqn, x)


@rule(ragged_rules, "split", "unstack")
def _split(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    return None if eqn.params["axis"] == x.axis else context.bind(eqn, x)


@rule(ragged_rules, "stack")
def _stack(context: RaggedContext, eqn: JaxprEqn, *operands: Value) -> Any:
    return context.bind(eqn, *operands)


@rule(ragged_rules, "tile")
def _tile(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    return context.bind(eqn, x) if x.is_packed and eqn.params["reps"][x.axis] == 1 else None


# --- along the ragged axis ----------------------------------------------------------------------


def rows_at(context: RaggedContext, x: Value, positions: Any, size: Any) -> Any:
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


def shifted(context: RaggedContext, x: Value, offset: Any, size: Any) -> Any:
    """Return packed rows of a size, where row i of an example is row `i + offset` of `x`."""
    return rows_at(context, x, context.positions(size) + offset, size)


@rule(ragged_rules, "rev")
def _rev(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    axis, size = x.axis, x.size
    dims = eqn.params["dimensions"]
    array = x.array
    if axis in dims:
        last = context.at_rows(context.lengths(size), size) - 1
        array = rows_at(context, x, last - context.positions(size), size)
    return lax.rev(array, [d for d in dims if d != axis])


@rule(ragged_rules, "slice")
def _slice(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
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
    kept = Value(context.bind(eqn, x, **others), x.kind, x.shape)
    if start[axis] == 0 and limit[axis] == size:
        return kept.array
    out = eqn.outvars[0].aval.shape[axis]
    if context.sizes.axes([out]):
        return shifted(context, kept, start[axis], out)
    return first_rows(context, kept, start[axis], out)


def _with(values: Sequence[Any], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def first_rows(context: RaggedContext, x: Value, start: Any, count: Any) -> Any:
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
def _concatenate(context: RaggedContext, eqn: JaxprEqn, *operands: Value) -> Any:
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


def _static_rows(x: Value, positions: Any, batch_indices: Any, axis: int) -> Any:
    """Return rows, by position, of a value that is shared or batched."""
    if not isinstance(x.kind, Batched):
        return taken(x.array, positions, axis)
    rows = jnp.moveaxis(x.array, axis + 1, 1)
    return jnp.moveaxis(rows.at[batch_indices, positions].get(mode="clip"), 0, axis)


@rule(ragged_rules, "pad")
def _pad(context: RaggedContext, eqn: JaxprEqn, x: Value, value: Value) -> Any:
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
    rows = rows_at(context, Value(array, x.kind, x.shape), positions, size)
    length = context.at_rows(context.lengths(x.size), size)
    return select((positions >= 0) & (positions < length), axis, rows, value.array)
