"""Which equations of two programs correspond, whatever their order and the names in them.

Two programs are matched as graphs, body by body, from what is most alike to what is least. First
come equations that do the same and are computed from the same values, or from which the same is
computed. From pairs the matching spreads to those that give their operands and read their results.
What is left is matched by what is around it, and last by its operands alone. Equations that do the
same are matched before those that differ in a dtype or a constant, these before those that have no
more than the primitive in common, and last those of different primitives that stand between the
same equations.

Each body is matched with the body that the counterpart of its equation holds; a body that several
equations share once with each.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxprtool import jaxcompat
from jaxprtool.ir.body_matching import Matching
from jaxprtool.ir.equation_keys import EquationKeys
from jaxprtool.ir.regions import regions
from jaxprtool.ir.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var


@dataclass(eq=False)
class MatchedBody:
    """Two bodies that correspond, and what in them does.

    Attributes:
        before: The body in the one program, as held.
        after: The body in the other.
        path: The equations around them, the outermost first, as pairs.
        pairs: The positions of the equations that correspond, in the order of `before`.
        keys: What tells whether equations are the same.
        call: If one of the bodies is that of a call and the other has its equations without a
            call, which of them it is, 0 or 1, and the call.
    """

    before: AnyJaxpr
    after: AnyJaxpr
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...]
    pairs: dict[int, int]
    keys: EquationKeys
    _matching: Matching
    call: tuple[int, JaxprEqn] | None = None

    @property
    def bodies(self) -> tuple[Jaxpr, Jaxpr]:
        """The two bodies, open."""
        return jaxcompat.open_jaxpr(self.before), jaxcompat.open_jaxpr(self.after)

    @cached_property
    def equations(self) -> list[tuple[JaxprEqn, JaxprEqn]]:
        """The equations that correspond."""
        before, after = (body.eqns for body in self.bodies)
        return [(before[i], after[j]) for i, j in self.pairs.items()]

    @cached_property
    def opened(self) -> tuple[set[int], set[int]]:
        """The positions of calls whose equations the other body has itself."""
        found: tuple[set[int], set[int]] = set(), set()
        for each in self._matching.opened:
            found[each.which].add(each.position)
        return found

    def is_alone(self, which: int, position: int) -> bool:
        """Return True if an equation of one of the bodies has no counterpart anywhere."""
        return position not in self._matching.taken[which]

    @property
    def values(self) -> Sequence[tuple[Var, Var]]:
        """The variables that correspond: arguments, constants, and results of equations."""
        return self._matching.values

    @property
    def results(self) -> Sequence[tuple[Atom, Atom]]:
        """The results of the bodies that correspond."""
        return self._matching.results

    def result_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return which results of two counterparts correspond, by their positions."""
        return self._matching.result_pairs(old, new)

    def counterpart(self, var: Atom) -> Var | None:
        """Return the variable of `after` that corresponds to an atom of `before`."""
        return self._matching.partner.get(id(var))

    def is_matched(self, which: int, var: Var) -> bool:
        """Return True if a variable of one of the bodies has a counterpart, in a call perhaps."""
        return self._matching.knows(which, var)

    def agree(self, old: Atom, new: Atom) -> bool:
        """Return True if two operands correspond, or are the same literal."""
        literals = self._matching.literals
        old, new = literals.get(id(old), old), literals.get(id(new), new)
        if type(old) is Literal and type(new) is Literal:
            return self.keys.literal(old) == self.keys.literal(new)
        return self._matching.agree(old, new)

    def is_rewired(self, old: Atom, new: Atom) -> bool:
        """Return True if operands of counterparts differ, and nothing removed or added explains it.

        What reads the result of an added equation that reads what was read before is not rewired,
        nor what reads what a removed equation did.
        """
        if self.agree(old, new):
            return False
        if type(old) is Literal or type(new) is Literal:
            return True
        matching = self._matching
        if id(old) in matching.partner and id(new) in matching.back:
            return True
        a, b = matching.sides
        lost, found = a.front(old, matching.partner), b.front(new, matching.back)
        if not lost or not found:
            return False
        moved = [matching.partner[id(var)] for var in lost]
        return not any(matching.is_equal(x, y) for x in moved for y in found)


def counterparts(
    before: AnyJaxpr,
    after: AnyJaxpr,
    arguments: Sequence[tuple[int, int]] | None = None,
    results: Sequence[tuple[int, int]] | None = None,
) -> list[MatchedBody]:
    """Match the equations of two programs.

    Args:
        before: A program's jaxpr.
        after: Another one's.
        arguments: The positions of the arguments that correspond. If left out, those at the same
            positions do.
        results: Likewise for results.

    Returns:
        The bodies that correspond, the programs' own first, a body before those in it.
    """
    keys = EquationKeys()
    a, b = jaxcompat.open_jaxpr(before), jaxcompat.open_jaxpr(after)
    ins = _in_place(a.invars, b.invars) if arguments is None else arguments
    outs = _in_place(a.outvars, b.outvars) if results is None else results
    found: list[MatchedBody] = []
    todo = deque([_Bodies(before, after, ins, outs)])
    seen = {(a, b)}
    while todo:
        each = todo.popleft()
        held = each.before, each.after
        matching = Matching.of_bodies(keys, held, each.arguments, each.results)
        for matched in _with_opened(keys, matching, each.path):
            found.append(matched)
            for inner in _bodies_of_pairs(matched):
                opened = jaxcompat.open_jaxpr(inner.before), jaxcompat.open_jaxpr(inner.after)
                if opened not in seen:
                    seen.add(opened)
                    todo.append(inner)
    return found


def _with_opened(
    keys: EquationKeys,
    matching: Matching,
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...],
    call: tuple[int, JaxprEqn] | None = None,
) -> Iterator[MatchedBody]:
    """Yield two bodies that are matched, and those of calls that only one of them has."""
    a, b = matching.sides
    pairs = dict(sorted(matching.pairs.items()))
    yield MatchedBody(a.held, b.held, path, pairs, keys, matching, call)
    for each in matching.opened:
        eqn = matching.sides[each.which].eqns[each.position]
        yield from _with_opened(keys, each.matching, (*path, (eqn, eqn)), (each.which, eqn))


@dataclass(frozen=True, eq=False)
class _Bodies:
    """Two bodies to match, as held; which arguments and results correspond; what is around them."""

    before: AnyJaxpr
    after: AnyJaxpr
    arguments: Sequence[tuple[int, int]]
    results: Sequence[tuple[int, int]]
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...] = ()


def _in_place(a: Sequence[object], b: Sequence[object]) -> list[tuple[int, int]]:
    return [(i, i) for i in range(min(len(a), len(b)))]


def _bodies_of_pairs(matched: MatchedBody) -> Iterator[_Bodies]:
    """Yield the bodies of counterparts, in order."""
    for old, new in matched.equations:
        if not (holds_jaxpr(old.params.values()) and holds_jaxpr(new.params.values())):
            continue
        if old.primitive is not new.primitive and not (traits(old).call and traits(new).call):
            continue
        held = [[body for _, body in sub_jaxprs(eqn)] for eqn in (old, new)]
        path = (*matched.path, (old, new))
        for place, (a, b) in enumerate(zip(*held, strict=False)):
            results = _results(matched, (old, new), place, (a, b))
            yield _Bodies(a, b, _arguments(matched, (old, new), place, (a, b)), results, path)


def _arguments(
    matched: MatchedBody,
    pair: tuple[JaxprEqn, JaxprEqn],
    place: int,
    bodies: tuple[AnyJaxpr, AnyJaxpr],
) -> list[tuple[int, int]]:
    """Return the arguments of two bodies that correspond: of the same operands, then in order."""
    counts = [len(jaxcompat.open_jaxpr(body).invars) for body in bodies]
    given = [_operands(eqn, place, count) for eqn, count in zip(pair, counts, strict=True)]
    pairs: dict[int, int] = {}
    if given[0] and given[1]:
        # First what is in the same place: loops are often given one value twice.
        pairs = {i: i for i, (x, y) in enumerate(zip(*given, strict=False)) if matched.agree(x, y)}
        free: dict[int, deque[int]] = defaultdict(deque)
        taken = set(pairs.values())
        for j, atom in enumerate(given[1]):
            if j not in taken:
                free[id(atom)].append(j)
        for i, atom in enumerate(given[0]):
            partner = None if type(atom) is Literal else matched.counterpart(atom)
            if i not in pairs and (places := free.get(id(partner))):
                pairs[i] = places.popleft()
    taken = set(pairs.values())
    left = (
        [i for i in range(counts[0]) if i not in pairs],
        [j for j in range(counts[1]) if j not in taken],
    )
    return [*pairs.items(), *zip(*left, strict=False)]


def _results(
    matched: MatchedBody,
    pair: tuple[JaxprEqn, JaxprEqn],
    place: int,
    bodies: tuple[AnyJaxpr, AnyJaxpr],
) -> list[tuple[int, int]]:
    """Return the results of two bodies that correspond, as those of their equations do."""
    counts = [jaxcompat.open_jaxpr(body).outvars for body in bodies]
    inside = [regions(eqn) for eqn in pair]
    if len(counts[0]) != len(counts[1]) and all(
        each is not None and place < len(each.regions) for each in inside
    ):
        outs = [each.regions[place].outs for each in inside if each is not None]
        places = {k: j for j, k in enumerate(outs[1])}
        return [
            (i, places[theirs])
            for k, theirs in matched.result_pairs(*pair)
            for i, result in enumerate(outs[0])
            if result == k and theirs in places
        ]
    return _in_place(*counts)


def _operands(eqn: JaxprEqn, place: int, count: int) -> list[Atom]:
    """Return what the arguments of a body are given, if that is known."""
    inside = regions(eqn)
    if inside is None or place >= len(inside.regions):
        return []
    ins = inside.regions[place].ins
    return [eqn.invars[i] for i in ins] if len(ins) == count else []
