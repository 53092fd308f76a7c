"""Masking of custom_jvp and custom_vjp calls: the function, and its rules when they are asked.

The symbols are operands of the call, before the user's, since the rules need them too. They have
no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from jaxprtool import jaxcompat
from jaxprtool.ir.custom_rules import jvp_params, jvp_rule, vjp_params, vjp_rule
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import CustomJVP, CustomVJP
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, JVPRule, Params, Var, VJPRule
from jaxprtool.passes.mask.body import MaskedBody, Writing, structured_mask_rules
from jaxprtool.passes.mask.calls import with_symbols
from jaxprtool.passes.mask.values import Facts


@rule(structured_mask_rules, *CustomJVP.primitives)
def _custom_jvp(
    writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]
) -> None:
    run, consts = writing.run, eqn.params["num_consts"]
    names = tuple(run.bounds)

    @cache
    def masked_rule() -> JVPRule:
        found = jvp_rule(eqn)
        if found.jaxpr is None:
            return found
        count = len(eqn.invars) - consts
        tangents = [_unknown(var) for var in found.jaxpr.invars[count:]]
        rule_body = run.body(found.jaxpr, [*facts[consts:], *tangents])
        body = with_symbols(rule_body, names)
        zeros = [Var(var.aval.to_tangent_aval()) for var in body.invars[: len(names)]]
        at = len(names) + count
        invars = [*body.invars[:at], *zeros, *body.invars[at:]]
        new = jaxcompat.replace_jaxpr(body, invars=invars)
        return replace(found, jaxpr=new, perturbed=(*(True for _ in names), *found.perturbed))

    masked = run.body(CustomJVP.of(eqn).body, facts)
    body = _after_consts(masked, names, consts)
    name = eqn.params["jvp_jaxpr_fun"].debug_info.func_name
    params = jvp_params(body, name, masked_rule, consts, eqn.params["symbolic_zeros"])
    _add(writing, eqn, operands, params, masked)


@rule(structured_mask_rules, *CustomVJP.primitives)
def _custom_vjp(
    writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]
) -> None:
    run, consts = writing.run, eqn.params["num_consts"]
    names = tuple(run.bounds)

    @cache
    def masked_rule() -> VJPRule:
        found = vjp_rule(eqn)
        primals = facts[consts:]
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

    masked = run.body(CustomVJP.of(eqn).body, facts)
    body = _after_consts(masked, names, consts)
    functions = (eqn.params[k].debug_info.func_name for k in ("fwd_jaxpr_thunk", "bwd"))
    params = vjp_params(body, tuple(functions), masked_rule, consts, eqn.params["symbolic_zeros"])
    _add(writing, eqn, operands, params, masked)


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
    # What the rule gives depends on what it is asked for, so that no padding is known.
    facts = [replace(each, fills=(None,) * len(each.fills)) for each in masked.facts]
    writing.add(new, eqn, facts)


def _after_consts(masked: MaskedBody, names: Sequence[str], consts: int) -> ClosedJaxpr:
    """Return a masked body that takes its constants, then all symbols, then the rest."""
    body = with_symbols(masked, names)
    count = len(names)
    symbols, held, rest = (
        body.invars[:count],
        body.invars[count : count + consts],
        body.invars[count + consts :],
    )
    return jaxcompat.replace_jaxpr(body, invars=[*held, *symbols, *rest])


def _unknown(var: Var) -> Facts:
    return Facts.of(var, active=True)
