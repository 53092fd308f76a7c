"""The costs of primitives by the rules of `jax.experimental.roofline`."""

from __future__ import annotations

import jax
from jax.extend.core import JaxprEqn


def roofline_flops(eqn: JaxprEqn) -> int | None:
    """Return the FLOPs of an equation by a rule from `register_roofline`.

    Returns:
        None if there is no rule, if the rule counts no FLOPs, as for many JAX primitives, or if the
        equation has operands other than arrays of known sizes, which rules do not support.
    """
    from jax.experimental.roofline import RooflineRuleContext, RooflineShape
    from jax.experimental.roofline.roofline import _rooflines

    rule, avals = _rooflines.get(eqn.primitive), [v.aval for v in eqn.invars]
    if rule is None or not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
        return None
    if not all(type(size) is int for aval in avals for size in aval.shape):
        return None
    context = RooflineRuleContext(
        name_stack=eqn.source_info.name_stack,
        primitive=eqn.primitive,
        avals_in=avals,
        avals_out=[v.aval for v in eqn.outvars],
        jaxpr_eqn_ctx=eqn.ctx,
        mesh=None,
        pin_lhs_in_vmem=False,
        pin_rhs_in_vmem=False,
    )
    found = rule(context, *map(RooflineShape.from_aval, avals), **eqn.params)
    return found.flops or found.unfused_flops or None
