"""Rules for what lays arrays out anew: the mapped dimension stays where it is, if it can.

It may be anywhere between the dimensions that it is between, so that a reshape, or a broadcast,
that leaves what is before it apart from what is after it needs no transpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import (
    lane_shape,
    nbytes,
    only,
    placed,
    result_sizes,
    rule_for,
    together,
)

Params = dict[str, Any]


@rule_for("squeeze")
def _squeeze(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    x, dim = only(operands, dims)
    gone = [d + (d >= dim) for d in params["dimensions"]]
    return lax.squeeze(x, gone), dim - sum(d < dim for d in gone)


@rule_for("reshape")
def _reshape(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Elements keep their order: the mapped dimension can stay if as many of them are before it,
    and as many after it, as with some dimension of the new shape."""
    (x, dim), sizes = only(operands, dims), params["new_sizes"]
    if params["dimensions"] is not None or params["sharding"] is not None:
        return None
    before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    places = [
        i
        for i in range(len(sizes) + 1)
        if math.prod(sizes[:i]) == before and math.prod(sizes[i:]) == after
    ]
    if not places:
        return None
    place = _nearest(places, x, dim)
    return lax.reshape(x, (*sizes[:place], x.shape[dim], *sizes[place:])), place


@rule_for("broadcast_in_dim")
def _broadcast_in_dim(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """The mapped dimension stays between its neighbours.

    An operand that grows is rather moved to the front before than after.
    """
    (x, dim), shape = only(operands, dims), params["shape"]
    if params["sharding"] is not None:
        return None
    if nbytes(shape, x.dtype) > nbytes(lane_shape(x, dim), x.dtype):
        return None
    kept = params["broadcast_dimensions"]
    first = kept[dim - 1] + 1 if dim else 0
    last = kept[dim] if dim < len(kept) else len(shape)
    place = _nearest(range(first, last + 1), x, dim)
    new_shape = (*shape[:place], x.shape[dim], *shape[place:])
    moved = [d + (d >= place) for d in kept]
    return lax.broadcast_in_dim(x, new_shape, (*moved[:dim], place, *moved[dim:])), place


def _nearest(places: Sequence[int], x: Any, dim: int) -> int:
    """One of the places that are free: the last for what was mapped last, else the first."""
    return places[-1] if 0 < dim == x.ndim - 1 else places[0]


@rule_for("concatenate")
def _concatenate(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    sizes = result_sizes(axis, primitive, operands, dims, params)
    parts, target = together(axis, operands, dims, sizes)
    dimension = params["dimension"]
    return lax.concatenate(parts, dimension + (dimension >= target)), target


@rule_for("bitcast_convert_type", always=True)
def _bitcast_convert_type(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """A wider type takes the last dimension up in its elements, and must not take the mapped one,
    as it does in JAX's rule."""
    x, dim = only(operands, dims)
    lane = jax.ShapeDtypeStruct(lane_shape(x, dim), x.dtype)
    result = jax.eval_shape(lambda x: lax.bitcast_convert_type(x, params["new_dtype"]), lane)
    if not result.ndim < lane.ndim == dim:
        return None
    return primitive.bind(placed(axis, x, dim, 0), **params), 0
