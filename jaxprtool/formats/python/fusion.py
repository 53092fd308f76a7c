"""Equations that Python writes as one: a branch, with what makes its condition an index.

`lax.cond` converts its predicate to an index, `lax.switch` clamps its number, and
`lax.platform_dependent` asks for the platform's number before they bind `cond`. Written as they
stand, these equations would be there twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxprtool.formats.python.expressions import Giving
from jaxprtool.formats.python.rules.loops import on_number, on_platform, on_predicate
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Line:
    """An equation to write, with the operands that it has in Python.

    `expression` stands for it if what it is fused with decides that.
    """

    eqn: JaxprEqn
    operands: tuple[Atom, ...]
    expression: Giving | None = None


def lines(jaxpr: Jaxpr) -> list[Line]:
    """The equations of a jaxpr, with the conversions and clamps of indexes taken into branches."""
    if not any(eqn.primitive.name == "cond" for eqn in jaxpr.eqns):
        return [Line(eqn, tuple(eqn.invars)) for eqn in jaxpr.eqns]
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    fused, left = {}, set(map(id, jaxpr.outvars))
    for eqn in jaxpr.eqns:
        condition = _condition(eqn, makers)
        if condition is not None:
            fused[id(eqn)] = condition
        left.update(id(v) for v in eqn.invars[condition is not None :])
    found = []
    taken = {id(eqn.invars[0]) for eqn in jaxpr.eqns if id(eqn) in fused} - left
    for eqn in jaxpr.eqns:
        if id(eqn) in fused:
            before, expression = fused[id(eqn)]
            found.append(Line(eqn, (*before, *eqn.invars[1:]), expression))
        elif not any(id(v) in taken for v in eqn.outvars):
            found.append(Line(eqn, tuple(eqn.invars)))
    return found


def _condition(
    eqn: JaxprEqn, makers: dict[Var, JaxprEqn]
) -> tuple[tuple[Atom, ...], Giving] | None:
    """What a branch depends on before it is made an index, and how the branch is written then."""
    if eqn.primitive.name != "cond" or isinstance(eqn.invars[0], Literal):
        return None
    maker = makers.get(eqn.invars[0])
    if maker is None:
        return None
    branches = len(eqn.params["branches"])
    if maker.primitive.name == "convert_element_type":
        predicate, index = maker.invars[0], eqn.invars[0].aval
        is_index = index.dtype == np.int32 and not index.shape
        if branches == 2 and predicate.aval.dtype == np.bool_ and is_index:
            return (predicate,), on_predicate(eqn)
        return None
    if maker.primitive.name == "platform_index":
        same = maker.params["platforms"] == eqn.params.get("branches_platforms")
        return ((), on_platform(eqn)) if same else None
    if maker.primitive.name != "clamp":
        return None
    low, number, high = maker.invars
    if _is_literal(low, 0) and _is_literal(high, branches - 1) and branches > 1:
        return (number,), on_number(eqn)
    return None


def _is_literal(atom: Atom, value: int) -> bool:
    return isinstance(atom, Literal) and atom.val == value
