"""Expand equations into older or simpler ones: by rules, and by JAX's own functions.

    @rule("expand", "my_primitive")
    def _(eqn):
        return jax.make_jaxpr(my_implementation)(*(v.aval for v in eqn.invars))

Many primitives are lowered by tracing a function of JAX: `cumsum` is a `reduce_window`, a sparse
product is gathers and a scatter. An analysis that must see inside such a primitive works on the
expanded program, in which a call of the traced function takes the place of the equation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import primitives

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError, described
from jaxprtool.ir.custom_rules import jvp_params, untraceable_rule, vjp_params
from jaxprtool.ir.equations import LIVE, equations, fuses, named
from jaxprtool.ir.regions import High, call, copies_of_body, holds_jaxpr, regions, sub_jaxprs
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, JaxprEqn, JVPRule, Primitive, Var

# --- expansions -----------------------------------------------------------------------------------
# Expand equations into what JAX lowers them to: an open table of rules, and JAX's own functions.

#: A function that returns what an equation expands to, a jaxpr with its operands as arguments and
#: its results as results; None if it does not expand.
ExpansionRule = Callable[[JaxprEqn], ClosedJaxpr | None]

expansion_rules: RuleTable[ExpansionRule] = RuleTable()

#: The most equations of the iterations of a scan that expands.
_MOST_EQUATIONS = 10_000


def expanded(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Replace each equation that JAX expands when it lowers it by a call of its expansion.

    An equation expands by a rule of the table, into its only body, or into JAX's function for the
    CPU; so do the equations of the expansion. A scan that `unroll` makes a sequence of iterations
    expands into them. Other equations with regions stay, and those with effects. So do those that a
    compiler fuses with their readers, unless they expand into loops.

    Args:
        jaxpr: The jaxpr, closed or open.

    Returns:
        The jaxpr with the same arguments and results; the same object if nothing expands.
    """
    return _Expander().expanded(jaxpr)


class _Expander:
    """Expands jaxprs. Equal equations share one expansion."""

    def __init__(self) -> None:
        self._known: dict[Hashable, ClosedJaxpr | None] = {}
        self._has_function: dict[Primitive, bool] = {}

    def expanded(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        # Most programs have calls, but nothing that expands. Finding out is cheaper than a rewrite.
        if not any(map(self._may_expand, equations(jaxcompat.open_jaxpr(jaxpr)))):
            return jaxpr
        return map_equations(jaxpr, self._rule)

    def _may_expand(self, eqn: JaxprEqn) -> bool:
        """Return True if JAX may expand an equation: no loop, branch or call, nor one with effects.

        It holds a body without a view, or its primitive has a rule or a function.
        """
        if eqn.effects:
            return False
        primitive = eqn.primitive
        if primitive not in self._has_function:
            self._has_function[primitive] = (
                expansion_rules.get(primitive.name) is not None
                or jaxcompat.lowering_function(primitive) is not None
            )
        if not (self._has_function[primitive] or holds_jaxpr(eqn.params.values())):
            return False
        return _is_unrolled(eqn) or regions(eqn) is None

    def _rule(self, eqn: JaxprEqn) -> Sequence[JaxprEqn] | None:
        if not self._may_expand(eqn):
            return None
        body = self._expansion(eqn)
        return None if body is None else [call(body, eqn.invars, eqn.outvars, eqn)]

    def _expansion(self, eqn: JaxprEqn) -> ClosedJaxpr | None:
        rule = expansion_rules.get(eqn.primitive.name)
        if rule is None and (body := _called_body(eqn)) is not None:
            return body
        avals = tuple(v.aval for v in eqn.invars)
        key = eqn.primitive, avals, tuple(eqn.params.items())
        try:
            if key in self._known:
                return self._known[key]
        except TypeError:  # a parameter that cannot be hashed
            return self._traced(eqn, rule)
        self._known[key] = self._traced(eqn, rule)
        return self._known[key]

    def _traced(self, eqn: JaxprEqn, rule: ExpansionRule | None) -> ClosedJaxpr | None:
        body = jaxcompat.traced_lowering(eqn) if rule is None else rule(eqn)
        if body is None or (fuses(eqn) and all(map(fuses, equations(jaxcompat.open_jaxpr(body))))):
            return None
        # The iterations of a scan have the lines of the user's body.
        return self.expanded(body if regions(eqn) else map_equations(body, _without_source))


def _is_unrolled(eqn: JaxprEqn) -> bool:
    """Return True if JAX lowers an equation to its iterations, without a loop."""
    copies = copies_of_body(eqn)
    if copies < 2 or copies != eqn.params.get("length"):
        return False
    size = sum(len(jaxcompat.open_jaxpr(body).eqns) for _, body in sub_jaxprs(eqn))
    return copies * size <= _MOST_EQUATIONS


def _without_source(eqn: JaxprEqn) -> list[JaxprEqn]:
    return [eqn.replace(source_info=jaxcompat.NO_SOURCE)]


def _called_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the only body of an equation if it has the equation's operands and results."""
    bodies = [jaxcompat.close_jaxpr(body) for _, body in sub_jaxprs(eqn)]
    if len(bodies) != 1:
        return None
    pairs = (bodies[0].in_avals, eqn.invars), (bodies[0].out_avals, eqn.outvars)
    types = [([_type(a) for a in avals], [_type(v.aval) for v in vs]) for avals, vs in pairs]
    return bodies[0] if all(inner == outer for inner, outer in types) else None


def _type(aval: object) -> tuple[object, object]:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)


@rule(expansion_rules, "argmax", "argmin", "conj", "threefry2x32")
def _stays(eqn: JaxprEqn) -> None:
    """Keep what a compiler has as one kernel."""


# --- high -----------------------------------------------------------------------------------------
# Convert equations that hold live objects to calls, which files and Python code support.
#
# A `call_hi_primitive` holds its computation, and its own rules for derivatives and batching. A
# call with a custom derivative computes the same and has the same derivatives; it is batched by
# batching its body. A `remat_opt`, the forward rule of a `custom_vjp` with `optimize_remat`, holds
# a thunk of the function without the rule, by which JAX replaces it where no residual is used. It
# computes, and is differentiated, like a call of its body.


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
    rule = _EquationRule(derivative, jaxcompat.high_key(eqn), eqn)
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
class _EquationRule:
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
            raise untraceable_rule(eqn, error) from error
