"""Masking of sorts and selections: padding is sorted, or selected, last."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.reductions import largest, least, reduction
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules
from jaxprtool.passes.mapping.mask.values import Filled, Padded


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
    known = [Filled(y, {axis: _last(y.dtype)}) for y in results[:keys]]
    return [*known, *results[keys:]]


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
