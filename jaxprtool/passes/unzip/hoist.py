"""Hoisting of loop-invariant computations on early values.

A variable sown in a loop is one value for each iteration. If all of these are equal, one value
before the loop suffices, even if the length of the loop is unknown.
"""

from __future__ import annotations

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import needed_equations, substitute, variables, with_operands
from jaxprtool.ir.core.regions import Regions, open_regions, regions
from jaxprtool.ir.rewriting.rewrite import partition
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.unzip.binding_times import EARLY, Context
from jaxprtool.passes.unzip.flow import parts_of
from jaxprtool.passes.unzip.split import Split


def hoisted(part: Split, context: Context) -> ClosedJaxpr:
    """Return the body of a split with computations on early constants moved out of its loops.

    Here, early values are those that are early and not ready. If nothing moves, the body stays the
    same object.
    """
    eqns: list[JaxprEqn] = []
    changed = False
    for position, eqn in enumerate(part.body.eqns):
        early = {v for v in eqn.invars if isinstance(v, Var) and part.times[v] == EARLY}
        new = eqn
        before: list[JaxprEqn] = []
        inside = open_regions(eqn) if early else None
        if inside is not None:
            parts = parts_of(part, position, context)
            inner = [hoisted(each, context) for each in parts]
            if any(body is not each.body for body, each in zip(inner, parts, strict=True)):
                new = inside.rebuild(inner)
                inside = regions(new)
            if inside is not None and inside.repeats:
                before, new = _moved_out(inside, early)
        eqns += [*before, new]
        changed |= new is not eqn
    return jaxcompat.replace_jaxpr(part.body, eqns=eqns) if changed else part.body


def _moved_out(inside: Regions, early: set[Var]) -> tuple[list[JaxprEqn], JaxprEqn]:
    """Return the equations that are moved out of a loop, and the loop without them.

    These have no effect, and depend only on constants of the loop, some of which are early.
    """
    number = len(inside.bodies) - 1
    body, region = inside.bodies[number], inside.regions[number]
    pairs = zip(body.invars, region.ins, region.loop_invariant, strict=True)
    outside: dict[Var, Atom] = {
        var: inside.eqn.invars[i] for var, i, is_invariant in pairs if is_invariant
    }
    known = {var for var, atom in outside.items() if isinstance(atom, Var) and atom in early}
    same: list[JaxprEqn] = []
    for eqn in body.eqns:
        operands = variables(eqn.invars)
        if not eqn.effects and all(v in outside for v in operands):
            same.append(eqn)
            outside.update((v, Var(v.aval)) for v in eqn.outvars)
            if not known.isdisjoint(operands):
                known.update(eqn.outvars)
    taken = needed_equations(same, (), lambda eqn: not known.isdisjoint(eqn.outvars))
    if not taken or region.constants is None:
        return [], inside.eqn
    eqns, made = partition(body, taken)
    invars = inside.arguments(region, body.invars, {region.constants: made})
    bodies = [*inside.bodies[:number], jaxcompat.replace_jaxpr(body, invars=invars, eqns=eqns)]
    new = inside.rebuild(bodies, more={region.constants: [outside[v] for v in made]})
    moved = [with_operands(eqn, outside) for eqn in taken]
    return [eqn.replace(outvars=substitute(eqn.outvars, outside)) for eqn in moved], new
