"""Loops, branches and calls, rewritten on the edges of their bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.caches import JaxprCache
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.regions import Region, Regions, regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.mapping.domains.domain import Domain, K, Rewritten, Role

if TYPE_CHECKING:
    from jaxprtool.passes.mapping.domains.body import BodyBuilder

#: Bodies that take their constants as arguments, by their original body.
_lifted = JaxprCache()


@dataclass(frozen=True, eq=False)
class Solution(Generic[K]):
    """The kinds of the operands and results of an equation that holds jaxprs, and its new bodies.

    Attributes:
        found: The regions of the equation.
        operands: The kinds of the operands; for a sliced operand, the kind of one row.
        results: The kinds of the results; for a stacked result, the kind of one row.
        bodies: The rewritten bodies.
    """

    found: Regions
    operands: list[K]
    results: list[K]
    bodies: list[Rewritten[K]]


def by_edges(builder: BodyBuilder[K], eqn: JaxprEqn) -> bool:
    """Write a loop, branch or call; return False if a predicate or index is not uniform."""
    found = regions(eqn)
    assert found is not None
    solution = solve(builder, found)
    if solution is not None:
        write(builder, solution)
    return solution is not None


def solve(
    builder: BodyBuilder[K], found: Regions, kinds: Sequence[K] | None = None, context: Any = None
) -> Solution[K] | None:
    """Return the kinds that hold in every iteration, or None if a predicate is not uniform.

    Args:
        builder: The body that the equation is in. It is not written to.
        found: The regions of the equation.
        kinds: The kinds of the operands, if they are not those in `builder`.
        context: The context of the bodies; if None, the one that the domain returns.
    """
    domain: Domain[K] = builder.domain
    context = domain.context(builder.context, found) if context is None else context
    kinds = [*map(builder.kind, found.eqn.invars)] if kinds is None else kinds
    if not all(domain.uniform(kinds[i]) for i in found.predicates):
        return None
    types = [v.aval for v in found.eqn.invars]
    for body, region in zip(found.bodies, found.regions, strict=True):
        for i, var in zip(region.ins, body.invars, strict=True):
            types[i] = var.aval
    roles = _roles(found)
    triples = zip(kinds, types, roles, strict=True)
    start = [domain.settled(kind, aval, role, found) for kind, aval, role in triples]

    known: dict[int, Rewritten[K]] = {}

    def through(number: int, kinds: Sequence[K]) -> Sequence[Any]:
        body, region = found.bodies[number], found.regions[number]
        if region.is_predicate:
            return (None,)  # rewritten below, once
        known[number] = made = domain.body(body, kinds, None, context)
        result_roles: list[Role] = [
            "result" if operand is None else "carry" for operand in region.next_iteration
        ]
        triples = zip(made.kinds, body.outvars, result_roles, strict=True)
        return [domain.settled(kind, v.aval, role, found) for kind, v, role in triples]

    operands, results = found.forward(start, through, domain.join, domain.widened)
    bodies = []
    for number, region in enumerate(found.regions):
        wanted = [None if out is None else results[out] for out in region.outs]
        made = known.get(number)
        if made is None or not all(map(domain.fits, made.kinds, wanted)):
            kinds = [operands[i] for i in region.ins]
            made = domain.body(found.bodies[number], kinds, wanted, context)
        if region.is_predicate and not domain.uniform(made.kinds[0]):
            return None
        bodies.append(made)
    return Solution(found, operands, results, bodies)


def _roles(found: Regions) -> list[Role]:
    """Return the role of each operand in the bodies."""
    roles: list[Role] = ["operand"] * len(found.eqn.invars)
    for i, _ in found.carried:
        roles[i] = "carry"
    for i in _positions(found.edges.sliced, found.operands):
        roles[i] = "row"
    return roles


def _positions(fields: Sequence[str], ranges: Mapping[str, range]) -> set[int]:
    return {i for field in fields for i in ranges[field]}


def write(
    builder: BodyBuilder[K],
    solution: Solution[K],
    by_iteration: Mapping[Any, Atom] | None = None,
    **changes: Any,
) -> None:
    """Write the equation of a solution.

    Args:
        builder: The body that is written.
        solution: The kinds and the bodies.
        by_iteration: Extra arguments of the bodies that differ between iterations, by name: the
            stacked operands. The others are taken from `builder`.
        changes: Fields of the view to change, such as the length of a scan.
    """
    found, domain = solution.found, builder.domain
    eqn, trips = found.eqn, found.view.trips

    def whole(kinds: Sequence[K], rows: set[int]) -> list[K]:
        return [domain.stacked(kind, trips) if i in rows else kind for i, kind in enumerate(kinds)]

    ins = whole(solution.operands, _positions(found.edges.sliced, found.operands))
    outs = whole(solution.results, _positions(found.edges.stacked, found.results))
    bodies = solution.bodies
    if found.kind == "call" and not traits(eqn).holds_constants:
        bodies = [_with_constants_as_extras(builder, body) for body in bodies]
    extras: dict[str, dict[Any, Atom]] = {}
    for made, region in zip(bodies, found.regions, strict=True):
        for name in made.extras:
            row = None if by_iteration is None else by_iteration.get(name)
            place = _place(found, region, row is not None)
            atom = name if isinstance(name, Var) else builder.extra(name) if row is None else row
            extras.setdefault(place, {})[name] = atom
    values = {"invars": [*map(builder.held, eqn.invars, ins)]}
    values["outvars"] = builder.outs(eqn.outvars, outs)
    # The fast path: nothing is added, and no effect names an operand that has been replaced.
    if not (extras or changes or eqn.effects):
        rebuilt = found.with_bodies([made.jaxpr for made in bodies]).replace(**values)
    else:
        pairs = zip(bodies, found.regions, strict=True)
        new = eqn.replace(**values)
        rebuilt = Regions.of(replace(type(found.view).of(new), **changes)).rebuild(
            [_with_extras(domain, found, region, made, extras) for made, region in pairs],
            more={field: [*each.values()] for field, each in extras.items()},
            first=True,
        )
    builder.add(rebuilt, eqn, outs)


def _place(found: Regions, region: Region, sliced: bool) -> str:
    """Return the field of operands to which extra arguments of a body are added."""
    edges = found.edges
    changing = {field for field, _ in edges.carried}.union(edges.sliced)
    fields = edges.sliced if sliced else [f for f in region.groups if f not in changing]
    if not fields:
        raise UnsupportedError(
            f"{named(found.eqn)} takes no constants, but its body now needs some"
        )
    return fields[0]


def _with_extras(
    domain: Domain[K],
    found: Regions,
    region: Region,
    made: Rewritten[K],
    extras: Mapping[str, Mapping[Any, Atom]],
) -> ClosedJaxpr:
    """Return a body that takes, in each field, the extra arguments that were added to it."""
    count = len(made.extras)
    own = dict(zip(made.extras, made.jaxpr.invars, strict=False))
    more = {
        field: [own.pop(name, None) or Var(domain.extra_aval(name)) for name in extras[field]]
        for field in region.groups
        if field in extras
    }
    invars = found.arguments(region, made.jaxpr.invars[count:], more, first=True)
    if invars == made.jaxpr.invars:
        return made.jaxpr  # shared by all equations whose bodies are rewritten to it
    return jaxcompat.replace_jaxpr(made.jaxpr, invars=invars)


def _with_constants_as_extras(builder: BodyBuilder[K], made: Rewritten[K]) -> Rewritten[K]:
    """Return a body whose constants are extra arguments, named by their variables."""
    body, consts = lifted(made.jaxpr)
    return replace(made, jaxpr=body, extras=(*map(builder.constant, consts), *made.extras))


def lifted(body: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
    """Return a closed jaxpr that takes its constants before its arguments, and these constants.

    Use it for equations whose bodies hold no constants. Shared bodies stay shared.
    """
    if not body.consts:
        return body, ()
    known = _lifted.of(body)
    new = known.get("lifted")
    if new is None:
        invars = [*body.constvars, *body.invars]
        new = jaxcompat.replace_jaxpr(body, constvars=(), consts=(), invars=invars)
        known["lifted"] = new
    return new, tuple(body.consts)
