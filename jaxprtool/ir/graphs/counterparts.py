"""Match the equations of two programs, regardless of order and names.

Two programs are matched as graphs, body by body:

1. Equations are paired by value numbering: forwards, if they compute the same from the same values,
   and backwards, if the same is computed from their results.
2. The matching spreads from pairs to the definitions of their operands and the readers of their
   results.
3. The equations left are paired by their neighbourhood, and then by their operands alone.

These steps are taken for equations that are the same, then for those that differ in a dtype or a
constant, and then for those that share only the primitive (`equation_keys.MatchLevel`). At the end,
equations of different primitives with the same neighbours are paired.

A body is matched with the body that the counterpart of its equation holds. A body shared by
several equations is matched once with each different counterpart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.core.regions import Region, regions
from jaxprtool.ir.core.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.equality.equation_keys import EquationKeys
from jaxprtool.ir.graphs.body_matching import match_bodies
from jaxprtool.ir.graphs.body_pairs import MatchedBody
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn, Literal


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
        both = match_bodies(keys, held, each.arguments, each.results)
        for matched in _with_opened(both, each.path):
            found.append(matched)
            for inner in _bodies_of_pairs(matched):
                opened = jaxcompat.open_jaxpr(inner.before), jaxcompat.open_jaxpr(inner.after)
                if opened not in seen:
                    seen.add(opened)
                    todo.append(inner)
    return found


def _with_opened(
    matched: MatchedBody,
    path: tuple[tuple[JaxprEqn, JaxprEqn], ...],
    call: tuple[int, JaxprEqn] | None = None,
) -> Iterator[MatchedBody]:
    """Yield two matched bodies, and then the bodies of calls that only one of them has."""
    matched.path, matched.call = path, call
    matched.pairs = dict(sorted(matched.pairs.items()))
    yield matched
    for each in matched.opened_calls:
        eqn = matched.graphs[each.which].eqns[each.position]
        yield from _with_opened(each.inside, (*path, (eqn, eqn)), (each.which, eqn))


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
            positions = {k: j for j, k in enumerate(ins[1])}
            return [
                (i, positions[others[k]])
                for i, k in enumerate(ins[0])
                if others.get(k) in positions
            ]
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
    """Return the corresponding results of two bodies, by the results of their equations."""
    outs = [jaxcompat.open_jaxpr(body).outvars for body in bodies]
    if len(outs[0]) == len(outs[1]) or edges[0] is None or edges[1] is None:
        return _in_place(*outs)
    positions = edges[0].outs, edges[1].outs
    partner = dict(matched.result_pairs(*pair))
    index_of = {k: j for j, k in enumerate(positions[1])}
    return [
        (i, index_of[partner[k]])
        for i, k in enumerate(positions[0])
        if k is not None and partner.get(k) in index_of
    ]
