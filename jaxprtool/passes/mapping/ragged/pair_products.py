"""Rules for products with pairs of rows as an operand or the result, computed by blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.ragged.bands import Band
from jaxprtool.passes.mapping.ragged.pairs import (
    of_rows,
    pair_rules,
    paired,
    pairs_of,
    result_kind,
    without_others,
)
from jaxprtool.passes.mapping.ragged.reductions import segment_sum
from jaxprtool.passes.mapping.ragged.table import RaggedContext, broadcast_unsorted
from jaxprtool.passes.mapping.ragged.values import Batched, Pairs, Value


@rule(pair_rules, "dot_general")
def _dot_general(context: RaggedContext, eqn: JaxprEqn, x: Value, y: Value) -> Any:
    contracted, batch = eqn.params["dimension_numbers"]
    both = (x, y)
    if any(isinstance(v.kind, Batched) for v in both):
        return None
    axes = [_ragged_axes(v) for v in both]
    if any(set(own) & set(dims) for own, dims in zip(axes, batch, strict=True)):
        return None
    summed = [
        [i for i, axis in enumerate(dims) if axis in own]
        for own, dims in zip(axes, contracted, strict=True)
    ]
    kind = result_kind(context, eqn)
    if not any(summed):
        if not (x.is_packed and y.is_packed):
            return context.bind(eqn, x, y)
        band = context.sizes.band(kind.size)
        cuts = [(x.axis, band.blocks), (y.axis, band.windows)]
        array = _in_blocks(band, eqn, (x.array, y.array), cuts, kind.axes[0], band.merged)
        return paired(context, array, kind)
    if len(summed[0]) != 1 or summed[0] != summed[1]:
        return None
    over = [dims[summed[0][0]] for dims in contracted]
    factors = [_factor(context, v, axis) for v, axis in zip(both, over, strict=True)]
    if isinstance(kind, Pairs):
        return _of_two_pairs(context, eqn, both, factors)
    return _of_pairs_and_rows(context, eqn, both, factors, over)


#: Cut an array along an axis into blocks, or join blocks to rows.
ByBlocks = Callable[[Any, int], Any]


def _in_blocks(
    band: Band,
    eqn: JaxprEqn,
    factors: Sequence[Any],
    cuts: Sequence[tuple[int, ByBlocks]],
    place: int,
    join: ByBlocks,
) -> Any:
    """Return the product of two factors, with blocks as a batch dimension.

    Args:
        band: The blocks.
        eqn: The product.
        factors: The factors.
        cuts: For each factor, the axis along which it is cut into blocks, and the function that
            cuts it.
        place: The ragged axis of the product; the first if it has two.
        join: Joins the blocks of the product to rows.
    """
    if band.is_whole:
        return eqn.primitive.bind(*factors, **eqn.params)
    contracted, batch = (
        tuple(
            tuple(dim + (dim >= axis) for dim in dims)
            for dims, (axis, _) in zip(each, cuts, strict=True)
        )
        for each in eqn.params["dimension_numbers"]
    )
    with_blocks = tuple((*dims, axis) for dims, (axis, _) in zip(batch, cuts, strict=True))
    blocks = [cut(factor, axis) for factor, (axis, cut) in zip(factors, cuts, strict=True)]
    params = {**eqn.params, "dimension_numbers": (contracted, with_blocks)}
    found = eqn.primitive.bind(*blocks, **params)
    return join(jnp.moveaxis(found, len(batch[0]), place), place)


def _of_pairs_and_rows(
    context: RaggedContext,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    factors: Sequence[Any],
    over: Sequence[int],
) -> Any:
    """Return the product of pairs and rows, which sums over one ragged axis of the pairs."""
    place = 0 if isinstance(operands[0].kind, Pairs) else 1
    pairs, rows = operands[place], operands[1 - place]
    axis = result_kind(context, eqn).axis
    (first, second), size = pairs_of(pairs).axes, pairs_of(pairs).size
    band = context.sizes.band(size)
    cut, join = (band.windows, band.merged) if over[place] == second else (band.blocks, band.summed)
    cuts = [(over[1 - place], cut), (over[1 - place], cut)]
    cuts[place] = (first, band.blocks)
    array = _in_blocks(band, eqn, factors, cuts, axis, join)
    array = array + _not_finite(context, eqn, rows, 1 - place, axis, array)
    return of_rows(context, array, eqn)


def _of_two_pairs(
    context: RaggedContext, eqn: JaxprEqn, operands: Sequence[Value], factors: Sequence[Any]
) -> Any:
    """Return the product of pairs and pairs, computed as `[N, N]` matrices."""
    kind = result_kind(context, eqn)
    band = context.sizes.band(kind.size)
    both = zip(factors, operands, strict=True)
    whole = [band.whole(factor, pairs_of(x).axes) for factor, x in both]
    array = eqn.primitive.bind(*whole, **eqn.params)
    return paired(context, band.cut(array, kind.axes), kind)


def _ragged_axes(x: Value) -> tuple[int, ...]:
    if isinstance(x.kind, Pairs):
        return x.kind.axes
    return (x.axis,) if x.is_packed else ()


def _factor(context: RaggedContext, x: Value, over: int) -> Any:
    """Return a factor of a product over a ragged axis, with zeros where the sum skips elements.

    Pairs are masked by zeros. But zero times infinity is NaN, so the other factor, of rows, is made
    finite here; `_not_finite` adds the NaN again, in the examples where it belongs.
    """
    if isinstance(x.kind, Pairs):
        return without_others(context, x.array, x.kind, over)
    return _finite(x.array) if jnp.issubdtype(x.array.dtype, jnp.inexact) else x.array


@jax.custom_jvp
def _finite(array: Any) -> Any:
    """Return an array with zeros for inf and NaN. Tangents pass through unchanged."""
    return jnp.where(jnp.isfinite(array), array, 0)


_finite.defjvp(lambda primals, tangents: (_finite(*primals), tangents[0]))


def _not_finite(
    context: RaggedContext, eqn: JaxprEqn, x: Value, place: int, row_axis: int, like: Any
) -> Any:
    """Return NaN for the examples in which a packed factor is not finite, and 0 for the others.

    Args:
        context: The context of the rule.
        eqn: The product.
        x: The packed factor.
        place: 0 if it is the first factor, 1 if it is the second.
        row_axis: The ragged axis of the product.
        like: The product, whose shape the result is broadcast to.
    """
    if not jnp.issubdtype(x.array.dtype, jnp.inexact):
        return jnp.zeros((), like.dtype)
    contracted, batch = (dims[place] for dims in eqn.params["dimension_numbers"])
    rest = [i for i in range(len(x.shape)) if i != x.axis]
    zeros = jnp.moveaxis(lax.stop_gradient(x.array), x.axis, 0) * 0
    summed = zeros.sum(tuple(1 + i for i, axis in enumerate(rest) if axis in contracted))
    sums = segment_sum(context, summed.astype(like.dtype), 0, x.size)
    rows = context.at_rows(sums, x.size)
    rest = [axis for axis in rest if axis not in contracted]
    free = [axis for axis in rest if axis not in batch]
    # The product has the batch dimensions first, then the free ones of each factor.
    start = len(batch) if place == 0 else like.ndim - len(free)
    at = {axis: i for i, axis in enumerate(batch)} | {a: start + i for i, a in enumerate(free)}
    return broadcast_unsorted(rows, like.shape, [row_axis, *(at[axis] for axis in rest)])
