"""`custom_jvp` and `custom_vjp` calls.

The function is rewritten at once, its derivative rules when JAX first needs them: a rule may call
its own function. The extra arguments become operands of the call, since the derivative rules need
them too; they have no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic

from jaxprtool import jaxcompat
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import CustomJVP
from jaxprtool.ir.rewriting.custom_rules import following, jvp_rule, rule_key, vjp_rule
from jaxprtool.jaxcompat import JaxprEqn, JVPRule, Var, VJPRule
from jaxprtool.passes.mapping.domains.domain import Domain, K

if TYPE_CHECKING:
    from jaxprtool.passes.mapping.domains.body import BodyBuilder


def custom_derivative(builder: BodyBuilder[K], eqn: JaxprEqn) -> bool:
    """Write a `custom_jvp` or `custom_vjp` call."""
    domain, p, found = builder.domain, eqn.params, regions(eqn)
    assert found is not None
    context, consts, names = domain.context(builder.context, found), p["num_consts"], domain.extras
    kinds = [*map(builder.kind, eqn.invars)]
    (body,) = found.bodies
    plain = domain.body(body, kinds, None, context).kinds
    outs = [domain.differentiated(k, v.aval) for k, v in zip(plain, eqn.outvars, strict=True)]
    jaxpr = domain.matched(body, kinds, outs, context).taking(domain, names)
    first, own, rest = _cut(jaxpr.invars, len(names), len(names) + consts)
    jaxpr = jaxcompat.replace_jaxpr(jaxpr, invars=[*own, *first, *rest])
    rules = _Rules(domain, eqn, kinds[consts:], outs, context)
    key = rule_key(eqn), tuple(rules.primals), tuple(outs), context
    of_call = rules.jvp if eqn.primitive.name in CustomJVP.primitives else rules.vjp
    made = domain.derivatives.setdefault(key, cache(of_call))
    params = following(eqn, jaxpr, made, consts, p["symbolic_zeros"])
    held = [*map(builder.held, eqn.invars, kinds)]
    invars = [*held[:consts], *map(builder.extra, names), *held[consts:]]
    outvars = builder.outs(eqn.outvars, outs)
    builder.add(eqn.replace(invars=invars, outvars=outvars, params={**p, **params}), eqn, outs)
    return True


def _cut(values: Sequence[Any], *inner: int) -> list[Sequence[Any]]:
    edges = [0, *inner, len(values)]
    return [values[a:b] for a, b in pairwise(edges)]


@dataclass(frozen=True, eq=False)
class _Rules(Generic[K]):
    """The derivative rules of a call, for the kinds of its primals and of its results."""

    domain: Domain[K]
    eqn: JaxprEqn
    primals: Sequence[K]
    outs: Sequence[K]
    context: Any

    def jvp(self) -> JVPRule:
        """Return the rewritten rule of a `custom_jvp` call."""
        found, domain, names = jvp_rule(self.eqn), self.domain, self.domain.extras
        if found.jaxpr is None:
            return found
        count = len(self.primals)
        pairs = zip(self.primals, found.jaxpr.invars[count:], strict=True)
        kinds = [*self.primals, *(domain.tangent(kind, var.aval) for kind, var in pairs)]
        moving = [k for k, zero in zip(self.outs, found.out_zeros, strict=True) if not zero]
        made = domain.body(found.jaxpr, kinds, [*self.outs, *moving], self.context)
        body = made.taking(domain, names)
        zeros = [Var(var.aval.to_tangent_aval()) for var in body.invars[: len(names)]]
        primals, tangents = _cut(body.invars, len(names) + count)
        new = jaxcompat.replace_jaxpr(body, invars=[*primals, *zeros, *tangents])
        return replace(found, jaxpr=new, perturbed=(*(True for _ in names), *found.perturbed))

    def vjp(self) -> VJPRule:
        """Return the rewritten rules of a `custom_vjp` call."""
        found, domain, names = vjp_rule(self.eqn), self.domain, self.domain.extras
        new = sum(i is None for i in found.forwarded)
        fwd = domain.body(found.fwd, self.primals, [*(None,) * new, *self.outs], self.context)
        given = iter(fwd.kinds)
        kinds = [next(given) if i is None else self.primals[i] for i in found.forwarded]
        pairs = zip(self.outs, found.bwd.invars[len(kinds) :], strict=True)
        kinds += [domain.tangent(kind, var.aval) for kind, var in pairs]
        moving = [k for k, zero in zip(self.primals, found.in_zeros, strict=True) if not zero]
        more = (True,) * len(names)
        shifted = [None if i is None else i + len(names) for i in found.forwarded]
        return replace(
            found,
            fwd=fwd.taking(domain, names),
            bwd=domain.backward(found.bwd, kinds, moving, self.context),
            forwarded=(*range(len(names)), *shifted),
            in_zeros=(*more, *found.in_zeros),
            perturbed=(*more, *found.perturbed),
        )
