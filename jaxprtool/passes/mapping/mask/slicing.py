"""Masking of slices, concatenations and pads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.weak_types import as_weak_as, strongly_typed
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.sizes import Bounds
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules
from jaxprtool.passes.mapping.mask.values import Filled, Padded, number


def overhang(bounds: Bounds, whole: Any, size: Any) -> Any:
    """Return how far a padded window can reach beyond the end of a padded axis, in elements.

    Args:
        bounds: The bounds.
        whole: The logical size of the axis.
        size: The logical size of the window, which starts at `whole - size` at most.
    """
    if not bounds.is_masked(size):
        return 0
    past = bounds.padded(whole - size) + bounds.padded(size) - bounds.padded(whole)
    return past if past > 0 else 0


def pad_end(array: Any, room: Sequence[Any], blank: Any = 0) -> Any:
    """Pad an array at the end of each axis by `room` elements: `blank`, or zeros for keys."""
    if not any(room):
        return array
    config = [(0, more, 0) for more in room]
    if isinstance(array.dtype, np.dtype):
        return lax.pad(array, lax.full_like(array, blank, shape=()), config)
    # JAX traces a `pad` of random keys, but cannot lower it.
    data = lax.pad(jax.random.key_data(array), np.uint32(0), [*config, (0, 0, 0)])
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def window_at(array: Any, starts: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Return a dynamic slice at indices that are not negative."""
    return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)


def clamped(start: Any, limit: Any) -> Any:
    """Return an index clamped to the range from 0 to `limit`, an `i32[]` or a number."""
    if start.dtype.itemsize < 4:
        start = lax.convert_element_type(start, np.int32)
    return lax.min(lax.max(start, np.zeros((), start.dtype)), jnp.asarray(limit, start.dtype))


# --- slice, split, rev ----------------------------------------------------------------------------


def cut(
    context: MaskContext,
    x: Padded,
    starts: Sequence[Any],
    limits: Sequence[Any],
    strides: Sequence[int],
    shape: Sequence[Any],
) -> Any:
    """Return a slice of a value.

    Args:
        context: The context of the rule.
        x: The value.
        starts: The logical start along each axis.
        limits: The logical end along each axis.
        strides: The stride along each axis.
        shape: The logical shape of the slice.
    """
    bounds = context.bounds
    extents = [
        (bounds.padded(size) - 1) * stride + 1 if bounds.padded(size) != 0 else 0
        for size, stride in zip(shape, strides, strict=True)
    ]
    spans = zip(starts, extents, x.shape, shape, strict=True)
    room = [
        max(0, bounds.padded(start) + extent - bounds.padded(whole))
        if any(map(bounds.is_masked, (start, size)))
        else 0
        for start, extent, whole, size in spans
    ]
    array = pad_end(x.array, room)
    if any(map(bounds.is_masked, starts)):
        at = [jnp.asarray(context.size(start), np.int32) for start in starts]
        array = window_at(array, at, extents)
        starts = [0] * x.ndim
    ends = [start + extent for start, extent in zip(starts, extents, strict=True)]
    array = lax.slice(array, starts, ends, strides)
    whole = [axis for axis in range(x.ndim) if limits[axis] == x.shape[axis]]
    made = context.isolate_cotangent(
        array, shape, [i for i in range(x.ndim) if i not in whole], active=x.active
    )
    return made if any(room) else Filled(made, {axis: x.fill(axis) for axis in whole})


@rule(mask_rules, "slice")
def _slice(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    params = eqn.params
    strides = params["strides"] or (1,) * x.ndim
    shape = eqn.outvars[0].aval.shape
    return cut(context, x, params["start_indices"], params["limit_indices"], strides, shape)


@rule(mask_rules, "split")
def _split(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    axis, start, results = eqn.params["axis"], 0, []
    for var in eqn.outvars:
        shape = var.aval.shape
        starts, limits = [0] * x.ndim, list(x.shape)
        starts[axis], limits[axis] = start, start + shape[axis]
        results.append(cut(context, x, starts, limits, (1,) * x.ndim, shape))
        start += shape[axis]
    return results


def flip_logical(
    context: MaskContext, array: Any, shape: Sequence[Any], axes: Sequence[int]
) -> Any:
    """Reverse an array along padded axes, within its logical size.

    Args:
        context: The context of the rule.
        array: The padded array.
        shape: Its logical shape.
        axes: The axes to reverse.

    Returns:
        A padded array with zeros in the padding along these axes.
    """
    sizes, aval = context.bounds.shape(shape), jax.typeof(array)
    # JAX's transposes of pads and slices return strongly typed gradients.
    array = lax.rev(strongly_typed(array), axes)
    array = pad_end(array, [sizes[axis] if axis in axes else 0 for axis in range(len(sizes))])
    starts = [
        sizes[axis] - context.size(shape[axis]) if axis in axes else np.int32(0)
        for axis in range(len(sizes))
    ]
    return as_weak_as(window_at(array, starts, sizes), aval)


@rule(mask_rules, "rev")
def _rev(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    padded, axes = context.axes(x), eqn.params["dimensions"]
    array = lax.rev(x.array, [axis for axis in axes if axis not in padded])
    axes = [axis for axis in padded if axis in axes]
    if not axes:
        return Filled(array, {axis: x.fill(axis) for axis in padded})
    made = flip_logical(context, array, x.shape, axes)
    zero = [axis for axis in padded if axis in axes or x.fill(axis) == 0]
    return Filled(made, dict.fromkeys(zero, 0))


# --- dynamic slices -------------------------------------------------------------------------------


def _starts(
    context: MaskContext, starts: Sequence[Padded], wholes: Sequence[Any], sizes: Sequence[Any]
) -> list[Any]:
    """Return the starts of windows, clamped as JAX does, but to logical sizes."""
    found = []
    for start, whole, size in zip(starts, wholes, sizes, strict=True):
        masked = any(map(context.bounds.is_masked, (whole, size)))
        at = start.array
        if masked:
            zero = np.zeros((), at.dtype)
            at = zero if whole == size else clamped(at, context.size(whole - size))
        found.append(at)
    dtype = jnp.result_type(*(each.dtype for each in found))
    return [jnp.asarray(each, dtype) for each in found]


@rule(mask_rules, "dynamic_slice")
def _dynamic_slice(context: MaskContext, eqn: JaxprEqn, x: Padded, *starts: Padded) -> Any:
    sizes, bounds = eqn.params["slice_sizes"], context.bounds
    at = _starts(context, starts, x.shape, sizes)
    room = [overhang(bounds, *each) for each in zip(x.shape, sizes, strict=True)]
    made = window_at(pad_end(x.array, room), at, bounds.shape(sizes))
    whole = [axis for axis in range(x.ndim) if sizes[axis] == x.shape[axis]]
    made = context.isolate_cotangent(
        made, sizes, [i for i in range(x.ndim) if i not in whole], active=x.active
    )
    return made if any(room) else Filled(made, {axis: x.fill(axis) for axis in whole})


@rule(mask_rules, "dynamic_update_slice")
def _dynamic_update_slice(
    context: MaskContext, eqn: JaxprEqn, x: Padded, update: Padded, *starts: Padded
) -> Any:
    at = _starts(context, starts, x.shape, update.shape)
    room = [overhang(context.bounds, *each) for each in zip(x.shape, update.shape, strict=True)]
    array, window = pad_end(x.array, room), update.array
    part = [axis for axis in context.axes(update) if update.shape[axis] != x.shape[axis]]
    if part:  # the operand must not change under the padding of the update
        under = window_at(array, at, window.shape)
        for axis in part:
            valid = context.valid(update.shape[axis])
            within = lax.broadcast_in_dim(valid, window.shape, (axis,))
            window = lax.select(within, window, under)
    made = lax.dynamic_update_slice(array, window, at, allow_negative_indices=False)
    if any(room):
        made = lax.slice(made, [0] * x.ndim, x.array.shape)
    kept = [
        axis
        for axis in range(x.ndim)
        if update.shape[axis] != x.shape[axis] or _same_fill(x, update, axis)
    ]
    return Filled(made, {axis: x.fill(axis) for axis in kept})


def _same_fill(x: Padded, y: Padded, axis: int) -> bool:
    return x.facts.fills[axis] is not None and x.facts.fills[axis] == y.facts.fills[axis]


# --- concatenate, stack, pad ----------------------------------------------------------------------


@rule(mask_rules, "concatenate")
def _concatenate(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    axis, bounds = eqn.params["dimension"], context.bounds
    first, *rest = operands
    alike = [i for i in range(first.ndim) if all(_same_fill(first, x, i) for x in rest)]
    fills = {i: first.fill(i) for i in alike if i != axis}
    padded = [x for x in operands if bounds.is_masked(x.shape[axis])]
    if not padded:
        return Filled(context.bind(eqn, *operands), fills)
    known = {x.facts.fills[axis] for x in padded}
    held = padded[0].fill(axis) if len(known) == 1 else None
    starts, end = [], 0
    for x in operands:
        starts.append(end)
        end = end + x.shape[axis]
    whole = bounds.padded(end)
    pairs = zip(starts, operands, strict=True)
    ends = [bounds.padded(start) + bounds.padded(x.shape[axis]) for start, x in pairs]
    length = max(whole, *ends)
    blank = 0 if held is None else held
    after = [length - ends[0] if i == axis else 0 for i in range(first.ndim)]
    array = pad_end(first.array, after, blank)
    for start, x in zip(starts[1:], rest, strict=True):  # overwrites the padding before it
        at = [jnp.int32(0)] * first.ndim
        at[axis] = jnp.asarray(context.size(start), np.int32)
        array = lax.dynamic_update_slice(array, x.array, at, allow_negative_indices=False)
    array = lax.slice_in_dim(array, 0, whole, axis=axis) if length != whole else array
    fills = {i: value for i, value in fills.items() if _is(value, blank)}
    return Filled(array, {**fills, axis: held})


@rule(mask_rules, "stack")
def _stack(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    first, *rest = operands
    at = eqn.params["axis"]
    alike = [i for i in range(first.ndim) if all(_same_fill(first, x, i) for x in rest)]
    fills = {i + (i >= at): first.fill(i) for i in alike}
    return Filled(context.bind(eqn, *operands), fills)


@rule(mask_rules, "unstack")
def _unstack(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    kept = [i for i in range(x.ndim) if i != eqn.params["axis"]]
    fills = {axis: x.fill(i) for axis, i in enumerate(kept)}
    return [Filled(each, fills) for each in context.bind(eqn, x)]


@rule(mask_rules, "pad")
def _pad(context: MaskContext, eqn: JaxprEqn, x: Padded, value: Padded) -> Any:
    """Pad an operand after filling its own padding with the padding value."""
    config, bounds = eqn.params["padding_config"], context.bounds
    shape = eqn.outvars[0].aval.shape
    axes = [i for i in range(x.ndim) if any(map(bounds.is_masked, (x.shape[i], *config[i])))]
    literal = value.facts.literal
    blank = value.array if literal is None else number(literal, value.dtype)
    behind = [i for i in axes if not _is_number(config[i][1], at_most=0)]
    array = context.filled(x, dict.fromkeys(behind, blank))
    new, starts = list(config), [np.int32(0)] * x.ndim
    for i in axes:
        low, _, interior = config[i]
        most = bounds.padded(low)
        length = bounds.padded(x.shape[i])
        reach = most + length + max(length - 1, 0) * interior
        if bounds.is_masked(low):
            starts[i] = most - context.size(low)
            new[i] = (most, most - bounds.least(low) + bounds.padded(shape[i]), interior)
        else:
            new[i] = (low, bounds.padded(shape[i]) - reach, interior)
    made = lax.pad(array, value.array, new)
    if any(bounds.is_masked(low) for low, _, _ in config):
        made = window_at(made, starts, bounds.shape(shape))
    mixed = [i for i in axes if value.active or not _is_number(config[i][1], at_least=0)]
    made = context.isolate_cotangent(made, shape, mixed, active=x.active or value.active)
    if literal is None:
        return made
    same = [i for i in context.axes(x) if i in behind or _is(x.fill(i), blank)]
    return Filled(made, dict.fromkeys(same, blank))


def _is(known: Any, wanted: Any) -> bool:
    return known is not None and np.array_equal(known, wanted, equal_nan=True)


def _is_number(size: Any, at_least: float = -math.inf, at_most: float = math.inf) -> bool:
    """Return True for a number in a range, False for any symbolic size."""
    return isinstance(size, int | np.integer) and bool(at_least <= size <= at_most)
