"""Match the equations of two programs, regardless of order and names.

Two programs are matched as graphs, body by body:

1. Equations are paired that compute the same from the same values, or from whose results the same
   is computed (value numbering, forwards and backwards).
2. The matching spreads from pairs to the makers of their operands and the readers of their results.
3. The equations left are paired by their neighbourhood, and then by their operands alone.

These steps are taken for equations that are the same, then for those that differ in a dtype or a
constant, and then for those that share only the primitive (`equation_keys.Likeness`). At the end,
equations of different primitives with the same neighbours are paired.

A body is matched with the body that the counterpart of its equation holds. A body shared by
several equations is matched once with each different counterpart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.body_matching import match_bodies
from jaxprtool.ir.body_pairs import BodyPairs
from jaxprtool.ir.equation_keys import EquationKeys
from jaxprtool.ir.equations import substitute
from jaxprtool.ir.regions import Region, regions
from jaxprtool.ir.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var


@dataclass(eq=False)
class MatchedBody:
    """Two bodies that correspond, and the pairs found in them.

    Attributes:
        before: The body in the first program, as its equation holds it.
        after: The body in the second program.
        path: The pairs of equations around the bodies, the outermost first.
        pairs: The position in `after` of each paired equation of `before`, in order of `before`.
        keys: The numbering of equations and types, for comparisons.
        call: If one of the bodies is that of a call that the other program has inline: the program
            with the call, 0 or 1, and the call. Otherwise None.
    """

    before: AnyJaxpr
    after: AnyJaxpr
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...]
    pairs: dict[int, int]
    keys: EquationKeys
    _found: BodyPairs
    call: tuple[int, JaxprEqn] | None = None

    @property
    def bodies(self) -> tuple[Jaxpr, Jaxpr]:
        """The two bodies, open."""
        return jaxcompat.open_jaxpr(self.before), jaxcompat.open_jaxpr(self.after)

    @cached_property
    def equations(self) -> list[tuple[JaxprEqn, JaxprEqn]]:
        """The pairs of equations."""
        before, after = (body.eqns for body in self.bodies)
        return [(before[i], after[j]) for i, j in self.pairs.items()]

    @cached_property
    def opened(self) -> tuple[set[int], set[int]]:
        """For each body, the positions of the calls whose equations the other body has inline."""
        found: tuple[set[int], set[int]] = set(), set()
        for each in self._found.opened:
            found[each.which].add(each.position)
        return found

    def is_alone(self, which: int, position: int) -> bool:
        """Return True if an equation has no counterpart, here or in an opened call."""
        return position not in self._found.taken[which]

    @property
    def values(self) -> Sequence[tuple[Var, Var]]:
        """The pairs of variables: arguments, constants, and results of equations."""
        return self._found.values

    @property
    def results(self) -> Sequence[tuple[Atom, Atom]]:
        """The pairs of results of the bodies."""
        return self._found.results

    def result_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return the positions of the corresponding results of two counterparts."""
        return self._found.result_pairs(old, new)

    def operand_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return the positions of the corresponding operands of two counterparts."""
        return self._found.operand_pairs(old, new)

    def counterpart(self, var: Atom) -> Var | None:
        """Return the variable of `after` that corresponds to an atom of `before`."""
        return self._found.partner.get(id(var))

    def is_matched(self, which: int, var: Var) -> bool:
        """Return True if a variable of one of the bodies is paired, here or in an opened call."""
        return self._found.has_counterpart(which, var)

    def agree(self, old: Atom, new: Atom) -> bool:
        """Return True if two operands correspond, or are the same literal."""
        old, new = substitute((old, new), self._found.literals)
        if type(old) is Literal and type(new) is Literal:
            return self.keys.literal(old) == self.keys.literal(new)
        return self._found.agree(old, new)

    def is_rewired(self, old: Atom, new: Atom) -> bool:
        """Return True if two operands differ for no reason but that another value is read.

        An operand is not rewired if an inserted equation now computes it from the value that was
        read before, or if the removed equation that computed it read the value that is read now.
        """
        if self.agree(old, new):
            return False
        if type(old) is Literal or type(new) is Literal:
            return True
        pairs = self._found
        if id(old) in pairs.partner and id(new) in pairs.back:
            return True
        a, b = pairs.sides
        olds, news = a.nearest_known(old, pairs.partner), b.nearest_known(new, pairs.back)
        if not olds or not news:
            return False
        partners = [pairs.partner[id(var)] for var in olds]
        return not any(pairs.is_equal(x, y) for x in partners for y in news)


def counterparts(
    before: AnyJaxpr,
    after: AnyJaxpr,
    arguments: Sequence[tuple[int, int]] | None = None,
    results: Sequence[tuple[int, int]] | None = None,
) -> list[MatchedBody]:
    """Match the equations of two programs.

    Args:
        before: The jaxpr of the first program.
        after: The jaxpr of the second program.
        arguments: The positions of the arguments that correspond. If None, those at the same
            positions do.
        results: The same for results.

    Returns:
        The bodies that correspond: the programs' own first, and each body before those in it.
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
        pairs = match_bodies(keys, held, each.arguments, each.results)
        for matched in _with_opened(keys, pairs, each.path):
            found.append(matched)
            for inner in _bodies_of_pairs(matched):
                opened = jaxcompat.open_jaxpr(inner.before), jaxcompat.open_jaxpr(inner.after)
                if opened not in seen:
                    seen.add(opened)
                    todo.append(inner)
    return found


def _with_opened(
    keys: EquationKeys,
    pairs: BodyPairs,
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...],
    call: tuple[int, JaxprEqn] | None = None,
) -> Iterator[MatchedBody]:
    """Yield two matched bodies, and then the bodies of calls that only one of them has."""
    a, b = pairs.sides
    in_order = dict(sorted(pairs.pairs.items()))
    yield MatchedBody(a.held, b.held, path, in_order, keys, pairs, call)
    for each in pairs.opened:
        eqn = pairs.sides[each.which].eqns[each.position]
        yield from _with_opened(keys, each.inside, (*path, (eqn, eqn)), (each.which, eqn))


@dataclass(frozen=True, eq=False)
class _Bodies:
    """Two bodies to match, their corresponding arguments and results, and the path to them."""

    before: AnyJaxpr
    after: AnyJaxpr
    arguments: Sequence[tuple[int, int]]
    results: Sequence[tuple[int, int]]
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...] = ()


def _in_place(a: Sequence[object], b: Sequence[object]) -> list[tuple[int, int]]:
    return [(i, i) for i in range(min(len(a), len(b)))]


def _bodies_of_pairs(matched: MatchedBody) -> Iterator[_Bodies]:
    """Yield the bodies that the counterparts in two matched bodies hold, in order."""
    for old, new in matched.equations:
        if not (holds_jaxpr(old.params.values()) and holds_jaxpr(new.params.values())):
            continue
        if old.primitive is not new.primitive and not (traits(old).call and traits(new).call):
            continue
        held = [[body for _, body in sub_jaxprs(eqn)] for eqn in (old, new)]
        path = (*matched.path, (old, new))
        for a, b in zip(*held, strict=False):
            edges = _edges(old, a), _edges(new, b)
            arguments = _arguments(matched, (old, new), (a, b), edges)
            yield _Bodies(a, b, arguments, _results(matched, (old, new), (a, b), edges), path)


#: The regions of the bodies of two counterparts; None for a body that has no region.
_TwoEdges: TypeAlias = tuple[Region | None, Region | None]


def _edges(eqn: JaxprEqn, body: AnyJaxpr) -> Region | None:
    """Return the region of one of an equation's bodies, or None if it has none."""
    inside, opened = regions(eqn), jaxcompat.open_jaxpr(body)
    region = None if inside is None else inside.region_of(opened)
    return region if region is not None and len(region.ins) == len(opened.invars) else None


def _arguments(
    matched: MatchedBody,
    pair: tuple[JaxprEqn, JaxprEqn],
    bodies: tuple[AnyJaxpr, AnyJaxpr],
    edges: _TwoEdges,
) -> list[tuple[int, int]]:
    """Return the corresponding arguments of two bodies.

    Arguments correspond if their operands do; the others are paired in order.
    """
    counts = [len(jaxcompat.open_jaxpr(body).invars) for body in bodies]
    pairs: dict[int, int] = {}
    if edges[0] is not None and edges[1] is not None:
        ins = edges[0].ins, edges[1].ins
        if len(pair[0].invars) != len(pair[1].invars):
            others = dict(matched.operand_pairs(*pair))
            places = {k: j for j, k in enumerate(ins[1])}
            return [(i, places[others[k]]) for i, k in enumerate(ins[0]) if others.get(k) in places]
        given = [[eqn.invars[k] for k in each] for each, eqn in zip(ins, pair, strict=True)]
        # The same place first: loops are often given the same value twice.
        pairs = {i: i for i, (x, y) in enumerate(zip(*given, strict=False)) if matched.agree(x, y)}
        free: dict[int, deque[int]] = defaultdict(deque)
        taken = set(pairs.values())
        for j, atom in enumerate(given[1]):
            if j not in taken:
                free[id(atom)].append(j)
        for i, atom in enumerate(given[0]):
            partner = None if type(atom) is Literal else matched.counterpart(atom)
            if i not in pairs and (found := free.get(id(partner))):
                pairs[i] = found.popleft()
    taken = set(pairs.values())
    left = (
        [i for i in range(counts[0]) if i not in pairs],
        [j for j in range(counts[1]) if j not in taken],
    )
    return [*pairs.items(), *zip(*left, strict=False)]


def _results(
    matched: MatchedBody,
    pair: tuple[JaxprEqn, JaxprEqn],
    bodies: tuple[AnyJaxpr, AnyJaxpr],
    edges: _TwoEdges,
) -> list[tuple[int, int]]:
    """Return the corresponding results of two bodies, which are those of their equations."""
    outs = [jaxcompat.open_jaxpr(body).outvars for body in bodies]
    if len(outs[0]) == len(outs[1]) or edges[0] is None or edges[1] is None:
        return _in_place(*outs)
    becomes = edges[0].outs, edges[1].outs
    partner = dict(matched.result_pairs(*pair))
    places = {k: j for j, k in enumerate(becomes[1])}
    return [
        (i, places[partner[k]])
        for i, k in enumerate(becomes[0])
        if k is not None and partner.get(k) in places
    ]
