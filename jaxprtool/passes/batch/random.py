"""Rules for random keys: arrays of numbers become arrays of keys where they are mapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import rule_for


@rule_for("random_wrap")
def _wrap(
    axis: Axis,
    primitive: Primitive,
    operands: Sequence[Any],
    dims: Sequence[Dim],
    params: dict[str, Any],
) -> Any:
    """JAX's rule moves the numbers to the front; that is needed only for one of a key's own."""
    (x,), (dim,) = operands, dims
    if dim >= x.ndim - len(params["impl"].key_shape):
        return None
    return primitive.bind(x, **params), dim
