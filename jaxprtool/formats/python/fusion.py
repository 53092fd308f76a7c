"""Fusion of equations that are one call in Python: a branch and the computation of its index.

Before they bind `cond`, `lax.cond` converts its predicate to an index, `lax.switch` clamps its
index, and `lax.platform_dependent` queries the platform index. Without fusion, these equations
would be duplicated. A branch by any other index is written as `branch_at`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxprtool.formats.python.expressions import MultiResult
from jaxprtool.formats.python.rules.loops import on_number, on_platform, on_predicate
from jaxprtool.ir.core.structured import Cond
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, open_jaxpr


@dataclass(frozen=True)
class Line:
    """An equation to write, with its operands in Python.

    `expression` is its expression if it is fused with another equation.
    """

    eqn: JaxprEqn
    operands: tuple[Atom, ...]
    expression: MultiResult | None = None


def lines(jaxpr: Jaxpr) -> list[Line]:
    """Return the equations of a jaxpr, with conversions and clamps fused into branches."""
    uses = Counter(
        id(v) for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars) for v in atoms
    )
    found: list[Line] = []
    for eqn in jaxpr.eqns:
        fused = None
        if eqn.primitive.name == "cond" and found and uses[id(eqn.invars[0])] == 1:
            # JAX's functions bind the index directly before the branch and use it nowhere else.
            fused = _condition(eqn, found[-1].eqn)
        if fused is None:
            found.append(Line(eqn, tuple(eqn.invars)))
        else:
            before, expression = fused
            found[-1] = Line(eqn, (*before, *eqn.invars[1:]), expression)
    return found


def _condition(eqn: JaxprEqn, definition: JaxprEqn) -> tuple[tuple[Atom, ...], MultiResult] | None:
    """Return the operands that replace a branch's index, and the expression of the branch."""
    index = eqn.invars[0]
    if not any(v is index for v in definition.outvars) or _forwards_operand(eqn):
        return None
    branches = len(eqn.params["branches"])
    if definition.primitive.name == "convert_element_type":
        predicate = definition.invars[0]
        is_index = index.aval.dtype == np.int32 and not index.aval.shape
        if branches == 2 and predicate.aval.dtype == np.bool_ and is_index:
            return (predicate,), on_predicate(eqn)
    elif definition.primitive.name == "platform_index":
        if definition.params["platforms"] == eqn.params.get("branches_platforms"):
            return (), on_platform(eqn)
    elif definition.primitive.name == "clamp":
        low, number, high = definition.invars
        if _is_literal(low, 0) and _is_literal(high, branches - 1) and branches > 1:
            return (number,), on_number(eqn)
    return None


def _forwards_operand(eqn: JaxprEqn) -> bool:
    """Return True if a result is the same operand in all branches, which JAX would forward."""
    choice = Cond.of(eqn)
    bodies = list(map(open_jaxpr, choice.branches))
    places = [{v: i for i, v in enumerate(body.invars)} for body in bodies]
    for outs in zip(*(body.outvars for body in bodies), strict=True):
        found = {
            None if isinstance(v, Literal) else at.get(v)
            for v, at in zip(outs, places, strict=True)
        }
        if len(found) == 1 and found != {None}:
            return True
    return False


def _is_literal(atom: Atom, value: int) -> bool:
    return isinstance(atom, Literal) and atom.val == value
