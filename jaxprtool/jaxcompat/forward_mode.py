"""The derivative of one equation in forward mode, by JAX's rules."""

from __future__ import annotations

from collections.abc import Sequence

from jax._src.interpreters import ad
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxprtool.jaxcompat.jaxprs import close_jaxpr, new_jaxpr
from jaxprtool.jaxcompat.tracing import setting_of, trace_flat


def equation_jvp(eqn: JaxprEqn, moving: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the jaxpr of an equation and its derivative, and which results have tangents.

    Args:
        eqn: The equation.
        moving: Whether each operand has a tangent.

    Returns:
        A jaxpr that takes the operands and those tangents, and returns the results and their
        tangents; and for each result, whether it has a tangent.

    Raises:
        Exception: The error of JAX or the rule if there is no derivative.
    """
    ins, outs = ([Var(v.aval) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    with setting_of(eqn):
        names = trace_flat(list, "equation", []).jaxpr.debug_info
        closed = new_jaxpr((), (), ins, outs, [eqn.replace(invars=ins, outvars=outs)], names)
        jaxpr, with_tangents = ad.jvp_jaxpr(closed, list(moving), False)
    return close_jaxpr(jaxpr), list(with_tangents)
