"""Match the equations of two bodies, without looking into the bodies that these hold.

The bodies are matched as graphs, from the most similar equations to the least similar; see
`ir.graphs.counterparts`. Each step visits each equation and operand a bounded number of times, so
the time is linear in the size of the bodies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import substitute
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.equality.equation_keys import EquationKeys, MatchLevel
from jaxprtool.ir.graphs.body_graph import BodyGraph
from jaxprtool.ir.graphs.body_pairs import MOST_ALIKE, InlinedCall, MatchedBody, in_order
from jaxprtool.jaxcompat import AnyJaxpr, Atom, JaxprEqn, Literal, Var

T = TypeVar("T")

#: The number of equations in opened calls that may be visited; larger bodies are allowed more.
_OPENED_AT_LEAST = 2000

#: The sizes of the neighbourhoods by which equations are distinguished, in steps, in this order.
_RADII = (4, 1, 0)


def match_bodies(
    keys: EquationKeys,
    bodies: tuple[AnyJaxpr, AnyJaxpr],
    arguments: Sequence[tuple[int, int]],
    results: Sequence[tuple[int, int]],
) -> MatchedBody:
    """Match two bodies.

    Args:
        keys: The numbering of equations, shared by all bodies of two programs.
        bodies: The two bodies, open or closed.
        arguments: The positions of the arguments that correspond.
        results: The positions of the results that correspond.
    """
    first, second = (
        BodyGraph(
            keys,
            body,
            {pair[k]: n for n, pair in enumerate(arguments)},
            {pair[k]: n for n, pair in enumerate(results)},
        )
        for k, body in enumerate(bodies)
    )
    found = MatchedBody(keys, (first, second))
    a, b = first.jaxpr, second.jaxpr
    for i, j in arguments:
        found.correspond(a.invars[i], b.invars[j])
    _pair_constants(keys, found, by_type=True)
    found.results = [(a.outvars[i], b.outvars[j]) for i, j in results]
    _BodyMatching(keys, found).run()
    return found


def _pair_constants(keys: EquationKeys, found: MatchedBody, by_type: bool) -> None:
    """Pair constants with equal values and then, with `by_type`, those of the same type."""
    values = [keys.constants(graph.held) for graph in found.graphs]
    types = [[str(var.aval) for var in graph.jaxpr.constvars] for graph in found.graphs]
    taken: tuple[set[int], set[int]] = set(), set()
    a, b = (graph.jaxpr.constvars for graph in found.graphs)
    for old, new in (values, types) if by_type else (values,):
        for i, j in in_order(enumerate(old), enumerate(new), taken):
            found.correspond(a[i], b[j])


class _BodyMatching:
    """The search for the pairs of two bodies.

    Args:
        keys: The numbering of equations.
        found: The two bodies and the pairs known at first; the search adds to these.
        budget: The number of equations in opened calls that may still be visited, in a list of one
            that nested searches share.
    """

    def __init__(self, keys: EquationKeys, found: MatchedBody, budget: list[int] | None = None):
        self._keys = keys
        self._found = found
        # The number of ways to open nested calls may be exponential.
        size = sum(len(graph.eqns) for graph in found.graphs)
        self._budget = [_OPENED_AT_LEAST + 4 * size] if budget is None else budget

    def run(self) -> None:
        self._pair_in_order(*(self._by_variables(graph) for graph in self._found.graphs))
        for level in MatchLevel:
            if not self._is_done(level):
                origins = [graph.origins(level).equations for graph in self._found.graphs]
                uses = [graph.use_numbers(level) for graph in self._found.graphs]
                self._pair_in_order(
                    *(list(zip(*each, strict=True)) for each in zip(origins, uses, strict=True))
                )
                self._pair_in_order(*origins)
                self._pair_in_order(*uses)
            spread = _Spreader(self._found, level)
            if all(self._found.unpaired()):
                spread.run()
                self._open_calls(spread, (0, 1))
            for radius in _RADII:
                if not self._is_done(level):
                    self._pair_unique(level, radius, spread)
            if not self._is_done(level):
                spread.bridge()
                self._pair_rest(level, spread)
        self._pair_replaced()

    def _is_done(self, level: MatchLevel) -> bool:
        """Return True if no unpaired equations of the two bodies have the same key."""
        left = self._found.unpaired()
        if not (left[0] and left[1]):
            return True
        keys = (graph.own(level) for graph in self._found.graphs)
        first, second = ({own[i] for i in each} for own, each in zip(keys, left, strict=True))
        return first.isdisjoint(second)

    # --- calls ------------------------------------------------------------------------------------

    def _open_calls(self, spread: _Spreader, numbers: Sequence[int]) -> None:
        """Match the bodies of unpaired calls with the other body, where both fit."""
        while calls := [
            (which, i, body)
            for which in numbers
            for i, body in self._found.graphs[which].calls
            if i not in self._found.taken[which] and not self._is_in_other(which, i)
        ]:
            # Large calls first: a smaller one could take their equations in the other body.
            calls.sort(key=lambda call: -len(jaxcompat.open_jaxpr(call[2]).eqns))
            opened = [self._open(*call) for call in calls]
            if not any(opened):
                break
            spread.run()

    def _is_in_other(self, which: int, position: int) -> bool:
        """Return True if the other body has an unpaired call similar to this one."""
        this, other = self._found.graphs[which], self._found.graphs[1 - which]
        key, keys = this.own(MatchLevel.SIMILAR)[position], other.own(MatchLevel.SIMILAR)
        taken = self._found.taken[1 - which]
        return any(key == keys[j] for j, _ in other.calls if j not in taken)

    def _open(self, which: int, position: int, body: AnyJaxpr) -> bool:
        """Match the body of a call with the other body, and return True if enough of it was found.

        If not, the pairs found are rolled back.
        """
        if position in self._found.taken[which]:
            return False
        eqn, opened = self._found.graphs[which].eqns[position], jaxcompat.open_jaxpr(body)
        given = [*zip(opened.invars, _call_operands(eqn), strict=True)]
        constants = zip(opened.constvars, getattr(body, "consts", ()), strict=False)
        scalars = [(var, jaxcompat.as_literal(value, var.aval)) for var, value in constants]
        literals = {var: atom for var, atom in given + scalars if type(atom) is Literal}
        inner = BodyGraph(self._keys, body, {}, {}, literals)
        self._budget[0] -= 1 + len(inner.eqns)
        if self._budget[0] < 0:
            return False
        inside = MatchedBody(self._keys, _in_place(self._found.graphs, which, inner))
        inside.taken = _in_place(self._found.taken, which, set())
        inside.literals = literals
        known = (self._found.partner, self._found.inverse)[which]
        for var, operand in given:
            if (other := known.get(id(operand))) is not None:
                inside.correspond(*((var, other) if which == 0 else (other, var)))
        for atom, var in zip(opened.outvars, eqn.outvars, strict=True):
            if (read := self._read_for(which, var)) is not None:
                inside.results.append((atom, read) if which == 0 else (read, atom))
        if not _BodyMatching(self._keys, inside, self._budget)._match_call(which):
            inside.rollback(1 - which)
            return False
        self._found.taken[which].add(position)
        self._found.opened_calls.append(InlinedCall(which, position, inside))
        self._note_operands(which, dict(given), inside)
        found = (inside.partner, inside.inverse)[which]
        outvars = substitute(opened.outvars, inside.literals)
        for atom, var in zip(outvars, eqn.outvars, strict=True):
            if type(atom) is Literal:
                self._found.literals[var] = atom
            elif (other := found.get(id(atom))) is not None:
                self._found.correspond(*((var, other) if which == 0 else (other, var)))
        return True

    def _match_call(self, which: int) -> bool:
        """Match the body of a call with the other body, and return True if enough of it was found.

        Enough is half of its equations, or half of the unpaired equations of the other body.
        """
        inner = self._found.graphs[which]
        left = len(self._found.graphs[1 - which].eqns) - len(self._found.taken[1 - which])
        if inner.jaxpr.constvars:
            _pair_constants(self._keys, self._found, by_type=False)
        _Spreader(self._found, MatchLevel.SAME).run()
        spread = _Spreader(self._found, MatchLevel.SIMILAR)
        spread.run()
        self._open_calls(spread, (which,))
        _Spreader(self._found, MatchLevel.KIND).run()  # beyond loops that differ
        # Nested calls that are SIMILAR may have different bodies: only those that are SAME count.
        flat = [not holds_jaxpr(each.params.values()) for each in inner.eqns]
        similar, same = (
            [graph.own(level) for graph in self._found.graphs]
            for level in (MatchLevel.SIMILAR, MatchLevel.SAME)
        )
        found = []
        for pair in self._found.order:
            own = similar if flat[pair[which]] else same
            if own[0][pair[0]] == own[1][pair[1]]:
                found.append(pair[which])
        found += [each.position for each in self._found.opened_calls]
        known = flat.count(True) + sum(not flat[i] for i in found)
        return 2 * len(found) >= min(known, left) and bool(found or not inner.eqns)

    def _note_operands(self, which: int, given: dict[Var, Atom], inside: MatchedBody) -> None:
        """Record the atoms that the other body reads in place of the operands of an opened call."""
        eqns = [graph.eqns for graph in inside.graphs]
        pairs = [(eqns[0][i].invars, eqns[1][j].invars) for i, j in inside.order]
        for atoms in chain(inside.read, *(zip(*pair, strict=False) for pair in pairs)):
            own, other = atoms[which], atoms[1 - which]
            if type(own) is not Literal and own in given:
                self._found.read.append((given[own], other) if which == 0 else (other, given[own]))

    def _read_for(self, which: int, var: Var) -> Atom | None:
        """Return the atom that the counterpart of a variable's reader reads in its place."""
        pairs = (self._found.pairs, self._found.paired)[which]
        own, other = self._found.graphs[which], self._found.graphs[1 - which]
        for i, place in own.uses.get(var, ()):
            if i in pairs and place < len(read := other.eqns[pairs[i]].invars):
                return read[place]
        for pair in self._found.results:
            if pair[which] is var:
                return pair[1 - which]
        return None

    # --- pairing ----------------------------------------------------------------------------------

    def _by_variables(self, graph: BodyGraph) -> list[Hashable]:
        """Return a key for each equation with the variables that it binds.

        Many passes keep the variables of the equations that they do not change.
        """
        own = graph.own(MatchLevel.SAME)
        return [(key, *map(id, eqn.outvars)) for key, eqn in zip(own, graph.eqns, strict=True)]

    def _pair_in_order(self, old: Sequence[Hashable], new: Sequence[Hashable]) -> None:
        """Pair unpaired equations with equal keys, in order."""
        left = self._found.unpaired()
        olds, news = (
            [(i, keys[i]) for i in each] for keys, each in zip((old, new), left, strict=True)
        )
        for i, j in in_order(olds, news, (set(), set())):
            self._found.pair(i, j)

    def _pair_unique(self, level: MatchLevel, radius: int, spread: _Spreader) -> None:
        """Pair equations that their neighbourhoods identify."""
        own = [graph.own(level) for graph in self._found.graphs]
        for olds, news in self._alike_around(own, radius):
            if len(olds) == 1 or radius == _RADII[0]:
                for i, j in zip(olds, news, strict=True):
                    if self._found.is_free(i, j) and not self._found.conflict(i, j):
                        self._found.pair(i, j)
        spread.run()

    def _pair_replaced(self) -> None:
        """Pair equations of different primitives that have the same neighbours."""
        if not all(self._found.unpaired()):
            return
        own = [[len(eqn.outvars) for eqn in graph.eqns] for graph in self._found.graphs]
        for olds, news in self._alike_around(own, _RADII[0]):
            for i, j in zip(olds, news, strict=True):
                if self._found.fit(i, j, MatchLevel.KIND) > 1:
                    self._found.pair(i, j)

    def _alike_around(
        self, own: Sequence[Sequence[int]], radius: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield unpaired equations with equal neighbourhoods, if both bodies have equally many."""
        by_key: tuple[dict[Hashable, list[int]], ...] = defaultdict(list), defaultdict(list)
        for k, left in enumerate(self._found.unpaired()):
            for i, key in _around(self._found, k, left, own[k], radius).items():
                by_key[k][key].append(i)
        for key, olds in by_key[0].items():
            news = by_key[1].get(key, [])
            if len(olds) == len(news):
                yield olds, news

    def _pair_rest(self, level: MatchLevel, spread: _Spreader) -> None:
        """Pair each equation left with the candidate of the same key that fits it best."""
        left = self._found.unpaired()
        own = [graph.own(level) for graph in self._found.graphs]
        free: dict[int, deque[int]] = defaultdict(deque)
        for j in left[1]:
            free[own[1][j]].append(j)
        for i in left[0]:
            if i in self._found.taken[0] or own[0][i] not in free:
                continue
            found = self._found.best(i, free[own[0][i]], level)
            if found is not None:
                self._found.pair(i, found)
                spread.run()


class _Spreader:
    """Spread the matching from pairs to the equations that define and read their values.

    `run` resumes at the pairs that were found since it last ran.
    """

    def __init__(self, matching: MatchedBody, level: MatchLevel):
        self._matching = matching
        self._level = level
        self._own = [graph.own(level) for graph in matching.graphs]
        self._eqns = [graph.eqns for graph in matching.graphs]
        self._next_value = self._next_pair = self._next_read = 0
        self._ambiguous: list[tuple[deque[int], deque[int]]] = []
        for v, w in matching.results:
            self._upwards(v, w)

    def run(self) -> None:
        """Pair all equations that can be reached from the pairs known."""
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
            elif self._ambiguous:
                self._pair_ambiguous(*self._ambiguous.pop())
            else:
                break

    def bridge(self) -> None:
        """Pair readers of corresponding values if equations were inserted before one of them."""
        matching = self._matching
        at = 0
        while at < len(matching.values):
            pair = matching.values[at]
            at += 1
            for k, taken_here in enumerate(matching.taken):
                readers = matching.graphs[k].uses.get(pair[k], ())
                free = [(i, place) for i, place in readers[:MOST_ALIKE] if i not in taken_here]
                for i, place in free:
                    self._pair_across(1 - k, pair[1 - k], i, place)
            self.run()

    def _pair_across(self, which: int, var: Var, i: int, place: int) -> None:
        """Pair equation `i` with an equation two steps below `var` that reads at the same place."""
        matching = self._matching
        graph, taken = matching.graphs[which], matching.taken[which]
        for inserted, _ in graph.uses.get(var, ())[:MOST_ALIKE]:
            for result in graph.eqns[inserted].outvars if inserted not in taken else ():
                for j, at in graph.uses.get(result, ())[:MOST_ALIKE]:
                    if at == place:
                        self._try(*((i, j) if which == 1 else (j, i)))

    def _upwards(self, x: Atom, y: Atom) -> None:
        """Pair the equations that bind two corresponding operands."""
        if type(x) is Literal or type(y) is Literal:
            return
        a, b = self._matching.graphs
        made, other = a.definitions.get(x), b.definitions.get(y)
        if not (made and other):
            return
        counts = [len(self._eqns[k][i].outvars) for k, (i, _) in enumerate((made, other))]
        if made[1] == other[1] or counts[0] != counts[1]:
            self._try(made[0], other[0])

    def _downwards(self, v: Var, w: Var) -> None:
        """Pair the equations that read two corresponding variables at the same place."""
        groups: tuple[dict[Hashable, list[int]], ...] = defaultdict(list), defaultdict(list)
        for k, (graph, var) in enumerate(zip(self._matching.graphs, (v, w), strict=True)):
            taken = self._matching.taken[k]
            for i, place in graph.uses.get(var, ()):
                if i not in taken:
                    groups[k][self._own[k][i], self._role(graph.eqns[i], place)].append(i)
        for key, olds in groups[0].items():
            news = groups[1].get(key)
            if news and len(olds) == len(news) == 1:
                self._try(olds[0], news[0])
            elif news:
                self._ambiguous.append((deque(olds), deque(news)))

    def _role(self, eqn: JaxprEqn, place: int) -> int:
        """Return the place of an operand; -1 for a loop that may have another number of them."""
        is_loop = self._level is MatchLevel.KIND and holds_jaxpr(eqn.params.values())
        return -1 if is_loop else place

    def _pair_ambiguous(self, olds: deque[int], news: deque[int]) -> None:
        """Pair equations with equal keys that read the same value, by their other operands."""
        for i in olds:
            if i not in self._matching.taken[0]:
                j = self._matching.best(i, news, self._level)
                if j is not None:
                    self._matching.pair(i, j)

    def _try(self, i: int, j: int) -> None:
        """Pair two equations if their keys are equal and nothing conflicts."""
        matching = self._matching
        alike = self._own[0][i] == self._own[1][j]
        if alike and matching.is_free(i, j) and not matching.conflict(i, j):
            matching.pair(i, j)


def _in_place(pair: tuple[T, T], which: int, other: T) -> tuple[T, T]:
    """Return a copy of `pair` with its element `which` replaced."""
    return (other, pair[1]) if which == 0 else (pair[0], other)


def _call_operands(eqn: JaxprEqn) -> list[Atom]:
    """Return the operands of a call, in the order of its body's arguments."""
    inside = regions(eqn)
    assert inside is not None
    return [eqn.invars[i] for i in inside.regions[0].ins]


def _around(
    matching: MatchedBody, which: int, left: Sequence[int], own: Sequence[int], radius: int
) -> dict[int, Hashable]:
    """Return a key of the neighbourhood of each unpaired equation, above and below it.

    This is Weisfeiler-Leman refinement: the keys begin with `own`, and each step hashes in those of
    the neighbours. Paired neighbours are labelled by their pair. Opened calls, and equations paired
    with one in an opened call, all have the same label.

    Args:
        matching: The pairs known.
        which: The body, 0 or 1.
        left: The positions of its unpaired equations.
        own: A key for each equation by itself.
        radius: The number of steps.
    """
    graph = matching.graphs[which]
    definitions, uses = graph.definitions, graph.uses
    labels = {id(pair[which]): number for number, pair in enumerate(matching.values)}
    known = dict.fromkeys(matching.taken[which], 0)
    known.update((pair[which], -1 - number) for number, pair in enumerate(matching.order))
    returned = {id(pair[which]): number for number, pair in enumerate(matching.results)}
    up = {i: own[i] for i in left}
    down = {i: hash((own[i], *(returned.get(id(v)) for v in graph.eqns[i].outvars))) for i in left}
    for _ in range(radius):
        higher, lower = {}, {}
        for i in left:
            operands: list[int | None] = []
            for atom in graph.eqns[i].invars:
                if type(atom) is Literal:
                    continue
                definition = up.get(definitions[atom][0]) if atom in definitions else None
                operands.append(labels.get(id(atom)) if definition is None else -1 - definition)
            higher[i] = hash((up[i], *operands))
            reads = [
                tuple(sorted((known.get(r, down.get(r)), at) for r, at in uses.get(var, ())))
                for var in graph.eqns[i].outvars
            ]
            lower[i] = hash((down[i], *reads))
        up, down = higher, lower
    return {i: (up[i], down[i]) for i in left}
