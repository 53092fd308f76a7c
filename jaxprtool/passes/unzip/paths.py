"""Why variables do not cut: a path from a key to where apply would need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.outline import named
from jaxprtool.ir.structured import Call
from jaxprtool.jaxcompat import JaxprEqn, Literal, Var
from jaxprtool.passes.unzip.split import Split

#: Of a long path, so many equations are shown at either end.
SHOWN = 6


def uncut(part: Split, in_names: Sequence[str], out_names: Sequence[str]) -> str | None:
    """The path by which a program needs a key through no variable, or None if there is none.

    It ends in a result, or in an equation with an effect that needs keys and other arguments.
    """
    for atom, known, name in zip(part.body.outvars, part.outs, out_names, strict=True):
        if not known.ready:
            return _shown(*_path(part, atom), in_names, name)
    if part.stuck:
        start, steps = _path_of(part, part.stuck[0])
        return _shown(start, steps, in_names, None)
    return None


def _shown(start: int, steps: list[JaxprEqn], in_names: Sequence[str], end: str | None) -> str:
    shown = [_named(eqn) for eqn in steps]
    if len(shown) > 2 * SHOWN:
        shown[SHOWN:-SHOWN] = [f"({len(shown) - 2 * SHOWN} more)"]
    return " -> ".join([in_names[start], *shown, *([] if end is None else [end])])


def _named(eqn: JaxprEqn) -> str:
    """An equation for the path; a call by the name of what it calls."""
    return named(eqn).replace("jit", eqn.params["name"], 1) if "name" in eqn.params else named(eqn)


def _path(part: Split, atom: Any) -> tuple[int, list[JaxprEqn]]:
    """The argument that a value that is not ready comes from, and the equations on the way."""
    invars = {v: i for i, v in enumerate(part.body.invars)}
    made = {v: i for i, eqn in enumerate(part.body.eqns) for v in eqn.outvars}
    steps: list[JaxprEqn] = []
    while atom not in invars:
        position = made[atom]
        atom, inner = _before(part, position, atom)
        steps[:0] = inner
    return invars[atom], steps


def _path_of(part: Split, eqn: JaxprEqn) -> tuple[int, list[JaxprEqn]]:
    """The path to an equation with an effect, into the body that holds the effect."""
    position = next(i for i, each in enumerate(part.body.eqns) if each is eqn)
    inner: list[JaxprEqn] = [eqn]
    operand = _unready(part, eqn)
    for body in part.parts.get(position, ()):
        if body.stuck and eqn.primitive.name in Call.primitives:
            index, inner = _path_of(body, body.stuck[0])
            operand = eqn.invars[index]
    start, steps = _path(part, operand)
    return start, [*steps, *inner]


def _before(part: Split, position: int, atom: Var) -> tuple[Var, list[JaxprEqn]]:
    """The operand of an equation that its result is not ready for, and the equations between."""
    eqn = part.body.eqns[position]
    if position in part.parts and eqn.primitive.name in Call.primitives:
        (body,) = part.parts[position]
        index, steps = _path(body, body.body.outvars[eqn.outvars.index(atom)])
        # What a library's own call does inside has no line of the user's.
        own = any(jaxcompat.user_frame(each) for each in steps)
        return eqn.invars[index], steps if own else [eqn]
    return _unready(part, eqn), [eqn]


def _unready(part: Split, eqn: JaxprEqn) -> Any:
    for atom in eqn.invars:
        if not isinstance(atom, Literal) and not part.known[atom].ready:
            return atom
    raise AssertionError(f"{named(eqn)} lacks no operand")
