"""Rules for collectives over the mapped axis, of lanes where they are.

JAX's rules for reductions move the lanes to the front first, and that for permutations takes them
one by one with all the care that `jnp.take` has for indices that may be out of bounds. The other
collectives' results are mapped, or not, where their parameters say; these are left to JAX's rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import placed, rule_for
from jaxprtool.passes.batch.table import jaxs_rule

Params = dict[str, Any]


@rule_for("psum", "pmax", "pmin")
def _reduce(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Named axes become dimensions, which are numbers among the names. Where no name is left it is
    a reduction as any other, which can be differentiated where a collective cannot."""
    ((x,), (dim,)), names = (operands, dims), params["axes"]
    if dim is None or axis.name not in names or params["axis_index_groups"] is not None:
        return None
    axes = tuple(
        dim if name == axis.name else name + (name >= dim) if isinstance(name, int) else name
        for name in names
    )
    if all(isinstance(name, int) for name in axes) and jnp.issubdtype(x.dtype, jnp.number):
        return _REDUCTIONS[primitive.name](x, axes), None
    return primitive.bind(x, **{**params, "axes": axes}), None


_REDUCTIONS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


@rule_for("ppermute", always=True)
def _permute(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Lanes taken in another order. A lane that is sent nothing has zeros, as on devices; JAX's
    rule has none for such permutations."""
    (x,), (dim,) = operands, dims
    if params["axis_name"] not in (axis.name, (axis.name,)):
        return None
    sources = np.full(axis.size, axis.size, np.int32)
    for source, target in params["perm"]:
        sources[target] = source
    is_whole = len(params["perm"]) == axis.size
    if dim is None:
        if is_whole:
            return x, None
        x, dim = placed(axis, x, None, 0), 0
    others = tuple(d for d in range(x.ndim) if d != dim)
    mode = lax.GatherScatterMode
    lanes = lax.gather(
        x,
        sources[:, None],
        lax.GatherDimensionNumbers(others, (dim,), (dim,)),
        (*x.shape[:dim], 1, *x.shape[dim + 1 :]),
        unique_indices=is_whole,
        mode=mode.PROMISE_IN_BOUNDS if is_whole else mode.FILL_OR_DROP,
        fill_value=None if is_whole else 0,
    )
    return lanes, dim


@rule_for("all_to_all", always=True)
def _all_to_all(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """The same parts sent from all lanes; JAX's rule takes the shape of such an operand amiss."""
    (x,), (dim,), names = operands, dims, params["axis_name"]
    names = names if isinstance(names, (tuple, list)) else (names,)
    if dim is not None or axis.name not in names or params["axis_index_groups"] is not None:
        return None
    return jaxs_rule(axis, primitive, [placed(axis, x, None, 0)], [0], params)


@rule_for("reduce_scatter", always=True)
def _reduce_scatter(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Over another axis. Untiled it takes a dimension away; JAX's rule counts one more instead."""
    (x,), (dim,), names = operands, dims, params["axis_name"]
    names = names if isinstance(names, (tuple, list)) else (names,)
    if dim is None or axis.name in names or params["tiled"] or dim <= params["scatter_dimension"]:
        return None
    return primitive.bind(x, **params), dim - 1
