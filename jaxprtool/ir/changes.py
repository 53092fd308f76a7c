"""Which equations of a program a rewrite took away, and which it added.

Two equations are counterparts if they do the same on values of the same types: the same primitive
and parameters, the same literals. Of several that are alike those are paired that are computed from
the same values, or that the same is computed from, or that come from the same line. What an
equation reads may have another name, or stand for something that is gone; but if what it read is
still there and it now reads something else, it is another equation.

Bodies are compared with the bodies of the counterpart: what changed inside a loop leaves the loop
itself as it was, unless that takes or gives other values now.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import bodies, equations
from jaxprtool.ir.structural_key import literal_key, own_parameters_key
from jaxprtool.ir.structured import holds_jaxpr
from jaxprtool.jaxcompat import AnyJaxpr, Aval, Jaxpr, JaxprEqn, Literal, Var

#: Of equations that are alike, so many are looked at for the one that fits best.
_MOST_ALIKE = 16

#: Two equations, by their positions.
_Pairs: TypeAlias = dict[int, int]


@dataclass(frozen=True)
class Changes:
    """The equations, by `id`, that one program has and the other has no counterpart of.

    Attributes:
        removed: Those of the program before, in bodies too.
        added: Those of the program after.
    """

    removed: frozenset[int]
    added: frozenset[int]


def changes(before: AnyJaxpr, after: AnyJaxpr) -> Changes:
    """Return which equations of two programs have no counterpart in the other.

    A body that several equations share is compared once with each body that it became; an equation
    in it has a counterpart if it has one in any of these.
    """
    old, new = jaxcompat.open_jaxpr(before), jaxcompat.open_jaxpr(after)
    keys = _Keys()
    kept: tuple[set[int], set[int]] = set(), set()
    todo, seen = [(old, new)], {(old, new)}
    while todo:
        a, b = todo.pop()
        if a is b:
            for each in kept:
                each.update(map(id, equations(a)))
            continue
        pairs = _Bodies(keys, a, b).pairs()
        kept[0].update(id(a.eqns[i]) for i in pairs)
        kept[1].update(id(b.eqns[j]) for j in pairs.values())
        inside = _bodies_of_pairs(a, b, pairs)
        new_pairs = [pair for pair in dict.fromkeys(inside) if pair not in seen]
        seen.update(new_pairs)
        todo += new_pairs
    return Changes(_others(old, kept[0]), _others(new, kept[1]))


def _others(jaxpr: Jaxpr, kept: set[int]) -> frozenset[int]:
    return frozenset(id(eqn) for eqn in equations(jaxpr)) - kept


def _bodies_of_pairs(a: Jaxpr, b: Jaxpr, pairs: _Pairs) -> Iterator[tuple[Jaxpr, Jaxpr]]:
    """Yield the bodies to compare: of counterparts, and of others that are alike, in order."""
    partners = dict(pairs)
    for kind in (_name, _primitive):
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        taken = set(partners.values())
        for j, eqn in enumerate(b.eqns):
            if j not in taken and holds_jaxpr(eqn.params.values()):
                waiting[kind(eqn)].append(j)
        for i, eqn in enumerate(a.eqns) if waiting else ():
            if i not in partners and holds_jaxpr(eqn.params.values()) and waiting[kind(eqn)]:
                partners[i] = waiting[kind(eqn)].popleft()
    for i, j in partners.items():
        held = bodies(a.eqns[i]), bodies(b.eqns[j])
        if len(held[0]) == len(held[1]):
            yield from ((x, y) for (_, x), (_, y) in zip(*held, strict=True))


def _primitive(eqn: JaxprEqn) -> Hashable:
    return eqn.primitive.name


def _name(eqn: JaxprEqn) -> Hashable:
    return eqn.primitive.name, eqn.params.get("name")


class _Keys:
    """Numbers of types and equations: the same for those that are the same but for names."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._types: dict[int, int] = {}
        self._literals: dict[int, int] = {}
        self._equations: dict[int, int] = {}

    def number(self, key: Hashable) -> int:
        """Return the number that stands for a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def equation(self, eqn: JaxprEqn) -> int:
        """Return the number of an equation, what it reads and its bodies left out."""
        found = self._equations.get(id(eqn))
        if found is None:
            operands = [
                self._literal(atom) if type(atom) is Literal else self._type(atom.aval)
                for atom in eqn.invars
            ]
            results = [self._type(var.aval) for var in eqn.outvars]
            key = eqn.primitive.name, own_parameters_key(eqn), tuple(operands), tuple(results)
            found = self._equations[id(eqn)] = self.number(key)
        return found

    def _type(self, aval: Aval) -> int:
        found = self._types.get(id(aval))
        if found is None:
            found = self._types[id(aval)] = self.number(("type", aval))
        return found

    def _literal(self, literal: Literal) -> int:
        found = self._literals.get(id(literal))
        if found is None:
            found = self._literals[id(literal)] = self.number(("literal", literal_key(literal)))
        return found


class _Bodies:
    """Two bodies that are compared, their own bodies left aside."""

    def __init__(self, keys: _Keys, a: Jaxpr, b: Jaxpr):
        self._keys = keys
        self._sides = a, b
        self._own = [list(map(keys.equation, side.eqns)) for side in self._sides]
        self._arguments: list[tuple[Var, Var]] = []
        for olds, news in ((a.constvars, b.constvars), (a.invars, b.invars)):
            if len(olds) == len(news):
                self._arguments += zip(olds, news, strict=True)

    def pairs(self) -> _Pairs:
        """Return the equations that are counterparts, by their positions."""
        possible = (Counter(self._own[0]) & Counter(self._own[1])).total()
        likely: _Pairs = {}
        for keys in (self._by_results, self._by_origin, self._by_use):
            if len(likely) < possible:
                _add_pairs(likely, keys(0), keys(1))
        return self._consistent(likely)

    def _by_results(self, side: int) -> list[Hashable]:
        """A key for each equation by the variables that it binds, which many passes keep."""
        eqns = self._sides[side].eqns
        return [
            (own, *map(id, eqn.outvars)) for own, eqn in zip(self._own[side], eqns, strict=True)
        ]

    def _by_origin(self, side: int) -> list[Hashable]:
        """A key for each equation by all that it is computed from."""
        number = self._keys.number
        values = {id(pair[side]): number(("argument", i)) for i, pair in enumerate(self._arguments)}
        found: list[Hashable] = []
        for own, eqn in zip(self._own[side], self._sides[side].eqns, strict=True):
            operands = [
                None if type(v) is Literal else values.get(id(v), id(v)) for v in eqn.invars
            ]
            key = number((own, *operands))
            for i, var in enumerate(eqn.outvars):
                values[id(var)] = number((key, "result", i)) if i else key
            found.append(key)
        return found

    def _by_use(self, side: int) -> list[Hashable]:
        """A key for each equation by all that is computed from it."""
        number, body = self._keys.number, self._sides[side]
        uses: dict[int, list[int]] = defaultdict(list)
        for i, atom in enumerate(body.outvars):
            uses[id(atom)].append(number(("output", i)))
        found: list[Hashable] = []
        for own, eqn in zip(reversed(self._own[side]), reversed(body.eqns), strict=True):
            results = [tuple(sorted(uses.pop(id(var), ()))) for var in eqn.outvars]
            key = number((own, "used", *results))
            for i, atom in enumerate(eqn.invars):
                if type(atom) is not Literal:
                    uses[id(atom)].append(number((key, "operand", i)))
            found.append(key)
        return found[::-1]

    def _consistent(self, likely: _Pairs) -> _Pairs:
        """Return pairs that read what corresponds: the likely ones, then the best of those left."""
        a, b = self._sides
        taken = set(likely.values())
        free: dict[int, deque[int]] = defaultdict(deque)
        for j, own in enumerate(self._own[1]):
            if j not in taken:
                free[own].append(j)
        partners = {id(old): new for old, new in self._arguments}
        pairs: _Pairs = {}
        for i, (own, eqn) in enumerate(zip(self._own[0], a.eqns, strict=True)):
            found = likely.get(i)
            if found is not None and _agreement(eqn, b.eqns[found], partners) is None:
                free[own].append(found)
                found = None
            if found is None:
                found = _take_best(eqn, b.eqns, free[own], partners)
            if found is not None:
                pairs[i] = found
                results = b.eqns[found].outvars
                partners.update((id(v), w) for v, w in zip(eqn.outvars, results, strict=True))
        return pairs


def _add_pairs(pairs: _Pairs, old: Sequence[Hashable], new: Sequence[Hashable]) -> None:
    """Pair those that have no partner yet by their keys; of several with one key, in order."""
    taken = set(pairs.values())
    waiting: dict[Hashable, deque[int]] = defaultdict(deque)
    for j, key in enumerate(new):
        if j not in taken:
            waiting[key].append(j)
    for i, key in enumerate(old):
        if i not in pairs and (found := waiting.get(key)):
            pairs[i] = found.popleft()


def _take_best(
    eqn: JaxprEqn, eqns: Sequence[JaxprEqn], free: deque[int], partners: dict[int, Var]
) -> int | None:
    """Take from those alike the one that reads most of what corresponds, from the same line."""
    best, most = None, -1
    for place, j in enumerate(islice(free, _MOST_ALIKE)):
        agreed = _agreement(eqn, eqns[j], partners)
        if agreed is not None:
            traceback = eqn.source_info.traceback
            same_line = traceback is not None and traceback == eqns[j].source_info.traceback
            if 2 * agreed + same_line > most:
                best, most = place, 2 * agreed + same_line
    if best is None:
        return None
    found = free[best]
    del free[best]
    return found


def _agreement(old: JaxprEqn, new: JaxprEqn, partners: dict[int, Var]) -> int | None:
    """Return how many operands correspond; None if one that is still there is read no more."""
    count = 0
    for atom, other in zip(old.invars, new.invars, strict=True):
        partner = partners.get(id(atom))
        if partner is not None and partner is not other:
            return None
        count += partner is not None
    return count
