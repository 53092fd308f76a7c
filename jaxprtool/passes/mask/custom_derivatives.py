"""Structured masking rules for `custom_jvp` and `custom_vjp` calls.

The function is masked at once, its derivative rules when JAX first asks for them. The symbols
become operands of the call, since the derivative rules need them too; they have no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.custom_rules import jvp_params, jvp_rule, rule_key, vjp_params, vjp_rule
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import CustomJVP, CustomVJP
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, JVPRule, Params, Var, VJPRule
from jaxprtool.passes.mask.body import MaskedBody, Run, Writing, structured_mask_rules
from jaxprtool.passes.mask.calls import with_symbols
from jaxprtool.passes.mask.values import Facts


@rule(structured_mask_rules, *CustomJVP.primitives)
def _custom_jvp(
    writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]
) -> None:
    masked = writing.run.body(CustomJVP.of(eqn).body, facts)
    made = _rule(writing.run, eqn, facts, _jvp_rule)
    name = eqn.params["jvp_jaxpr_fun"].debug_info.func_name
    body = _after_consts(masked, writing.run, eqn)
    consts, zeros = eqn.params["num_consts"], eqn.params["symbolic_zeros"]
    _add(writing, eqn, operands, jvp_params(body, name, made, consts, zeros), masked)


@rule(structured_mask_rules, *CustomVJP.primitives)
def _custom_vjp(
    writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]
) -> None:
    masked = writing.run.body(CustomVJP.of(eqn).body, facts)
    made = _rule(writing.run, eqn, facts, _vjp_rule)
    functions = (eqn.params[k].debug_info.func_name for k in ("fwd_jaxpr_thunk", "bwd"))
    body = _after_consts(masked, writing.run, eqn)
    consts, zeros = eqn.params["num_consts"], eqn.params["symbolic_zeros"]
    _add(writing, eqn, operands, vjp_params(body, tuple(functions), made, consts, zeros), masked)


def _rule(
    run: Run, eqn: JaxprEqn, facts: Sequence[Facts], mask: Callable[..., Any]
) -> Callable[[], Any]:
    """Return a function that returns the masked derivative rule of a call.

    Calls with the same rule share it. A rule may call its own function, so it is masked lazily.
    """
    key = rule_key(eqn), tuple(facts)
    return run.rules.setdefault(key, cache(partial(mask, run, eqn, facts)))


def _jvp_rule(run: Run, eqn: JaxprEqn, facts: Sequence[Facts]) -> JVPRule:
    found, names = jvp_rule(eqn), tuple(run.bounds)
    if found.jaxpr is None:
        return found
    primals = facts[eqn.params["num_consts"] :]
    count = len(primals)
    tangents = [_unknown(var) for var in found.jaxpr.invars[count:]]
    body = with_symbols(run.body(found.jaxpr, [*primals, *tangents]), names)
    zeros = [Var(var.aval.to_tangent_aval()) for var in body.invars[: len(names)]]
    at = len(names) + count
    invars = [*body.invars[:at], *zeros, *body.invars[at:]]
    new = jaxcompat.replace_jaxpr(body, invars=invars)
    return replace(found, jaxpr=new, perturbed=(*(True for _ in names), *found.perturbed))


def _vjp_rule(run: Run, eqn: JaxprEqn, facts: Sequence[Facts]) -> VJPRule:
    found, names = vjp_rule(eqn), tuple(run.bounds)
    primals = facts[eqn.params["num_consts"] :]
    fwd = run.body(found.fwd, primals)
    given = iter(fwd.facts)
    residuals = [next(given) if i is None else primals[i] for i in found.forwarded]
    cotangents = [_unknown(var) for var in found.bwd.invars[len(residuals) :]]
    bwd = run.body(found.bwd, [*residuals, *cotangents])
    shifted = [None if i is None else i + len(names) for i in found.forwarded]
    more = (True,) * len(names)
    return replace(
        found,
        fwd=with_symbols(fwd, names),
        bwd=with_symbols(bwd, names),
        forwarded=(*range(len(names)), *shifted),
        in_zeros=(*more, *found.in_zeros),
        perturbed=(*more, *found.perturbed),
    )


def _add(
    writing: Writing, eqn: JaxprEqn, operands: list[Atom], params: Params, masked: MaskedBody
) -> None:
    consts = params["num_consts"]
    symbols = [writing.symbol(name) for name in writing.run.bounds]
    new = eqn.replace(
        invars=[*operands[:consts], *symbols, *operands[consts:]],
        outvars=writing.outs(eqn.outvars),
        params={**eqn.params, **params},
    )
    # The derivative rule may leave other padding in the results than the function does.
    facts = [replace(each, fills=(None,) * len(each.fills)) for each in masked.facts]
    writing.add(new, eqn, facts)


def _after_consts(masked: MaskedBody, run: Run, eqn: JaxprEqn) -> ClosedJaxpr:
    """Return a masked body with its arguments reordered: constants, symbols, then the rest."""
    names, consts = tuple(run.bounds), eqn.params["num_consts"]
    body = with_symbols(masked, names)
    count = len(names)
    held = body.invars[count : count + consts]
    invars = [*held, *body.invars[:count], *body.invars[count + consts :]]
    return jaxcompat.replace_jaxpr(body, invars=invars)


def _unknown(var: Var) -> Facts:
    return Facts.of(var, active=True)
