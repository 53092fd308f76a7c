"""Structured masking rules for `call_hi_primitive` and `custom_linear_solve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxprtool.ir.high import classic
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.mask.body import Writing, structured_mask_rules
from jaxprtool.passes.mask.table import refusal
from jaxprtool.passes.mask.values import Facts


@rule(structured_mask_rules, "call_hi_primitive")
def _high(writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]) -> None:
    older = classic(eqn)
    apply = structured_mask_rules.get(older.primitive.name)
    if apply is None:
        raise refusal(eqn, "there is no masking rule for what it computes")
    apply(writing, older, operands, facts)


@rule(structured_mask_rules, "custom_linear_solve")
def _linear_solve(
    writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]
) -> None:
    """Mask each of its functions for vectors of unknown padding, as derivatives pass them."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    start = sum(lengths)
    vectors = [Facts.unknown(each.shape, active=True) for each in facts[start:]]
    ins: list[Atom] = []
    new_lengths, new_jaxprs, at = [], [], 0
    for length, jaxpr in zip(lengths, jaxprs, strict=True):
        symbols: list[Atom] = []
        if jaxpr is not None:
            masked = writing.run.body(jaxpr, [*facts[at : at + length], *vectors])
            symbols = [writing.symbol(name) for name in masked.symbols]
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
    outs = writing.outs(eqn.outvars)
    new = eqn.replace(invars=[*ins, *operands[start:]], outvars=outs, params=params)
    active = any(each.active for each in facts)
    varies = any(each.varies for each in facts)
    known = [Facts.unknown(var.aval.shape, active=active) for var in eqn.outvars]
    writing.add(new, eqn, [replace(each, varies=varies) for each in known])
