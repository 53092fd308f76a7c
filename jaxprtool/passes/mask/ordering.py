"""Masking of what orders elements: padding comes last, or is never found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mask.reductions import largest, least
from jaxprtool.passes.mask.table import Masking, MaskRule, mask_rules
from jaxprtool.passes.mask.values import Filled, Padded


def _last(dtype: Any) -> Any:
    """Return what JAX sorts last."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(np.nan, np.nan)
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else largest(dtype)


@rule(mask_rules, "sort")
def _sort(masking: Masking, eqn: JaxprEqn, *operands: Padded) -> Any:
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    if not masking.bounds.is_masked(operands[0].shape[axis]):
        return masking.bind(eqn, *operands)
    # What is equal to the padding in all keys stays before it, since the sort is stable.
    filled = [masking.filled(x, {axis: _last(x.dtype)}) for x in operands[:keys]]
    results = masking.bind(eqn, *filled, *operands[keys:], is_stable=True)
    known = [Filled(y, {axis: _last(y.dtype)}) for y in results[:keys]]
    return [*known, *results[keys:]]


@rule(mask_rules, "top_k")
def _top_k(masking: Masking, eqn: JaxprEqn, x: Padded) -> Any:
    axis = eqn.params.get("axis", x.ndim - 1)
    values, places = masking.bind(eqn, masking.filled(x, {axis: least(x.dtype)}))
    shape = eqn.outvars[0].aval.shape
    return masking.apart(values, shape, [axis], active=x.active), places


def _first(identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule for the place of an extreme: of equal ones it is the first."""

    def apply(masking: Masking, eqn: JaxprEqn, x: Padded) -> Any:
        fills = dict.fromkeys(eqn.params["axes"], identity(x.dtype))
        return masking.bind(eqn, masking.filled(x, fills))

    return apply


rule(mask_rules, "argmax")(_first(least))
rule(mask_rules, "argmin")(_first(largest))
