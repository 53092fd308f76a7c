"""Packed rules for reductions, scans and sorts over the rows of examples, by segment operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn, is_symbolic_dimension
from jaxprtool.passes.mapping.mask.reductions import largest, least
from jaxprtool.passes.mapping.ragged.table import RaggedContext, ragged_rules, taken
from jaxprtool.passes.mapping.ragged.values import Value


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


def _rows_first(eqn: JaxprEqn, x: Value) -> tuple[Any, tuple[int, ...]]:
    """Return an operand with its rows along axis 0, and the other axes to reduce."""
    others = tuple(axis + (axis < x.axis) for axis in eqn.params["axes"] if axis != x.axis)
    return jnp.moveaxis(x.array, x.axis, 0), others


@rule(ragged_rules, "reduce_sum")
def _sum(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    if x.axis not in eqn.params["axes"]:
        return context.bind(eqn, x)
    rows, others = _rows_first(eqn, x)
    within = context.bind(eqn, rows, axes=others) if others else rows
    return segment_sum(context, within, 0, x.size)


#: True for a reduction that is a maximum, False for a minimum.
_LOGICAL = {"reduce_or": True, "reduce_and": False}
_IS_MAX = {"reduce_max": True, "reduce_min": False, **_LOGICAL}


@rule(ragged_rules, *_IS_MAX)
def _extremes(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    if x.axis not in eqn.params["axes"]:
        return context.bind(eqn, x)
    logical, name = x.array.dtype == bool, eqn.primitive.name
    if name in _LOGICAL and not logical:
        return None  # a bitwise reduction of integers
    rows, others = _rows_first(eqn, x)
    rows = rows.astype(jnp.int32) if logical else rows
    found = _extreme(
        _IS_MAX[name], others, rows, context.examples(x.size), context.sizes.batch_size
    )
    return found > 0 if logical else found  # if empty, the least or largest integer


@rule(ragged_rules, "argmax", "argmin")
def _arg(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
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
def _scan(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
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
    x: Value,
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
    before = context.positions(size)
    if reverse:
        ends = context.at_rows(context.lengths(size), size) - 1
        before = jnp.where(context.real(size), ends - before, 0)
    rows = jnp.arange(x.array.shape[axis], dtype=jnp.int32)

    def step(value: Any, shift: Any) -> Any:
        other = taken(value, rows + shift if reverse else rows - shift, axis)
        within = lax.broadcast_in_dim(before >= shift, value.shape, (axis,))
        return combine(lax.select(within, other, lax.full_like(value, identity)), value), None

    shifts = 2 ** jnp.arange(steps, dtype=jnp.int32)
    scanned, _ = lax.scan(step, x.array, shifts)
    return context.spared(scanned, axis, size)


@rule(ragged_rules, "sort")
def _sort(context: RaggedContext, eqn: JaxprEqn, *operands: Value) -> Any:
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
    return [context.spared(each, axis, size) for each in results]


@rule(ragged_rules, "top_k")
def _top_k(context: RaggedContext, eqn: JaxprEqn, x: Value) -> Any:
    along = eqn.params.get("axis", len(x.shape) - 1) % len(x.shape)
    return None if along == x.axis else context.bind(eqn, x)
