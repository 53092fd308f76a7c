"""Masking of convolutions and pooling, which move a window over an array.

The padding is filled with a number that does not change a result, so that windows may reach into
it. The equation's own padding at the end is computed for the padded size. Its padding at the start
may depend on the size, as for "SAME" with a stride; then the array is shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.weak_types import as_weak_as, strongly_typed
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.reductions import identity_of, largest, least
from jaxprtool.passes.mapping.mask.sizes import Bounds
from jaxprtool.passes.mapping.mask.slicing import window_at
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules, refusal
from jaxprtool.passes.mapping.mask.values import Padded, number


@dataclass(frozen=True)
class _Axis:
    """The windows along one axis. All sizes are logical.

    Attributes:
        axis: The axis of the operand.
        size: The size of the operand along it.
        window: The size of the window.
        stride: The distance between two windows.
        low: The padding at the start.
        high: The padding at the end.
        dilation: The distance between two elements of the operand.
        spread: The distance between two elements of the window.
        result: The number of windows.
    """

    axis: int
    size: Any
    window: Any
    stride: Any
    low: Any
    high: Any
    dilation: int
    spread: int
    result: Any

    def is_masked(self, bounds: Bounds) -> bool:
        """Return True if one of its sizes is masked."""
        sizes = (self.size, self.window, self.low, self.high, self.result)
        return any(map(bounds.is_masked, sizes))

    def reach(self, bounds: Bounds) -> Any:
        """Return the number of elements that all windows of the padded result cover."""
        return (bounds.padded(self.result) - 1) * self.stride + _dilated(
            bounds.padded(self.window), self.spread
        )

    def length(self, bounds: Bounds) -> Any:
        """Return the size of the padded operand after dilation."""
        return _dilated(bounds.padded(self.size), self.dilation)


def _dilated(size: Any, dilation: int) -> Any:
    """Return the extent of `size` elements that are `dilation` apart."""
    return (size - 1) * dilation + 1 if size != 0 else 0


@dataclass(frozen=True)
class _Placed:
    """An operand whose first window starts at a known position, and its new parameters.

    Attributes:
        x: The operand.
        padding: The padding of each axis in `axes` of `_placed`: low and high.
        dilation: The dilation of each of these axes.
    """

    x: Padded
    padding: list[tuple[Any, Any]]
    dilation: list[int]


def _placed(context: MaskContext, x: Padded, axes: Sequence[_Axis], blank: Any) -> _Placed:
    """Return an operand whose padding is filled with `blank`, placed for its windows.

    An axis whose low padding is masked is padded and dilated here, and shifted so that the first
    window starts at index 0.
    """
    bounds = context.bounds
    masked = [each for each in axes if each.is_masked(bounds)]
    moved = [each for each in masked if bounds.is_masked(each.low)]
    array = context.filled(x, {each.axis: blank for each in masked})
    padding, dilation = [], []
    config, starts, sizes = [(0, 0, 0)] * x.ndim, [np.int32(0)] * x.ndim, list(array.shape)
    facts = x.facts
    for each in axes:
        reach, length = each.reach(bounds), each.length(bounds)
        if each in moved:
            most, fewest = bounds.padded(each.low), bounds.least(each.low)
            config[each.axis] = (most, max(0, reach - fewest - length), each.dilation - 1)
            starts[each.axis] = most - context.size(each.low)
            sizes[each.axis] = reach
            facts = replace(facts, shape=_with(facts.shape, each.axis, reach))
            padding.append((0, 0))
            dilation.append(1)
        else:
            high = reach - length - each.low if each in masked else each.high
            padding.append((each.low, high))
            dilation.append(each.dilation)
    if moved:
        # JAX's transposes of pads and slices return strongly typed gradients.
        strong = strongly_typed(array)
        strong = lax.pad(strong, lax.full_like(strong, blank, shape=()), config)
        array = as_weak_as(window_at(strong, starts, sizes), jax.typeof(array))
    facts = replace(facts, fills=(None,) * x.ndim)
    return _Placed(Padded(array, facts), padding, dilation)


def _cut(placed: _Placed) -> _Placed:
    """Crop an operand after the last window, where its padding is negative.

    XLA does not allow negative padding in `select_and_scatter`, the derivative of max pooling.
    """
    pairs = zip(placed.padding, placed.dilation, strict=True)
    crops = [min(0, high) if dilation == 1 else 0 for (_, high), dilation in pairs]
    array = _with_ends(placed.x.array, crops)
    padding = [(low, high - n) for (low, high), n in zip(placed.padding, crops, strict=True)]
    return _Placed(Padded(array, placed.x.facts), padding, placed.dilation)


def _with_ends(array: Any, rows: Sequence[int]) -> Any:
    """Pad an array at the end of each axis with `rows` zeros; crop it if negative."""
    config = [(0, n, 0) for n in rows]
    return lax.pad(array, lax.full_like(array, 0, shape=()), config) if any(rows) else array


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


# --- convolutions ---------------------------------------------------------------------------------


@rule(mask_rules, "conv_general_dilated")
def _convolution(context: MaskContext, eqn: JaxprEqn, x: Padded, kernel: Padded) -> Any:
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    of_x, of_kernel, of_result = params["dimension_numbers"]
    _check_groups(context, eqn, x.shape, kernel.shape)
    axes = [
        _Axis(i, x.shape[i], kernel.shape[j], stride, low, high, dilation, spread, shape[k])
        for i, j, k, stride, (low, high), dilation, spread in zip(
            of_x[2:],
            of_kernel[2:],
            of_result[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ]
    placed = _placed(context, x, axes, 0)
    more = {"padding": tuple(placed.padding), "lhs_dilation": tuple(placed.dilation)}
    # The derivative with respect to the kernel sums over examples and windows, with respect to `x`
    # over output features.
    summed = dict.fromkeys(of_kernel[1:], 0)
    return context.apply(
        lambda a, b: context.bind(eqn, a, b, **more),
        [placed.x, kernel],
        shape,
        needed=[{of_x[1]: 0}, summed],
        derivative=[{of_x[0]: 0}, {of_kernel[0]: 0}],
        mixed=range(len(shape)),
    )


def _check_groups(
    context: MaskContext, eqn: JaxprEqn, shape: Sequence[Any], kernel: Sequence[Any]
) -> None:
    of_x, of_kernel, _ = eqn.params["dimension_numbers"]
    results = kernel[of_kernel[0]]
    grouped = {
        "feature_group_count": (shape[of_x[1]], kernel[of_kernel[1]], results),
        "batch_group_count": (shape[of_x[0]], results),
    }
    for name, sizes in grouped.items():
        count = eqn.params[name]
        if count != 1 and any(map(context.bounds.is_masked, (count, *sizes))):
            raise refusal(eqn, f"{name} is {count}, and the size of a group is masked")


# --- pooling --------------------------------------------------------------------------------------


def _axes_of(
    context: MaskContext, eqn: JaxprEqn, shape: Sequence[Any], result: Sequence[Any]
) -> list[_Axis]:
    """Return the windows of a reduction along each axis.

    Raises:
        UnsupportedError: If the size of a window is masked, and there is more than one window.
    """
    params, rank = eqn.params, len(shape)
    ones = (1,) * rank
    axes = [
        _Axis(i, size, window, stride, low, high, dilation, spread, count)
        for i, size, window, stride, (low, high), dilation, spread, count in zip(
            range(rank),
            shape,
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params.get("base_dilation", ones),
            params.get("window_dilation", ones),
            result,
            strict=True,
        )
    ]
    for each in axes:
        alone = each.result == 1 and each.low == 0
        if context.bounds.is_masked(each.window) and not alone:
            raise refusal(eqn, f"its window has the masked size {each.window}")
    return axes


def _mixed(context: MaskContext, axes: Sequence[_Axis]) -> list[int]:
    """Return the padded axes along which windows combine, drop or shift elements."""
    alone = 1, 1, 0, 0
    return [
        each.axis
        for each in axes
        if (each.window, each.stride, each.low, each.high) != alone
        and context.bounds.is_masked(each.result)
    ]


def _pooled(context: MaskContext, eqn: JaxprEqn, x: Padded, blank: Any, *inits: Padded) -> Any:
    shape = eqn.outvars[0].aval.shape
    axes = _axes_of(context, eqn, x.shape, shape)
    placed = _cut(_placed(context, x, axes, blank))
    more = {"padding": tuple(placed.padding), "base_dilation": tuple(placed.dilation)}
    made = context.bind(eqn, placed.x, *inits, **more)
    (array,) = made if eqn.primitive.multiple_results else (made,)
    array = context.isolate_cotangent(array, shape, _mixed(context, axes), active=x.active)
    return [array] if eqn.primitive.multiple_results else array


@rule(mask_rules, "reduce_window_sum")
def _reduce_window_sum(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    return _pooled(context, eqn, x, 0)


@rule(mask_rules, "reduce_window_max")
def _reduce_window_max(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    return _pooled(context, eqn, x, least(x.dtype))


@rule(mask_rules, "reduce_window_min")
def _reduce_window_min(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    return _pooled(context, eqn, x, largest(x.dtype))


@rule(mask_rules, "reduce_window")
def _reduce_window(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    identity = identity_of(eqn.params["jaxpr"])
    x, init = operands[0], operands[-1]
    if identity is None:
        raise refusal(eqn, "its reduction has no known neutral element")
    blank, start = identity(x.dtype), init.facts.literal
    if start is None or number(start, x.dtype) != blank:
        raise refusal(eqn, "its initial value is not known to be the neutral element")
    return _pooled(context, eqn, x, blank, init)


def _rejected(eqn: JaxprEqn, dtype: Any) -> Any:
    """Return the number that loses every comparison of the equation."""
    return least(dtype) if eqn.params["select_prim"] is lax.ge_p else largest(dtype)


@rule(mask_rules, "select_and_gather_add")
def _select_and_gather_add(context: MaskContext, eqn: JaxprEqn, tangent: Padded, x: Padded) -> Any:
    shape = eqn.outvars[0].aval.shape
    axes = _axes_of(context, eqn, x.shape, shape)
    moving = _cut(_placed(context, tangent, axes, 0))
    placed = _cut(_placed(context, x, axes, _rejected(eqn, x.dtype)))
    more = {"padding": tuple(placed.padding), "base_dilation": tuple(placed.dilation)}
    made = context.bind(eqn, moving.x, placed.x, **more)
    return context.isolate_cotangent(made, shape, _mixed(context, axes), active=tangent.active)


@rule(mask_rules, "select_and_scatter_add")
def _select_and_scatter_add(context: MaskContext, eqn: JaxprEqn, source: Padded, x: Padded) -> Any:
    axes = _axes_of(context, eqn, x.shape, source.shape)
    placed = _placed(context, x, axes, _rejected(eqn, x.dtype))
    cut = _cut(placed)
    source_array = context.filled(source, dict.fromkeys(_mixed(context, axes), 0))
    made = context.bind(eqn, source_array, cut.x.array, padding=tuple(cut.padding))
    behind = zip(placed.x.array.shape, cut.x.array.shape, strict=True)
    made = _with_ends(made, [whole - left for whole, left in behind])
    moved = [each for each in axes if context.bounds.is_masked(each.low)]
    if not moved:
        return made
    # Undo the shift of the operand.
    config, starts = [(0, 0, 0)] * x.ndim, [np.int32(0)] * x.ndim
    for each in moved:
        before = max(0, -context.bounds.least(each.low))
        config[each.axis] = (before, context.bounds.padded(each.size), 0)
        starts[each.axis] = before + jnp.asarray(context.size(each.low), np.int32)
    strong = strongly_typed(made)
    strong = lax.pad(strong, lax.full_like(strong, 0, shape=()), config)
    return as_weak_as(window_at(strong, starts, x.array.shape), jax.typeof(made))
