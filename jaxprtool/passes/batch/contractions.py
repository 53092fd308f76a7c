"""Rules for contractions.

That of dot_general is JAX's, which moves nothing: the mapped dimension is one more batch dimension
if both operands have it, and goes to the result with the operand that has it if one has. So is
that of most convolutions, where lanes are more examples, features or groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import rule_for

Params = dict[str, Any]


@rule_for("conv_general_dilated")
def _grouped_convolution(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """A convolution in groups, of which one operand is mapped.

    The lanes are put within the groups, which stay outermost. That takes one reshape to part the
    groups, and one to make a dimension of groups, lanes and what is in a group.
    """
    (lhs, rhs), (lhs_dim, rhs_dim) = operands, dims
    (examples, *_), (features, *_), (out_examples, out_features, *_) = params["dimension_numbers"]
    batch_groups = params["batch_group_count"]
    groups = max(batch_groups, params["feature_group_count"])
    static = all(isinstance(size, int) for size in (axis.size, *lhs.shape, *rhs.shape))
    if groups == 1 or not static or axis.size == 0 or params.get("out_sharding") is not None:
        return None
    if rhs_dim is None and lhs_dim is not None and batch_groups > 1:
        lhs = _within_groups(lhs, lhs_dim, examples, groups)
        out = primitive.bind(lhs, rhs, **params)
        return lax.reshape(out, _split(out.shape, out_examples, axis.size)), out_examples
    if lhs_dim is None and rhs_dim is not None:
        rhs = _within_groups(rhs, rhs_dim, features, groups)
        out = primitive.bind(lhs, rhs, **params)
        parts = _split(_split(out.shape, out_features, groups), out_features + 1, axis.size)
        order = list(range(len(parts)))
        order[out_features : out_features + 2] = out_features + 1, out_features
        lanes_first = lax.reshape(
            lax.reshape(out, parts), _split(out.shape, out_features, axis.size), order
        )
        return lanes_first, out_features
    return None


def _within_groups(x: Any, dim: int, grouped: int, groups: int) -> Any:
    """The lanes of `x` put between the groups of a dimension and what is in each group.

    `grouped` is that dimension in a lane.
    """
    lane = [d for d in range(x.ndim) if d != dim]
    each = x.shape[lane[grouped]] // groups
    sizes = [x.shape[d] for d in lane]
    sizes[grouped] *= x.shape[dim]
    if each == 1:
        return lax.reshape(x, sizes, [*lane[: grouped + 1], dim, *lane[grouped + 1 :]])
    at = lane[grouped]
    lane = [d + (d > at) for d in lane]
    order = [*lane[: grouped + 1], dim + (dim > at), at + 1, *lane[grouped + 1 :]]
    return lax.reshape(lax.reshape(x, _split(x.shape, at, groups)), sizes, order)


def _split(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    """A shape with one dimension as two, the first of them of size `count`."""
    return (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
