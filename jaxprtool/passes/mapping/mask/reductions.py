"""Masking of reductions: the padding is filled with the identity of the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn
from jaxprtool.passes.mapping.mask.table import MaskContext, MaskRule, mask_rules, refusal
from jaxprtool.passes.mapping.mask.values import Facts, Padded, number


def least(dtype: Any) -> Any:
    """Return the identity of a maximum: the least number of a dtype."""
    return _limit(dtype, lowest=True)


def largest(dtype: Any) -> Any:
    """Return the identity of a minimum: the largest number of a dtype."""
    return _limit(dtype, lowest=False)


def _limit(dtype: Any, *, lowest: bool) -> Any:
    """Return an end of the order of a dtype. Not every float dtype has an infinity."""
    if dtype == np.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max
    infinity = -np.inf if lowest else np.inf
    if jnp.issubdtype(dtype, jnp.complexfloating):  # ordered by the real part, then the imaginary
        return complex(infinity, infinity)
    if np.isinf(np.asarray(infinity).astype(dtype).astype(np.float64)):
        return infinity
    return float(jnp.finfo(dtype).min if lowest else jnp.finfo(dtype).max)


def one(dtype: Any) -> Any:
    """Return the identity of a product.

    Raises ValueError for complex numbers: an infinity times 1+0j has NaN as its imaginary part.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError("no number in the padding keeps a product of complex infinities")
    return 1


def identities(
    context: MaskContext, x: Padded, axes: Sequence[int], identity: Callable[[Any], Any]
) -> dict[int, Any]:
    """Return the fills of the padded axes of a reduction with this identity."""
    padded = context.axes(x)
    return {axis: identity(x.dtype) for axis in axes if axis in padded}


def reduction(identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a reduction with this identity, a function of the dtype."""

    def apply(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
        fills = identities(context, x, eqn.params["axes"], identity)
        return context.bind(eqn, context.filled(x, fills))

    return apply


def _all_bits(dtype: Any) -> Any:
    return True if dtype == np.bool_ else np.asarray(-1).astype(dtype)


rule(mask_rules, "reduce_sum", "reduce_or", "reduce_xor")(reduction(lambda dtype: 0))
rule(mask_rules, "reduce_prod")(reduction(one))
rule(mask_rules, "reduce_and")(reduction(_all_bits))


def _extreme(identity: Callable[[Any], Any]) -> MaskRule:
    """Return the rule of a maximum or a minimum with this identity, a function of the dtype.

    The derivative is shared by all elements equal to the result. Padding must not be among them,
    though it is equal if all elements are infinite. So the derivative has its own mask.
    """

    def apply(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
        axes = eqn.params["axes"]
        padded = [axis for axis in axes if context.bounds.is_masked(x.shape[axis])]

        def filled(array: Any) -> Any:
            return context.filled(Padded(array, x.facts), dict.fromkeys(axes, identity(x.dtype)))

        if not (x.active and padded):
            return context.bind(eqn, filled(x.array))
        masks = [context.valid(x.shape[axis]) for axis in padded]
        pairs = zip(padded, masks, strict=True)
        parts = [lax.broadcast_in_dim(mask, x.array.shape, (i,)) for i, mask in pairs]
        within = reduce(lax.bitwise_and, parts)

        @jax.custom_jvp
        def extreme(array: Any, within: Any) -> Any:
            full = lax.full_like(array, identity(array.dtype))
            return context.bind(eqn, lax.select(within, array, full))

        @extreme.defjvp
        def masked_derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
            array, within = primals
            found = extreme(array, within)
            kept = [i for i in range(array.ndim) if i not in axes]
            chosen = (array == lax.broadcast_in_dim(found, array.shape, kept)) & within
            tangent = lax.select(chosen, tangents[0], lax.full_like(array, 0))
            counts = lax.convert_element_type(chosen, array.dtype).sum(axes)
            return found, tangent.sum(axes) / counts

        return extreme(x.array, within)

    return apply


rule(mask_rules, "reduce_max")(_extreme(least))
rule(mask_rules, "reduce_min")(_extreme(largest))


# --- the user's own reductions --------------------------------------------------------------------

#: The identity of each primitive that the jaxpr of a `reduce` may consist of, by dtype.
_IDENTITIES: dict[str, Callable[[Any], Any]] = {
    "add": lambda dtype: 0,
    "mul": one,
    "max": least,
    "min": largest,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "and": _all_bits,
}


def identity_of(jaxpr: AnyJaxpr) -> Callable[[Any], Any] | None:
    """Return the identity, a function of the dtype, of a jaxpr of two numbers; None if unknown."""
    body = jaxcompat.open_jaxpr(jaxpr)
    if len(body.eqns) != 1 or list(body.outvars) != list(body.eqns[0].outvars):
        return None
    (eqn,) = body.eqns
    if {*eqn.invars} != {*body.invars} or len(body.invars) != 2:
        return None
    return _IDENTITIES.get(eqn.primitive.name)


@rule(mask_rules, "reduce")
def _reduce(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    axes, jaxpr = eqn.params["dimensions"], eqn.params["jaxpr"]
    xs, inits = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    identity = identity_of(jaxpr)
    if identity is not None:
        (x,), start = xs, inits[0].facts.literal
        fills = identities(context, x, axes, identity)
        if start is not None and any(number(start, x.dtype) != fill for fill in fills.values()):
            raise refusal(
                eqn, "its initial value is not the neutral element, so its result is undefined"
            )
        return context.bind(eqn, context.filled(x, fills), *inits)
    return _reduced_with_flags(context, eqn, xs, inits)


def _reduced_with_flags(
    context: MaskContext, eqn: JaxprEqn, xs: Sequence[Padded], inits: Sequence[Padded]
) -> Any:
    """Return a reduction whose operands have a flag, False in the padding."""
    axes = eqn.params["dimensions"]
    combine = jaxcompat.jaxpr_as_fun(jaxcompat.close_jaxpr(eqn.params["jaxpr"]))
    within = context.filled(
        Padded(jnp.ones(xs[0].array.shape, np.bool_), Facts.unknown(xs[0].shape)),
        dict.fromkeys(axes, False),
    )

    def combined(first: Any, second: Any) -> Any:
        (*a, a_valid), (*b, b_valid) = first, second
        either = [lax.select(a_valid, x, y) for x, y in zip(a, b, strict=True)]
        both = a_valid & b_valid
        pairs = zip(combine(*a, *b), either, strict=True)
        return (*(lax.select(both, x, y) for x, y in pairs), a_valid | b_valid)

    arrays = (*(x.array for x in xs), within)
    starts = (*(x.array for x in inits), np.True_)
    return lax.reduce(arrays, starts, combined, axes)[:-1]
