"""Rules for pairs of rows, `[..., N, ..., N]`: attention of all rows to all, masked by example.

A pair of rows of two lanes is computed like others, and belongs to none. It holds what its row,
paired with itself, does, so that nothing is computed of it that is not computed of a pair that
counts, neither is a derivative. A sum over one of the two axes leaves it out.

Rules are for equations of which an operand or a result is so. They return None as those of
`table.ragged_rules` do: then lanes are padded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mask.reductions import largest, least
from jaxprtool.passes.mask.values import is_number
from jaxprtool.passes.ragged.reductions import segment_sum
from jaxprtool.passes.ragged.stacked import with_a_row
from jaxprtool.passes.ragged.table import RaggedRule, Ragging
from jaxprtool.passes.ragged.values import Lanes, Pairs, Shared, Value

#: Rules by primitive.
pair_rules: RuleTable[RaggedRule] = RuleTable()


def of_one_lane(
    ragging: Ragging, shape: tuple[Any, ...], kind: Pairs, over: int | None = None
) -> Any:
    """Return which pairs count: those of two rows of one lane.

    A row left over counts as the first does, with which it is equal, but in a sum over it. If no
    row belongs to a lane, the first does: a sum is not of nothing.

    Args:
        ragging: Where rows are.
        shape: The shape of the mask.
        kind: Where its ragged axes are.
        over: The axis that is summed over: the second of the two if it is None.
    """
    kept, summed = ragging.lanes(kind.size), ragging.examples(kind.size)
    if not ragging.sizes.is_exact(kind.size):
        is_first = lax.iota(jnp.int32, summed.shape[0]) == 0
        summed = lax.select(is_first, kept, summed)
    first, second = (summed, kept) if over == kind.axes[0] else (kept, summed)
    return lax.broadcast_in_dim(first[:, None] == second, shape, kind.axes)


def without_others(ragging: Ragging, array: Any, kind: Pairs, over: int, other: Any = 0) -> Any:
    """Return pairs with a number in those that a sum over an axis leaves out."""
    counted = of_one_lane(ragging, array.shape, kind, over)
    return lax.select(counted, array, lax.full_like(array, other))


def paired(ragging: Ragging, array: Any, kind: Pairs) -> Any:
    """Return an array with those pairs that do not count as the rules have them."""
    own = jnp.diagonal(array, 0, *kind.axes)
    own = lax.stop_gradient(jnp.moveaxis(own, -1, kind.axes[0]))
    dims = [i for i in range(array.ndim) if i != kind.axes[1]]
    counted = of_one_lane(ragging, array.shape, kind)
    return lax.select(counted, array, lax.broadcast_in_dim(own, array.shape, dims))


def _pairs(x: Value) -> Pairs:
    """Return where the ragged axes of a value are that is known to hold pairs."""
    assert isinstance(x.kind, Pairs)
    return x.kind


def _result_kind(ragging: Ragging, eqn: JaxprEqn) -> Any:
    return ragging.sizes.canonical(eqn.outvars[0].aval)


# --- elements -----------------------------------------------------------------------------------


@rule(pair_rules, "elementwise")
def _elementwise(ragging: Ragging, eqn: JaxprEqn, *operands: Value) -> Any:
    shape, kind = tuple(eqn.outvars[0].aval.shape), _result_kind(ragging, eqn)
    whole, (first, second) = ragging.sizes.shape(kind, shape), kind.axes
    arrays = []
    for x in operands:
        array = ragging.along(x, shape, first)
        if x.is_packed and x.axis == second:  # of size 1 along the first
            array = paired(ragging, jnp.broadcast_to(array, whole), kind)
        arrays.append(array)
    return ragging.bind(eqn, *arrays)


@rule(pair_rules, "iota")
def _iota(ragging: Ragging, eqn: JaxprEqn) -> Any:
    kind, dimension = _result_kind(ragging, eqn), eqn.params["dimension"]
    if dimension not in kind.axes:
        return ragging.bind(eqn)
    numbers = ragging.positions(kind.size).astype(eqn.params["dtype"])
    whole = ragging.sizes.shape(kind, eqn.params["shape"])
    array = lax.broadcast_in_dim(numbers, whole, (dimension,))
    return paired(ragging, array, kind) if dimension == kind.axes[1] else array


@rule(pair_rules, "broadcast_in_dim")
def _broadcast_in_dim(ragging: Ragging, eqn: JaxprEqn, x: Value) -> Any:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kind = _result_kind(ragging, eqn)
    if isinstance(x.kind, Lanes):
        # A size of 1 along a ragged axis is left out; the lane's value is at each of its rows.
        kept = [i for i, dim in enumerate(dims) if dim not in kind.axes]
        array = x.array.reshape(x.array.shape[0], *(x.shape[i] for i in kept))
        places = [kind.axes[0], *(dims[i] for i in kept)]
        order = sorted(range(len(places)), key=lambda i: places[i])
        rows = jnp.transpose(ragging.at_rows(array, kind.size), order)
        return lax.broadcast_in_dim(rows, ragging.sizes.shape(kind, shape), sorted(places))
    array = ragging.bind(eqn, x)
    is_second = x.is_packed and dims[x.axis] == kind.axes[1]
    return paired(ragging, array, kind) if is_second else array


@rule(pair_rules, "transpose")
def _transpose(ragging: Ragging, eqn: JaxprEqn, x: Value) -> Any:
    array, order = ragging.bind(eqn, x), eqn.params["permutation"]
    first, second = map(order.index, _pairs(x).axes)
    return array if first < second else paired(ragging, array, _result_kind(ragging, eqn))


@rule(pair_rules, "squeeze")
def _squeeze(ragging: Ragging, eqn: JaxprEqn, x: Value) -> Any:
    return ragging.bind(eqn, x)


@rule(pair_rules, "reshape")
def _reshape(ragging: Ragging, eqn: JaxprEqn, x: Value) -> Any:
    """Pairs stay pairs if what is before, between and after the two axes stays as large."""
    kind = _result_kind(ragging, eqn)
    if not (isinstance(x.kind, Pairs) and isinstance(kind, Pairs)) or eqn.params["dimensions"]:
        return None
    old, new = (
        [_product(shape[: axes[0]]), _product(shape[axes[0] + 1 : axes[1]])]
        for shape, axes in ((x.shape, x.kind.axes), (eqn.outvars[0].aval.shape, kind.axes))
    )
    return ragging.bind(eqn, x) if old == new and x.kind.size == kind.size else None


def _product(sizes: Any) -> Any:
    result = 1
    for size in sizes:
        result = result * size
    return result


@rule(pair_rules, "gather")
def _gather(ragging: Ragging, eqn: JaxprEqn, x: Value, indices: Value) -> Any:
    """Look up a table that all lanes share: a bias for each distance, say."""
    if not isinstance(x.kind, Shared) or not isinstance(indices.kind, Pairs):
        return None
    return ragging.bind(eqn, x, indices)


# --- reductions ---------------------------------------------------------------------------------


@rule(pair_rules, "reduce_sum")
def _sum(ragging: Ragging, eqn: JaxprEqn, x: Value) -> Any:
    axes, kind = eqn.params["axes"], _pairs(x)
    over = [axis for axis in kind.axes if axis in axes]
    if not over:
        return ragging.bind(eqn, x)
    summed = without_others(ragging, x.array, kind, over[-1])
    if len(over) == 1:
        return _of_rows(ragging, ragging.bind(eqn, summed), eqn, kind, over[0])
    rows = jnp.moveaxis(summed, kind.axes[0], 0)
    others = tuple(axis + (axis < kind.axes[0]) for axis in axes if axis != kind.axes[0])
    return segment_sum(ragging, ragging.bind(eqn, rows, axes=others), 0, kind.size)


@rule(pair_rules, "reduce_max", "reduce_min")
def _extremes(ragging: Ragging, eqn: JaxprEqn, x: Value) -> Any:
    def of(counted: Any) -> Any:
        largest_of = eqn.primitive.name == "reduce_max"
        return _extreme(largest_of, tuple(eqn.params["axes"]), x.array, counted)

    return _over_one(ragging, eqn, x, of)


@rule(pair_rules, "reduce_or", "reduce_and")
def _logical(ragging: Ragging, eqn: JaxprEqn, x: Value) -> Any:
    def of(counted: Any) -> Any:
        # Of the bits of integers, too: of -1 all are set.
        is_and, is_bool = eqn.primitive.name == "reduce_and", x.array.dtype == bool
        identity = is_and if is_bool else -int(is_and)
        return ragging.bind(eqn, lax.select(counted, x.array, lax.full_like(x.array, identity)))

    return _over_one(ragging, eqn, x, of)


def _over_one(ragging: Ragging, eqn: JaxprEqn, x: Value, of: Callable[[Any], Any]) -> Any:
    """Return a reduction over one of the two axes, of the pairs that count; None over both."""
    axes, kind = eqn.params["axes"], _pairs(x)
    over = [axis for axis in kind.axes if axis in axes]
    if not over:
        return ragging.bind(eqn, x)
    if len(over) == 2:
        return None
    counted = of_one_lane(ragging, x.array.shape, kind, over[0])
    return _of_rows(ragging, of(counted), eqn, kind, over[0])


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extreme(largest_of: bool, axes: tuple[int, ...], array: Any, counted: Any) -> Any:
    """Return the largest, or least, of the pairs that count.

    The derivative is shared by those that are equal to it, and by none that does not count.
    """
    number = (least if largest_of else largest)(array.dtype)
    filled = lax.select(counted, array, lax.full_like(array, number))
    return (lax.reduce_max if largest_of else lax.reduce_min)(filled, axes)


@_extreme.defjvp
def _extreme_jvp(largest_of: bool, axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    array, counted = primals
    best = _extreme(largest_of, axes, array, counted)
    is_best = ((array == jnp.expand_dims(best, axes)) & counted).astype(array.dtype)
    return best, (tangents[0] * is_best).sum(axes) / is_best.sum(axes)


def _of_rows(ragging: Ragging, found: Any, eqn: JaxprEqn, kind: Pairs, over: int) -> Any:
    """Return packed rows, with those left over as they are to be, after a sum over an axis."""
    if over == kind.axes[1]:
        return found
    return ragging.spared(found, _result_kind(ragging, eqn).axis, kind.size)


# --- products -----------------------------------------------------------------------------------


@rule(pair_rules, "dot_general")
def _dot_general(ragging: Ragging, eqn: JaxprEqn, x: Value, y: Value) -> Any:
    contracted, batch = eqn.params["dimension_numbers"]
    both = (x, y)
    if any(isinstance(v.kind, Lanes) for v in both):
        return None
    axes = [_ragged_axes(v) for v in both]
    if any(set(own) & set(dims) for own, dims in zip(axes, batch, strict=True)):
        return None
    summed = [
        [i for i, axis in enumerate(dims) if axis in own]
        for own, dims in zip(axes, contracted, strict=True)
    ]
    kind = _result_kind(ragging, eqn)
    if not any(summed):
        array = ragging.bind(eqn, x, y)
        return paired(ragging, array, kind) if x.is_packed else array
    if len(summed[0]) != 1 or summed[0] != summed[1]:
        return None
    over = [dims[summed[0][0]] for dims in contracted]
    factors = [_factor(ragging, v, axis) for v, axis in zip(both, over, strict=True)]
    array = ragging.bind(eqn, *factors)
    if isinstance(kind, Pairs):
        return paired(ragging, array, kind)
    place = 0 if isinstance(x.kind, Pairs) else 1
    array = array + _not_finite(ragging, eqn, both[1 - place], 1 - place, kind.axis, array)
    return _of_rows(ragging, array, eqn, _pairs(both[place]), over[place])


def _ragged_axes(x: Value) -> tuple[int, ...]:
    if isinstance(x.kind, Pairs):
        return x.kind.axes
    return (x.axis,) if x.is_packed else ()


def _factor(ragging: Ragging, x: Value, over: int) -> Any:
    """Return a factor of a product that sums over an axis: zero where it does not count.

    A zero does not take out a row that is not finite, so that such rows have none here: they are
    brought back by `_not_finite`, in their own lane.
    """
    if isinstance(x.kind, Pairs):
        return without_others(ragging, x.array, x.kind, over)
    return _finite(x.array) if jnp.issubdtype(x.array.dtype, jnp.inexact) else x.array


@jax.custom_jvp
def _finite(array: Any) -> Any:
    """Return an array with zeros for what is not finite, of which the derivative is that of it."""
    return jnp.where(jnp.isfinite(array), array, 0)


_finite.defjvp(lambda primals, tangents: (_finite(*primals), tangents[0]))


def _not_finite(
    ragging: Ragging, eqn: JaxprEqn, x: Value, place: int, row_axis: int, like: Any
) -> Any:
    """Return what is NaN in the rows of lanes in which a packed factor is not finite, and else 0.

    Args:
        ragging: Where rows are.
        eqn: The product.
        x: The packed factor.
        place: Which of the two it is.
        row_axis: The ragged axis of the product.
        like: The product.
    """
    if not jnp.issubdtype(x.array.dtype, jnp.inexact):
        return jnp.zeros((), like.dtype)
    contracted, batch = (dims[place] for dims in eqn.params["dimension_numbers"])
    rest = [i for i in range(len(x.shape)) if i != x.axis]
    zeros = jnp.moveaxis(lax.stop_gradient(x.array), x.axis, 0) * 0
    summed = zeros.sum(tuple(1 + i for i, axis in enumerate(rest) if axis in contracted))
    lanes = segment_sum(ragging, summed.astype(like.dtype), 0, x.size)
    rows = ragging.at_rows(lanes, x.size)
    rest = [axis for axis in rest if axis not in contracted]
    free = [axis for axis in rest if axis not in batch]
    start = len(batch) if place == 0 else like.ndim - len(free)
    at = {axis: i for i, axis in enumerate(batch)} | {a: start + i for i, a in enumerate(free)}
    places = [row_axis, *(at[axis] for axis in rest)]
    order = sorted(range(len(places)), key=lambda i: places[i])
    return lax.broadcast_in_dim(jnp.transpose(rows, order), like.shape, sorted(places))


# --- one form made of another -----------------------------------------------------------------


def lanes_of_pairs(ragging: Ragging, x: Value) -> Any:
    """Return pairs of rows as padded lanes, with zeros in the padding."""
    first, second = ragging.sizes.axes(x.shape)
    size = x.shape[first]
    numbers = jnp.arange(ragging.sizes.bounds.padded(size), dtype=jnp.int32)
    rows = ragging.starts(size)[:, None] + numbers
    pairs = jnp.moveaxis(x.array, (first, second), (0, 1))
    found = pairs.at[rows[:, :, None], rows[:, None]].get(mode="clip")
    lanes = jnp.moveaxis(found, (1, 2), (first + 1, second + 1))
    if not is_number(x.array):
        return lanes
    valid = numbers < ragging.lengths(size)[:, None]
    both = valid[:, :, None] & valid[:, None]
    within = lax.broadcast_in_dim(both, lanes.shape, (0, first + 1, second + 1))
    return lax.select(within, lanes, lax.full_like(lanes, 0))


def pairs_of_lanes(ragging: Ragging, x: Value) -> Any:
    """Return padded lanes as pairs of rows, those of two lanes as `paired` has them."""
    first, second = ragging.sizes.axes(x.shape)
    size = x.shape[first]
    lanes = jnp.moveaxis(x.array, (first + 1, second + 1), (1, 2))
    lanes = with_a_row(ragging, with_a_row(ragging, lanes, 1), 2)
    of, at = ragging.lanes(size), ragging.positions(size)
    kind = Pairs((0, 1), size)
    shape = of.shape * 2
    others = lax.select(
        of_one_lane(ragging, shape, kind),
        jnp.broadcast_to(at, shape),
        jnp.broadcast_to(at[:, None], shape),
    )
    found = lanes.at[of[:, None], at[:, None], others].get(mode="clip")
    return jnp.moveaxis(found, (0, 1), (first, second))
