"""Structured masking rules for `call_hi_primitive` and `custom_linear_solve`."""

from __future__ import annotations

from dataclasses import replace

from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.rewriting.high import lower_hijax
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.mapping.mask.body import MaskWriting, structured_mask_rules
from jaxprtool.passes.mapping.mask.table import refusal
from jaxprtool.passes.mapping.mask.values import Facts


@rule(structured_mask_rules, "call_hi_primitive")
def _high(writing: MaskWriting, eqn: JaxprEqn) -> bool:
    older = lower_hijax(eqn)
    if not writing.structured(older):
        raise refusal(eqn, "there is no masking rule for what it computes")
    return True


@rule(structured_mask_rules, "custom_linear_solve")
def _linear_solve(writing: MaskWriting, eqn: JaxprEqn) -> bool:
    """Mask each of its functions for vectors of unknown padding, as derivatives pass them."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    facts = [*map(writing.kind, eqn.invars)]
    operands = [*map(writing.held, eqn.invars, facts)]
    start = sum(lengths)
    vectors = [Facts.unknown(each.shape, active=True) for each in facts[start:]]
    ins: list[Atom] = []
    new_lengths, new_jaxprs, at = [], [], 0
    for length, jaxpr in zip(lengths, jaxprs, strict=True):
        symbols: list[Atom] = []
        if jaxpr is not None:
            known = [*facts[at : at + length], *vectors]
            masked = writing.domain.masked(jaxpr, known, in_scan=writing.context.in_scan)
            symbols = [writing.extra(name) for name in masked.extras]
            jaxpr = masked.jaxpr
        new_jaxprs.append(jaxpr)
        new_lengths.append(length + len(symbols))
        ins += [*symbols, *operands[at : at + length]]
        at += length
    params = {
        **eqn.params,
        "const_lengths": type(lengths)(*new_lengths),
        "jaxprs": type(jaxprs)(*new_jaxprs),
    }
    active = any(each.active for each in facts)
    varies = any(each.varies for each in facts)
    known = [Facts.unknown(var.aval.shape, active=active) for var in eqn.outvars]
    outs = writing.outs(eqn.outvars, known)
    new = eqn.replace(invars=[*ins, *operands[start:]], outvars=outs, params=params)
    writing.add(new, eqn, [replace(each, varies=varies) for each in known])
    return True
