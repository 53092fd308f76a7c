"""Masking of reductions: padding is made the number that does not change the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mask.table import Masking, MaskRule, mask_rules
from jaxprtool.passes.mask.values import Padded


def least(dtype: Any) -> Any:
    """Return the identity of a maximum."""
    if dtype == np.bool_:
        return False
    return -np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def largest(dtype: Any) -> Any:
    """Return the identity of a minimum."""
    if dtype == np.bool_:
        return True
    return np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _reduction(identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a reduction that this number of a dtype does not change."""

    def apply(masking: Masking, eqn: JaxprEqn, x: Padded) -> Any:
        fills = dict.fromkeys(eqn.params["axes"], identity(x.dtype))
        return masking.bind(eqn, masking.filled(x, fills))

    return apply


def _all_bits(dtype: Any) -> Any:
    return True if dtype == np.bool_ else np.asarray(-1).astype(dtype)


rule(mask_rules, "reduce_sum", "reduce_or", "reduce_xor")(_reduction(lambda dtype: 0))
rule(mask_rules, "reduce_prod")(_reduction(lambda dtype: 1))
rule(mask_rules, "reduce_max")(_reduction(least))
rule(mask_rules, "reduce_min")(_reduction(largest))
rule(mask_rules, "reduce_and")(_reduction(_all_bits))
