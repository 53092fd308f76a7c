"""Reduction steps that keep a part of the top level: of its results, equations, or loop iterations.

Variables that the part reads and no longer computes become arguments. The search gets their values
by running the program from which they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import free_variables
from jaxprtool.ir.core.structured import Scan, view
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, narrow, rewrite
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Var
from jaxprtool.passes.reduction.candidates import (
    Candidate,
    ReductionStep,
    fresh_names,
    is_array,
    is_variable,
    with_body,
)


def part(program: Program, kept: Sequence[JaxprEqn]) -> Candidate | None:
    """Return the candidate with only some of the equations; None if it would need a ref argument.

    Its arguments are the free variables of the equations. Its results are those of the program that
    are still computed, and the variables that no equation reads any more.
    """
    jaxpr = program.jaxpr
    defined = {v for eqn in kept for v in eqn.outvars}
    read = {v for eqn in kept for v in eqn.invars if is_variable(v)}
    outs: list[Atom] = [v for v in jaxpr.outvars if is_variable(v) and v in defined]
    ends = [v for eqn in kept for v in eqn.outvars if type(v) is not DropVar and v not in read]
    outs = list(dict.fromkeys([*outs, *(v for v in ends if is_array(v))]))
    given = dict(zip(jaxpr.invars, program.arg_names, strict=True))
    free = free_variables(kept, outs)
    new = [v for v in free if v not in given and v not in set(jaxpr.constvars)]
    if not all(map(is_array, new)):
        return None
    names = [name for v, name in given.items() if v in free]
    names += fresh_names(program, "v", len(new))
    invars = [*(v for v in given if v in free), *new]
    body = with_body(program, narrow(jaxpr, invars, outs, kept), names)
    cut = {name: v for name, v in zip(names, invars, strict=True) if v not in given}
    return Candidate(body, program if cut else None, cut)


def _equations(program: Program) -> Sequence[JaxprEqn]:
    return program.jaxpr.eqns if len(program.jaxpr.eqns) > 1 else ()


def _results(program: Program) -> Sequence[int]:
    count = len(program.jaxpr.outvars)
    return range(count) if count > 1 else ()


def _keep_results(program: Program, kept: Sequence[int]) -> Candidate:
    outvars = [program.jaxpr.outvars[i] for i in kept]
    return Candidate(with_body(program, jaxcompat.replace_jaxpr(program.jaxpr, outvars=outvars)))


# --- loops ----------------------------------------------------------------------------------------


def _long_scans(program: Program) -> Sequence[tuple[JaxprEqn, int]]:
    """Return the scans that can be cut in two, each with the half to keep, 0 or 1."""
    scans = [eqn for eqn in program.jaxpr.eqns if eqn.outvars and isinstance(view(eqn), Scan)]
    lengths = [(eqn, view(eqn).length) for eqn in scans]
    return [(eqn, i) for eqn, n in lengths if isinstance(n, int) and n > 1 for i in (0, 1)]


def _half(program: Program, chosen: Sequence[tuple[JaxprEqn, int]]) -> Candidate | None:
    """Cut a scan in two and keep one half; the results of the other become arguments."""
    ((eqn, kept),) = chosen
    halves: list[JaxprEqn] = []

    def visitor(writer: Writer) -> RewriteRule:
        def rule(each: JaxprEqn) -> Sequence[Atom] | None:
            same = each.outvars and each.outvars[0] is eqn.outvars[0]
            return _in_two(writer, view(each), halves) if same else None

        return rule

    whole = program.replace(jaxpr=rewrite(program.jaxpr, visitor, nested=False))
    if len(halves) != 2:
        return None
    dropped = halves[1 - kept]
    return part(whole, [each for each in whole.jaxpr.eqns if each is not dropped])


def _in_two(writer: Writer, scan: Scan, halves: list[JaxprEqn]) -> list[Atom]:
    """Write a scan as two scans, one after the other, and append these to `halves`."""
    middle, n = scan.length // 2, scan.length
    bounds = [(0, middle), (middle, n)]
    carry: tuple[Atom, ...] = scan.carry
    stacks: dict[int, tuple[Var, ...]] = {}
    for start, end in reversed(bounds) if scan.reverse else bounds:

        def rows(*xs: Any, start: int = start, end: int = end) -> list[Any]:
            return [lax.slice_in_dim(x, start, end) for x in xs]

        xs = tuple(writer.trace(rows, scan.xs, scan.eqn)) if scan.xs else ()
        outs = tuple(Var(v.aval) for v in scan.carry_outs)
        ys = tuple(Var(v.aval.update(shape=(end - start, *v.aval.shape[1:]))) for v in scan.ys)
        half = scan.rebuild(carry=carry, xs=xs, carry_outs=outs, ys=ys, length=end - start)
        writer.add(half)
        halves.append(half)
        carry, stacks[start] = outs, ys

    def joined(*parts: Any) -> list[Any]:
        count = len(parts) // 2
        return [lax.concatenate([parts[i], parts[count + i]], 0) for i in range(count)]

    pieces = [*stacks[0], *stacks[middle]]
    return [*carry, *(writer.trace(joined, pieces, scan.eqn) if pieces else ())]


PARTS = (
    ReductionStep("dropping results", _results, _keep_results, keeps=True),
    ReductionStep("dropping equations", _equations, part, keeps=True),
    ReductionStep("splitting loops", _long_scans, _half, alone=True),
)
