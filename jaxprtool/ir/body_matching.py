"""Pairs of equations that correspond in two bodies, their own bodies left aside.

The bodies are graphs, and equations are paired from what is most alike to what is least, see
`ir.counterparts`. Each step looks at each equation, and at each operand, a few times, so that the
time grows with the size of the bodies.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.body_graph import Side
from jaxprtool.ir.equation_keys import EquationKeys, Likeness
from jaxprtool.ir.regions import regions
from jaxprtool.ir.structured import holds_jaxpr
from jaxprtool.jaxcompat import AnyJaxpr, Atom, JaxprEqn, Literal, Var

T = TypeVar("T")

#: Of equations that are alike, so many are looked at for the one that fits best.
_MOST_ALIKE = 16

#: So many equations of calls are looked at, and in large bodies more.
_OPENED_AT_LEAST = 2000

#: How many steps around equations is looked for what tells them apart, in turn.
_RADII = (4, 1, 0)


@dataclass(frozen=True, eq=False)
class Opened:
    """A call in one of two bodies, the equations of which are in the other itself.

    Attributes:
        which: Which of the bodies has the call.
        position: Its position there.
        matching: The pairs of the call's body and the other one.
    """

    which: int
    position: int
    matching: Matching


class Matching:
    """The pairs of two bodies, while they are found.

    Attributes:
        pairs: The positions of the equations that correspond.
        paired: The same, from the second body to the first.
        order: The same in the order in which that was found.
        partner: The variable of the one body that corresponds to one of the other, by `id`.
        back: The same, the other way round.
        taken: The equations of each body that have a counterpart, here or in an opened call.
        literals: Of the arguments and constants of a call, and of the results of calls in it, those
            that are literals, by `id`.
        opened: The calls of one body whose equations are in the other itself.
        values: The variables that correspond, in the order in which that was found.
        results: The results of the bodies that correspond.
        read: Operands of opened calls, and what the other body reads in their place.
    """

    def __init__(
        self, keys: EquationKeys, sides: tuple[Side, Side], budget: list[int] | None = None
    ):
        self.sides = sides
        # Calls that hold each other may be opened along more ways than can be gone.
        size = sum(len(side.eqns) for side in sides)
        self._budget = [_OPENED_AT_LEAST + 4 * size] if budget is None else budget
        self._keys = keys
        self.pairs: dict[int, int] = {}
        self.paired: dict[int, int] = {}
        self.partner: dict[int, Var] = {}
        self.back: dict[int, Var] = {}
        self.taken: tuple[set[int], set[int]] = set(), set()
        self.opened: list[Opened] = []
        self.literals: dict[int, Literal] = {}
        self.order: list[tuple[int, int]] = []
        self.values: list[tuple[Var, Var]] = []
        self.results: list[tuple[Atom, Atom]] = []
        self.read: list[tuple[Atom, Atom]] = []

    @classmethod
    def of_bodies(
        cls,
        keys: EquationKeys,
        bodies: tuple[AnyJaxpr, AnyJaxpr],
        arguments: Sequence[tuple[int, int]],
        results: Sequence[tuple[int, int]],
    ) -> Matching:
        """Match two bodies, of which these arguments and results correspond, by position."""
        numbers = [
            (
                {pair[k]: n for n, pair in enumerate(arguments)},
                {pair[k]: n for n, pair in enumerate(results)},
            )
            for k in (0, 1)
        ]
        matching = cls(
            keys, (Side(keys, bodies[0], *numbers[0]), Side(keys, bodies[1], *numbers[1]))
        )
        a, b = (side.jaxpr for side in matching.sides)
        for i, j in arguments:
            matching.correspond(a.invars[i], b.invars[j])
        matching._pair_constants(by_type=True)
        matching.results = [(a.outvars[i], b.outvars[j]) for i, j in results]
        matching._run()
        return matching

    def _run(self) -> None:
        """Find all pairs."""
        self._pair_in_order(*(self._by_variables(side) for side in self.sides))
        for likeness in Likeness:
            if not self._is_done(likeness):
                origins = [side.origins(likeness).equations for side in self.sides]
                uses = [side.uses(likeness) for side in self.sides]
                self._pair_in_order(
                    *(list(zip(*each, strict=True)) for each in zip(origins, uses, strict=True))
                )
                self._pair_in_order(*origins)
                self._pair_in_order(*uses)
            spread = _Spread(self, likeness)
            if all(self.unpaired()):
                spread.run()
                self._open_calls(spread, (0, 1))
            for radius in _RADII:
                if not self._is_done(likeness):
                    self._pair_unique(likeness, radius, spread)
            if not self._is_done(likeness):
                spread.bridge()
                self._pair_rest(likeness, spread)
        self._pair_replaced()

    # --- what is known ----------------------------------------------------------------------------

    def unpaired(self) -> tuple[list[int], list[int]]:
        """Return the equations that have no counterpart, by their positions."""
        a, b = (range(len(side.eqns)) for side in self.sides)
        return [i for i in a if i not in self.taken[0]], [j for j in b if j not in self.taken[1]]

    def is_free(self, i: int, j: int) -> bool:
        """Return True if neither of two equations has a counterpart."""
        return i not in self.taken[0] and j not in self.taken[1]

    def agree(self, old: Atom, new: Atom) -> bool:
        """Return True if two variables correspond, or one has the value of the other's partner."""
        partner = self.partner.get(id(old))
        return partner is not None and (partner is new or self.is_equal(partner, new))

    def knows(self, which: int, var: Var) -> bool:
        """Return True if a variable of one of the bodies has a counterpart, in a call perhaps."""
        return id(var) in (self.partner, self.back)[which] or any(
            each.which != which and each.matching.knows(which, var) for each in self.opened
        )

    def is_equal(self, a: Atom, b: Atom) -> bool:
        """Return True if two variables of the second body have one value."""
        values = self.sides[1].origins(Likeness.SAME).values
        return a is b or values.get(id(a), id(a)) == values.get(id(b), id(b))

    def conflict(self, i: int, j: int) -> bool:
        """Return True if two equations read values that have counterparts, but other ones."""
        operands = zip(self.sides[0].eqns[i].invars, self.sides[1].eqns[j].invars, strict=False)
        return any(
            id(x) in self.partner and id(y) in self.back and not self.agree(x, y)
            for x, y in operands
        )

    def _is_done(self, likeness: Likeness) -> bool:
        """Return True if no two equations are left that are alike."""
        left = self.unpaired()
        if not (left[0] and left[1]):
            return True
        keys = (side.own(likeness) for side in self.sides)
        first, second = ({own[i] for i in each} for own, each in zip(keys, left, strict=True))
        return first.isdisjoint(second)

    # --- pairing ----------------------------------------------------------------------------------

    def pair(self, i: int, j: int) -> None:
        """Pair two equations, and their results."""
        self.pairs[i], self.paired[j] = j, i
        self.order.append((i, j))
        self.taken[0].add(i)
        self.taken[1].add(j)
        old, new = self.sides[0].eqns[i], self.sides[1].eqns[j]
        for k, m in self.result_pairs(old, new):
            self.correspond(old.outvars[k], new.outvars[m])

    def result_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return which results of two counterparts correspond, by their positions.

        Of a loop that carries more values, those do that are carried from operands that do.
        """
        counts = len(old.outvars), len(new.outvars)
        if counts[0] == counts[1]:
            return [(k, k) for k in range(counts[0])]
        inside = regions(old), regions(new)
        pairs: dict[int, int] = {}
        if inside[0] and inside[1]:
            begun = [
                (each.carried, eqn) for each, eqn in zip(inside, (old, new), strict=True) if each
            ]
            for operand, result in begun[0][0]:
                for other, theirs in begun[1][0]:
                    if theirs not in pairs.values() and self.agree(
                        old.invars[operand], new.invars[other]
                    ):
                        pairs[result] = theirs
                        break
        types = [[str(var.aval) for var in eqn.outvars] for eqn in (old, new)]
        taken = set(pairs), set(pairs.values())
        return [*pairs.items(), *_in_order(enumerate(types[0]), enumerate(types[1]), taken)]

    def correspond(self, v: Var, w: Var) -> None:
        """Note that two variables correspond, unless one of them has a counterpart."""
        if id(v) not in self.partner and id(w) not in self.back:
            self.partner[id(v)], self.back[id(w)] = w, v
            self.values.append((v, w))

    def _pair_constants(self, by_type: bool) -> None:
        """Pair constants of one value, and then perhaps those of one type."""
        keys = [self._keys.constants(side.held) for side in self.sides]
        types = [[str(var.aval) for var in side.jaxpr.constvars] for side in self.sides]
        taken: tuple[set[int], set[int]] = set(), set()
        a, b = (side.jaxpr.constvars for side in self.sides)
        for old, new in (keys, types) if by_type else (keys,):
            for i, j in _in_order(enumerate(old), enumerate(new), taken):
                self.correspond(a[i], b[j])

    # --- calls ------------------------------------------------------------------------------------

    def _open_calls(self, spread: _Spread, sides: Sequence[int]) -> None:
        """Match the bodies of calls that have no counterpart with the other body itself."""
        while calls := [
            (which, i, body)
            for which in sides
            for i, body in self.sides[which].calls
            if i not in self.taken[which] and not self._is_in_other(which, i)
        ]:
            # The equations of a large call are not those of smaller ones in the other body.
            calls.sort(key=lambda call: -len(jaxcompat.open_jaxpr(call[2]).eqns))
            opened = [self._open(*call) for call in calls]
            if not any(opened):
                break
            spread.run()

    def _is_in_other(self, which: int, position: int) -> bool:
        """Return True if a call of one body has an unpaired one like it in the other."""
        own, other = (side.own(Likeness.SIMILAR) for side in self.sides[:: 1 - 2 * which])
        calls, taken = self.sides[1 - which].calls, self.taken[1 - which]
        return any(own[position] == other[j] for j, _ in calls if j not in taken)

    def _open(self, which: int, position: int, body: AnyJaxpr) -> bool:
        """Match the body of a call with the other body, and return whether half of it is there."""
        if position in self.taken[which]:
            return False
        eqn, opened = self.sides[which].eqns[position], jaxcompat.open_jaxpr(body)
        given = [*zip(opened.invars, _given(eqn), strict=True)]
        constants = zip(opened.constvars, getattr(body, "consts", ()), strict=False)
        scalars = [(var, jaxcompat.as_literal(value, var.aval)) for var, value in constants]
        literals = {id(var): atom for var, atom in given + scalars if type(atom) is Literal}
        inner = Side(self._keys, body, {}, {}, literals)
        self._budget[0] -= 1 + len(inner.eqns)
        if self._budget[0] < 0:
            return False
        matching = Matching(self._keys, _in_place(self.sides, which, inner), self._budget)
        matching.taken = _in_place(self.taken, which, set())
        matching.literals = literals
        known = (self.partner, self.back)[which]
        for var, operand in given:
            if (other := known.get(id(operand))) is not None:
                matching.correspond(*((var, other) if which == 0 else (other, var)))
        for atom, var in zip(opened.outvars, eqn.outvars, strict=True):
            if (read := self._read_for(which, var)) is not None:
                matching.results.append((atom, read) if which == 0 else (read, atom))
        if not matching._is_half_there(which):
            matching._give_back(1 - which)
            return False
        self.taken[which].add(position)
        self.opened.append(Opened(which, position, matching))
        self._note_operands(which, dict(given), matching)
        found = (matching.partner, matching.back)[which]
        for atom, var in zip(opened.outvars, eqn.outvars, strict=True):
            literal = matching.literals.get(id(atom), atom)
            if type(literal) is Literal:
                self.literals[id(var)] = literal
            elif (other := found.get(id(atom))) is not None:
                self.correspond(*((var, other) if which == 0 else (other, var)))
        return True

    def _is_half_there(self, which: int) -> bool:
        """Match the body of a call, and return whether half of it, or of what is left, is there."""
        inner = self.sides[which]
        left = len(self.sides[1 - which].eqns) - len(self.taken[1 - which])
        if inner.jaxpr.constvars:
            self._pair_constants(by_type=False)
        _Spread(self, Likeness.SAME).run()
        spread = _Spread(self, Likeness.SIMILAR)
        spread.run()
        self._open_calls(spread, (which,))
        # That calls are alike but for their bodies is no sign that one is the other.
        same = [side.own(Likeness.SAME) for side in self.sides]
        flat = [not holds_jaxpr(each.params.values()) for each in inner.eqns]
        found = [
            pair[which]
            for pair in self.order
            if flat[pair[which]] or same[0][pair[0]] == same[1][pair[1]]
        ]
        found += [each.position for each in self.opened]
        known = flat.count(True) + sum(not flat[i] for i in found)
        return 2 * len(found) >= min(known, left) and bool(found or not inner.eqns)

    def _give_back(self, which: int) -> None:
        """Take back what a call's body has taken of the other one."""
        self.taken[which].difference_update(pair[which] for pair in self.order)
        for each in self.opened:
            each.matching._give_back(which)

    def _note_operands(self, which: int, given: dict[Var, Atom], inside: Matching) -> None:
        """Note what the other body reads in the place of what an opened call is given."""
        eqns = [side.eqns for side in inside.sides]
        pairs = [(eqns[0][i].invars, eqns[1][j].invars) for i, j in inside.order]
        for atoms in chain(inside.read, *(zip(*pair, strict=False) for pair in pairs)):
            own, other = atoms[which], atoms[1 - which]
            if type(own) is not Literal and own in given:
                self.read.append((given[own], other) if which == 0 else (other, given[own]))

    def _read_for(self, which: int, var: Var) -> Atom | None:
        """Return what the counterpart of a reader of a variable reads in its place."""
        pairs = (self.pairs, self.paired)[which]
        for i, place in self.sides[which].readers.get(id(var), ()):
            if i in pairs and place < len(read := self.sides[1 - which].eqns[pairs[i]].invars):
                return read[place]
        for pair in self.results:
            if pair[which] is var:
                return pair[1 - which]
        return None

    def _by_variables(self, side: Side) -> list[Hashable]:
        """A key for each equation by the variables that it binds, which many passes keep."""
        own = side.own(Likeness.SAME)
        return [(key, *map(id, eqn.outvars)) for key, eqn in zip(own, side.eqns, strict=True)]

    def _pair_in_order(self, old: Sequence[Hashable], new: Sequence[Hashable]) -> None:
        """Pair equations by their keys; of several with one key, in order."""
        left = self.unpaired()
        olds, news = (
            [(i, keys[i]) for i in each] for keys, each in zip((old, new), left, strict=True)
        )
        for i, j in _in_order(olds, news, (set(), set())):
            self.pair(i, j)

    def _pair_unique(self, likeness: Likeness, radius: int, spread: _Spread) -> None:
        """Pair equations that are the only ones of their kind in what is around them."""
        for olds, news in self._alike_around([side.own(likeness) for side in self.sides], radius):
            if len(olds) == 1 or radius == _RADII[0]:
                for i, j in zip(olds, news, strict=True):
                    if self.is_free(i, j) and not self.conflict(i, j):
                        self.pair(i, j)
        spread.run()

    def _pair_replaced(self) -> None:
        """Pair equations of different primitives that stand between the same equations."""
        if not all(self.unpaired()):
            return
        own = [[len(eqn.outvars) for eqn in side.eqns] for side in self.sides]
        for olds, news in self._alike_around(own, _RADII[0]):
            for i, j in zip(olds, news, strict=True):
                if self._fit(i, j, Likeness.KIND) > 1:
                    self.pair(i, j)

    def _alike_around(
        self, own: Sequence[Sequence[int]], radius: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the equations without counterpart that have one key, if both sides have as many."""
        by_key: tuple[dict[Hashable, list[int]], ...] = defaultdict(list), defaultdict(list)
        for k, left in enumerate(self.unpaired()):
            for i, key in _around(self, k, left, own[k], radius).items():
                by_key[k][key].append(i)
        for key, olds in by_key[0].items():
            news = by_key[1].get(key, [])
            if len(olds) == len(news):
                yield olds, news

    def _pair_rest(self, likeness: Likeness, spread: _Spread) -> None:
        """Pair what is left with the best of those alike that has something in common with it."""
        left = self.unpaired()
        own = [side.own(likeness) for side in self.sides]
        free: dict[int, deque[int]] = defaultdict(deque)
        for j in left[1]:
            free[own[1][j]].append(j)
        for i in left[0]:
            if i in self.taken[0] or own[0][i] not in free:
                continue
            found = self.best(i, free[own[0][i]], likeness)
            if found is not None:
                self.pair(i, found)
                spread.run()

    def best(self, i: int, free: deque[int], likeness: Likeness, least: int = 1) -> int | None:
        """Take from those alike the one that fits best; None if none fits at all."""
        best, most = None, 2 * least - 1
        while free and free[0] in self.taken[1]:
            free.popleft()
        for place, j in enumerate(islice(free, _MOST_ALIKE)):
            if j not in self.taken[1] and (fit := self._fit(i, j, likeness)) > most:
                best, most = place, fit
        if best is None:
            return None
        found = free[best]
        del free[best]
        return found

    def _fit(self, i: int, j: int, likeness: Likeness) -> int:
        """Return how well two equations fit; at most 1 if they have nothing in common."""
        old, new = self.sides[0].eqns[i], self.sides[1].eqns[j]
        same_line = _place(old) == _place(new)
        if likeness is Likeness.KIND:
            reads = Counter(id(self.partner[id(x)]) for x in old.invars if id(x) in self.partner)
            common = (reads & Counter(map(id, new.invars))).total()
        elif self.conflict(i, j):
            return 0
        else:
            common = sum(map(self.agree, old.invars, new.invars))
        if not any(type(x) is not Literal for x in (*old.invars, *new.invars)):
            common += 1
        for v, w in zip(old.outvars, new.outvars, strict=False):
            common += self._common_readers(v, w)
        return 2 * common + same_line

    def _common_readers(self, v: Var, w: Var) -> int:
        """Return 1 if equations that correspond read two variables at the same place."""
        readers = self.sides[0].readers.get(id(v), ())
        others = self.sides[1].readers.get(id(w), ())
        if not (readers and others):
            return 0
        theirs = set(others[:_MOST_ALIKE])
        return int(any((self.pairs.get(i), at) in theirs for i, at in readers[:_MOST_ALIKE]))


class _Spread:
    """Pairs what gives operands to pairs, or reads their results, if that is alike.

    `run` goes on from the pairs that were made since it last ran.
    """

    def __init__(self, matching: Matching, likeness: Likeness):
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
                for x, y in zip(self._eqns[0][i].invars, self._eqns[1][j].invars, strict=False):
                    self._upwards(x, y)
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
                free = [(i, place) for i, place in readers[:_MOST_ALIKE] if i not in taken_here]
                for i, place in free:
                    self._over(1 - k, pair[1 - k], i, place)
            self.run()

    def _over(self, which: int, var: Var, i: int, place: int) -> None:
        """Pair an equation with one that reads at a place what is computed of a variable."""
        matching = self._matching
        side, taken = matching.sides[which], matching.taken[which]
        for put, _ in side.readers.get(id(var), ())[:_MOST_ALIKE]:
            for result in side.eqns[put].outvars if put not in taken else ():
                for j, at in side.readers.get(id(result), ())[:_MOST_ALIKE]:
                    if at == place:
                        self._try(*((i, j) if which == 1 else (j, i)))

    def _upwards(self, x: Atom, y: Atom) -> None:
        """Pair the equations that bind two operands of counterparts."""
        a, b = self._matching.sides
        made, other = a.makers.get(id(x)), b.makers.get(id(y))
        if made and other and made[1] == other[1]:
            self._try(made[0], other[0])

    def _downwards(self, v: Var, w: Var) -> None:
        """Pair the equations that read two values that correspond."""
        groups: tuple[dict[Hashable, list[int]], ...] = defaultdict(list), defaultdict(list)
        for k, (side, var) in enumerate(zip(self._matching.sides, (v, w), strict=True)):
            taken = self._matching.taken[k]
            for i, place in side.readers.get(id(var), ()):
                if i not in taken:
                    groups[k][self._own[k][i], place].append(i)
        for key, olds in groups[0].items():
            news = groups[1].get(key)
            if news and len(olds) == len(news) == 1:
                self._try(olds[0], news[0])
            elif news:
                self._unclear.append((deque(olds), deque(news)))

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


def _place(eqn: JaxprEqn) -> object:
    """What tells where an equation comes from, in any version of its file: its scope."""
    return jaxcompat.name_stack(eqn)


def _in_order(
    old: Iterable[tuple[int, Hashable]],
    new: Iterable[tuple[int, Hashable]],
    taken: tuple[set[int], set[int]],
) -> Iterator[tuple[int, int]]:
    """Yield pairs of one key that are not taken yet, and take them."""
    waiting: dict[Hashable, deque[int]] = defaultdict(deque)
    for j, key in new:
        if j not in taken[1]:
            waiting[key].append(j)
    for i, key in old:
        if i not in taken[0] and (found := waiting.get(key)):
            j = found.popleft()
            taken[0].add(i)
            taken[1].add(j)
            yield i, j


def _around(
    matching: Matching, which: int, left: Sequence[int], own: Sequence[int], radius: int
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
