"""Packed rule for `dot_general`."""

from __future__ import annotations

from typing import Any

from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.ragged.reductions import segment_sum
from jaxprtool.passes.mapping.ragged.table import RaggedContext, ragged_rules
from jaxprtool.passes.mapping.ragged.values import Batched, Value


@rule(ragged_rules, "dot_general")
def _dot_general(context: RaggedContext, eqn: JaxprEqn, x: Value, y: Value) -> Any:
    """Compute one product for the rows of all examples, unless a factor is batched."""
    if isinstance(x.kind, Batched) or isinstance(y.kind, Batched):
        return None
    contracted, _ = eqn.params["dimension_numbers"]
    if any(v.is_packed and v.axis in dims for v, dims in zip((x, y), contracted, strict=True)):
        return _summed(context, eqn, x, y)
    return context.bind(eqn, x, y)


def _summed(context: RaggedContext, eqn: JaxprEqn, x: Value, y: Value) -> Any:
    """Return a product that sums over rows, as a segment sum, if one factor is a vector.

    A product of two matrices, `x.T @ y`, takes less memory with padded examples.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    if batch[0] or len(contracted[0]) > 1 or min(len(x.shape), len(y.shape)) > 1:
        return None
    kind = eqn.params["preferred_element_type"] or eqn.outvars[0].aval.dtype
    one, many = (x, y) if len(x.shape) == 1 else (y, x)
    axis = many.axis
    weights = lax.broadcast_in_dim(one.array.astype(kind), many.array.shape, (axis,))
    return segment_sum(context, weights * many.array.astype(kind), axis, many.size)
