"""Masking of random bits: the bits of each element depend on its logical position.

With `jax_threefry_partitionable`, the default, JAX computes the bits of Threefry from the position
of each element alone. So they do not depend on the size of the array.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.reshaping import reshaped
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules, refusal
from jaxprtool.passes.mapping.mask.values import Facts, Padded


@rule(mask_rules, "random_bits", "random_split")
def _by_position(context: MaskContext, eqn: JaxprEqn, keys: Padded) -> Any:
    shape = eqn.params["shape"]
    if not any(map(context.bounds.is_masked, shape)):
        return context.bind(eqn, keys)
    if jax.random.key_impl(keys.array) != "threefry2x32":
        raise refusal(eqn, "its random bits depend on the size, because the key is not Threefry")
    if not eqn.ctx.threefry_partitionable:
        raise refusal(
            eqn,
            "its random bits depend on the size",
            "they do not with jax.config.update('jax_threefry_partitionable', True)",
        )
    number = prod(shape)
    array = context.bind(eqn, keys, shape=(context.bounds.padded(number),))
    flat = Padded(array, Facts.unknown((*keys.shape, number)))
    return reshaped(context, flat, (*keys.shape, *shape))


@rule(mask_rules, "random_clone", "random_fold_in", "random_seed", "random_unwrap", "random_wrap")
def _by_key(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    return context.bind(eqn, *operands)
