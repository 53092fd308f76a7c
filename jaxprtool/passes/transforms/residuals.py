"""What residuals are called: by where in the user's source they are computed.

A value that a call, a loop or a branch gives is followed to the equation inside that computes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.paths import unique
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, ShardMap, While, view
from jaxprtool.jaxcompat import JaxprEqn, Literal, Var


def residual_names(values: Sequence[Var], jaxpr: Any, arg_names: Sequence[str]) -> dict[Var, str]:
    """A name for each variable of a closed jaxpr that is no constant, no two the same.

    An argument has its own; a value named with `checkpoint_name`, that one; others have the file,
    line and primitive that made them, `model.py:12 tanh`.
    """
    known = dict(zip(jaxpr.invars, arg_names, strict=True))
    makers = _makers(jaxpr)
    names = [_name(value, makers, known) for value in values]
    return dict(zip(values, unique(names), strict=True))


def _makers(jaxpr: Any) -> dict[Var, JaxprEqn]:
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def _name(value: Var, makers: dict[Var, JaxprEqn], known: dict[Var, str]) -> str:
    place = ""
    while value not in known:
        eqn = makers[value]
        eqn, place, operand = _innermost(eqn, eqn.outvars.index(value), place)
        if not isinstance(operand, Var):
            if eqn.primitive.name == "name":
                return str(eqn.params["name"])
            return f"{place} {eqn.primitive.name}".strip()
        value = operand
    return known[value]


def _innermost(eqn: JaxprEqn, index: int, place: str) -> tuple[JaxprEqn, str, Any]:
    """The equation, at any depth, that computes a result of `eqn`, and its source line.

    If a body only hands on what it is given, also the operand of `eqn` that this is.
    """
    inside = False
    while True:
        place = _place(eqn) or place
        for body in _bodies(eqn):
            atom = body.outvars[index]
            if isinstance(atom, Literal):
                continue
            inner = _makers(body).get(atom)
            if inner is not None and not (isinstance(view(eqn), Cond) and _is_filler(inner)):
                eqn, index, inside = inner, inner.outvars.index(atom), True
                break
            if not inside and atom in body.invars and not isinstance(view(eqn), Cond | While):
                operand = body.invars.index(atom)
                if not _is_carry(eqn, operand):
                    return eqn, place, eqn.invars[operand]
        else:
            return eqn, place, None


def _bodies(eqn: JaxprEqn) -> Sequence[Any]:
    """The bodies whose results are those of an equation, one for one."""
    match view(eqn):
        case Call() | CustomJVP() | ShardMap() | Scan() | While() as structured:
            return [structured.body]
        case Cond() as structured:
            return structured.branches
    return []


def _is_carry(eqn: JaxprEqn, operand: int) -> bool:
    scan = view(eqn)
    if not isinstance(scan, Scan):
        return False
    return 0 <= operand - len(scan.consts) < len(scan.carry)


def _is_filler(eqn: JaxprEqn) -> bool:
    """Whether an equation only spreads a number, as a branch does that has no such residual."""
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def _place(eqn: JaxprEqn) -> str:
    frame = jaxcompat.user_frame(eqn)
    return f"{os.path.basename(frame[0])}:{frame[1]}" if frame else ""
