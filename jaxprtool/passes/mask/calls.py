"""Structured masking rules for equations that hold jaxprs: calls, branches and loops.

Each body is masked for the facts about its arguments, and takes the symbols that it needs before
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import Contains
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import CALLS, Call, Cond, Scan, While
from jaxprtool.ir.weak_types import as_weak_as
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.cse import cse_body
from jaxprtool.passes.mask.body import SCALAR, MaskedBody, Writing, structured_mask_rules
from jaxprtool.passes.mask.guards import guarded, in_round
from jaxprtool.passes.mask.table import refusal
from jaxprtool.passes.mask.values import Facts, is_float


def _symbols(writing: Writing, names: Sequence[str]) -> list[Atom]:
    return [writing.symbol(name) for name in names]


def with_symbols(masked: MaskedBody, names: Sequence[str]) -> ClosedJaxpr:
    """Return a masked body that takes the values of exactly these symbols, used or not."""
    body = masked.jaxpr
    own = dict(zip(masked.symbols, body.invars, strict=False))
    invars = [own.get(name) or Var(SCALAR) for name in names]
    invars += body.invars[len(masked.symbols) :]
    return jaxcompat.replace_jaxpr(body, invars=invars)


@rule(structured_mask_rules, *CALLS)
def _call(writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]) -> None:
    call = Call.of(eqn)
    masked = writing.run.body(call.body, facts, writing.round is not None)
    more = _symbols(writing, masked.symbols)
    if writing.round is not None:
        more.append(writing.round)
    places = [None] * len(more) + list(range(len(operands)))
    new = call.rebuild(
        operands=(*more, *operands),
        outs=tuple(writing.outs(eqn.outvars)),
        body=masked.jaxpr,
        **call.entries(places, range(len(eqn.outvars))),
    )
    writing.add(new, eqn, masked.facts)


@rule(structured_mask_rules, "cond")
def _cond(writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]) -> None:
    cond = Cond.of(eqn)
    made = [writing.run.body(branch, facts[1:]) for branch in cond.branches]
    names = [name for name in writing.run.bounds if any(name in each.symbols for each in made)]
    joined = [_joined(each) for each in zip(*(each.facts for each in made), strict=True)]
    new = cond.rebuild(
        index=operands[0],
        operands=(*_symbols(writing, names), *operands[1:]),
        outs=tuple(writing.outs(eqn.outvars)),
        branches=tuple(with_symbols(each, names) for each in made),
    )
    writing.add(new, eqn, joined)


def _joined(facts: Sequence[Facts]) -> Facts:
    found = facts[0]
    for each in facts[1:]:
        found = found.joined(each)
    return found


def _carried(
    writing: Writing,
    body: ClosedJaxpr,
    before: Sequence[Facts],
    carry: Sequence[Facts],
    xs: Sequence[Facts] = (),
    rounds: bool = False,
) -> tuple[MaskedBody, list[Facts]]:
    """Return the masked body of a loop, and the facts that hold for its carry in every round."""
    while True:
        masked = writing.run.body(body, (*before, *carry, *xs), rounds)
        pairs = zip(carry, masked.facts, strict=False)
        joined = [replace(old, literal=None).joined(new) for old, new in pairs]
        if joined == list(carry):
            return masked, joined
        carry = joined


@rule(structured_mask_rules, "while")
def _while(writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]) -> None:
    loop = While.of(eqn)
    c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
    body, carry = _carried(writing, loop.body, facts[c:b], facts[b:])
    cond = writing.run.body(loop.cond, (*facts[:c], *carry))
    new = loop.rebuild(
        cond_consts=(*_symbols(writing, cond.symbols), *operands[:c]),
        body_consts=(*_symbols(writing, body.symbols), *operands[c:b]),
        carry=tuple(operands[b:]),
        outs=tuple(writing.outs(eqn.outvars)),
        cond=cond.jaxpr,
        body=body.jaxpr,
    )
    writing.add(new, eqn, carry)


# --- scan -------------------------------------------------------------------------------------


@rule(structured_mask_rules, "scan")
def _scan(writing: Writing, eqn: JaxprEqn, operands: list[Atom], facts: Sequence[Facts]) -> None:
    scan = Scan.of(eqn)
    n, k = len(scan.consts), len(scan.consts) + len(scan.carry)
    rows = [replace(x, shape=x.shape[1:], fills=x.fills[1:]) for x in facts[k:]]
    whole = not writing.run.bounds.is_masked(scan.length)
    in_rounds = not whole and not has_while(scan.body)
    varying = [replace(each, varies=each.varies or in_rounds) for each in (*facts[n:k], *rows)]
    init, rows = varying[: k - n], varying[k - n :]
    with writing.run.scanned():
        masked, carry = _carried(writing, scan.body, facts[:n], init, rows, in_rounds)
    length, xs, body = scan.length, operands[k:], masked.jaxpr
    # Results of this scan differ between rounds of an outer scan only if its operands do.
    outer = any(each.varies for each in facts)
    known = [replace(each, varies=outer) for each in masked.facts]
    ys = [_stacked(each, length) for each in known[k - n :]]
    carry = [replace(each, varies=outer) for each in carry]
    if not whole:
        if any(isinstance(v.aval, jaxcompat.AbstractRef) for v in eqn.invars) or eqn.effects:
            raise refusal(eqn, "its rounds have effects, and how many there are is masked")
        body = (_select_rounds if in_rounds else _only_rounds)(eqn, masked, n, k - n)
        # Merge equal masks: JAX would store each of them in every round, for derivatives.
        body = cse_body(body)
        xs = [*xs, writing.valid(length)]
    new = scan.rebuild(
        consts=(*_symbols(writing, masked.symbols), *operands[:n]),
        carry=tuple(operands[n:k]),
        xs=tuple(xs),
        carry_outs=tuple(writing.outs(scan.carry_outs)),
        ys=tuple(writing.outs(scan.ys)),
        body=body,
        length=writing.run.bounds.padded(length),
    )
    writing.add(new, eqn, [*carry, *ys])


def _stacked(facts: Facts, length: Any) -> Facts:
    fills = (None, *facts.fills)
    return replace(facts, shape=(length, *facts.shape), fills=fills, literal=None)


#: Return True if a jaxpr holds a while loop, at any depth.
has_while = Contains(lambda eqn: eqn.primitive.name in While.primitives)


def _select_rounds(eqn: JaxprEqn, masked: MaskedBody, consts: int, carried: int) -> ClosedJaxpr:
    """Return the body of a scan with a flag as its last argument; if False, the carry is kept.

    A round in the padding may compute NaN, with a NaN derivative. The masked body keeps these out
    of the derivatives of values that are the same in all rounds. Here they are kept out of the
    carry.
    """
    start = len(masked.symbols)

    def fun(*args: Any) -> list[Any]:
        *values, flag = args
        carry = values[start + consts : start + consts + carried]
        values[start + consts : start + consts + carried] = [_guarded(flag, x) for x in carry]
        outs = evaluate(*values[:start], flag, *values[start:])
        kept = [in_round(flag, new, old) for new, old in zip(outs, carry, strict=False)]
        return [*kept, *(_guarded(flag, y) for y in outs[carried:])]

    evaluate = jaxcompat.jaxpr_as_fun(masked.jaxpr)
    avals = [v.aval for v in masked.jaxpr.invars]
    flag = avals.pop(start)
    return jaxcompat.trace_in_setting(fun, [*avals, flag], eqn)


def _guarded(flag: Any, x: Any) -> Any:
    return guarded(flag, x) if is_float(x) else x


def _only_rounds(eqn: JaxprEqn, masked: MaskedBody, consts: int, carried: int) -> ClosedJaxpr:
    """Return the body of a scan with a flag as its last argument; if False, it is skipped.

    It is used for bodies with a while loop, which might not terminate in a round of the padding.
    """
    body = masked.jaxpr
    start = len(masked.symbols) + consts
    outs = [v.aval for v in body.outvars[carried:]]
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def fun(*args: Any) -> list[Any]:
        *values, flag = args
        carry = values[start : start + carried]

        def skip(*_: Any) -> list[Any]:
            return [*carry, *(as_weak_as(jnp.zeros(aval.shape, aval.dtype), aval) for aval in outs)]

        return lax.cond(flag, lambda *each: evaluate(*each), skip, *values)

    flag = jax.core.ShapedArray((), jnp.bool_)
    return jaxcompat.trace_in_setting(fun, [*(v.aval for v in body.invars), flag], eqn)
