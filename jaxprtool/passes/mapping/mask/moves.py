"""Masking of equations that act by element, or move, slice, reshape and index elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.lax import GatherScatterMode

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import as_weak_as, strongly_typed
from jaxprtool.ir.evaluation import evaluate_exactly
from jaxprtool.ir.rules import rule
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.table import (
    Bounds,
    Facts,
    Filled,
    MaskContext,
    Padded,
    fill_number,
    mask_error,
    mask_rules,
)

# --- elementwise ----------------------------------------------------------------------------------
# Masking of elementwise operations, which compute the padding like the other elements.

#: An argument at which a function has an exact result, and this result, for functions that round.
_EXACT = {
    "asin": (0.0, 0.0),
    "asinh": (0.0, 0.0),
    "atan": (0.0, 0.0),
    "cbrt": (0.0, 0.0),
    "erf": (0.0, 0.0),
    "exp": (-np.inf, 0.0),
    "exp2": (-np.inf, 0.0),
    "expm1": (0.0, 0.0),
    "log1p": (0.0, 0.0),
    "logistic": (-np.inf, 0.0),
    "sin": (0.0, 0.0),
    "sinh": (0.0, 0.0),
    "sqrt": (0.0, 0.0),
    "tan": (0.0, 0.0),
    "tanh": (0.0, 0.0),
}


@rule(mask_rules, "elementwise")
def _elementwise(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    if eqn.primitive.multiple_results:  # result i depends on operand i alone
        return context.bind(eqn, *operands)
    whole = eqn.outvars[0].aval.shape
    results = context.bind(eqn, *(_repeated(context, x, whole) for x in operands))
    fills = {axis: _fill(eqn, operands, axis) for axis in context.bounds.axes(whole)}
    return Filled(results, {axis: value for axis, value in fills.items() if value is not None})


def _repeated(context: MaskContext, x: Padded, shape: Sequence[Any]) -> Any:
    """Broadcast an active operand along the padded axes that it lacks, with a guard."""
    kept_axes = range(len(shape) - x.ndim, len(shape)) if x.ndim else ()
    mixed = [
        axis
        for axis in context.bounds.axes(shape)
        if axis not in kept_axes or x.shape[axis] != shape[axis]
    ]
    if not (x.active and mixed):
        return x
    whole = context.bounds.shape(shape)
    return context.apply(
        lambda array: lax.broadcast_in_dim(array, whole, tuple(kept_axes)), [x], shape, mixed=mixed
    )


def _fill(eqn: JaxprEqn, operands: Sequence[Padded], axis: int) -> np.ndarray | None:
    """Return the fill of the result along an axis, or None if that of an operand is unknown."""
    fills = [_number(x, axis) for x in operands]
    known_fills = [value for value in fills if value is not None]
    if len(known_fills) < len(fills):
        return None
    exact = _EXACT.get(eqn.primitive.name)
    if exact is not None:
        return np.asarray(exact[1], known_fills[0].dtype) if known_fills[0] == exact[0] else None
    if traits(eqn).gives == "same":
        return known_fills[0]
    return evaluate_exactly(eqn, known_fills)


def _number(x: Padded, axis: int) -> np.ndarray | None:
    if x.ndim > 0:
        return x.fill(axis)
    return None if x.facts.literal is None else fill_number(x.facts.literal, x.dtype)


# --- layout ---------------------------------------------------------------------------------------
# Masking of equations that move or repeat elements, or create arrays from sizes alone.


@rule(mask_rules, jaxcompat.DIM_AS_VALUE)
def _dim_as_value(context: MaskContext, eqn: JaxprEqn) -> Any:
    return jnp.asarray(context.size(eqn.params["dim"]), eqn.outvars[0].aval.dtype)


@rule(mask_rules, "device_put")
def _device_put(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    return context.bind(eqn, *operands)


@rule(mask_rules, "iota")
def _iota(context: MaskContext, eqn: JaxprEqn, *shape: Padded) -> Any:
    params = eqn.params
    return lax.broadcasted_iota(
        params["dtype"], context.bounds.shape(params["shape"]), params["dimension"]
    )


@rule(mask_rules, "broadcast_in_dim")
def _broadcast_in_dim(context: MaskContext, eqn: JaxprEqn, x: Padded, *sizes: Padded) -> Any:
    shape, kept = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    whole = context.bounds.shape(shape)
    unchanged = {axis: i for i, axis in enumerate(kept) if x.shape[i] == shape[axis]}
    mixed = [axis for axis in context.bounds.axes(shape) if axis not in unchanged]
    result = context.apply(
        lambda array: lax.broadcast_in_dim(array, whole, kept), [x], shape, mixed=mixed
    )
    fills = {axis: x.fill(i) for axis, i in unchanged.items()}
    if x.facts.literal is not None:
        fills = dict.fromkeys(range(len(shape)), fill_number(x.facts.literal, x.dtype))
    return Filled(result, fills)


@rule(mask_rules, "transpose")
def _transpose(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    permutation = eqn.params["permutation"]
    fills = {axis: x.fill(i) for axis, i in enumerate(permutation)}
    return Filled(context.bind(eqn, x), fills)


@rule(mask_rules, "squeeze")
def _squeeze(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    kept = [i for i in range(x.ndim) if i not in eqn.params["dimensions"]]
    return Filled(context.bind(eqn, x), {axis: x.fill(i) for axis, i in enumerate(kept)})


# --- reshaping ------------------------------------------------------------------------------------
# Masking of reshapes, which keep the order of elements by logical position.
#
# A reshape is split into groups of axes with the same number of elements before and after:
# `f32[n,6] -> f32[n,2,3]` is `n -> n` and `6 -> (2, 3)`. In most groups the padding comes last both
# before and after, and JAX's reshape is used. In the others, as in `f32[2,n] -> f32[2*n]`, each
# element is gathered.


@dataclass(frozen=True)
class _AxisGroup:
    """Axes of the operand that become axes of the result."""

    before: range
    after: range


def _groups(before: Sequence[Any], after: Sequence[Any]) -> list[_AxisGroup]:
    """Return the smallest groups of axes with the same number of elements."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        rest = product(range(len(before) - i + 1), range(len(after) - j + 1))
        fitting = [
            (m, n)
            for m, n in sorted(rest, key=sum)
            if m + n and prod(before[i : i + m]) == prod(after[j : j + n])
        ]
        if not fitting:  # JAX traces such a reshape, which is valid only at some sizes
            raise ValueError("it does not keep the number of elements at all sizes")
        m, n = fitting[0]
        groups.append(_AxisGroup(range(i, i + m), range(j, j + n)))
        i, j = i + m, j + n
    return groups


def reshaped(context: MaskContext, x: Padded, shape: Sequence[Any]) -> Any:
    """Return a value reshaped to another logical shape."""
    bounds = context.bounds
    if any(size == 0 for size in (*x.shape, *shape) if isinstance(size, int)):
        return lax.full(bounds.shape(shape), 0, x.dtype)
    groups = _groups(x.shape, shape)
    plain = [g for g in groups if _is_prefix(bounds, x.shape, shape, g)]
    # Reshape each group to one axis first, whose elements are ordered by padded position.
    sizes = [prod(bounds.shape([x.shape[i] for i in g.before])) for g in groups]
    wanted = [prod(bounds.shape([shape[i] for i in g.after])) for g in groups]
    array = x.array
    if sizes != wanted or len(plain) < len(groups):
        array = lax.reshape(array, sizes)
        for axis, group in enumerate(groups):
            if group not in plain:
                array = _looked_up(context, array, axis, x.shape, shape, group)
            elif sizes[axis] != wanted[axis]:
                array = _fitted(array, axis, wanted[axis])
    array = lax.reshape(array, bounds.shape(shape))
    moved = [i for g in groups if g not in plain for i in g.after]
    result = context.isolate_cotangent(array, shape, moved, active=x.active)
    fills = {}
    for group, size, other in zip(groups, sizes, wanted, strict=True):
        if group in plain and size == other:
            before = [i for i in group.before if bounds.is_masked(x.shape[i])]
            after = [i for i in group.after if bounds.is_masked(shape[i])]
            fills.update({j: x.fill(i) for i, j in zip(before, after, strict=True)})
    return Filled(result, fills if sizes == wanted else {})


def _is_prefix(
    bounds: Bounds, before: Sequence[Any], after: Sequence[Any], group: _AxisGroup
) -> bool:
    """Return True if the padding of a group comes last, both before and after."""
    sides = [before[i] for i in group.before], [after[i] for i in group.after]
    if not any(map(bounds.is_masked, (*sides[0], *sides[1]))):
        return True
    for sizes in sides:
        first = next((i for i, size in enumerate(sizes) if size != 1), 0)
        if any(map(bounds.is_masked, sizes[first + 1 :])) or not bounds.axes(sizes):
            return False
    return True


def _fitted(array: Any, axis: int, size: Any) -> Any:
    """Pad or crop an array along an axis to this size."""
    more = [0] * array.ndim
    if size > array.shape[axis]:
        more[axis] = size - array.shape[axis]
        return pad_end(array, more)
    return lax.slice_in_dim(array, 0, size, axis=axis)


def _looked_up(
    context: MaskContext,
    array: Any,
    axis: int,
    before: Sequence[Any],
    after: Sequence[Any],
    group: _AxisGroup,
) -> Any:
    """Reshape a group by a gather: compute the old position of each element of the result.

    Args:
        context: The context of the rule.
        array: An array with one axis for each group.
        axis: The axis of this group.
        before: The logical shape of the operand.
        after: The logical shape of the result.
        group: The axes of the group.

    Returns:
        The array with the elements of the group in their new order along `axis`.
    """
    old, new = [before[i] for i in group.before], [after[i] for i in group.after]
    number = _numbers(context, new)
    place, step = 0, 1
    for size in reversed(old):
        logical = jnp.asarray(context.size(size), np.int32)
        positive = lax.max(logical, np.int32(1))
        place = place + lax.rem(number, lax.broadcast(positive, number.shape)) * step
        number = lax.div(number, lax.broadcast(positive, number.shape))
        step = step * context.bounds.padded(size)
    indices = lax.reshape(place, (prod(context.bounds.shape(new)),))
    return jnp.take(array, indices, axis=axis, mode="clip")


def _numbers(context: MaskContext, shape: Sequence[Any]) -> Any:
    """Return the row-major index of each element of a padded array in its logical shape."""
    sizes = context.bounds.shape(shape)
    number, step = jnp.zeros(sizes, np.int32), jnp.int32(1)
    for axis in reversed(range(len(shape))):
        number = number + lax.broadcasted_iota(np.int32, sizes, axis) * step
        step = step * context.size(shape[axis])
    return number


@rule(mask_rules, "reshape")
def _reshape(context: MaskContext, eqn: JaxprEqn, x: Padded, *sizes: Padded) -> Any:
    order, shape = eqn.params["dimensions"], eqn.outvars[0].aval.shape
    if order is not None:
        facts = x.facts
        moved = Facts(
            tuple(facts.shape[i] for i in order),
            tuple(facts.fills[i] for i in order),
            facts.active,
        )
        x = Padded(lax.transpose(x.array, order), moved)
    return reshaped(context, x, shape)


@rule(mask_rules, "tile")
def _tile(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    """Repeat along new axes, and merge these with those of the operand by a reshape."""
    repeats, bounds = eqn.params["reps"], context.bounds
    shape = tuple(size for pair in zip(repeats, x.shape, strict=True) for size in pair)
    old_axes = tuple(range(1, len(shape), 2))
    whole = bounds.shape(shape)
    array = context.apply(
        lambda array: lax.broadcast_in_dim(array, whole, old_axes),
        [x],
        shape,
        mixed=[i for i in bounds.axes(shape) if i not in old_axes],
    )
    fills = tuple(x.facts.fills[i // 2] if i in old_axes else None for i in range(len(shape)))
    repeated = Padded(array, Facts(shape, fills, x.active))
    return reshaped(context, repeated, eqn.outvars[0].aval.shape)


# --- slicing --------------------------------------------------------------------------------------
# Masking of slices, concatenations and pads.


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


def sliced_value(
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
    result = context.isolate_cotangent(
        array, shape, [i for i in range(x.ndim) if i not in whole], active=x.active
    )
    return result if any(room) else Filled(result, {axis: x.fill(axis) for axis in whole})


@rule(mask_rules, "slice")
def _slice(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    params = eqn.params
    strides = params["strides"] or (1,) * x.ndim
    shape = eqn.outvars[0].aval.shape
    return sliced_value(
        context, x, params["start_indices"], params["limit_indices"], strides, shape
    )


@rule(mask_rules, "split")
def _split(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    axis, start, results = eqn.params["axis"], 0, []
    for var in eqn.outvars:
        shape = var.aval.shape
        starts, limits = [0] * x.ndim, list(x.shape)
        starts[axis], limits[axis] = start, start + shape[axis]
        results.append(sliced_value(context, x, starts, limits, (1,) * x.ndim, shape))
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
    flipped = flip_logical(context, array, x.shape, axes)
    zero = [axis for axis in padded if axis in axes or x.fill(axis) == 0]
    return Filled(flipped, dict.fromkeys(zero, 0))


# --- dynamic slices -------------------------------------------------------------------------------


def _starts(
    context: MaskContext, starts: Sequence[Padded], wholes: Sequence[Any], sizes: Sequence[Any]
) -> list[Any]:
    """Return the starts of windows, clamped as JAX does, but to logical sizes."""
    new_starts = []
    for start, whole, size in zip(starts, wholes, sizes, strict=True):
        masked = any(map(context.bounds.is_masked, (whole, size)))
        at = start.array
        if masked:
            zero = np.zeros((), at.dtype)
            at = zero if whole == size else clamped(at, context.size(whole - size))
        new_starts.append(at)
    dtype = jnp.result_type(*(start.dtype for start in new_starts))
    return [jnp.asarray(start, dtype) for start in new_starts]


@rule(mask_rules, "dynamic_slice")
def _dynamic_slice(context: MaskContext, eqn: JaxprEqn, x: Padded, *starts: Padded) -> Any:
    sizes, bounds = eqn.params["slice_sizes"], context.bounds
    at = _starts(context, starts, x.shape, sizes)
    room = [overhang(bounds, *pair) for pair in zip(x.shape, sizes, strict=True)]
    window = window_at(pad_end(x.array, room), at, bounds.shape(sizes))
    whole = [axis for axis in range(x.ndim) if sizes[axis] == x.shape[axis]]
    window = context.isolate_cotangent(
        window, sizes, [i for i in range(x.ndim) if i not in whole], active=x.active
    )
    return window if any(room) else Filled(window, {axis: x.fill(axis) for axis in whole})


@rule(mask_rules, "dynamic_update_slice")
def _dynamic_update_slice(
    context: MaskContext, eqn: JaxprEqn, x: Padded, update: Padded, *starts: Padded
) -> Any:
    at = _starts(context, starts, x.shape, update.shape)
    room = [overhang(context.bounds, *pair) for pair in zip(x.shape, update.shape, strict=True)]
    array, window = pad_end(x.array, room), update.array
    part = [axis for axis in context.axes(update) if update.shape[axis] != x.shape[axis]]
    if part:  # the operand must not change under the padding of the update
        under = window_at(array, at, window.shape)
        for axis in part:
            valid = context.valid(update.shape[axis])
            within = lax.broadcast_in_dim(valid, window.shape, (axis,))
            window = lax.select(within, window, under)
    updated = lax.dynamic_update_slice(array, window, at, allow_negative_indices=False)
    if any(room):
        updated = lax.slice(updated, [0] * x.ndim, x.array.shape)
    kept = [
        axis
        for axis in range(x.ndim)
        if update.shape[axis] != x.shape[axis] or _same_fill(x, update, axis)
    ]
    return Filled(updated, {axis: x.fill(axis) for axis in kept})


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
    axis_fills = {x.facts.fills[axis] for x in padded}
    common_fill = padded[0].fill(axis) if len(axis_fills) == 1 else None
    starts, end = [], 0
    for x in operands:
        starts.append(end)
        end = end + x.shape[axis]
    whole = bounds.padded(end)
    pairs = zip(starts, operands, strict=True)
    ends = [bounds.padded(start) + bounds.padded(x.shape[axis]) for start, x in pairs]
    length = max(whole, *ends)
    blank = 0 if common_fill is None else common_fill
    after = [length - ends[0] if i == axis else 0 for i in range(first.ndim)]
    array = pad_end(first.array, after, blank)
    for start, x in zip(starts[1:], rest, strict=True):  # overwrites the padding before it
        at = [jnp.int32(0)] * first.ndim
        at[axis] = jnp.asarray(context.size(start), np.int32)
        array = lax.dynamic_update_slice(array, x.array, at, allow_negative_indices=False)
    array = lax.slice_in_dim(array, 0, whole, axis=axis) if length != whole else array
    fills = {i: value for i, value in fills.items() if _is(value, blank)}
    return Filled(array, {**fills, axis: common_fill})


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
    return [Filled(row, fills) for row in context.bind(eqn, x)]


@rule(mask_rules, "pad")
def _pad(context: MaskContext, eqn: JaxprEqn, x: Padded, value: Padded) -> Any:
    """Pad an operand after filling its own padding with the padding value."""
    config, bounds = eqn.params["padding_config"], context.bounds
    shape = eqn.outvars[0].aval.shape
    axes = [i for i in range(x.ndim) if any(map(bounds.is_masked, (x.shape[i], *config[i])))]
    literal = value.facts.literal
    blank = value.array if literal is None else fill_number(literal, value.dtype)
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
    result = lax.pad(array, value.array, new)
    if any(bounds.is_masked(low) for low, _, _ in config):
        result = window_at(result, starts, bounds.shape(shape))
    mixed = [i for i in axes if value.active or not _is_number(config[i][1], at_least=0)]
    result = context.isolate_cotangent(result, shape, mixed, active=x.active or value.active)
    if literal is None:
        return result
    same = [i for i in context.axes(x) if i in behind or _is(x.fill(i), blank)]
    return Filled(result, dict.fromkeys(same, blank))


def _is(value: Any, wanted: Any) -> bool:
    return value is not None and np.array_equal(value, wanted, equal_nan=True)


def _is_number(size: Any, at_least: float = -math.inf, at_most: float = math.inf) -> bool:
    """Return True for a number in a range, False for any symbolic size."""
    return isinstance(size, int | np.integer) and bool(at_least <= size <= at_most)


# --- indexing -------------------------------------------------------------------------------------
# Masking of gathers and scatters: indices are compared with logical sizes.
#
# For an index in the padding of the indices, a gather reads any element in bounds. A scatter must
# write nothing: such indices are set out of bounds, and their updates dropped.

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
        raise mask_error(eqn, f"the index mode {mode} is not supported")
    # The largest valid starts.
    ends = [x.shape[d] - sizes[d] for d in numbers.start_index_map]
    junk = context.axes(indices)
    at = context.filled(indices, dict.fromkeys(junk, 0) if mode == _PROMISE else {})
    # JAX would compare indices with the size of the padded array.
    logical = any(_is_masked(context, x.shape[d], sizes[d]) for d in numbers.start_index_map)
    if logical and mode != _PROMISE:
        at = (_clipped if mode == _CLIP else _or_outside)(context, _wide(at), ends)
    room = [overhang(bounds, *pair) for pair in zip(x.shape, sizes, strict=True)]
    result = context.bind(
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
    result = context.isolate_cotangent(result, shape, mixed, active=x.active)
    if any(room) or mode == _DROP:
        return result
    return Filled(result, {axis: x.fill(d) for axis, d in whole.items()})


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
        raise mask_error(eqn, f"the index mode {mode} is not supported")
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
    result = context.bind(eqn, x, at, updates, **changed)
    full = {d for d in axes if sizes[d] == x.shape[d]} | {*numbers.operand_batching_dims}
    return Filled(result, {d: x.fill(d) for d in range(x.ndim) if d not in full})


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
