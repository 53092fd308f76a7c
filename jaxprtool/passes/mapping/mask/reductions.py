"""Masking of equations that combine elements: reductions, sorts, products, windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import as_weak_as, strongly_typed
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn
from jaxprtool.passes.mapping.mask.moves import flip_logical, reshaped, window_at
from jaxprtool.passes.mapping.mask.table import (
    Bounds,
    Facts,
    Filled,
    MaskContext,
    MaskRule,
    Padded,
    fill_number,
    mask_error,
    mask_rules,
)

# --- reductions -----------------------------------------------------------------------------------
# Masking of reductions: the padding is filled with the identity of the reduction.


def least(dtype: Any) -> Any:
    """Return the identity of a maximum: the least number of a dtype."""
    return _limit(dtype, lowest=True)


def largest(dtype: Any) -> Any:
    """Return the identity of a minimum: the largest number of a dtype."""
    return _limit(dtype, lowest=False)


def _limit(dtype: Any, *, lowest: bool) -> Any:
    """Return an end of the order of a dtype. Not every float dtype has an infinity."""
    if dtype == np.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max
    infinity = -np.inf if lowest else np.inf
    if jnp.issubdtype(dtype, jnp.complexfloating):  # ordered by the real part, then the imaginary
        return complex(infinity, infinity)
    if np.isinf(np.asarray(infinity).astype(dtype).astype(np.float64)):
        return infinity
    return float(jnp.finfo(dtype).min if lowest else jnp.finfo(dtype).max)


def one(dtype: Any) -> Any:
    """Return the identity of a product.

    Raises ValueError for complex numbers: an infinity times 1+0j has NaN as its imaginary part.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError("no number in the padding keeps a product of complex infinities")
    return 1


def identities(
    context: MaskContext, x: Padded, axes: Sequence[int], identity: Callable[[Any], Any]
) -> dict[int, Any]:
    """Return the fills of the padded axes of a reduction with this identity."""
    padded = context.axes(x)
    return {axis: identity(x.dtype) for axis in axes if axis in padded}


def reduction(identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a reduction with this identity, a function of the dtype."""

    def apply(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
        fills = identities(context, x, eqn.params["axes"], identity)
        return context.bind(eqn, context.filled(x, fills))

    return apply


def _all_bits(dtype: Any) -> Any:
    return True if dtype == np.bool_ else np.asarray(-1).astype(dtype)


rule(mask_rules, "reduce_sum", "reduce_or", "reduce_xor")(reduction(lambda dtype: 0))
rule(mask_rules, "reduce_prod")(reduction(one))
rule(mask_rules, "reduce_and")(reduction(_all_bits))


def _extreme(identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a maximum or a minimum with this identity, a function of the dtype.

    The derivative is shared by all elements equal to the result. Padding must not be among them,
    though it is equal if all elements are infinite. So the derivative has its own mask.
    """

    def apply(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
        axes = eqn.params["axes"]
        padded = [axis for axis in axes if context.bounds.is_masked(x.shape[axis])]

        def filled(array: Any) -> Any:
            return context.filled(Padded(array, x.facts), dict.fromkeys(axes, identity(x.dtype)))

        if not (x.active and padded):
            return context.bind(eqn, filled(x.array))
        masks = [context.valid(x.shape[axis]) for axis in padded]
        pairs = zip(padded, masks, strict=True)
        parts = [lax.broadcast_in_dim(mask, x.array.shape, (i,)) for i, mask in pairs]
        within = reduce(lax.bitwise_and, parts)

        @jax.custom_jvp
        def extreme(array: Any, within: Any) -> Any:
            full = lax.full_like(array, identity(array.dtype))
            return context.bind(eqn, lax.select(within, array, full))

        @extreme.defjvp
        def masked_derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
            array, within = primals
            extremes = extreme(array, within)
            kept = [i for i in range(array.ndim) if i not in axes]
            chosen = (array == lax.broadcast_in_dim(extremes, array.shape, kept)) & within
            tangent = lax.select(chosen, tangents[0], lax.full_like(array, 0))
            counts = lax.convert_element_type(chosen, array.dtype).sum(axes)
            return extremes, tangent.sum(axes) / counts

        return extreme(x.array, within)

    return apply


rule(mask_rules, "reduce_max")(_extreme(least))
rule(mask_rules, "reduce_min")(_extreme(largest))


# --- the user's own reductions --------------------------------------------------------------------

#: The identity of each primitive that the jaxpr of a `reduce` may consist of, by dtype.
_IDENTITIES: dict[str, Callable[[Any], Any]] = {
    "add": lambda dtype: 0,
    "mul": one,
    "max": least,
    "min": largest,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "and": _all_bits,
}


def identity_of(jaxpr: AnyJaxpr) -> Callable[[Any], Any] | None:
    """Return the identity, a function of the dtype, of a jaxpr of two numbers; None if unknown."""
    body = jaxcompat.open_jaxpr(jaxpr)
    if len(body.eqns) != 1 or list(body.outvars) != list(body.eqns[0].outvars):
        return None
    (eqn,) = body.eqns
    if {*eqn.invars} != {*body.invars} or len(body.invars) != 2:
        return None
    return _IDENTITIES.get(eqn.primitive.name)


@rule(mask_rules, "reduce")
def _reduce(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    axes, jaxpr = eqn.params["dimensions"], eqn.params["jaxpr"]
    xs, inits = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    identity = identity_of(jaxpr)
    if identity is not None:
        (x,), start = xs, inits[0].facts.literal
        fills = identities(context, x, axes, identity)
        if start is not None and any(
            fill_number(start, x.dtype) != fill for fill in fills.values()
        ):
            raise mask_error(
                eqn, "its initial value is not the neutral element, so its result is undefined"
            )
        return context.bind(eqn, context.filled(x, fills), *inits)
    return _reduced_with_flags(context, eqn, xs, inits)


def _reduced_with_flags(
    context: MaskContext, eqn: JaxprEqn, xs: Sequence[Padded], inits: Sequence[Padded]
) -> Any:
    """Return a reduction whose operands have a flag, False in the padding."""
    axes = eqn.params["dimensions"]
    combine = jaxcompat.jaxpr_as_fun(jaxcompat.close_jaxpr(eqn.params["jaxpr"]))
    within = context.filled(
        Padded(jnp.ones(xs[0].array.shape, np.bool_), Facts.unknown(xs[0].shape)),
        dict.fromkeys(axes, False),
    )

    def combined(first: Any, second: Any) -> Any:
        (*a, a_valid), (*b, b_valid) = first, second
        either = [lax.select(a_valid, x, y) for x, y in zip(a, b, strict=True)]
        both = a_valid & b_valid
        pairs = zip(combine(*a, *b), either, strict=True)
        return (*(lax.select(both, x, y) for x, y in pairs), a_valid | b_valid)

    arrays = (*(x.array for x in xs), within)
    starts = (*(x.array for x in inits), np.True_)
    return lax.reduce(arrays, starts, combined, axes)[:-1]


# --- cumulative -----------------------------------------------------------------------------------
# Masking of cumulative sums, products and extremes, forward and in reverse.


def _cumulative(neutral: int, identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a cumulative sum or product.

    Args:
        neutral: The number that changes no finite sum or product, for the derivative.
        identity: The identity, a function of the dtype. Forward, the padding comes last, and the
            values need none.
    """

    def apply(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
        axis, reverse = eqn.params["axis"], eqn.params["reverse"]
        fills = identities(context, x, [axis], identity) if reverse else {}
        result = context.apply(
            lambda array: context.bind(eqn, array),
            [x],
            x.shape,
            needed=[fills],
            derivative=[{axis: neutral}],
            mixed=[axis],
        )
        return Filled(result, fills) if reverse else result

    return apply


rule(mask_rules, "cumsum")(_cumulative(0, lambda dtype: 0))
rule(mask_rules, "cumprod")(_cumulative(1, one))


@rule(mask_rules, "cummax", "cummin", "cumlogsumexp")
def _cumulative_extreme(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    """Scan forward even in reverse, on reversed elements, so that padding comes last.

    The fill could be equal to an infinite element, and receive a part of its derivative.
    """
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    turn = reverse and context.bounds.is_masked(x.shape[axis])
    if turn:
        array = flip_logical(context, x.array, x.shape, [axis])
        x = Padded(array, Facts.unknown(x.shape, active=x.active))
    result = context.apply(
        lambda array: context.bind(eqn, array, reverse=reverse and not turn),
        [x],
        x.shape,
        derivative=[{axis: 0}],
        mixed=[axis],
    )
    return flip_logical(context, result, x.shape, [axis]) if turn else result


# --- ordering -------------------------------------------------------------------------------------
# Masking of sorts and selections: padding is sorted, or selected, last.


def _last(dtype: Any) -> Any:
    """Return the value of a dtype that JAX sorts last."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(np.nan, np.nan)
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else largest(dtype)


@rule(mask_rules, "sort")
def _sort(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    if not context.bounds.is_masked(operands[0].shape[axis]):
        return context.bind(eqn, *operands)
    # The sort is stable, so elements whose keys are equal to the padding stay before it.
    filled = [context.filled(x, {axis: _last(x.dtype)}) for x in operands[:keys]]
    results = context.bind(eqn, *filled, *operands[keys:], is_stable=True)
    sorted_keys = [Filled(y, {axis: _last(y.dtype)}) for y in results[:keys]]
    return [*sorted_keys, *results[keys:]]


@rule(mask_rules, "top_k")
def _top_k(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    return _selected(context, eqn, x, eqn.params.get("axis", x.ndim - 1), least(x.dtype))


@rule(mask_rules, "approx_top_k")
def _approx_top_k(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    last = least if eqn.params["is_max_k"] else largest
    return _selected(context, eqn, x, eqn.params["reduction_dimension"], last(x.dtype))


def _selected(context: MaskContext, eqn: JaxprEqn, x: Padded, axis: int, last: Any) -> Any:
    """Return the elements selected along an axis, padding last, and their indices."""
    values, indices = context.bind(eqn, context.filled(x, {axis: last}))
    shape = eqn.outvars[0].aval.shape
    return context.isolate_cotangent(values, shape, [axis], active=x.active), indices


# Both select the first of equal elements, so never padding, which comes after the others.
rule(mask_rules, "argmax")(reduction(least))
rule(mask_rules, "argmin")(reduction(largest))


# --- products -------------------------------------------------------------------------------------
# Masking of products of matrices.


@rule(mask_rules, "dot_general")
def _dot_general(context: MaskContext, eqn: JaxprEqn, x: Padded, y: Padded) -> Any:
    contracted, batch = eqn.params["dimension_numbers"]
    operands = (x, y)
    free = [
        [i for i in range(z.ndim) if i not in (*contracted[k], *batch[k])]
        for k, z in enumerate(operands)
    ]
    # The derivative with respect to one operand is a product that sums over the other's free axes.
    derivative: list[dict[int, int]] = [{}, {}]
    mixed = []
    start = len(batch[0])
    for k, other in enumerate((y, x)):
        if other.active:
            derivative[k] = dict.fromkeys(free[k], 0)
            mixed += [start + i for i in range(len(free[k]))]
        start += len(free[k])
    return context.apply(
        lambda a, b: context.bind(eqn, a, b),
        operands,
        eqn.outvars[0].aval.shape,
        needed=[dict.fromkeys(axes, 0) for axes in contracted],
        derivative=derivative,
        mixed=mixed,
    )


@rule(mask_rules, "ragged_dot_general")
def _ragged_dot_general(
    context: MaskContext, eqn: JaxprEqn, x: Padded, y: Padded, groups: Padded
) -> Any:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, _ = numbers.dot_dimension_numbers
    if context.axes(groups):
        raise mask_error(eqn, "the number of groups is masked")
    shape = eqn.outvars[0].aval.shape
    return context.apply(
        lambda a, b, sizes: context.bind(eqn, a, b, sizes),
        [x, y, groups],
        shape,
        needed=[*(dict.fromkeys(axes, 0) for axes in contracted), {}],
        derivative=[dict.fromkeys(range(x.ndim), 0), dict.fromkeys(range(y.ndim), 0), {}],
        mixed=range(len(shape)),
    )


# --- linear algebra -------------------------------------------------------------------------------
# Masking of operations batched over leading axes, such as `fft`, and of matrix factorizations.


@rule(mask_rules, "bitcast_convert_type")
def _bitcast(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    return context.bind(eqn, x)


@rule(
    mask_rules,
    *("eig", "eigh", "fft", "geev", "geqp3", "geqrf", "hessenberg", "householder_product", "qr"),
    *("schur", "svd", "tridiagonal"),
)
def _over_leading_axes(context: MaskContext, eqn: JaxprEqn, x: Padded, *more: Padded) -> Any:
    _check_unpadded(context, eqn, x, len(eqn.params.get("fft_lengths", (0, 0))))
    for operand in more:
        _check_unpadded(context, eqn, operand, 1)
    return context.bind(eqn, x, *more)


def _check_unpadded(context: MaskContext, eqn: JaxprEqn, x: Padded, rank: int) -> None:
    """Raise UnsupportedError for an operand that is padded along one of its last `rank` axes."""
    if any(axis >= x.ndim - rank for axis in context.axes(x)):
        raise mask_error(eqn, "it mixes all elements of an axis, including padding")


# --- matrices with padding ------------------------------------------------------------------------


def _with_identity(context: MaskContext, x: Padded) -> Any:
    """Return square matrices padded with an identity matrix: `[[x, 0], [0, 1]]`."""
    rows, columns = x.ndim - 2, x.ndim - 1
    array = context.filled(x, {rows: 0, columns: 0})
    if not context.bounds.is_masked(x.shape[columns]):
        return array
    numbers = [lax.broadcasted_iota(np.int32, array.shape, axis) for axis in (rows, columns)]
    valid = lax.broadcast_in_dim(context.valid(x.shape[columns]), array.shape, (columns,))
    diagonal = (numbers[0] == numbers[1]) & ~valid
    return lax.select(diagonal, lax.full_like(array, 1), array)


@rule(mask_rules, "cholesky")
def _cholesky(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    factor = context.bind(eqn, _with_identity(context, x))
    return context.isolate_cotangent(factor, x.shape, (x.ndim - 2, x.ndim - 1), active=x.active)


@rule(mask_rules, "lu")
def _lu(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    rows, columns = x.ndim - 2, x.ndim - 1
    if x.shape[rows] != x.shape[columns]:
        _check_unpadded(context, eqn, x, 2)
    factors, pivots, permutation = context.bind(eqn, _with_identity(context, x))
    return (
        context.isolate_cotangent(factors, x.shape, (rows, columns), active=x.active),
        pivots,
        permutation,
    )


@rule(mask_rules, "lu_pivots_to_permutation")
def _permutation(context: MaskContext, eqn: JaxprEqn, pivots: Padded) -> Any:
    """Fill the padding with pivots that exchange each row with itself."""
    array, axis = pivots.array, pivots.ndim - 1
    if context.bounds.is_masked(pivots.shape[axis]):
        valid = context.valid(pivots.shape[axis])
        within = lax.broadcast_in_dim(valid, array.shape, (axis,))
        array = lax.select(within, array, lax.broadcasted_iota(array.dtype, array.shape, axis))
    return context.bind(eqn, array)


@rule(mask_rules, "triangular_solve")
def _triangular_solve(context: MaskContext, eqn: JaxprEqn, a: Padded, b: Padded) -> Any:
    rows, columns = b.ndim - 2, b.ndim - 1
    solved, free = (rows, columns) if eqn.params["left_side"] else (columns, rows)
    array = _with_identity(context, a)
    if a.active and context.bounds.is_masked(b.shape[free]):
        # Without rows the derivative is zero, but the solution in the padding may be NaN.
        ones = jnp.broadcast_to(jnp.eye(array.shape[-1], dtype=array.dtype), array.shape)
        array = lax.select(context.size(b.shape[free]) > 0, array, ones)
    matrices = Padded(array, Facts.unknown(a.shape, active=a.active))
    return context.apply(
        lambda a, b: context.bind(eqn, a, b),
        [matrices, b],
        b.shape,
        needed=[{}, {solved: 0}],
        derivative=[{}, {free: 0}],
        mixed=[rows, columns],
    )


# --- windows --------------------------------------------------------------------------------------
# Masking of convolutions and pooling, which move a window over an array.
#
# The padding is filled with a number that does not change a result, so that windows may reach into
# it. The equation's own padding at the end is computed for the padded size. Its padding at the
# start may depend on the size, as for "SAME" with a stride; then the array is shifted.


@dataclass(frozen=True)
class _WindowAxis:
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
class _PlacedOperand:
    """An operand whose first window starts at a known position, and its new parameters.

    Attributes:
        x: The operand.
        padding: The padding of each axis in `axes` of `_placed`: low and high.
        dilation: The dilation of each of these axes.
    """

    x: Padded
    padding: list[tuple[Any, Any]]
    dilation: list[int]


def _placed(
    context: MaskContext, x: Padded, axes: Sequence[_WindowAxis], blank: Any
) -> _PlacedOperand:
    """Return an operand whose padding is filled with `blank`, placed for its windows.

    An axis whose low padding is masked is padded and dilated here, and shifted so that the first
    window starts at index 0.
    """
    bounds = context.bounds
    masked = [dim for dim in axes if dim.is_masked(bounds)]
    moved = [dim for dim in masked if bounds.is_masked(dim.low)]
    array = context.filled(x, {dim.axis: blank for dim in masked})
    padding, dilation = [], []
    config, starts, sizes = [(0, 0, 0)] * x.ndim, [np.int32(0)] * x.ndim, list(array.shape)
    facts = x.facts
    for dim in axes:
        reach, length = dim.reach(bounds), dim.length(bounds)
        if dim in moved:
            most, fewest = bounds.padded(dim.low), bounds.least(dim.low)
            config[dim.axis] = (most, max(0, reach - fewest - length), dim.dilation - 1)
            starts[dim.axis] = most - context.size(dim.low)
            sizes[dim.axis] = reach
            facts = replace(facts, shape=_with(facts.shape, dim.axis, reach))
            padding.append((0, 0))
            dilation.append(1)
        else:
            high = reach - length - dim.low if dim in masked else dim.high
            padding.append((dim.low, high))
            dilation.append(dim.dilation)
    if moved:
        # JAX's transposes of pads and slices return strongly typed gradients.
        strong = strongly_typed(array)
        strong = lax.pad(strong, lax.full_like(strong, blank, shape=()), config)
        array = as_weak_as(window_at(strong, starts, sizes), jax.typeof(array))
    facts = replace(facts, fills=(None,) * x.ndim)
    return _PlacedOperand(Padded(array, facts), padding, dilation)


def _cut(placed: _PlacedOperand) -> _PlacedOperand:
    """Crop an operand after the last window, where its padding is negative.

    XLA does not allow negative padding in `select_and_scatter`, the derivative of max pooling.
    """
    pairs = zip(placed.padding, placed.dilation, strict=True)
    crops = [min(0, high) if dilation == 1 else 0 for (_, high), dilation in pairs]
    array = _with_ends(placed.x.array, crops)
    padding = [(low, high - n) for (low, high), n in zip(placed.padding, crops, strict=True)]
    return _PlacedOperand(Padded(array, placed.x.facts), padding, placed.dilation)


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
        _WindowAxis(i, x.shape[i], kernel.shape[j], stride, low, high, dilation, spread, shape[k])
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
            raise mask_error(eqn, f"{name} is {count}, and the size of a group is masked")


# --- pooling --------------------------------------------------------------------------------------


def _axes_of(
    context: MaskContext, eqn: JaxprEqn, shape: Sequence[Any], result: Sequence[Any]
) -> list[_WindowAxis]:
    """Return the windows of a reduction along each axis.

    Raises:
        UnsupportedError: If the size of a window is masked, and there is more than one window.
    """
    params, rank = eqn.params, len(shape)
    ones = (1,) * rank
    axes = [
        _WindowAxis(i, size, window, stride, low, high, dilation, spread, count)
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
    for dim in axes:
        alone = dim.result == 1 and dim.low == 0
        if context.bounds.is_masked(dim.window) and not alone:
            raise mask_error(eqn, f"its window has the masked size {dim.window}")
    return axes


def _mixed(context: MaskContext, axes: Sequence[_WindowAxis]) -> list[int]:
    """Return the padded axes along which windows combine, drop or shift elements."""
    alone = 1, 1, 0, 0
    return [
        dim.axis
        for dim in axes
        if (dim.window, dim.stride, dim.low, dim.high) != alone
        and context.bounds.is_masked(dim.result)
    ]


def _pooled(context: MaskContext, eqn: JaxprEqn, x: Padded, blank: Any, *inits: Padded) -> Any:
    shape = eqn.outvars[0].aval.shape
    axes = _axes_of(context, eqn, x.shape, shape)
    placed = _cut(_placed(context, x, axes, blank))
    more = {"padding": tuple(placed.padding), "base_dilation": tuple(placed.dilation)}
    outs = context.bind(eqn, placed.x, *inits, **more)
    (array,) = outs if eqn.primitive.multiple_results else (outs,)
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
        raise mask_error(eqn, "its reduction has no known neutral element")
    blank, start = identity(x.dtype), init.facts.literal
    if start is None or fill_number(start, x.dtype) != blank:
        raise mask_error(eqn, "its initial value is not known to be the neutral element")
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
    result = context.bind(eqn, moving.x, placed.x, **more)
    return context.isolate_cotangent(result, shape, _mixed(context, axes), active=tangent.active)


@rule(mask_rules, "select_and_scatter_add")
def _select_and_scatter_add(context: MaskContext, eqn: JaxprEqn, source: Padded, x: Padded) -> Any:
    axes = _axes_of(context, eqn, x.shape, source.shape)
    placed = _placed(context, x, axes, _rejected(eqn, x.dtype))
    cut = _cut(placed)
    source_array = context.filled(source, dict.fromkeys(_mixed(context, axes), 0))
    result = context.bind(eqn, source_array, cut.x.array, padding=tuple(cut.padding))
    behind = zip(placed.x.array.shape, cut.x.array.shape, strict=True)
    result = _with_ends(result, [whole - left for whole, left in behind])
    moved = [dim for dim in axes if context.bounds.is_masked(dim.low)]
    if not moved:
        return result
    # Undo the shift of the operand.
    config, starts = [(0, 0, 0)] * x.ndim, [np.int32(0)] * x.ndim
    for dim in moved:
        low = max(0, -context.bounds.least(dim.low))
        config[dim.axis] = (low, context.bounds.padded(dim.size), 0)
        starts[dim.axis] = low + jnp.asarray(context.size(dim.low), np.int32)
    strong = strongly_typed(result)
    strong = lax.pad(strong, lax.full_like(strong, 0, shape=()), config)
    return as_weak_as(window_at(strong, starts, x.array.shape), jax.typeof(result))


# --- random ---------------------------------------------------------------------------------------
# Masking of random bits: the bits of each element depend on its logical position.
#
# With `jax_threefry_partitionable`, the default, JAX computes the bits of Threefry from the
# position of each element alone. So they do not depend on the size of the array.


@rule(mask_rules, "random_bits", "random_split")
def _by_position(context: MaskContext, eqn: JaxprEqn, keys: Padded) -> Any:
    shape = eqn.params["shape"]
    if not any(map(context.bounds.is_masked, shape)):
        return context.bind(eqn, keys)
    if jax.random.key_impl(keys.array) != "threefry2x32":
        raise mask_error(eqn, "its random bits depend on the size, because the key is not Threefry")
    if not eqn.ctx.threefry_partitionable:
        raise mask_error(
            eqn,
            "its random bits depend on the size",
            "they do not with jax.config.update('jax_threefry_partitionable', True)",
        )
    number = prod(shape)
    array = context.bind(eqn, keys, shape=(context.bounds.padded(number),))
    flat = Padded(array, Facts.unknown((*keys.shape, number)))
    return reshaped(context, flat, (*keys.shape, *shape))


@rule(mask_rules, "random_clone", "random_fold_in", "random_seed", "random_unwrap", "random_wrap")
def _by_key(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    return context.bind(eqn, *operands)
