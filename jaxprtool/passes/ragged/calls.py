"""Structured rules for equations that hold jaxprs: calls, branches and loops.

Each body is rewritten for the layouts of its arguments, and takes the lengths that it needs before
them. Branches and loops are rewritten here if all lanes take them together. If the index or the
condition differs between lanes, the equation is computed by lanes. A scan over the rows of an
example has a packed rule instead (`scans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import CALLS, Call, Cond, Scan, While
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.ragged.body import RaggedBody, Writing, structured_ragged_rules
from jaxprtool.passes.ragged.table import Ragging
from jaxprtool.passes.ragged.values import Kind, Packed, Pairs, Shared, Sizes, Stacked


def kinds_of(writing: Writing, atoms: Sequence[Atom]) -> list[Kind]:
    """Return the layouts of atoms of the old body."""
    return [writing.kind(atom) for atom in atoms]


def held(writing: Writing, atoms: Sequence[Atom], kinds: Sequence[Kind]) -> tuple[Atom, ...]:
    """Return the atoms that hold atoms of the old body in these layouts."""
    return tuple(writing.held(atom, kind) for atom, kind in zip(atoms, kinds, strict=True))


def lengths(writing: Writing, names: Sequence[str]) -> list[Atom]:
    """Return the lengths of these symbols."""
    return [writing.symbol(name) for name in names]


def with_lengths(body: RaggedBody, names: Sequence[str], sizes: Sizes) -> ClosedJaxpr:
    """Return a rewritten body that takes the lengths of exactly these symbols, used or not."""
    own = dict(zip(body.symbols, body.jaxpr.invars, strict=False))
    invars = [own.get(name) or Var(sizes.lengths_aval) for name in names]
    return jaxcompat.replace_jaxpr(
        body.jaxpr, invars=[*invars, *body.jaxpr.invars[len(body.symbols) :]]
    )


@rule(structured_ragged_rules, *CALLS)
def _call(writing: Writing, eqn: JaxprEqn) -> bool:
    call = Call.of(eqn)
    kinds = kinds_of(writing, eqn.invars)
    body = writing.run.body(call.body, kinds)
    places = [None] * len(body.symbols) + list(range(len(eqn.invars)))
    new = call.rebuild(
        operands=(*lengths(writing, body.symbols), *held(writing, eqn.invars, kinds)),
        outs=tuple(writing.outs(eqn.outvars, body.kinds)),
        body=body.jaxpr,
        **call.entries(places, range(len(eqn.outvars))),
    )
    writing.add(new, eqn, body.kinds)
    return True


@rule(structured_ragged_rules, "cond")
def _cond(writing: Writing, eqn: JaxprEqn) -> bool:
    cond, run = Cond.of(eqn), writing.run
    if not writing.is_shared(cond.index):
        return False
    kinds = kinds_of(writing, cond.operands)
    made = [run.body(branch, kinds) for branch in cond.branches]
    outs = [
        run.sizes.canonical(var.aval, shared=all(isinstance(kind, Shared) for kind in each))
        for var, *each in zip(eqn.outvars, *(body.kinds for body in made), strict=True)
    ]
    made = [run.body(branch, kinds, outs) for branch in cond.branches]
    names = [name for name in run.sizes.bounds if any(name in body.symbols for body in made)]
    new = cond.rebuild(
        index=writing.held(cond.index, Shared()),
        operands=(*lengths(writing, names), *held(writing, cond.operands, kinds)),
        outs=tuple(writing.outs(eqn.outvars, outs)),
        branches=tuple(with_lengths(body, names, run.sizes) for body in made),
    )
    writing.add(new, eqn, outs)
    return True


def _carried(
    writing: Writing,
    body: ClosedJaxpr,
    before: Sequence[Kind],
    carry: Sequence[Atom],
    xs: Sequence[Kind],
) -> tuple[RaggedBody, list[Kind]]:
    """Return the rewritten body of a loop, and the layouts of its carry.

    The layouts are a fixed point: a carry is shared only if it is so in every round.
    """
    run, variables = writing.run, body.outvars[: len(carry)]
    shared = [writing.is_shared(atom) for atom in carry]
    while True:
        pairs = zip(variables, shared, strict=True)
        kinds = [run.sizes.canonical(var.aval, shared=flag) for var, flag in pairs]
        made = run.body(body, (*before, *kinds, *xs))
        now = [
            flag and isinstance(kind, Shared)
            for flag, kind in zip(shared, made.kinds, strict=False)
        ]
        if now == shared:
            break
        shared = now
    rest = [
        run.sizes.canonical(var.aval, shared=isinstance(kind, Shared))
        for var, kind in zip(body.outvars[len(kinds) :], made.kinds[len(kinds) :], strict=True)
    ]
    return run.body(body, (*before, *kinds, *xs), (*kinds, *rest)), kinds


@rule(structured_ragged_rules, "while")
def _while(writing: Writing, eqn: JaxprEqn) -> bool:
    loop, run = While.of(eqn), writing.run
    conds, consts = kinds_of(writing, loop.cond_consts), kinds_of(writing, loop.body_consts)
    body, carry = _carried(writing, loop.body, consts, loop.carry, ())
    cond = run.body(loop.cond, (*conds, *carry))
    if not isinstance(cond.kinds[0], Shared):
        return False
    new = loop.rebuild(
        cond_consts=(*lengths(writing, cond.symbols), *held(writing, loop.cond_consts, conds)),
        body_consts=(*lengths(writing, body.symbols), *held(writing, loop.body_consts, consts)),
        carry=held(writing, loop.carry, carry),
        outs=tuple(writing.outs(eqn.outvars, carry)),
        cond=cond.jaxpr,
        body=body.jaxpr,
    )
    writing.add(new, eqn, carry)
    return True


# --- scan ---------------------------------------------------------------------------------------


@rule(structured_ragged_rules, "scan")
def _scan(writing: Writing, eqn: JaxprEqn) -> bool:
    scan, sizes = Scan.of(eqn), writing.run.sizes
    if sizes.axes([scan.length]):
        return writing.by_rule(eqn)
    consts = kinds_of(writing, scan.consts)
    before = len(scan.consts) + len(scan.carry)
    slices = [
        sizes.canonical(var.aval, shared=writing.is_shared(atom))
        for var, atom in zip(scan.body.invars[before:], scan.xs, strict=True)
    ]
    body, carry = _carried(writing, scan.body, consts, scan.carry, slices)
    made = body.kinds[len(carry) :]
    xs = [_rounds_first(writing, x, kind) for x, kind in zip(scan.xs, slices, strict=True)]
    ys = [_with_rounds(kind, scan.length) for kind in made]
    outs = [Var(jaxcompat.stacked_aval(scan.length, v.aval)) for v in body.jaxpr.outvars]
    carry_outs = writing.outs(scan.carry_outs, carry)
    new = scan.rebuild(
        consts=(*lengths(writing, body.symbols), *held(writing, scan.consts, consts)),
        carry=held(writing, scan.carry, carry),
        xs=tuple(xs),
        carry_outs=tuple(carry_outs),
        ys=tuple(outs[len(carry) :]),
        body=body.jaxpr,
    )
    writing.eqns.append(new)
    for var, kind, atom in zip(scan.carry_outs, carry, carry_outs, strict=True):
        writing.bind(var, kind, atom)
    for var, kind, atom in zip(scan.ys, ys, outs[len(carry) :], strict=True):
        writing.bind(var, kind, _swapped(writing, atom, kind))
    return True


def _rounds_first(writing: Writing, atom: Atom, slices: Kind) -> Atom:
    """Return the stacked operand of a scan whose slices have this layout."""
    kind = _with_rounds(slices, atom.aval.shape[0])
    return _swapped(writing, writing.held(atom, kind), kind)


def _with_rounds(kind: Kind, length: Any) -> Kind:
    """Return the layout of stacked values, from the layout of one."""
    if isinstance(kind, Packed):
        return Packed(kind.axis + 1, kind.size)
    if isinstance(kind, Pairs):
        first, second = kind.axes
        return Pairs((first + 1, second + 1), kind.size)
    if isinstance(kind, Stacked):
        facts = kind.facts
        return Stacked(type(facts)((length, *facts.shape), (None, *facts.fills), facts.active))
    return kind


def _swapped(writing: Writing, atom: Atom, kind: Kind) -> Atom:
    """Exchange the axes of lanes and rounds, if the layout has an axis of lanes."""
    if isinstance(kind, Shared | Packed | Pairs):
        return atom

    def compute(_: Ragging, array: Any) -> list[Any]:
        return [jnp.swapaxes(array, 0, 1)]

    return writing.template((_swapped, atom.aval), compute, [atom], [], None)[0]
