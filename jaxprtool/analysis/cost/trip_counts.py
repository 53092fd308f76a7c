"""Find the trip count of a loop."""

from __future__ import annotations

from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.core.regions import Regions
from jaxprtool.ir.core.structured import While
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal


def trip_count(held: Regions) -> Any:
    """Return the number of times that the bodies of an equation run, or None if unknown.

    The trip count of a `while` is known if it counts up by 1 to a constant, as `fori_loop` does.
    """
    trips = held.view.trips
    return _counted(held.view) if trips is None and isinstance(held.view, While) else trips


def runs_of(held: Regions | None) -> Any:
    """Return the number of times that bodies run, which is 1 if it is unknown."""
    count = None if held is None else trip_count(held)
    return 1 if count is None else count


def _counted(loop: While) -> int | None:
    cond, body = jaxcompat.open_jaxpr(loop.cond), jaxcompat.open_jaxpr(loop.body)
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None
    counter, end = cond.eqns[0].invars
    position = _position(counter, cond.invars[len(loop.cond_consts) :])
    limit = _literal(end)
    if limit is None:
        place = _position(end, cond.invars)
        outside = (*loop.cond_consts, *loop.carry)
        # A limit that is carried is constant if the body passes it on.
        if place is None or not _stays(loop, place - len(loop.cond_consts)):
            return None
        limit = _literal(outside[place])
    start = None if position is None else _literal(loop.carry[position])
    if position is None or start is None or limit is None:
        return None
    inside = body.invars[len(loop.body_consts) + position]
    step = next((e for e in body.eqns if body.outvars[position] in e.outvars), None)
    return max(limit - start, 0) if step is not None and _adds_one(step, inside) else None


def _position(atom: Atom, among: Any) -> int | None:
    return next((i for i, each in enumerate(among) if each is atom), None)


def _literal(atom: Atom) -> int | None:
    whole = type(atom) is Literal and getattr(atom.aval, "dtype", None) is not None
    return (
        int(atom.val) if whole and atom.aval.shape == () and atom.aval.dtype.kind in "iu" else None
    )


def _stays(loop: While, position: int) -> bool:
    """Return True if a carried value never changes. Constants have a negative position."""
    body = jaxcompat.open_jaxpr(loop.body)
    return position < 0 or body.outvars[position] is body.invars[len(loop.body_consts) + position]


def _adds_one(eqn: JaxprEqn, counter: Atom) -> bool:
    values = [_literal(v) for v in eqn.invars]
    return eqn.primitive.name == "add" and counter in eqn.invars and 1 in values
