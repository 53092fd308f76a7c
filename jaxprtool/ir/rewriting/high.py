"""Convert equations that hold live objects to calls, which files and Python code support.

A `call_hi_primitive` holds its computation, and its own rules for derivatives and batching. A call
with a custom derivative computes the same and has the same derivatives; it is batched by batching
its body. A `remat_opt`, the forward rule of a `custom_vjp` with `optimize_remat`, holds a thunk of
the function without the rule, by which JAX replaces it where no residual is used. It computes, and
is differentiated, like a call of its body.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import primitives

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError, described
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.structured import High, call
from jaxprtool.ir.rewriting.custom_rules import jvp_params, unsupported, vjp_params
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, JVPRule, Var

#: The primitives whose equations hold live objects that have an equivalent without them.
LIVE = (jaxcompat.CALL_HIGH, "remat_opt")


def without_live_objects(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation, or an equivalent one without live objects, with the same derivatives.

    The rules of a hijax operation are traced when they are needed.

    Raises:
        UnsupportedError: If JAX cannot expand a hijax operation, or its rules are more than
            functions of arrays.
    """
    if eqn.primitive.name not in LIVE:
        return eqn
    if eqn.primitive.name != jaxcompat.CALL_HIGH:
        return call(eqn.params["fwd_jaxpr"], eqn.invars, eqn.outvars, eqn)
    older = jaxcompat.older_form(eqn)
    if older is not None:
        return older
    high = High.of(eqn)
    if high is None:
        class_name = type(eqn.params["_prim"]).__name__
        raise UnsupportedError(
            f"the {named(eqn)}, a {class_name}, has no equivalent on plain arrays"
        )
    body = _without_constants(high)
    debug = body.debug_info._replace(func_src_info=jaxcompat.high_name(eqn))
    body = jaxcompat.replace_jaxpr(body, debug_info=debug)
    derivative = jaxcompat.high_derivative(eqn)
    if derivative == "body":
        return call(body, eqn.invars, eqn.outvars, eqn)
    rule = _Rule(derivative, jaxcompat.high_key(eqn), eqn)
    if derivative == "jvp":
        # The rule gets symbolic zero tangents, and may return some.
        params = jvp_params(body, f"{rule.name}_jvp", rule, symbolic_zeros=True)
        return eqn.replace(primitive=primitives.custom_jvp_call_p, params=params)
    params = vjp_params(body, (f"{rule.name}_fwd", f"{rule.name}_bwd"), rule)
    return eqn.replace(primitive=primitives.custom_vjp_call_p, params=params)


def _without_constants(high: High) -> ClosedJaxpr:
    """Return the body with its constants inside a call: a custom call's body may have none."""
    if not high.body.consts:
        return high.body
    ins, outs = ([Var(v.aval) for v in atoms] for atoms in (high.operands, high.outs))
    eqns = [call(high.body, ins, outs, high.eqn)]
    parts = {"invars": ins, "outvars": outs, "eqns": eqns}
    return jaxcompat.replace_jaxpr(high.body, constvars=(), consts=(), **parts)


@dataclass(frozen=True)
class _Rule:
    """The rule of an equation; equal for equations whose objects follow the same rule."""

    derivative: str
    key: Hashable
    eqn: JaxprEqn = field(compare=False)

    @property
    def name(self) -> str:
        return jaxcompat.high_name(self.eqn)

    def __call__(self) -> Any:
        eqn = self.eqn
        try:
            if self.derivative == "jvp":
                return jaxcompat.high_jvp_rule(eqn)
            return jaxcompat.high_vjp_rule(eqn)
        except Exception as error:  # the rule is another package's, and may raise anything
            if self.derivative == "jvp":
                zeros, perturbed = (False,) * len(eqn.outvars), (True,) * len(eqn.invars)
                return JVPRule(f"{self.name}_jvp", None, zeros, perturbed, described(error))
            raise unsupported(eqn, error) from error
