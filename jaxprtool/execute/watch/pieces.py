"""Pieces of bodies: equations compiled together, and stepped equations between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxprtool import jaxcompat
from jaxprtool.execute.watch.collected import ITERATION_BYTES, Wanted, is_stepped
from jaxprtool.ir.basics.caches import anchor
from jaxprtool.ir.core.equations import Contains, free_variables, size_of
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, view
from jaxprtool.ir.rewriting.rewrite import narrow
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

#: The limit in bytes of the values of equations compiled together, unless it is a single one.
_PIECE_BYTES = 1 << 28


@dataclass(frozen=True)
class Piece:
    """Consecutive equations.

    Attributes:
        body: Their jaxpr, from the values that they read to those read later.
        together: Whether they are compiled together.
        live: The variables read after them.
    """

    body: ClosedJaxpr
    together: bool
    live: tuple[Var, ...]


class Pieces:
    """The pieces of bodies.

    Args:
        wanted: Decides which results of equations are watched.
        stepped: The equations to step in addition to those that cannot be compiled with others.
    """

    def __init__(self, wanted: Wanted, stepped: Callable[[JaxprEqn], bool]):
        self._wanted = wanted
        #: Whether a body has a stepped equation.
        self.steps = Contains(lambda eqn: stepped(eqn) or is_stepped(eqn))
        self._known: dict[AnyJaxpr, list[Piece]] = {}
        self._bytes: dict[Jaxpr, int] = {}

    def of(self, closed: ClosedJaxpr) -> list[Piece]:
        """Return the pieces of a body, in order."""
        key = anchor(closed)
        if key not in self._known:
            self._known[key] = self._cut(closed)
        return self._known[key]

    def _cut(self, closed: ClosedJaxpr) -> list[Piece]:
        constants = set(closed.constvars)
        live = {v: None for v in closed.outvars if not isinstance(v, Literal)}
        found = []
        for together, eqns in reversed(self._groups(closed)):
            free = free_variables(eqns)
            results = [v for eqn in eqns for v in eqn.outvars if v in live]
            given = [v for v in free if v not in constants]
            body = narrow(closed, given, results, eqns)
            found.append(Piece(body, together, tuple(live)))
            for v in results:
                del live[v]
            live.update(free)
        return found[::-1]

    def _groups(self, closed: ClosedJaxpr) -> list[tuple[bool, list[JaxprEqn]]]:
        groups: list[tuple[bool, list[JaxprEqn]]] = []
        total = 0
        for eqn in closed.eqns:
            size = self._size(eqn)
            together = not self.steps.at(eqn) and (size <= ITERATION_BYTES or not _inside(eqn))
            total += size
            if not groups or groups[-1][0] != together or total > _PIECE_BYTES:
                groups.append((together, []))
                total = size
            groups[-1][1].append(eqn)
        return groups

    def _size(self, eqn: JaxprEqn) -> int:
        """Return the bytes of the values collected from an equation."""
        held = view(eqn)
        wanted = (v for i, v in enumerate(eqn.outvars) if self._wanted(eqn, i))
        size = sum(size_of(v.aval, unknown=0) for v in wanted)
        times = held.length if isinstance(held, Scan) else 1
        return size + times * sum(map(self._size_inside, _inside(eqn)))

    def _size_inside(self, body: ClosedJaxpr) -> int:
        jaxpr = jaxcompat.open_jaxpr(body)
        if jaxpr not in self._bytes:
            self._bytes[jaxpr] = sum(map(self._size, jaxpr.eqns))
        return self._bytes[jaxpr]


def _inside(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """Return the bodies from which values are collected."""
    held = view(eqn)
    if isinstance(held, Cond):
        return tuple(held.branches)
    return (held.body,) if isinstance(held, Scan | Call | CustomJVP) else ()
