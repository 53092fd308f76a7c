"""Reorder the equations of programs, to compare programs that differ only in this order.

Independent equations may come in any order, those with effects only in one. They are sorted by what
they compute from the arguments, and then, among equal ones, by the uses of their results. Nothing
is added or dropped, and each equation stays after those it depends on. So two programs with the
same equations that are `equivalent` after sorting compute the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import anchor
from jaxprtool.ir.equivalence import Unkeyable, structural_difference, value_key
from jaxprtool.ir.keys import literal_key
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.rewrite import with_bodies
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var


def difference_but_for_order(p: Program, q: Program) -> str | None:
    """Return the first difference between two programs, except for the order of equations."""
    order = _Order()
    return structural_difference(*(each.replace(jaxpr=order.sorted(each.jaxpr)) for each in (p, q)))


class _Order:
    """A common order for the equations of several programs."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Hashable, Any] = {}

    def sorted(self, jaxpr: Any) -> Any:
        """Return a jaxpr with its equations in order, at every depth."""
        key = anchor(jaxpr), type(jaxpr)
        if key not in self._known:
            eqns = [with_bodies(eqn, self.sorted) for eqn in jaxcompat.open_jaxpr(jaxpr).eqns]
            body = jaxcompat.open_jaxpr(jaxpr)
            ranks = self._ranks(eqns, (*body.constvars, *body.invars), body.outvars)
            ordered = [eqns[i] for i in _topological(_needed(eqns), ranks)]
            self._known[key] = jaxcompat.replace_jaxpr(jaxpr, eqns=ordered)
        return self._known[key]

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _parameters(self, eqn: JaxprEqn) -> Iterator[Hashable]:
        """Yield what distinguishes the parameters of an equation, with sorted bodies."""
        yield tuple(v.aval for v in eqn.outvars)
        for name, value in eqn.params.items():
            if not holds_jaxpr([value]) and not callable(value):
                try:
                    yield name, value_key(value)
                except Unkeyable:
                    continue
        for path, inner in sub_jaxprs(eqn):
            body = jaxcompat.open_jaxpr(inner)
            ranks = self._ranks(body.eqns, (*body.constvars, *body.invars), body.outvars)
            yield path, *ranks

    def _ranks(
        self, eqns: Sequence[JaxprEqn], arguments: Sequence[Var], results: Sequence[Atom]
    ) -> list[tuple[int, int]]:
        """Return for each equation two numbers: what it computes, and the uses of its results."""
        values: dict[Atom, int] = {v: self._number("argument", i) for i, v in enumerate(arguments)}
        computed, before = [], -1
        for eqn in eqns:
            operands = [
                self._number(literal_key(v)) if isinstance(v, Literal) else values[v]
                for v in eqn.invars
            ]
            earlier = before if _is_pinned(eqn) else None
            number = self._number(eqn.primitive, *self._parameters(eqn), *operands, earlier)
            before = before if earlier is None else number
            computed.append(number)
            values.update((v, self._number(number, i)) for i, v in enumerate(eqn.outvars))
        uses: dict[Atom, list[tuple[int, int]]] = {}
        for i, atom in enumerate(results):
            if not isinstance(atom, Literal):
                uses.setdefault(atom, []).append((-1, i))
        becomes = [0] * len(eqns)
        for k in range(len(eqns) - 1, -1, -1):
            found = [tuple(sorted(uses.get(v, ()))) for v in eqns[k].outvars]
            becomes[k] = self._number(computed[k], *found)
            for i, atom in enumerate(eqns[k].invars):
                if not isinstance(atom, Literal):
                    uses.setdefault(atom, []).append((becomes[k], i))
        return list(zip(computed, becomes, strict=True))


def _is_pinned(eqn: JaxprEqn) -> bool:
    """Return True if an equation has an effect, and must stay after earlier ones with effects."""
    return bool(eqn.effects) and not jaxcompat.only_names_axes(eqn.effects)


def _needed(eqns: Sequence[JaxprEqn]) -> list[list[int]]:
    """Return the equations that each equation depends on, by operand, then by effect."""
    definition = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needed, before = [], None
    for i, eqn in enumerate(eqns):
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        found = [definition[v] for v in read if v in definition]
        if _is_pinned(eqn):
            found += [] if before is None else [before]
            before = i
        needed.append(found)
    return needed


def _topological(needed: Sequence[list[int]], ranks: Sequence[tuple[int, int]]) -> list[int]:
    """Return equations by rank, each after its dependencies; ties in their order."""
    readers: list[list[int]] = [[] for _ in needed]
    for i, before in enumerate(needed):
        for j in before:
            readers[j].append(i)
    waiting = list(map(len, needed))
    ready: list[tuple[Any, ...]] = []
    position: dict[int, int] = {}

    def push(i: int) -> None:
        heappush(ready, (*ranks[i], [position[j] for j in needed[i]], i))

    for i, count in enumerate(waiting):
        if not count:
            push(i)
    while ready:
        *_, i = heappop(ready)
        position[i] = len(position)
        for reader in readers[i]:
            waiting[reader] -= 1
            if not waiting[reader]:
                push(reader)
    return list(position)
