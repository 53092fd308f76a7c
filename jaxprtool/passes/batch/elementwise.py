"""Rules for what is computed element by element from several operands.

Most such primitives broadcast dimensions of size 1 and take scalars beside arrays: an unmapped
operand of theirs needs no more than a dimension of size 1. `clamp` and `select_n` want operands of
one shape, and may have scalars for some. Neither needs the mapped dimension in front.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import (
    filled,
    lane_shape,
    meeting_dim,
    nbytes,
    placed,
    prefers_jaxs,
    result_sizes,
    rule_for,
    with_one_lane,
)

Params = dict[str, Any]


@rule_for(*jaxcompat.broadcasting_primitives())
def _broadcasting(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """All operands but scalars get the rank of the result: those that are unmapped, or have one
    number for each lane, by dimensions of size 1."""
    lanes = list(map(lane_shape, operands, dims))
    rank = max(map(len, lanes))
    array_dims = [dim if len(lane) == rank else None for lane, dim in zip(lanes, dims, strict=True)]
    if len({(x.shape, dim) for x, dim in zip(operands, dims, strict=True) if x.ndim}) == 1:
        return None  # nothing is to be moved
    sizes = result_sizes(axis, primitive, operands, dims, params)
    target = meeting_dim(operands, array_dims, sizes)

    def prepared(x: Any, dim: Dim) -> Any:
        if dim is None:
            return with_one_lane(x, target) if x.ndim else x
        if x.ndim == rank + 1:
            return placed(axis, x, dim, target)
        return lax.expand_dims(x, [i for i in range(rank + 1) if i != target])

    results = primitive.bind(*map(prepared, operands, dims), **params)
    return results, [target] * len(results) if primitive.multiple_results else target


@rule_for("add_any")
def _add_any(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """A sum with an unmapped term is one that broadcasts, which `add_any` does not."""
    if None not in dims or axis.size == 0 or not jnp.issubdtype(operands[0].dtype, jnp.number):
        return None
    if len({jax.typeof(term).weak_type for term in operands}) > 1:
        return None  # `add_any` takes the type of its first operand
    target = next(dim for dim in dims if dim is not None)
    terms = [
        with_one_lane(term, target) if dim is None and term.ndim else term
        for term, dim in zip(operands, dims, strict=True)
    ]
    return lax.add_p.bind(*terms), target


@rule_for("clamp", always=True)
def _clamp(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Bounds are scalars or have the shape of what they bound, each for itself. JAX's rule fails
    for a scalar that only its upper bound makes differ by lane."""
    if prefers_jaxs(axis) and lane_shape(operands[1], dims[1]):
        return None
    prepared, target = _of_one_shape(axis, operands, dims, {1})
    return primitive.bind(*prepared, **params), target


@rule_for("select_n")
def _select_n(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Cases have one shape; which one is taken is said by a scalar, or for each element."""
    prepared, target = _of_one_shape(axis, operands, dims, range(1, len(operands)))
    return primitive.bind(*prepared, **params), target


def _of_one_shape(
    axis: Axis, operands: Sequence[Any], dims: Sequence[Dim], always: Collection[int]
) -> tuple[list[Any], int]:
    """Operands in one shape, and where that is mapped; scalars stay scalars, save for those that
    `always` have it, as the second operand does."""
    lane = lane_shape(operands[1], dims[1])
    rank, size = len(lane), nbytes((axis.size, *lane), operands[1].dtype)
    array_dims = [
        dim if x.ndim == rank + 1 else None for x, dim in zip(operands, dims, strict=True)
    ]
    target = meeting_dim(operands, array_dims, [size])
    model = placed(axis, operands[1], dims[1], target)

    def prepared(i: int, x: Any, dim: Dim) -> Any:
        if i == 1:
            return model
        if i in always or len(lane_shape(x, dim)) == rank > 0:
            return placed(axis, x, dim, target)
        return x if dim is None else filled(x, model, target)

    return [prepared(i, x, d) for i, (x, d) in enumerate(zip(operands, dims, strict=True))], target


@rule_for("tie", always=True)
def _tie(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """The result is the second operand, wherever that is mapped; the first may be anything."""
    return primitive.bind(*operands, **params), dims[1]
