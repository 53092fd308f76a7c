"""Which bodies write into arrays that they are given.

A compiler writes an update into the array itself if nothing needs that afterwards. A unit is
compiled for any caller, so that it copies the whole array first, at every call.
"""

from __future__ import annotations

from jaxprtool.ir.equations import size_of
from jaxprtool.ir.regions import regions
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, JaxprEqn, Literal, Var, open_jaxpr

#: Bytes of an array that may be copied at every call.
MOST_COPIED = 2**16


def writes_into_arguments(jaxpr: AnyJaxpr) -> bool:
    """Return True if a body, or one within it, updates a large argument or gives it as a result."""
    body = open_jaxpr(jaxpr)
    large = {v for v in body.invars if size_of(v.aval, 0) > MOST_COPIED}
    return any(out in large for out in body.outvars) or _updates(body, large)


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
