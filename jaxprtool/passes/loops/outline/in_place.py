"""Find the bodies whose results a compiler writes into their arguments.

It does so if the array is not needed afterwards, and some elements are updated, or all are
recomputed element by element, as in an optimizer's step on donated parameters. A unit is compiled
for any caller, so it allocates another array, which is copied at every call.
"""

from __future__ import annotations

from jaxprtool.ir.core.equations import equations, size_of
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr

#: The size in bytes of an array that may be copied at every call.
MOST_COPIED = 2**16


def writes_into_arguments(jaxpr: AnyJaxpr) -> bool:
    """Return True if a body may write a result into a large argument when it is inlined.

    It does if it, or a body within it, updates the argument, if the argument is a result, or if all
    equations are elementwise; the latter would compile no faster as a unit.
    """
    body = open_jaxpr(jaxpr)
    large = {v for v in body.invars if size_of(v.aval, 0) > MOST_COPIED}
    return bool(large) and (
        any(out in large for out in body.outvars) or _updates(body, large) or _is_elementwise(body)
    )


def _is_elementwise(jaxpr: Jaxpr) -> bool:
    for eqn in equations(jaxpr):
        found, held = traits(eqn), regions(eqn)
        if found.reduces or found.expensive or found.collective or (held and held.repeats):
            return False
    return True


def _updates(jaxpr: AnyJaxpr, arrays: set[Var]) -> bool:
    """Return True if a body updates one of these arrays, which are variables of its own."""
    same = set(arrays)
    for eqn in open_jaxpr(jaxpr).eqns:
        if not same:
            return False
        if not any(_is_in(atom, same) for atom in eqn.invars):
            continue
        found = traits(eqn)
        if found.updates and _is_in(eqn.invars[0], same):
            return True
        if found.gives in ("same", "layout"):
            same |= {v for v in eqn.outvars if size_of(v.aval, 0) > MOST_COPIED}
        elif _updates_within(eqn, same):
            return True
    return False


def _updates_within(eqn: JaxprEqn, arrays: set[Var]) -> bool:
    """Return True if a body that an equation holds updates one of these arrays."""
    structured = regions(eqn)
    if structured is None:
        return False
    for body, region in zip(structured.bodies, structured.regions, strict=True):
        whole = {
            argument
            for argument, i in zip(body.invars, region.ins, strict=True)
            # A loop takes some of its operands a slice at a time.
            if _is_in(eqn.invars[i], arrays) and argument.aval.shape == eqn.invars[i].aval.shape
        }
        if whole and _updates(body, whole):
            return True
    return False


def _is_in(atom: Atom, arrays: set[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in arrays
