"""Match the equations of two bodies: graphs of them, pairs, and how pairs are found.

The bodies are matched as graphs, from the most similar equations to the least similar; see
`ir.differences`. Each step visits each equation and operand a bounded number of times, so
the time is linear in the size of the bodies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.equations import substitute, with_operands
from jaxprtool.ir.equivalence import EquationKeys, MatchLevel, ValueNumbering
from jaxprtool.ir.regions import holds_jaxpr, regions
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var

# --- body matching --------------------------------------------------------------------------------
# Match the equations of two bodies, without looking into the bodies that these hold.

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
    matching = MatchedBody(keys, (first, second))
    a, b = first.jaxpr, second.jaxpr
    for i, j in arguments:
        matching.correspond(a.invars[i], b.invars[j])
    _pair_constants(keys, matching, by_type=True)
    matching.results = [(a.outvars[i], b.outvars[j]) for i, j in results]
    if not _pair_twins(keys, matching):
        _BodyMatching(keys, matching).run()
    return matching


def _pair_twins(keys: EquationKeys, matching: MatchedBody) -> bool:
    """Pair the equations of bodies that have the same ones in the same order, or return False."""
    first, second = (graph.eqns for graph in matching.graphs)
    if len(first) != len(second):
        return False
    partner: dict[int, Var] = dict(matching.partner)

    def agree(x: Atom, y: Atom) -> bool:
        if type(x) is Literal or type(y) is Literal:
            return type(x) is type(y)  # their values are part of the keys
        return partner.get(id(x)) is y

    for old, new in zip(first, second, strict=True):
        if old.primitive is not new.primitive or len(old.invars) != len(new.invars):
            return False
        if len(old.outvars) != len(new.outvars) or not all(map(agree, old.invars, new.invars)):
            return False
        same = MatchLevel.SAME
        if old is not new and keys.equation(old, same) != keys.equation(new, same):
            return False
        partner.update(zip(map(id, old.outvars), new.outvars, strict=True))
    if not all(agree(x, y) for x, y in matching.results):
        return False
    for i in range(len(first)):
        matching.pair(i, i)
    matching.are_twins = True
    return True


def _pair_constants(keys: EquationKeys, matching: MatchedBody, by_type: bool) -> None:
    """Pair constants with equal values and then, with `by_type`, those of the same type."""
    if not all(graph.jaxpr.constvars for graph in matching.graphs):
        return
    values = [keys.constants(graph.held) for graph in matching.graphs]
    types = [[str(var.aval) for var in graph.jaxpr.constvars] for graph in matching.graphs]
    taken: tuple[set[int], set[int]] = set(), set()
    a, b = (graph.jaxpr.constvars for graph in matching.graphs)
    for old, new in (values, types) if by_type else (values,):
        for i, j in in_order(enumerate(old), enumerate(new), taken):
            matching.correspond(a[i], b[j])


class _BodyMatching:
    """The search for the pairs of two bodies.

    Args:
        keys: The numbering of equations.
        found: The two bodies and the pairs known at first; the search adds to these.
        budget: The number of equations in opened calls that may still be visited, in a list of one
            that nested searches share.
    """

    def __init__(self, keys: EquationKeys, matching: MatchedBody, budget: list[int] | None = None):
        self._keys = keys
        self._found = matching
        # The number of ways to open nested calls may be exponential.
        size = sum(len(graph.eqns) for graph in matching.graphs)
        self._budget = [_OPENED_AT_LEAST + 4 * size] if budget is None else budget

    def run(self) -> None:
        self._pair_in_order(*(self._by_variables(graph) for graph in self._found.graphs))
        for level in MatchLevel:
            if self._found.is_complete:
                return
            if not self._is_done(level):
                origins = [graph.origins(level).equations for graph in self._found.graphs]
                uses = [graph.use_numbers(level) for graph in self._found.graphs]
                self._pair_in_order(
                    *(
                        list(zip(*numbers, strict=True))
                        for numbers in zip(origins, uses, strict=True)
                    )
                )
                self._pair_in_order(*origins)
                self._pair_in_order(*uses)
            spread = _Spreader(self._found, level)
            if not self._found.is_complete:
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
        if self._found.is_complete:
            return True
        left = self._found.unpaired()
        keys = (graph.own(level) for graph in self._found.graphs)
        first, second = (
            {numbers[i] for i in positions} for numbers, positions in zip(keys, left, strict=True)
        )
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
        """Return True if the other body has an unpaired call similar to this one.

        A call with the same primitives in its body is one, also if it is of other shapes.
        """
        this, other = self._found.graphs[which], self._found.graphs[1 - which]
        key, keys = this.own(MatchLevel.SIMILAR)[position], other.own(MatchLevel.SIMILAR)
        taken = self._found.taken[1 - which]
        outline, outlines = this.outlines[position], other.outlines
        return any(
            key == keys[j] or outline == outlines[j] for j, _ in other.calls if j not in taken
        )

    def _open(self, which: int, position: int, body: AnyJaxpr) -> bool:
        """Match the body of a call with the other body, and return True if enough of it was found.

        If not, the pairs found are rolled back.
        """
        if position in self._found.taken[which]:
            return False
        eqn, opened = self._found.graphs[which].eqns[position], jaxcompat.open_jaxpr(body)
        operands = [*zip(opened.invars, _call_operands(eqn), strict=True)]
        constants = zip(opened.constvars, getattr(body, "consts", ()), strict=False)
        scalars = [(var, jaxcompat.as_literal(value, var.aval)) for var, value in constants]
        literals = {var: atom for var, atom in operands + scalars if type(atom) is Literal}
        inner = BodyGraph(self._keys, body, {}, {}, literals)
        self._budget[0] -= 1 + len(inner.eqns)
        if self._budget[0] < 0:
            return False
        inside = MatchedBody(self._keys, _in_place(self._found.graphs, which, inner))
        inside.taken = _in_place(self._found.taken, which, set())
        inside.literals = literals
        partners = (self._found.partner, self._found.inverse)[which]
        for var, operand in operands:
            if (other := partners.get(id(operand))) is not None:
                inside.correspond(*((var, other) if which == 0 else (other, var)))
        for atom, var in zip(opened.outvars, eqn.outvars, strict=True):
            if (read := self._read_for(which, var)) is not None:
                inside.results.append((atom, read) if which == 0 else (read, atom))
        if not _BodyMatching(self._keys, inside, self._budget)._match_call(which):
            inside.rollback(1 - which)
            return False
        self._found.taken[which].add(position)
        self._found.opened_calls.append(InlinedCall(which, position, inside))
        self._note_operands(which, dict(operands), inside)
        inner_partners = (inside.partner, inside.inverse)[which]
        outvars = substitute(opened.outvars, inside.literals)
        for atom, var in zip(outvars, eqn.outvars, strict=True):
            if type(atom) is Literal:
                self._found.literals[var] = atom
            elif (other := inner_partners.get(id(atom))) is not None:
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
        flat = [not holds_jaxpr(eqn.params.values()) for eqn in inner.eqns]
        similar, same = (
            [graph.own(level) for graph in self._found.graphs]
            for level in (MatchLevel.SIMILAR, MatchLevel.SAME)
        )
        matched = []
        for pair in self._found.order:
            numbers = similar if flat[pair[which]] else same
            if numbers[0][pair[0]] == numbers[1][pair[1]]:
                matched.append(pair[which])
        matched += [call.position for call in self._found.opened_calls]
        total = flat.count(True) + sum(not flat[i] for i in matched)
        return 2 * len(matched) >= min(total, left) and bool(matched or not inner.eqns)

    def _note_operands(self, which: int, operands: dict[Var, Atom], inside: MatchedBody) -> None:
        """Record the atoms that the other body reads in place of the operands of an opened call."""
        eqns = [graph.eqns for graph in inside.graphs]
        pairs = [(eqns[0][i].invars, eqns[1][j].invars) for i, j in inside.order]
        for atoms in chain(inside.read, *(zip(*pair, strict=False) for pair in pairs)):
            atom, other = atoms[which], atoms[1 - which]
            if type(atom) is not Literal and atom in operands:
                self._found.read.append(
                    (operands[atom], other) if which == 0 else (other, operands[atom])
                )

    def _read_for(self, which: int, var: Var) -> Atom | None:
        """Return the atom that the counterpart of a variable's reader reads in its place."""
        pairs = (self._found.pairs, self._found.paired)[which]
        graph, other = self._found.graphs[which], self._found.graphs[1 - which]
        for i, place in graph.uses.get(var, ()):
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
        keys = graph.own(MatchLevel.SAME)
        return [(key, *map(id, eqn.outvars)) for key, eqn in zip(keys, graph.eqns, strict=True)]

    def _pair_in_order(self, old: Sequence[Hashable], new: Sequence[Hashable]) -> None:
        """Pair unpaired equations with equal keys, in order."""
        left = self._found.unpaired()
        olds, news = (
            [(i, keys[i]) for i in positions]
            for keys, positions in zip((old, new), left, strict=True)
        )
        for i, j in in_order(olds, news, (set(), set())):
            self._found.pair(i, j)

    def _pair_unique(self, level: MatchLevel, radius: int, spread: _Spreader) -> None:
        """Pair equations that their neighbourhoods identify."""
        keys = [graph.own(level) for graph in self._found.graphs]
        for olds, news in self._alike_around(keys, radius):
            if len(olds) == 1 or radius == _RADII[0]:
                for i, j in zip(olds, news, strict=True):
                    if self._found.is_free(i, j) and not self._found.conflict(i, j):
                        self._found.pair(i, j)
        spread.run()

    def _pair_replaced(self) -> None:
        """Pair equations of different primitives that have the same neighbours."""
        if self._found.is_complete:
            return
        counts = [[len(eqn.outvars) for eqn in graph.eqns] for graph in self._found.graphs]
        for olds, news in self._alike_around(counts, _RADII[0]):
            for i, j in zip(olds, news, strict=True):
                if self._found.fit(i, j, MatchLevel.KIND) > 1:
                    self._found.pair(i, j)

    def _alike_around(
        self, keys: Sequence[Sequence[int]], radius: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield unpaired equations with equal neighbourhoods, if both bodies have equally many."""
        by_key: tuple[dict[Hashable, list[int]], ...] = defaultdict(list), defaultdict(list)
        for k, around in enumerate(_around(self._found, keys, radius)):
            for i, key in around.items():
                by_key[k][key].append(i)
        for key, olds in by_key[0].items():
            news = by_key[1].get(key, [])
            if len(olds) == len(news):
                yield olds, news

    def _pair_rest(self, level: MatchLevel, spread: _Spreader) -> None:
        """Pair each equation left with the candidate of the same key that fits it best."""
        left = self._found.unpaired()
        keys = [graph.own(level) for graph in self._found.graphs]
        free: dict[int, deque[int]] = defaultdict(deque)
        for j in left[1]:
            free[keys[1][j]].append(j)
        for i in left[0]:
            if i in self._found.taken[0] or keys[0][i] not in free:
                continue
            best = self._found.best(i, free[keys[0][i]], level)
            if best is not None:
                self._found.pair(i, best)
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
        definition, other = a.definitions.get(x), b.definitions.get(y)
        if not (definition and other):
            return
        counts = [len(self._eqns[k][i].outvars) for k, (i, _) in enumerate((definition, other))]
        if definition[1] == other[1] or counts[0] != counts[1]:
            self._try(definition[0], other[0])

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
    matching: MatchedBody, initial: Sequence[Sequence[int]], radius: int
) -> list[dict[int, Hashable]]:
    """Return, for each body, a key of the neighbourhoods of its unpaired equations.

    This is Weisfeiler-Leman refinement: the keys begin with `initial`, and each step hashes in
    those of the neighbours above and below. An equation with a key that the other body lacks has no
    equal there, and neither have its neighbours in the next step: they are left out at once.

    Args:
        matching: The pairs known.
        initial: For each body, a key for each equation by itself.
        radius: The number of steps.
    """
    sides = [
        _Neighbours(matching, which, left, initial[which])
        for which, left in enumerate(matching.unpaired())
    ]
    ups, downs = _common(*(side.up for side in sides)), _common(*(side.down for side in sides))
    for _ in range(radius):
        ups = _common(*(side.above(up) for side, up in zip(sides, ups, strict=True)))
        downs = _common(*(side.below(down) for side, down in zip(sides, downs, strict=True)))
    return [
        {i: (key, down[i]) for i, key in up.items() if i in down}
        for up, down in zip(ups, downs, strict=True)
    ]


def _common(*keys: dict[int, int]) -> list[dict[int, int]]:
    """Return the keys of each body that the other has too."""
    shared = set(keys[0].values()) & set(keys[1].values())
    return [{i: key for i, key in of.items() if key in shared} for of in keys]


class _Neighbours:
    """The unpaired equations of one of two bodies, and their neighbours.

    Paired neighbours are labelled by their pair. Opened calls, and equations paired with one in an
    opened call, all have the same label.

    Attributes:
        up: The first key of each equation, for what it is computed from.
        down: The same for what is computed from it.
    """

    def __init__(
        self, matching: MatchedBody, which: int, left: Sequence[int], initial: Sequence[int]
    ):
        self._graph = matching.graphs[which]
        self._labels = {id(pair[which]): number for number, pair in enumerate(matching.values)}
        self._paired = dict.fromkeys(matching.taken[which], 0)
        self._paired.update((pair[which], -1 - n) for n, pair in enumerate(matching.order))
        returned = {id(pair[which]): number for number, pair in enumerate(matching.results)}
        eqns = self._graph.eqns
        self.up = {i: initial[i] for i in left}
        self.down = {
            i: hash((initial[i], *[returned.get(id(v)) for v in eqns[i].outvars])) for i in left
        }

    def above(self, up: dict[int, int]) -> dict[int, int]:
        """Hash in the keys of the equations that define the operands."""
        eqns, definitions, labels = self._graph.eqns, self._graph.definitions, self._labels
        paired, higher = self._paired, {}
        for i, own in up.items():
            operands: list[int | None] = [own]
            for atom in eqns[i].invars:
                if type(atom) is Literal:
                    continue
                position = definitions[atom][0] if atom in definitions else None
                if position is None or position in paired:
                    operands.append(labels.get(id(atom)))
                elif position in up:
                    operands.append(-1 - up[position])
                else:
                    break
            else:
                higher[i] = hash(tuple(operands))
        return higher

    def below(self, down: dict[int, int]) -> dict[int, int]:
        """Hash in the keys of the equations that read the results."""
        eqns, uses, lower = self._graph.eqns, self._graph.uses, {}
        key_of = {**down, **self._paired}
        for i, own in down.items():
            readers = [uses.get(var, ()) for var in eqns[i].outvars]
            if all(r in key_of for reads in readers for r, _ in reads):
                keys = [tuple(sorted([(key_of[r], at) for r, at in reads])) for reads in readers]
                lower[i] = hash((own, *keys))
        return lower


# --- body pairs -----------------------------------------------------------------------------------
# Two bodies that are matched: which equations and variables correspond.

#: The number of candidates among which the best fit is searched; it keeps the matching linear.
MOST_ALIKE = 16


@dataclass(frozen=True, eq=False)
class InlinedCall:
    """A call in one body whose equations are inlined in the other body.

    Attributes:
        which: The body that has the call, 0 or 1.
        position: The position of the call in that body.
        inside: The pairs of the call's body and the other body.
    """

    which: int
    position: int
    inside: MatchedBody


class MatchedBody:
    """Two bodies that correspond, with the pairs of equations and variables found so far.

    Attributes:
        graphs: The graphs of the two bodies.
        keys: The numbering of equations and types, for comparisons.
        path: The pairs of equations around the bodies, the outermost first.
        call: If one of the bodies is that of a call that the other program has inlined: the program
            with the call, 0 or 1, and the call. Otherwise None.
        pairs: The position in the second body of each paired equation of the first.
        paired: The inverse of `pairs`.
        order: The pairs of positions, in the order in which they were found.
        partner: The variable of the second body for each paired variable of the first, by `id`.
        inverse: The inverse of `partner`.
        taken: For each body, the positions of the equations that have a counterpart, here or in an
            opened call.
        literals: The literals that variables of an opened call represent: its arguments, its
            constants, and the results of calls in it.
        opened_calls: The calls in one body whose equations are inlined in the other.
        values: The pairs of variables, in the order in which they were found.
        results: The pairs of results of the two bodies.
        read: The operands of opened calls, each with the atom that the other body reads in its
            place.
        are_twins: Whether the two bodies have the same equations in the same order.
    """

    def __init__(self, keys: EquationKeys, graphs: tuple[BodyGraph, BodyGraph]):
        self.graphs = graphs
        self.keys = keys
        self.path: tuple[tuple[JaxprEqn, JaxprEqn], ...] = ()
        self.call: tuple[int, JaxprEqn] | None = None
        self.pairs: dict[int, int] = {}
        self.paired: dict[int, int] = {}
        self.order: list[tuple[int, int]] = []
        self.partner: dict[int, Var] = {}
        self.inverse: dict[int, Var] = {}
        self.taken: tuple[set[int], set[int]] = set(), set()
        self.literals: dict[Var, Literal] = {}
        self.opened_calls: list[InlinedCall] = []
        self.values: list[tuple[Var, Var]] = []
        self.results: list[tuple[Atom, Atom]] = []
        self.read: list[tuple[Atom, Atom]] = []
        self.are_twins = False

    # --- pairing ----------------------------------------------------------------------------------

    def pair(self, i: int, j: int) -> None:
        """Pair two equations and their results."""
        self.pairs[i], self.paired[j] = j, i
        self.order.append((i, j))
        self.taken[0].add(i)
        self.taken[1].add(j)
        old, new = self.graphs[0].eqns[i], self.graphs[1].eqns[j]
        for k, m in self.result_pairs(old, new):
            self.correspond(old.outvars[k], new.outvars[m])

    def correspond(self, v: Var, w: Var) -> None:
        """Pair two variables, unless one of them already has a counterpart."""
        if id(v) not in self.partner and id(w) not in self.inverse:
            self.partner[id(v)], self.inverse[id(w)] = w, v
            self.values.append((v, w))

    def rollback(self, which: int) -> None:
        """Free the equations of a body that were paired with those of an opened call."""
        self.taken[which].difference_update(pair[which] for pair in self.order)
        for call in self.opened_calls:
            call.inside.rollback(which)

    # --- properties of the matching ---------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """True if all equations of one of the bodies have a counterpart, so that none is left."""
        return any(
            len(taken) == len(graph.eqns)
            for taken, graph in zip(self.taken, self.graphs, strict=True)
        )

    def unpaired(self) -> tuple[list[int], list[int]]:
        """Return, for each body, the positions of the equations without a counterpart."""
        a, b = (range(len(graph.eqns)) for graph in self.graphs)
        return [i for i in a if i not in self.taken[0]], [j for j in b if j not in self.taken[1]]

    def is_free(self, i: int, j: int) -> bool:
        """Return True if neither of two equations has a counterpart."""
        return i not in self.taken[0] and j not in self.taken[1]

    def corresponds(self, old: Atom, new: Atom) -> bool:
        """Return True if `new` is the partner of `old`, or computes the same value as it."""
        partner = self.partner.get(id(old))
        return partner is not None and (partner is new or self.is_equal(partner, new))

    def is_matched(self, which: int, var: Var) -> bool:
        """Return True if a variable of one of the bodies is paired, here or in an opened call."""
        return id(var) in (self.partner, self.inverse)[which] or any(
            call.which != which and call.inside.is_matched(which, var) for call in self.opened_calls
        )

    def is_equal(self, a: Atom, b: Atom) -> bool:
        """Return True if two variables of the second body have the same value number."""
        return a is b or self._value(a) == self._value(b)

    def _value(self, atom: Atom) -> int:
        """Return the value number of a variable of the second body."""
        return self.graphs[1].origins(MatchLevel.SAME).values.get(id(atom), id(atom))

    def conflict(self, i: int, j: int) -> bool:
        """Return True if two operands at the same place are paired, but not with each other.

        Equations with different numbers of operands conflict if none of their operands agree.
        """
        old, new = self.graphs[0].eqns[i], self.graphs[1].eqns[j]
        if len(old.invars) != len(new.invars):
            olds = {self._value(self.partner[id(x)]) for x in old.invars if id(x) in self.partner}
            news = {self._value(y) for y in new.invars if id(y) in self.inverse}
            return bool(olds and news) and olds.isdisjoint(news)
        return any(
            id(x) in self.partner and id(y) in self.inverse and not self.corresponds(x, y)
            for x, y in zip(old.invars, new.invars, strict=True)
        )

    # --- results ----------------------------------------------------------------------------------

    @property
    def before(self) -> AnyJaxpr:
        """The body in the first program, as its equation holds it."""
        return self.graphs[0].held

    @property
    def after(self) -> AnyJaxpr:
        """The body in the second program, as its equation holds it."""
        return self.graphs[1].held

    @property
    def bodies(self) -> tuple[Jaxpr, Jaxpr]:
        """The two bodies, open."""
        return self.graphs[0].jaxpr, self.graphs[1].jaxpr

    @cached_property
    def equations(self) -> list[tuple[JaxprEqn, JaxprEqn]]:
        """The pairs of equations, in order of the first body."""
        before, after = (body.eqns for body in self.bodies)
        return [(before[i], after[j]) for i, j in sorted(self.pairs.items())]

    @cached_property
    def opened(self) -> tuple[set[int], set[int]]:
        """For each body, the positions of the calls that the other body has inlined."""
        positions: tuple[set[int], set[int]] = set(), set()
        for call in self.opened_calls:
            positions[call.which].add(call.position)
        return positions

    def is_alone(self, which: int, position: int) -> bool:
        """Return True if an equation has no counterpart, here or in an opened call."""
        return position not in self.taken[which]

    def counterpart(self, var: Atom) -> Var | None:
        """Return the variable of the second body that corresponds to an atom of the first."""
        return self.partner.get(id(var))

    def agree(self, old: Atom, new: Atom) -> bool:
        """Return True if two operands correspond, or are the same literal."""
        if self.literals:
            old, new = substitute((old, new), self.literals)
        if type(old) is Literal and type(new) is Literal:
            return self.keys.literal(old) == self.keys.literal(new)
        return self.corresponds(old, new)

    def is_rewired(self, old: Atom, new: Atom) -> bool:
        """Return True if two operands differ only because another value is read.

        An operand is not rewired if an inserted equation now computes it from the value that was
        read before, or if the removed equation that computed it read the value that is read now.
        """
        if self.agree(old, new):
            return False
        if type(old) is Literal or type(new) is Literal:
            return True
        if id(old) in self.partner and id(new) in self.inverse:
            return True
        a, b = self.graphs
        olds, news = a.nearest_known(old, self.partner), b.nearest_known(new, self.inverse)
        if not olds or not news:
            return False
        partners = [self.partner[id(var)] for var in olds]
        return not any(self.is_equal(x, y) for x in partners for y in news)

    # --- operands and results of counterparts -----------------------------------------------------

    def result_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return the positions of the corresponding results of two counterparts.

        If the equations have different numbers of results, results are paired in this order: by
        known partners; by initial values and readers; by readers; by initial values; by types, in
        order. The initial value is the operand that a loop carries to the result.
        """
        if len(old.outvars) == len(new.outvars):
            return [(k, k) for k in range(len(old.outvars))]
        eqns = old, new
        partners = [
            [id(self.partner.get(id(v), v)) for v in old.outvars],
            [id(w) for w in new.outvars],
        ]
        begun = [self._initial_values(which, eqn) for which, eqn in enumerate(eqns)]
        uses = [self._uses(which, eqn) for which, eqn in enumerate(eqns)]
        types = [[str(var.aval) for var in eqn.outvars] for eqn in eqns]
        both = [list(zip(*keys, strict=True)) for keys in zip(begun, uses, types, strict=True)]
        return _paired_by(partners, both, uses, begun, types)

    def operand_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return the positions of the corresponding operands of two counterparts.

        If the equations have different numbers of operands, the initial values of corresponding
        carries are paired first, then operands with the same role and value, and then operands with
        the same role and type, in order. The role is a field of the loop's view, such as `consts`.
        """
        if len(old.invars) == len(new.invars):
            return [(i, i) for i in range(len(old.invars))]
        eqns = old, new
        carried = [{result: i for i, result in _carried(eqn)} for eqn in eqns]
        pairs = [
            (carried[0].pop(k), carried[1].pop(m))
            for k, m in self.result_pairs(old, new)
            if k in carried[0] and m in carried[1]
        ]
        unpaired = [set(ins.values()) for ins in carried]  # their results have no counterpart
        roles = [_roles(eqn) for eqn in eqns]
        values = [
            [
                (role, self._identity(which, atom))
                for role, atom in zip(eqn_roles, eqn.invars, strict=True)
            ]
            for which, (eqn_roles, eqn) in enumerate(zip(roles, eqns, strict=True))
        ]
        types = [
            [(role, str(atom.aval)) for role, atom in zip(eqn_roles, eqn.invars, strict=True)]
            for eqn_roles, eqn in zip(roles, eqns, strict=True)
        ]
        taken = {i for i, _ in pairs} | unpaired[0], {j for _, j in pairs} | unpaired[1]
        return sorted(pairs + _paired_by(values, types, taken=taken))

    def _identity(self, which: int, atom: Atom) -> Hashable:
        """Return a key for an operand, equal for counterparts and unique if it has none."""
        if type(atom) is Literal:
            return "literal", self.keys.literal(atom)
        if which == 1:
            return self._value(atom) if id(atom) in self.inverse else ("new", id(atom))
        partner = self.partner.get(id(atom))
        return ("old", id(atom)) if partner is None else self._value(partner)

    def _initial_values(self, which: int, eqn: JaxprEqn) -> list[Hashable]:
        """Return a key for the initial value of each result that a loop carries.

        Other results have unique keys.
        """
        begun = {result: eqn.invars[i] for i, result in _carried(eqn)}
        return [
            self._identity(which, begun[k]) if k in begun else (which, k)
            for k in range(len(eqn.outvars))
        ]

    def _uses(self, which: int, eqn: JaxprEqn) -> list[Hashable]:
        """Return, for each result, a key of the paired equations and body results that read it."""
        returned = {id(pair[which]): n for n, pair in enumerate(self.results)}
        keys: list[Hashable] = []
        for k, var in enumerate(eqn.outvars):
            uses = set(self._paired_readers(which, var))
            if id(var) in returned:
                uses.add((-1, returned[id(var)]))
            keys.append(frozenset(uses) or (which, k))
        return keys

    def _paired_readers(self, which: int, var: Var) -> Iterator[tuple[int, int]]:
        """Yield the paired equations that read a variable, and the place of the operand.

        The equations are given by their positions in the second body, for both bodies.
        """
        for i, place in islice(self.graphs[which].uses.get(var, ()), MOST_ALIKE):
            if which == 1 and i in self.paired:
                yield i, place
            elif which == 0 and i in self.pairs:
                yield self.pairs[i], place

    # --- the best fit -----------------------------------------------------------------------------

    def best(self, i: int, free: deque[int], level: MatchLevel) -> int | None:
        """Remove the candidate that fits equation `i` best from `free`, and return it.

        Returns None if none of the candidates has anything in common with the equation.
        """
        best, most = None, 1
        while free and free[0] in self.taken[1]:
            free.popleft()
        surroundings = self._surroundings(i)
        for place, j in enumerate(islice(free, MOST_ALIKE)):
            if j not in self.taken[1] and (fit := self._fit(i, j, level, surroundings)) > most:
                best, most = place, fit
        if best is None:
            return None
        candidate = free[best]
        del free[best]
        return candidate

    def fit(self, i: int, j: int, level: MatchLevel) -> int:
        """Score a pair of equations: 2 for each common operand or reader, and 1 for the scope.

        At most 1 means that the equations have nothing in common.
        """
        return self._fit(i, j, level, self._surroundings(i))

    def _surroundings(self, i: int) -> _Surroundings:
        """Return the values and equations of the second body next to one of the first."""
        eqn = self.graphs[0].eqns[i]
        partners = (self.partner.get(id(x)) for x in eqn.invars)
        return _Surroundings(
            [id(partner) for partner in partners if partner is not None],
            [set(self._paired_readers(0, v)) for v in eqn.outvars],
            any(type(x) is not Literal for x in eqn.invars),
        )

    def _fit(self, i: int, j: int, level: MatchLevel, around: _Surroundings) -> int:
        old, new = self.graphs[0].eqns[i], self.graphs[1].eqns[j]
        common = 0
        if level is MatchLevel.KIND:
            if around.partners:
                reads = [*map(id, new.invars)]
                for partner in around.partners:
                    if partner in reads:
                        reads.remove(partner)
                        common += 1
        elif self.conflict(i, j):
            return 0
        elif around.partners:
            common = sum(map(self.corresponds, old.invars, new.invars))
        if not (around.reads_values or any(type(x) is not Literal for x in new.invars)):
            common += 1
        for readers, w in zip(around.readers, new.outvars, strict=False):
            if readers:
                common += not readers.isdisjoint(self._paired_readers(1, w))
        if not common:
            return 0
        return 2 * common + (jaxcompat.name_stack(old) == jaxcompat.name_stack(new))


class _Surroundings(NamedTuple):
    """What the second body has of the neighbours of an equation of the first.

    Attributes:
        partners: The partners of its operands, by `id`.
        readers: For each result, the paired equations that read it, as `_paired_readers` has them.
        reads_values: Whether any of its operands is a value, not a literal.
    """

    partners: list[int]
    readers: list[set[tuple[int, int]]]
    reads_values: bool


def in_order(
    old: Iterable[tuple[int, Hashable]],
    new: Iterable[tuple[int, Hashable]],
    taken: tuple[set[int], set[int]],
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of positions with the same key that are not taken yet, and take them."""
    waiting: dict[Hashable, deque[int]] = defaultdict(deque)
    for j, key in new:
        if j not in taken[1]:
            waiting[key].append(j)
    for i, key in old:
        if i not in taken[0] and (positions := waiting.get(key)):
            j = positions.popleft()
            taken[0].add(i)
            taken[1].add(j)
            yield i, j


def _paired_by(
    *keys: Sequence[Sequence[Hashable]], taken: tuple[set[int], set[int]] | None = None
) -> list[tuple[int, int]]:
    """Pair positions with equal keys, by the first two sequences of keys, then by the next two.

    `keys` are pairs of sequences, one for each body.
    """
    taken = (set(), set()) if taken is None else taken
    return [pair for old, new in keys for pair in in_order(enumerate(old), enumerate(new), taken)]


def _carried(eqn: JaxprEqn) -> Sequence[tuple[int, int]]:
    """Return the carries of a loop, as pairs of an operand's position and a result's."""
    inside = regions(eqn)
    return () if inside is None else inside.carried


def _roles(eqn: JaxprEqn) -> list[str]:
    """Return, for each operand, the field of the equation's view that it belongs to, or ""."""
    inside = regions(eqn)
    if inside is None:
        return [""] * len(eqn.invars)
    fields = {i: field for field, positions in inside.operands.items() for i in positions}
    return [fields.get(i, "") for i in range(len(eqn.invars))]


# --- body graph -----------------------------------------------------------------------------------
# One of two bodies that are matched: definitions and uses of its values, and keys.

#: The maximum number of variables that `BodyGraph.nearest_known` visits.
_MOST_FOLLOWED = 256


class BodyGraph(DefUse):
    """One of two bodies that are matched.

    Args:
        keys: The numbering of equations, shared by both bodies.
        held: The body as its equation holds it, open or closed.
        arguments: A number for each argument that has a counterpart, by position. Counterparts have
            the same number.
        results: The same for the results.
        literals: Literals to read instead of arguments and constants of a call.
    """

    def __init__(
        self,
        keys: EquationKeys,
        body: AnyJaxpr,
        arguments: dict[int, int],
        results: dict[int, int],
        literals: Mapping[Var, Literal] = MappingProxyType({}),
    ):
        self._keys = keys
        self.held = body
        self.jaxpr = jaxcompat.open_jaxpr(body)
        super().__init__(self.jaxpr.eqns)
        if literals:
            self.eqns = [with_operands(eqn, literals) for eqn in self.eqns]
            keys.keep(self.eqns)
        self._arguments: list[Hashable] = [
            ("argument", arguments[i]) if i in arguments else ("argument", id(var))
            for i, var in enumerate(self.jaxpr.invars)
        ]
        self._results = results

    @cached_property
    def calls(self) -> list[tuple[int, AnyJaxpr]]:
        """The positions of the calls, each with its body."""
        return [(i, body) for i, eqn in enumerate(self.eqns) if (body := _called(eqn)) is not None]

    @cached_property
    def outlines(self) -> dict[int, int]:
        """A key for each call by the primitives in its body, at the position of the call."""
        return {
            i: self._keys.number(
                tuple(e.primitive.name for e in (self.eqns[i], *jaxcompat.open_jaxpr(body).eqns))
            )
            for i, body in self.calls
        }

    @cached_method
    def own(self, level: MatchLevel) -> list[int]:
        """Return a key for each equation by itself, whatever its operands are computed from."""
        return [self._keys.equation(eqn, level) for eqn in self.eqns]

    def origins(self, level: MatchLevel) -> ValueNumbering:
        """Return the value numbering of the body."""
        return self._keys.numbering(self.held, tuple(self._arguments), level)

    def use_numbers(self, level: MatchLevel) -> list[int]:
        """Return a number for each equation by the values that are computed from its results.

        This is value numbering backwards, from the results of the body that have a counterpart.
        """
        number = self._keys.number
        uses: dict[int, list[int]] = defaultdict(list)
        for i, atom in enumerate(self.jaxpr.outvars):
            if i in self._results:
                uses[id(atom)].append(number(("result", self._results[i])))
        keys: list[int] = []
        for eqn_key, eqn in zip(reversed(self.own(level)), reversed(self.eqns), strict=True):
            results = [tuple(sorted(uses.pop(id(var), ()))) for var in eqn.outvars]
            key = number((eqn_key, "used", *results))
            for i, atom in enumerate(eqn.invars):
                if type(atom) is not Literal:
                    uses[id(atom)].append(number((key, "operand", i)))
            keys.append(key)
        return keys[::-1]

    def nearest_known(self, var: Var, known: dict[int, Var]) -> list[Var] | None:
        """Return the nearest `known` variables that `var` is computed from.

        Returns None if too many variables lie between them.
        """
        nearest: list[Var] = []
        todo, seen = [var], {id(var)}
        while todo:
            node = todo.pop()
            if id(node) in known:
                nearest.append(node)
            elif (definition := self.definitions.get(node)) is not None:
                for atom in self.eqns[definition[0]].invars:
                    if type(atom) is not Literal and id(atom) not in seen:
                        seen.add(id(atom))
                        todo.append(atom)
            if len(seen) > _MOST_FOLLOWED:
                return None
        return nearest


def _called(eqn: JaxprEqn) -> AnyJaxpr | None:
    """Return the body of a call, or None if the equation is not a call."""
    if not traits(eqn).call or (inside := regions(eqn)) is None or len(inside.bodies) != 1:
        return None
    return inside.bodies[0]
