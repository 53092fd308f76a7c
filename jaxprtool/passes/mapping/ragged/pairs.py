"""Rules for pairs of rows: attention within a band, and products computed by blocks.

A pair is *valid* if both its rows are of one example. Other pairs are computed like valid ones, and
so are the positions of a window before the first row and after the last. An invalid pair holds a
copy of the pair of its first row with itself, so it produces no NaN that a valid pair does not
produce, neither in a value nor in a derivative. Reductions over one of the two axes skip it.

These rules apply to equations with pairs among their operands or results. Like the rules of
`table.ragged_rules`, they may return None; then examples are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.reductions import largest, least
from jaxprtool.passes.mapping.mask.table import is_numeric_type
from jaxprtool.passes.mapping.ragged.rules import segment_sum
from jaxprtool.passes.mapping.ragged.table import (
    Band,
    Batched,
    Pairs,
    RaggedContext,
    RaggedOperand,
    RaggedRule,
    Shared,
    broadcast_unsorted,
    taken,
    with_a_row,
)

# --- pairs ----------------------------------------------------------------------------------------
# Rules for pairs of rows, `[..., N, ..., width]`: attention within a band, masked by example.

#: Rules by primitive.
pair_rules: RuleTable[RaggedRule] = RuleTable()


def in_same_example(
    context: RaggedContext, shape: tuple[Any, ...], kind: Pairs, over: int | None = None
) -> Any:
    """Return the mask of valid pairs, those of two rows of one example.

    A spare row counts as a copy of the first row, except along the axis of a reduction, where it is
    masked. The first row is always kept, so that no reduction is over an empty set.

    Args:
        context: The context of the rule.
        shape: The shape of the mask.
        kind: The layout of the mask.
        over: The axis of the reduction, one of `kind.axes`; by default the second.
    """
    kept, summed = context.batch_indices(kind.size), context.examples(kind.size)
    if not context.sizes.is_exact(kind.size):
        is_first = lax.iota(jnp.int32, summed.shape[0]) == 0
        summed = lax.select(is_first, kept, summed)
    first, second = (summed, kept) if over == kind.axes[0] else (kept, summed)
    columns = context.sizes.band(kind.size).at_second(second[None], (0, 1), fill=-1)
    return lax.broadcast_in_dim(first[:, None] == columns, shape, kind.axes)


def without_others(context: RaggedContext, array: Any, kind: Pairs, over: int) -> Any:
    """Return pairs with zeros in those that a reduction over an axis must skip."""
    counted = in_same_example(context, array.shape, kind, over)
    return lax.select(counted, array, lax.full_like(array, 0))


def paired(context: RaggedContext, array: Any, kind: Pairs) -> Any:
    """Replace each invalid pair by a copy of the pair of its first row with itself."""
    diagonal = context.sizes.band(kind.size).own(lax.stop_gradient(array), kind.axes)
    dims = [i for i in range(array.ndim) if i != kind.axes[1]]
    others = lax.broadcast_in_dim(diagonal, array.shape, dims)
    return lax.select(in_same_example(context, array.shape, kind), array, others)


def pairs_of(x: RaggedOperand) -> Pairs:
    """Return the layout of a value that is known to hold pairs."""
    assert isinstance(x.kind, Pairs)
    return x.kind


def result_kind(context: RaggedContext, eqn: JaxprEqn) -> Any:
    """Return the layout of the result of an equation."""
    return context.sizes.canonical(eqn.outvars[0].aval)


# --- elements -----------------------------------------------------------------------------------


@rule(pair_rules, "elementwise")
def _elementwise(context: RaggedContext, eqn: JaxprEqn, *operands: RaggedOperand) -> Any:
    shape, kind = tuple(eqn.outvars[0].aval.shape), result_kind(context, eqn)
    whole, (first, second) = context.sizes.shape(kind, shape), kind.axes
    arrays = []
    for x in operands:
        array = context.along(x, shape, first)
        if x.is_packed and x.axis == second:  # of size 1 along the first
            array = context.sizes.band(kind.size).at_second(array, kind.axes)
            array = paired(context, jnp.broadcast_to(array, whole), kind)
        arrays.append(array)
    return context.bind(eqn, *arrays)


@rule(pair_rules, "iota")
def _iota(context: RaggedContext, eqn: JaxprEqn) -> Any:
    kind, dimension = result_kind(context, eqn), eqn.params["dimension"]
    whole = context.sizes.shape(kind, eqn.params["shape"])
    if dimension not in kind.axes:
        return context.bind(eqn, shape=whole)
    numbers = context.positions(kind.size).astype(eqn.params["dtype"])
    if dimension == kind.axes[0]:
        return lax.broadcast_in_dim(numbers, whole, (dimension,))
    columns = context.sizes.band(kind.size).at_second(numbers[None], (0, 1))
    return paired(context, lax.broadcast_in_dim(columns, whole, kind.axes), kind)


@rule(pair_rules, "broadcast_in_dim")
def _broadcast_in_dim(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kind = result_kind(context, eqn)
    whole = context.sizes.shape(kind, shape)
    if isinstance(x.kind, Batched):
        # Drop axes of size 1 that become ragged; each row gets the value of its example.
        kept = [i for i, dim in enumerate(dims) if dim not in kind.axes]
        array = x.array.reshape(x.array.shape[0], *(x.shape[i] for i in kept))
        places = [kind.axes[0], *(dims[i] for i in kept)]
        return broadcast_unsorted(context.at_rows(array, kind.size), whole, places)
    if x.is_packed and dims[x.axis] == kind.axes[1]:
        sizes = dict(zip(dims, x.array.shape, strict=True))
        rows = lax.broadcast_in_dim(x.array, [sizes.get(i, 1) for i in range(len(shape))], dims)
        columns = context.sizes.band(kind.size).at_second(rows, kind.axes)
        return paired(context, jnp.broadcast_to(columns, whole), kind)
    return context.bind(eqn, x, shape=whole)


@rule(pair_rules, "transpose")
def _transpose(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    kind, order = pairs_of(x), eqn.params["permutation"]
    if order.index(kind.axes[0]) < order.index(kind.axes[1]):
        return context.bind(eqn, x)
    other = dict(zip(kind.axes, reversed(kind.axes), strict=True))
    array = context.sizes.band(kind.size).exchanged(x.array, kind.axes)
    moved = context.bind(eqn, array, permutation=tuple(other.get(axis, axis) for axis in order))
    return paired(context, moved, result_kind(context, eqn))


@rule(pair_rules, "squeeze")
def _squeeze(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    return context.bind(eqn, x)


@rule(pair_rules, "reshape")
def _reshape(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    """Reshape pairs if the sizes before, between and after the two ragged axes are unchanged."""
    kind = result_kind(context, eqn)
    if not (isinstance(x.kind, Pairs) and isinstance(kind, Pairs)) or eqn.params["dimensions"]:
        return None
    old, new = (
        [_product(shape[: axes[0]]), _product(shape[axes[0] + 1 : axes[1]])]
        for shape, axes in ((x.shape, x.kind.axes), (eqn.outvars[0].aval.shape, kind.axes))
    )
    if old != new or x.kind.size != kind.size:
        return None
    return context.bind(eqn, x, new_sizes=context.sizes.shape(kind, eqn.params["new_sizes"]))


def _product(sizes: Any) -> Any:
    result = 1
    for size in sizes:
        result = result * size
    return result


@rule(pair_rules, "gather")
def _gather(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, indices: RaggedOperand) -> Any:
    """Gather elements of a shared table at pairs, such as a bias for each distance."""
    if not isinstance(x.kind, Shared) or not isinstance(indices.kind, Pairs):
        return None
    return context.bind(eqn, x, indices)


# --- reductions ---------------------------------------------------------------------------------


@rule(pair_rules, "reduce_sum")
def _sum(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    axes, kind = eqn.params["axes"], pairs_of(x)
    over = [axis for axis in kind.axes if axis in axes]
    if not over:
        return context.bind(eqn, x)
    summed = without_others(context, x.array, kind, over[-1])
    if over == [kind.axes[0]]:
        band, second = context.sizes.band(kind.size), kind.axes[1]
        blocks = jnp.moveaxis(band.blocks(summed, over[0]), over[0], second)
        partial_sums = context.bind(
            eqn, blocks, axes=tuple(axis + (axis > second) for axis in axes)
        )
        sums = band.summed(partial_sums, _kept(second, axes))
        return of_rows(context, sums, eqn)
    if len(over) == 1:
        return of_rows(context, context.bind(eqn, summed), eqn)
    rows = jnp.moveaxis(summed, kind.axes[0], 0)
    others = tuple(axis + (axis < kind.axes[0]) for axis in axes if axis != kind.axes[0])
    return segment_sum(context, context.bind(eqn, rows, axes=others), 0, kind.size)


@rule(pair_rules, "reduce_max", "reduce_min")
def _extremes(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    def reduce(array: Any, axes: tuple[int, ...], valid: Any) -> Any:
        return _extreme(eqn.primitive.name == "reduce_max", axes, array, valid)

    return _over_one(context, eqn, x, reduce)


@rule(pair_rules, "reduce_or", "reduce_and")
def _logical(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand) -> Any:
    def reduce(array: Any, axes: tuple[int, ...], valid: Any) -> Any:
        # On integers the reduction is bitwise, and -1 has all bits set.
        is_and, is_bool = eqn.primitive.name == "reduce_and", array.dtype == bool
        identity = is_and if is_bool else -int(is_and)
        filled = lax.select(valid, array, lax.full_like(array, identity))
        return context.bind(eqn, filled, axes=axes)

    return _over_one(context, eqn, x, reduce)


def _over_one(
    context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, reduce: Callable[..., Any]
) -> Any:
    """Reduce valid pairs over one of the two ragged axes; return None for a reduction over both.

    A reduction over the first axis exchanges the two axes, and reduces over the second.

    Args:
        context: The context of the rule.
        eqn: The reduction.
        x: The pairs.
        reduce: `reduce(array, axes, valid)` reduces an array over axes, where a mask is True.
    """
    axes, kind, array = tuple(eqn.params["axes"]), pairs_of(x), x.array
    over = [axis for axis in kind.axes if axis in axes]
    if not over:
        return context.bind(eqn, x)
    if len(over) == 2:
        return None
    first, second = kind.axes
    reduced = axes
    if over == [first]:
        array = context.sizes.band(kind.size).exchanged(array, kind.axes)
        reduced = tuple(second if axis == first else axis for axis in axes)
    result = reduce(array, reduced, in_same_example(context, array.shape, kind, second))
    if over == [first]:
        result = jnp.moveaxis(result, _kept(first, reduced), _kept(second, axes))
    return of_rows(context, result, eqn)


def _kept(axis: int, axes: tuple[int, ...]) -> int:
    """Return the index of an axis after a reduction over others."""
    return axis - sum(other < axis for other in axes)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extreme(is_max: bool, axes: tuple[int, ...], array: Any, valid: Any) -> Any:
    """Return the largest, or least, valid pair.

    The derivative is shared by the valid pairs that are equal to it, as in JAX.
    """
    number = (least if is_max else largest)(array.dtype)
    filled = lax.select(valid, array, lax.full_like(array, number))
    return (lax.reduce_max if is_max else lax.reduce_min)(filled, axes)


@_extreme.defjvp
def _extreme_jvp(is_max: bool, axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    array, valid = primals
    best = _extreme(is_max, axes, array, valid)
    is_best = ((array == jnp.expand_dims(best, axes)) & valid).astype(array.dtype)
    return best, (tangents[0] * is_best).sum(axes) / is_best.sum(axes)


def of_rows(context: RaggedContext, rows: Any, eqn: JaxprEqn) -> Any:
    """Return the packed result of a reduction over one ragged axis, with its spare rows set."""
    kind = result_kind(context, eqn)
    return context.spared(rows, kind.axis, kind.size)


# --- conversions --------------------------------------------------------------------------------


def pairs_to_stacked(context: RaggedContext, x: RaggedOperand) -> Any:
    """Return pairs of rows as padded examples, with zeros in the padding."""
    first, second = context.sizes.axes(x.shape)
    size = x.shape[first]
    numbers = jnp.arange(context.sizes.bounds.padded(size), dtype=jnp.int32)
    rows = context.starts(size)[:, None] + numbers
    pairs = jnp.moveaxis(x.array, (first, second), (0, 1))
    starts = taken(context.sizes.band(size).starts(), rows)
    gathered = pairs.at[rows[:, :, None], rows[:, None] - starts[:, :, None]].get(mode="clip")
    padded = jnp.moveaxis(gathered, (1, 2), (first + 1, second + 1))
    if not is_numeric_type(x.array):
        return padded
    valid = numbers < context.lengths(size)[:, None]
    both = valid[:, :, None] & valid[:, None]
    within = lax.broadcast_in_dim(both, padded.shape, (0, first + 1, second + 1))
    return lax.select(within, padded, lax.full_like(padded, 0))


def stacked_to_pairs(context: RaggedContext, x: RaggedOperand) -> Any:
    """Return padded examples as pairs of rows, with copies in the invalid ones (see `paired`)."""
    first, second = context.sizes.axes(x.shape)
    size = x.shape[first]
    padded = jnp.moveaxis(x.array, (first + 1, second + 1), (1, 2))
    padded = with_a_row(context, padded, 0, 1, 2)
    of, at = context.batch_indices(size)[:, None], context.positions(size)
    kind = Pairs((0, 1), size)
    shape = context.sizes.shape(kind, (size, size))
    others = lax.select(
        in_same_example(context, shape, kind),
        context.sizes.band(size).at_second(at[None], (0, 1)),
        jnp.broadcast_to(at[:, None], shape),
    )
    gathered = padded.at[of, at[:, None], others].get(mode="clip")
    return jnp.moveaxis(gathered, (0, 1), (first, second))


# --- pair products --------------------------------------------------------------------------------
# Rules for products with pairs of rows as an operand or the result, computed by blocks.


@rule(pair_rules, "dot_general")
def _dot_general(context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, y: RaggedOperand) -> Any:
    contracted, batch = eqn.params["dimension_numbers"]
    both = (x, y)
    if any(isinstance(v.kind, Batched) for v in both):
        return None
    axes = [_ragged_axes(v) for v in both]
    if any(set(ragged) & set(dims) for ragged, dims in zip(axes, batch, strict=True)):
        return None
    summed = [
        [i for i, axis in enumerate(dims) if axis in ragged]
        for ragged, dims in zip(axes, contracted, strict=True)
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
            for dims, (axis, _) in zip(pair, cuts, strict=True)
        )
        for pair in eqn.params["dimension_numbers"]
    )
    with_blocks = tuple((*dims, axis) for dims, (axis, _) in zip(batch, cuts, strict=True))
    blocks = [cut(factor, axis) for factor, (axis, cut) in zip(factors, cuts, strict=True)]
    params = {**eqn.params, "dimension_numbers": (contracted, with_blocks)}
    result = eqn.primitive.bind(*blocks, **params)
    return join(jnp.moveaxis(result, len(batch[0]), place), place)


def _of_pairs_and_rows(
    context: RaggedContext,
    eqn: JaxprEqn,
    operands: Sequence[RaggedOperand],
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
    context: RaggedContext, eqn: JaxprEqn, operands: Sequence[RaggedOperand], factors: Sequence[Any]
) -> Any:
    """Return the product of pairs and pairs, computed as `[N, N]` matrices."""
    kind = result_kind(context, eqn)
    band = context.sizes.band(kind.size)
    both = zip(factors, operands, strict=True)
    whole = [band.whole(factor, pairs_of(x).axes) for factor, x in both]
    array = eqn.primitive.bind(*whole, **eqn.params)
    return paired(context, band.cut(array, kind.axes), kind)


def _ragged_axes(x: RaggedOperand) -> tuple[int, ...]:
    if isinstance(x.kind, Pairs):
        return x.kind.axes
    return (x.axis,) if x.is_packed else ()


def _factor(context: RaggedContext, x: RaggedOperand, over: int) -> Any:
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
    context: RaggedContext, eqn: JaxprEqn, x: RaggedOperand, place: int, row_axis: int, like: Any
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
