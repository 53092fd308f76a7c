"""Structured masking rules for calls with live objects and `custom_linear_solve`."""

from __future__ import annotations

from dataclasses import replace

from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.rewriting.high import LIVE, without_live_objects
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.mapping.mask.body import MaskBodyBuilder, structured_mask_rules
from jaxprtool.passes.mapping.mask.table import refusal
from jaxprtool.passes.mapping.mask.values import Facts


@rule(structured_mask_rules, *LIVE)
def _live(builder: MaskBodyBuilder, eqn: JaxprEqn) -> bool:
    older = without_live_objects(eqn)
    if not builder.structured(older):
        raise refusal(eqn, "no masking rule for the operation that it computes")
    return True


@rule(structured_mask_rules, "custom_linear_solve")
def _linear_solve(builder: MaskBodyBuilder, eqn: JaxprEqn) -> bool:
    """Mask each of its functions for vectors of unknown padding, as derivatives pass them."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    facts = [*map(builder.kind, eqn.invars)]
    operands = [*map(builder.held, eqn.invars, facts)]
    start = sum(lengths)
    vectors = [Facts.unknown(each.shape, active=True) for each in facts[start:]]
    ins: list[Atom] = []
    new_lengths, new_jaxprs, at = [], [], 0
    for length, jaxpr in zip(lengths, jaxprs, strict=True):
        symbols: list[Atom] = []
        if jaxpr is not None:
            known = [*facts[at : at + length], *vectors]
            masked = builder.domain.masked(jaxpr, known, in_scan=builder.context.in_scan)
            symbols = [builder.extra(name) for name in masked.extras]
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
    outs = builder.outs(eqn.outvars, known)
    new = eqn.replace(invars=[*ins, *operands[start:]], outvars=outs, params=params)
    builder.add(new, eqn, [replace(each, varies=varies) for each in known])
    return True
