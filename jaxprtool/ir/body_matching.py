"""Pairs of equations that correspond in two bodies, their own bodies left aside.

The bodies are graphs, and equations are paired from what is most alike to what is least, see
`ir.counterparts`. Each step looks at each equation, and at each operand, a few times, so that the
time grows with the size of the bodies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.body_graph import Side
from jaxprtool.ir.body_pairs import MOST_ALIKE, BodyPairs, Opened, in_order
from jaxprtool.ir.equation_keys import EquationKeys, Likeness
from jaxprtool.ir.regions import regions
from jaxprtool.ir.structured import holds_jaxpr
from jaxprtool.jaxcompat import AnyJaxpr, Atom, JaxprEqn, Literal, Var

T = TypeVar("T")

#: So many equations of calls are looked at, and in large bodies more.
_OPENED_AT_LEAST = 2000

#: How many steps around equations is looked for what tells them apart, in turn.
_RADII = (4, 1, 0)


def match_bodies(
    keys: EquationKeys,
    bodies: tuple[AnyJaxpr, AnyJaxpr],
    arguments: Sequence[tuple[int, int]],
    results: Sequence[tuple[int, int]],
) -> BodyPairs:
    """Match two bodies, of which these arguments and results correspond, by position."""
    first, second = (
        Side(
            keys,
            body,
            {pair[k]: n for n, pair in enumerate(arguments)},
            {pair[k]: n for n, pair in enumerate(results)},
        )
        for k, body in enumerate(bodies)
    )
    found = BodyPairs(keys, (first, second))
    a, b = first.jaxpr, second.jaxpr
    for i, j in arguments:
        found.correspond(a.invars[i], b.invars[j])
    _pair_constants(keys, found, by_type=True)
    found.results = [(a.outvars[i], b.outvars[j]) for i, j in results]
    _Search(keys, found).run()
    return found


def _pair_constants(keys: EquationKeys, found: BodyPairs, by_type: bool) -> None:
    """Pair constants of one value, and then perhaps those of one type."""
    values = [keys.constants(side.held) for side in found.sides]
    types = [[str(var.aval) for var in side.jaxpr.constvars] for side in found.sides]
    taken: tuple[set[int], set[int]] = set(), set()
    a, b = (side.jaxpr.constvars for side in found.sides)
    for old, new in (values, types) if by_type else (values,):
        for i, j in in_order(enumerate(old), enumerate(new), taken):
            found.correspond(a[i], b[j])


class _Search:
    """The search for the pairs of two bodies.

    Args:
        keys: What numbers the equations.
        found: The two bodies, and what is known of them at first.
        budget: How many equations of calls may still be looked at.
    """

    def __init__(self, keys: EquationKeys, found: BodyPairs, budget: list[int] | None = None):
        self._keys = keys
        self._found = found
        # Calls that hold each other may be opened along more ways than can be gone.
        size = sum(len(side.eqns) for side in found.sides)
        self._budget = [_OPENED_AT_LEAST + 4 * size] if budget is None else budget

    def run(self) -> None:
        """Find all pairs."""
        self._pair_in_order(*(self._by_variables(side) for side in self._found.sides))
        for likeness in Likeness:
            if not self._is_done(likeness):
                origins = [side.origins(likeness).equations for side in self._found.sides]
                uses = [side.uses(likeness) for side in self._found.sides]
                self._pair_in_order(
                    *(list(zip(*each, strict=True)) for each in zip(origins, uses, strict=True))
                )
                self._pair_in_order(*origins)
                self._pair_in_order(*uses)
            spread = _Spread(self._found, likeness)
            if all(self._found.unpaired()):
                spread.run()
                self._open_calls(spread, (0, 1))
            for radius in _RADII:
                if not self._is_done(likeness):
                    self._pair_unique(likeness, radius, spread)
            if not self._is_done(likeness):
                spread.bridge()
                self._pair_rest(likeness, spread)
        self._pair_replaced()

    def _is_done(self, likeness: Likeness) -> bool:
        """Return True if no two equations are left that are alike."""
        left = self._found.unpaired()
        if not (left[0] and left[1]):
            return True
        keys = (side.own(likeness) for side in self._found.sides)
        first, second = ({own[i] for i in each} for own, each in zip(keys, left, strict=True))
        return first.isdisjoint(second)

    # --- calls ------------------------------------------------------------------------------------

    def _open_calls(self, spread: _Spread, sides: Sequence[int]) -> None:
        """Match the bodies of calls that have no counterpart with the other body itself."""
        while calls := [
            (which, i, body)
            for which in sides
            for i, body in self._found.sides[which].calls
            if i not in self._found.taken[which] and not self._is_in_other(which, i)
        ]:
            # The equations of a large call are not those of smaller ones in the other body.
            calls.sort(key=lambda call: -len(jaxcompat.open_jaxpr(call[2]).eqns))
            opened = [self._open(*call) for call in calls]
            if not any(opened):
                break
            spread.run()

    def _is_in_other(self, which: int, position: int) -> bool:
        """Return True if a call of one body has an unpaired one like it in the other."""
        own, other = (side.own(Likeness.SIMILAR) for side in self._found.sides[:: 1 - 2 * which])
        calls, taken = self._found.sides[1 - which].calls, self._found.taken[1 - which]
        return any(own[position] == other[j] for j, _ in calls if j not in taken)

    def _open(self, which: int, position: int, body: AnyJaxpr) -> bool:
        """Match the body of a call with the other body, and return whether half of it is there."""
        if position in self._found.taken[which]:
            return False
        eqn, opened = self._found.sides[which].eqns[position], jaxcompat.open_jaxpr(body)
        given = [*zip(opened.invars, _given(eqn), strict=True)]
        constants = zip(opened.constvars, getattr(body, "consts", ()), strict=False)
        scalars = [(var, jaxcompat.as_literal(value, var.aval)) for var, value in constants]
        literals = {id(var): atom for var, atom in given + scalars if type(atom) is Literal}
        inner = Side(self._keys, body, {}, {}, literals)
        self._budget[0] -= 1 + len(inner.eqns)
        if self._budget[0] < 0:
            return False
        inside = BodyPairs(self._keys, _in_place(self._found.sides, which, inner))
        inside.taken = _in_place(self._found.taken, which, set())
        inside.literals = literals
        known = (self._found.partner, self._found.back)[which]
        for var, operand in given:
            if (other := known.get(id(operand))) is not None:
                inside.correspond(*((var, other) if which == 0 else (other, var)))
        for atom, var in zip(opened.outvars, eqn.outvars, strict=True):
            if (read := self._read_for(which, var)) is not None:
                inside.results.append((atom, read) if which == 0 else (read, atom))
        if not _Search(self._keys, inside, self._budget)._is_half_there(which):
            inside.give_back(1 - which)
            return False
        self._found.taken[which].add(position)
        self._found.opened.append(Opened(which, position, inside))
        self._note_operands(which, dict(given), inside)
        found = (inside.partner, inside.back)[which]
        for atom, var in zip(opened.outvars, eqn.outvars, strict=True):
            literal = inside.literals.get(id(atom), atom)
            if type(literal) is Literal:
                self._found.literals[id(var)] = literal
            elif (other := found.get(id(atom))) is not None:
                self._found.correspond(*((var, other) if which == 0 else (other, var)))
        return True

    def _is_half_there(self, which: int) -> bool:
        """Match the body of a call, and return whether half of it, or of what is left, is there."""
        inner = self._found.sides[which]
        left = len(self._found.sides[1 - which].eqns) - len(self._found.taken[1 - which])
        if inner.jaxpr.constvars:
            _pair_constants(self._keys, self._found, by_type=False)
        _Spread(self._found, Likeness.SAME).run()
        spread = _Spread(self._found, Likeness.SIMILAR)
        spread.run()
        self._open_calls(spread, (which,))
        _Spread(self._found, Likeness.KIND).run()  # beyond loops that differ
        # That calls are alike but for their bodies is no sign that one is the other.
        flat = [not holds_jaxpr(each.params.values()) for each in inner.eqns]
        similar, same = (
            [side.own(likeness) for side in self._found.sides]
            for likeness in (Likeness.SIMILAR, Likeness.SAME)
        )
        found = []
        for pair in self._found.order:
            own = similar if flat[pair[which]] else same
            if own[0][pair[0]] == own[1][pair[1]]:
                found.append(pair[which])
        found += [each.position for each in self._found.opened]
        known = flat.count(True) + sum(not flat[i] for i in found)
        return 2 * len(found) >= min(known, left) and bool(found or not inner.eqns)

    def _note_operands(self, which: int, given: dict[Var, Atom], inside: BodyPairs) -> None:
        """Note what the other body reads in the place of what an opened call is given."""
        eqns = [side.eqns for side in inside.sides]
        pairs = [(eqns[0][i].invars, eqns[1][j].invars) for i, j in inside.order]
        for atoms in chain(inside.read, *(zip(*pair, strict=False) for pair in pairs)):
            own, other = atoms[which], atoms[1 - which]
            if type(own) is not Literal and own in given:
                self._found.read.append((given[own], other) if which == 0 else (other, given[own]))

    def _read_for(self, which: int, var: Var) -> Atom | None:
        """Return what the counterpart of a reader of a variable reads in its place."""
        pairs = (self._found.pairs, self._found.paired)[which]
        own, other = self._found.sides[which], self._found.sides[1 - which]
        for i, place in own.readers.get(id(var), ()):
            if i in pairs and place < len(read := other.eqns[pairs[i]].invars):
                return read[place]
        for pair in self._found.results:
            if pair[which] is var:
                return pair[1 - which]
        return None

    # --- pairing ----------------------------------------------------------------------------------

    def _by_variables(self, side: Side) -> list[Hashable]:
        """A key for each equation by the variables that it binds, which many passes keep."""
        own = side.own(Likeness.SAME)
        return [(key, *map(id, eqn.outvars)) for key, eqn in zip(own, side.eqns, strict=True)]

    def _pair_in_order(self, old: Sequence[Hashable], new: Sequence[Hashable]) -> None:
        """Pair equations by their keys; of several with one key, in order."""
        left = self._found.unpaired()
        olds, news = (
            [(i, keys[i]) for i in each] for keys, each in zip((old, new), left, strict=True)
        )
        for i, j in in_order(olds, news, (set(), set())):
            self._found.pair(i, j)

    def _pair_unique(self, likeness: Likeness, radius: int, spread: _Spread) -> None:
        """Pair equations that are the only ones of their kind in what is around them."""
        own = [side.own(likeness) for side in self._found.sides]
        for olds, news in self._alike_around(own, radius):
            if len(olds) == 1 or radius == _RADII[0]:
                for i, j in zip(olds, news, strict=True):
                    if self._found.is_free(i, j) and not self._found.conflict(i, j):
                        self._found.pair(i, j)
        spread.run()

    def _pair_replaced(self) -> None:
        """Pair equations of different primitives that stand between the same equations."""
        if not all(self._found.unpaired()):
            return
        own = [[len(eqn.outvars) for eqn in side.eqns] for side in self._found.sides]
        for olds, news in self._alike_around(own, _RADII[0]):
            for i, j in zip(olds, news, strict=True):
                if self._found.fit(i, j, Likeness.KIND) > 1:
                    self._found.pair(i, j)

    def _alike_around(
        self, own: Sequence[Sequence[int]], radius: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the equations without counterpart that have one key, if both sides have as many."""
        by_key: tuple[dict[Hashable, list[int]], ...] = defaultdict(list), defaultdict(list)
        for k, left in enumerate(self._found.unpaired()):
            for i, key in _around(self._found, k, left, own[k], radius).items():
                by_key[k][key].append(i)
        for key, olds in by_key[0].items():
            news = by_key[1].get(key, [])
            if len(olds) == len(news):
                yield olds, news

    def _pair_rest(self, likeness: Likeness, spread: _Spread) -> None:
        """Pair what is left with the best of those alike that has something in common with it."""
        left = self._found.unpaired()
        own = [side.own(likeness) for side in self._found.sides]
        free: dict[int, deque[int]] = defaultdict(deque)
        for j in left[1]:
            free[own[1][j]].append(j)
        for i in left[0]:
            if i in self._found.taken[0] or own[0][i] not in free:
                continue
            found = self._found.best(i, free[own[0][i]], likeness)
            if found is not None:
                self._found.pair(i, found)
                spread.run()


class _Spread:
    """Pairs what gives operands to pairs, or reads their results, if that is alike.

    `run` goes on from the pairs that were made since it last ran.
    """

    def __init__(self, matching: BodyPairs, likeness: Likeness):
        self._matching = matching
        self._likeness = likeness
        self._own = [side.own(likeness) for side in matching.sides]
        self._eqns = [side.eqns for side in matching.sides]
        self._next_value = self._next_pair = self._next_read = 0
        self._unclear: list[tuple[deque[int], deque[int]]] = []
        for v, w in matching.results:
            self._upwards(v, w)

    def run(self) -> None:
        """Pair all that can be reached."""
        matching = self._matching
        while True:
            if self._next_pair < len(matching.order):
                i, j = matching.order[self._next_pair]
                self._next_pair += 1
                old, new = self._eqns[0][i], self._eqns[1][j]
                for k, m in matching.operand_pairs(old, new):
                    self._upwards(old.invars[k], new.invars[m])
            elif self._next_read < len(matching.read):
                self._upwards(*matching.read[self._next_read])
                self._next_read += 1
            elif self._next_value < len(matching.values):
                self._downwards(*matching.values[self._next_value])
                self._next_value += 1
            elif self._unclear:
                self._clear(*self._unclear.pop())
            else:
                break

    def bridge(self) -> None:
        """Pair readers of values that correspond, where equations were put before one of them."""
        matching = self._matching
        at = 0
        while at < len(matching.values):
            pair = matching.values[at]
            at += 1
            for k, taken_here in enumerate(matching.taken):
                readers = matching.sides[k].readers.get(id(pair[k]), ())
                free = [(i, place) for i, place in readers[:MOST_ALIKE] if i not in taken_here]
                for i, place in free:
                    self._over(1 - k, pair[1 - k], i, place)
            self.run()

    def _over(self, which: int, var: Var, i: int, place: int) -> None:
        """Pair an equation with one that reads at a place what is computed of a variable."""
        matching = self._matching
        side, taken = matching.sides[which], matching.taken[which]
        for put, _ in side.readers.get(id(var), ())[:MOST_ALIKE]:
            for result in side.eqns[put].outvars if put not in taken else ():
                for j, at in side.readers.get(id(result), ())[:MOST_ALIKE]:
                    if at == place:
                        self._try(*((i, j) if which == 1 else (j, i)))

    def _upwards(self, x: Atom, y: Atom) -> None:
        """Pair the equations that bind two operands of counterparts."""
        a, b = self._matching.sides
        made, other = a.makers.get(id(x)), b.makers.get(id(y))
        if not (made and other):
            return
        counts = [len(self._eqns[k][i].outvars) for k, (i, _) in enumerate((made, other))]
        if made[1] == other[1] or counts[0] != counts[1]:
            self._try(made[0], other[0])

    def _downwards(self, v: Var, w: Var) -> None:
        """Pair the equations that read two values that correspond."""
        groups: tuple[dict[Hashable, list[int]], ...] = defaultdict(list), defaultdict(list)
        for k, (side, var) in enumerate(zip(self._matching.sides, (v, w), strict=True)):
            taken = self._matching.taken[k]
            for i, place in side.readers.get(id(var), ()):
                if i not in taken:
                    groups[k][self._own[k][i], self._role(side.eqns[i], place)].append(i)
        for key, olds in groups[0].items():
            news = groups[1].get(key)
            if news and len(olds) == len(news) == 1:
                self._try(olds[0], news[0])
            elif news:
                self._unclear.append((deque(olds), deque(news)))

    def _role(self, eqn: JaxprEqn, place: int) -> int:
        """Return the place of an operand, one for all of a loop that may have other operands."""
        is_loop = self._likeness is Likeness.KIND and holds_jaxpr(eqn.params.values())
        return -1 if is_loop else place

    def _clear(self, olds: deque[int], news: deque[int]) -> None:
        """Pair equations that are alike and read the same value, by what else they read."""
        for i in olds:
            if i not in self._matching.taken[0]:
                j = self._matching.best(i, news, self._likeness)
                if j is not None:
                    self._matching.pair(i, j)

    def _try(self, i: int, j: int) -> None:
        matching = self._matching
        alike = self._own[0][i] == self._own[1][j]
        if alike and matching.is_free(i, j) and not matching.conflict(i, j):
            matching.pair(i, j)


def _in_place(pair: tuple[T, T], which: int, other: T) -> tuple[T, T]:
    """Return a pair with another value in one place."""
    return (other, pair[1]) if which == 0 else (pair[0], other)


def _given(eqn: JaxprEqn) -> list[Atom]:
    """Return what the arguments of the body of a call are."""
    inside = regions(eqn)
    assert inside is not None
    return [eqn.invars[i] for i in inside.regions[0].ins]


def _around(
    matching: BodyPairs, which: int, left: Sequence[int], own: Sequence[int], radius: int
) -> dict[int, Hashable]:
    """Return a key for each equation of a side that is left: what it reads, and what reads it.

    What has a counterpart is known by that, other variables by the equations that bind them, and
    so on for so many steps. Opened calls, and what is in those of the other side, are all alike.
    `own` has a key for each equation by itself.
    """
    side = matching.sides[which]
    makers, readers = side.makers, side.readers
    labels = {id(pair[which]): number for number, pair in enumerate(matching.values)}
    known = dict.fromkeys(matching.taken[which], 0)
    known.update((pair[which], -1 - number) for number, pair in enumerate(matching.order))
    returned = {id(pair[which]): number for number, pair in enumerate(matching.results)}
    up = {i: own[i] for i in left}
    down = {i: hash((own[i], *(returned.get(id(v)) for v in side.eqns[i].outvars))) for i in left}
    for _ in range(radius):
        higher, lower = {}, {}
        for i in left:
            operands: list[int | None] = []
            for atom in side.eqns[i].invars:
                if type(atom) is Literal:
                    continue
                maker = up.get(makers[id(atom)][0]) if id(atom) in makers else None
                operands.append(labels.get(id(atom)) if maker is None else -1 - maker)
            higher[i] = hash((up[i], *operands))
            reads = [
                tuple(sorted((known.get(r, down.get(r)), at) for r, at in readers.get(id(var), ())))
                for var in side.eqns[i].outvars
            ]
            lower[i] = hash((down[i], *reads))
        up, down = higher, lower
    return {i: (up[i], down[i]) for i in left}
