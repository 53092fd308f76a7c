"""The regions of an equation: its bodies, and the edges along which values pass between them.

`regions(eqn)` describes every loop, branch and call alike, by position. A pass that follows values
is written once, on these edges, and also supports the primitives of plug-ins, since regions are
derived from their views (`structured.views`). Compare MLIR's RegionBranchOpInterface.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, TypeAlias, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.core.structured import Edges, View, as_tuple, holds_jaxpr, view, views
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var

T = TypeVar("T")

_NONE: Mapping[str, Sequence[Any]] = {}


@dataclass(frozen=True, eq=False)
class Region:
    """The edges of one body.

    Attributes:
        field: The field of the view that holds the body.
        groups: The fields of operands that the arguments come from, in order.
        result_fields: The fields that the results become, in order; none for a predicate.
        ins: For each argument, the position of its operand, or of its initial value.
        outs: For each result, the position of the equation's result that it becomes; None if it
            is the predicate of a loop.
        next_iteration: For each result, the position of the operand that it replaces in the next
            iteration; None if it is not carried.
        loop_invariant: For each argument, whether it is the operand itself in every iteration.
        constants: The field of operands for this body alone that new constants can be added to.
    """

    field: str
    groups: tuple[str, ...]
    result_fields: tuple[str, ...]
    ins: tuple[int, ...]
    outs: tuple[int | None, ...]
    next_iteration: tuple[int | None, ...]
    loop_invariant: tuple[bool, ...]
    constants: str | None

    @property
    def is_predicate(self) -> bool:
        """True if the body computes the predicate of a loop: whether it continues."""
        return None in self.outs


#: The common part of all equations of a kind with equally many operands, results and bodies:
#: `operands`, `results`, `regions` and `carried` of `Regions`.
_Shape: TypeAlias = tuple[
    dict[str, range], dict[str, range], tuple[Region, ...], tuple[tuple[int, int], ...]
]


@lru_cache(maxsize=4096)
def _shape(
    edges: Edges, operands: tuple[int, ...], results: tuple[int, ...], bodies: tuple[int, ...]
) -> _Shape:
    """Return the positions along all edges, given the sizes of the fields."""
    ins, outs = _ranges(edges.operands, operands), _ranges(edges.results, results)
    carried = [pair for a, b in edges.carried for pair in zip(ins[a], outs[b], strict=True)]
    start = {result: operand for operand, result in carried}
    changing = {*(name for name, _ in edges.carried), *edges.sliced}
    takers = Counter(
        name
        for (_, arguments, _), count in zip(edges.bodies, bodies, strict=True)
        for name in arguments * count
    )
    regions: list[Region] = []
    for (field, arguments, result_fields), count in zip(edges.bodies, bodies, strict=True):
        places: tuple[int | None, ...] = tuple(i for name in result_fields for i in outs[name])
        if not result_fields:
            places = (None,)
        region = Region(
            field,
            arguments,
            result_fields,
            tuple(i for name in arguments for i in ins[name]),
            places,
            tuple(None if i is None else start.get(i) for i in places),
            tuple(name not in changing for name in arguments for _ in ins[name]),
            next((a for a in arguments if a not in changing and takers[a] == 1), None),
        )
        regions += [region] * count
    return ins, outs, tuple(regions), tuple(carried)


def _ranges(fields: Sequence[str], sizes: Sequence[int]) -> dict[str, range]:
    ranges, start = {}, 0
    for field, size in zip(fields, sizes, strict=True):
        ranges[field] = range(start, start + size)
        start += size
    return ranges


@dataclass(eq=False)
class Regions:
    """The regions of one equation.

    Attributes:
        view: The structured view of the equation.
        bodies: The closed jaxprs, one for each region.
        operands: The positions of the operands, by field of the view.
        results: The positions of the results, by field of the view.
        regions: The edges of each body.
        carried: The positions of each carried operand and of the result that is its last value. If
            a loop runs no iteration, the result is the operand.
    """

    view: View
    edges: Edges
    bodies: tuple[ClosedJaxpr, ...]
    operands: dict[str, range]
    results: dict[str, range]
    regions: tuple[Region, ...]
    carried: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, structured: View) -> Regions:
        """Return the regions of the equation of a view, whose edges must be known."""
        edges = structured.edges
        assert edges is not None
        held = [as_tuple(getattr(structured, field)) for field, _, _ in edges.bodies]
        ins = tuple(len(as_tuple(getattr(structured, field))) for field in edges.operands)
        outs = tuple(len(getattr(structured, field)) for field in edges.results)
        bodies = tuple(body for group in held for body in group)
        shape = _shape(edges, ins, outs, tuple(map(len, held)))
        return cls(structured, edges, bodies, *shape)

    @property
    def eqn(self) -> JaxprEqn:
        return self.view.eqn

    @cached_property
    def kind(self) -> str:
        """The kind of control flow: "loop", "branch" or "call"; "" if several bodies all run."""
        if self.repeats or self.edges.predicate is not None:
            return "loop" if self.repeats else "branch"
        return "call" if len(self.bodies) == 1 else ""

    @cached_property
    def repeats(self) -> bool:
        """True if the equation is a loop."""
        return bool(self.carried or self.edges.sliced or self.edges.stacked)

    @cached_property
    def predicates(self) -> tuple[int, ...]:
        """The positions of the operands that select which body runs."""
        return () if self.edges.predicate is None else tuple(self.operands[self.edges.predicate])

    @cached_property
    def jaxprs(self) -> tuple[Jaxpr, ...]:
        """The open jaxprs of the bodies."""
        return tuple(map(jaxcompat.open_jaxpr, self.bodies))

    def region_of(self, jaxpr: Jaxpr) -> Region | None:
        """Return the region of an open body, or None if it is not a body of this equation."""
        pairs = zip(self.jaxprs, self.regions, strict=True)
        return next((region for body, region in pairs if body is jaxpr), None)

    @cached_property
    def arguments_by_operand(self) -> list[list[tuple[int, Var]]]:
        """For each operand, the arguments that start with it, each with its region number."""
        found: list[list[tuple[int, Var]]] = [[] for _ in self.eqn.invars]
        for number, (body, region) in enumerate(zip(self.jaxprs, self.regions, strict=True)):
            for i, var in zip(region.ins, body.invars, strict=True):
                found[i].append((number, var))
        return found

    def sources(self) -> list[list[tuple[int, Atom]]]:
        """Return the possible sources of each result: results of bodies, by region number."""
        sources: list[list[tuple[int, Atom]]] = [[] for _ in self.eqn.outvars]
        for number, (body, region) in enumerate(zip(self.bodies, self.regions, strict=True)):
            for out, atom in zip(region.outs, body.outvars, strict=True):
                if out is not None:
                    sources[out].append((number, atom))
        return sources

    # --- equations of some operands and results ------------------------------------------------

    def rebuild(
        self,
        bodies: Sequence[ClosedJaxpr],
        operands: Sequence[bool] | None = None,
        results: Sequence[bool] | None = None,
        more: Mapping[str, Sequence[Atom]] = _NONE,
        more_results: Mapping[str, Sequence[Var]] = _NONE,
        first: bool = False,
    ) -> JaxprEqn:
        """Return the equation with a selection of its operands and results, and with new ones.

        Args:
            bodies: A closed jaxpr for each region. It takes the kept and the new arguments, and
                returns the kept and the new results, in the order of `arguments`.
            operands: Which operands are kept; all if None. A carried one is kept with its result.
            results: Which results are kept; all if None.
            more: New operands, by the field that they are added to.
            more_results: New results, by the field that they are added to.
            first: Whether new operands come before the existing ones of their field. By default
                they come after them.

        Returns:
            The new equation, with the effects of the bodies. The operand that selects which body
            runs is always kept.
        """
        edges = self.edges
        if edges.has_rule:
            given: Any = self.view
            results = [True] * len(self.eqn.outvars) if results is None else results
            return given.with_outputs(results).rebuild(body=bodies[0])
        # The view may have other operands and results than the equation from which it was created.
        ins, atoms = _selected(self.operands, self._values(edges.operands), operands, more, first)
        outs, outvars = _selected(self.results, self._values(edges.results), results, more_results)
        changes = {**atoms, **outvars, **self.view.entries(ins, outs)}
        if edges.predicate is not None:
            del changes[edges.predicate]
        return self.view.rebuild(**changes, **self._by_field(bodies))

    def with_bodies(self, bodies: Sequence[ClosedJaxpr]) -> JaxprEqn:
        """Return the equation with other bodies, with the same numbers of arguments and results."""
        return self.view.rebuild(**self._by_field(bodies))

    def _by_field(self, bodies: Sequence[ClosedJaxpr]) -> dict[str, Any]:
        """Return the fields of the view that hold the bodies."""
        given, fields = iter(bodies), dict[str, Any]()
        for field, _, _ in self.edges.bodies:
            held = getattr(self.view, field)
            several = isinstance(held, tuple)
            fields[field] = tuple(next(given) for _ in held) if several else next(given)
        return fields

    def _values(self, fields: Sequence[str]) -> list[Any]:
        return [value for field in fields for value in as_tuple(getattr(self.view, field))]

    def arguments(
        self,
        region: Region,
        values: Sequence[T],
        more: Mapping[str, Sequence[T]],
        operands: Sequence[bool] | None = None,
        first: bool = False,
    ) -> list[T]:
        """Return the arguments of a body if some operands are kept and others are new.

        Args:
            region: The region of the body.
            values: A value for each argument that it has.
            more: Values for new arguments, by the field that their operands are added to.
            operands: Which operands are kept; all if None.
            first: Whether new operands come before the existing ones of their field. By default
                they come after them.

        Returns:
            The values of the kept and the new arguments, field by field.
        """
        places = {field: self.operands[field] for field in region.groups}
        own = dict(zip(region.ins, values, strict=True))
        return [
            v for group in _selected(places, own, operands, more, first)[1].values() for v in group
        ]

    def outcomes(
        self, region: Region, values: Sequence[T], more: Mapping[str, Sequence[T]]
    ) -> list[T]:
        """Return the results of a body with new ones added: the counterpart of `arguments`."""
        if region.is_predicate:
            return list(values)
        places = {field: self.results[field] for field in region.result_fields}
        own = dict(zip(region.outs, values, strict=True))
        _, fields = _selected(places, own, None, more)
        return [value for group in fields.values() for value in group]

    # --- dataflow analysis -----------------------------------------------------------------------

    def forward(
        self,
        facts: Sequence[T],
        through: Callable[[int, list[T]], Sequence[T]],
        meet: Callable[[T, T], T],
        widen: Callable[[T, T], T] | None = None,
        control: bool = False,
    ) -> tuple[list[T], list[T]]:
        """Return the facts of the operands that hold in every iteration, and those of the results.

        Args:
            facts: The fact of each operand before the equation.
            through: Maps the number of a region and the facts of its arguments to those of its
                results.
            meet: Returns the fact of a value that is one of two values, from their facts. Repeated
                meets must reach a fixed point.
            widen: The same for a carried value, from its facts before and after an iteration;
                `meet` if None.
            control: Whether to meet the fact of a predicate or a branch index with those of the
                values that it selects.
        """
        facts, widen = list(facts), widen or meet
        while True:
            before, results = list(facts), dict[int, T]()
            predicates = [facts[i] for i in self.predicates]
            for number, region in enumerate(self.regions):
                outs = through(number, [facts[i] for i in region.ins])
                for fact, out, operand in zip(
                    outs, region.outs, region.next_iteration, strict=True
                ):
                    if out is None:
                        predicates.append(fact)
                    elif operand is not None:
                        facts[operand] = widen(facts[operand], fact)
                    else:
                        results[out] = meet(results[out], fact) if out in results else fact
            if control and predicates:
                predicate = reduce(meet, predicates)
                for i, _ in self.carried:
                    facts[i] = meet(facts[i], predicate)
                results = {i: meet(fact, predicate) for i, fact in results.items()}
            if facts == before:
                results.update((out, facts[i]) for i, out in self.carried)
                return facts, [results[i] for i in range(len(self.eqn.outvars))]

    def backward(
        self,
        results: Sequence[bool],
        through: Callable[[int, list[bool]], Sequence[bool]],
        control: bool = False,
    ) -> list[bool]:
        """Return which operands lead to some of the results, in any iteration.

        Args:
            results: The results in question.
            through: Maps the number of a region and a flag for each of its results to a flag for
                each argument that leads to one of the flagged results.
            control: Whether to follow control dependences: predicates then lead to all results.
        """
        facts = [False] * len(self.eqn.invars)
        for i in self.predicates if control else ():
            facts[i] = True
        for i, out in self.carried:
            facts[i] = results[out]
        while True:
            before = list(facts)
            for number, region in enumerate(self.regions):
                asked = [
                    (operand is not None and facts[operand])
                    or (control if out is None else results[out])
                    for out, operand in zip(region.outs, region.next_iteration, strict=True)
                ]
                for i, flag in zip(region.ins, through(number, asked), strict=True):
                    facts[i] |= flag
            if facts == before:
                return facts


def regions(eqn: JaxprEqn) -> Regions | None:
    """Return the regions of an equation, or None if its primitive has no view with edges."""
    params = eqn.params
    if not params or (eqn.primitive.name not in views and not holds_jaxpr(params.values())):
        return None  # most equations need no lookup in the table of views
    structured = view(eqn)
    return None if structured is None or structured.edges is None else Regions.of(structured)


def open_regions(eqn: JaxprEqn) -> Regions | None:
    """Return the regions of an equation, or None if a custom rule also takes the operands."""
    inside = regions(eqn)
    return None if inside is None or inside.edges.has_rule else inside


def _selected(
    places: Mapping[str, range],
    values: Any,
    flags: Sequence[bool] | None,
    more: Mapping[str, Sequence[Any]],
    first: bool = False,
) -> tuple[list[int | None], dict[str, tuple[Any, ...]]]:
    """Return the positions of the values kept, None for new ones, and the values by field."""
    everything: list[int | None] = []
    fields = {}
    for field, positions in places.items():
        own = [i for i in positions if flags is None or flags[i]]
        new = more.get(field, ())
        kept = [values[i] for i in own]
        fields[field] = (*new, *kept) if first else (*kept, *new)
        nowhere = [None] * len(new)
        everything += [*nowhere, *own] if first else [*own, *nowhere]
    return everything, fields
