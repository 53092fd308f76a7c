"""Masking of equations that move or repeat elements, or create arrays from sizes alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules
from jaxprtool.passes.mapping.mask.values import Filled, Padded, number


@rule(mask_rules, jaxcompat.DIM_AS_VALUE)
def _dim_as_value(context: MaskContext, eqn: JaxprEqn) -> Any:
    return jnp.asarray(context.size(eqn.params["dim"]), eqn.outvars[0].aval.dtype)


@rule(mask_rules, "device_put")
def _device_put(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    return context.bind(eqn, *operands)


@rule(mask_rules, "iota")
def _iota(context: MaskContext, eqn: JaxprEqn, *shape: Padded) -> Any:
    params = eqn.params
    return lax.broadcasted_iota(
        params["dtype"], context.bounds.shape(params["shape"]), params["dimension"]
    )


@rule(mask_rules, "broadcast_in_dim")
def _broadcast_in_dim(context: MaskContext, eqn: JaxprEqn, x: Padded, *sizes: Padded) -> Any:
    shape, kept = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    whole = context.bounds.shape(shape)
    own = {axis: i for i, axis in enumerate(kept) if x.shape[i] == shape[axis]}
    mixed = [axis for axis in context.bounds.axes(shape) if axis not in own]
    made = context.apply(
        lambda array: lax.broadcast_in_dim(array, whole, kept), [x], shape, mixed=mixed
    )
    fills = {axis: x.fill(i) for axis, i in own.items()}
    if x.facts.literal is not None:
        fills = dict.fromkeys(range(len(shape)), number(x.facts.literal, x.dtype))
    return Filled(made, fills)


@rule(mask_rules, "transpose")
def _transpose(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    permutation = eqn.params["permutation"]
    fills = {axis: x.fill(i) for axis, i in enumerate(permutation)}
    return Filled(context.bind(eqn, x), fills)


@rule(mask_rules, "squeeze")
def _squeeze(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    kept = [i for i in range(x.ndim) if i not in eqn.params["dimensions"]]
    return Filled(context.bind(eqn, x), {axis: x.fill(i) for axis, i in enumerate(kept)})
