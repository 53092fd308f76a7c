"""The regions of an equation, and one view of each higher-order primitive in every release.

`regions(eqn)` describes every loop, branch and call alike, by position. A pass that follows values
is written once, on these edges, and also supports the primitives of plug-ins, since regions are
derived from their views (`structured.views`). Compare MLIR's RegionBranchOpInterface.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from itertools import chain, compress
from typing import Any, ClassVar, TypeAlias, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, Effect, Jaxpr, JaxprEqn, Params, Var

# --- regions --------------------------------------------------------------------------------------
# The regions of an equation: its bodies, and the edges along which values pass between them.

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
        groups = [as_tuple(getattr(structured, field)) for field, _, _ in edges.bodies]
        ins = tuple([len(as_tuple(getattr(structured, field))) for field in edges.operands])
        outs = tuple([len(getattr(structured, field)) for field in edges.results])
        bodies = groups[0] if len(groups) == 1 else tuple(chain.from_iterable(groups))
        shape = _shape(edges, ins, outs, tuple([len(group) for group in groups]))
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
        by_operand: list[list[tuple[int, Var]]] = [[] for _ in self.eqn.invars]
        for number, (body, region) in enumerate(zip(self.jaxprs, self.regions, strict=True)):
            for i, var in zip(region.ins, body.invars, strict=True):
                by_operand[i].append((number, var))
        return by_operand

    @cached_property
    def replacements(self) -> dict[int, list[tuple[int, Atom]]]:
        """For each carried operand, the results that replace it, each with its region number."""
        by_operand: dict[int, list[tuple[int, Atom]]] = {}
        for number, (body, region) in enumerate(zip(self.jaxprs, self.regions, strict=True)):
            for i, atom in zip(region.next_iteration, body.outvars, strict=True):
                if i is not None:
                    by_operand.setdefault(i, []).append((number, atom))
        return by_operand

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
            call: Any = self.view
            results = [True] * len(self.eqn.outvars) if results is None else results
            return call.with_outputs(results).rebuild(body=bodies[0])
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
        remaining, fields = iter(bodies), dict[str, Any]()
        for field, _, _ in self.edges.bodies:
            old = getattr(self.view, field)
            several = isinstance(old, tuple)
            fields[field] = tuple(next(remaining) for _ in old) if several else next(remaining)
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
        by_operand = dict(zip(region.ins, values, strict=True))
        return [
            v
            for group in _selected(places, by_operand, operands, more, first)[1].values()
            for v in group
        ]

    def outcomes(
        self, region: Region, values: Sequence[T], more: Mapping[str, Sequence[T]]
    ) -> list[T]:
        """Return the results of a body with new ones added: the counterpart of `arguments`."""
        if region.is_predicate:
            return list(values)
        places = {field: self.results[field] for field in region.result_fields}
        by_result = dict(zip(region.outs, values, strict=True))
        _, fields = _selected(places, by_result, None, more)
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
            previous, results = list(facts), dict[int, T]()
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
            if facts == previous:
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
            previous = list(facts)
            for number, region in enumerate(self.regions):
                asked = [
                    (operand is not None and facts[operand])
                    or (control if out is None else results[out])
                    for out, operand in zip(region.outs, region.next_iteration, strict=True)
                ]
                for i, flag in zip(region.ins, through(number, asked), strict=True):
                    facts[i] |= flag
            if facts == previous:
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
        chosen = [i for i in positions if flags is None or flags[i]]
        new = more.get(field, ())
        kept = [values[i] for i in chosen]
        fields[field] = (*new, *kept) if first else (*kept, *new)
        nowhere = [None] * len(new)
        everything += [*nowhere, *chosen] if first else [*chosen, *nowhere]
    return everything, fields


# --- structured -----------------------------------------------------------------------------------
# One structured view of each of JAX's higher-order primitives, the same in every JAX release.
#
# `view(eqn)` returns a `Scan`, `While`, `Cond`, `Call`, `CustomJVP`, `CustomVJP`, `High` or
# `ShardMap`, whose fields are the equation's operands by role and its bodies as closed jaxprs.
# `.rebuild(...)` takes the same fields and returns an equation of the running JAX release, with its
# effects recomputed.
#
# Other primitives that hold jaxprs (a reduction, a linear solve) have no view; `sub_jaxprs` and
# `map_sub_jaxprs` reach their bodies too.

#: For each call primitive: the parameter that holds the body, those that hold one entry per
#: operand, and those that hold one per result.
CALLS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "jit": (
        "jaxpr",
        ("in_shardings", "in_layouts", "donated_invars"),
        ("out_shardings", "out_layouts"),
    ),
    "call": ("call_jaxpr", (), ()),
    "closed_call": ("call_jaxpr", (), ()),
    "eval_jaxpr": ("call_jaxpr", (), ()),
    "remat2": ("jaxpr", ("prevent_cse",), ()),
}

#: The entry of each parameter for a new operand or result: no options.
NO_OPTIONS: dict[str, Any] = {
    "in_shardings": jaxcompat.UNSPECIFIED,
    "out_shardings": jaxcompat.UNSPECIFIED,
    "in_layouts": None,
    "out_layouts": None,
    "donated_invars": False,
    "prevent_cse": True,
}


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges along which values pass into, between and out of the bodies of a kind of equation.

    Operands, results and bodies are named by the fields of the view that hold them.

    Attributes:
        operands: The fields of the operands, in the order of the equation.
        results: The fields of the results, in the order of the equation.
        bodies: For each field that holds a body, or a tuple of similar bodies: the fields of its
            arguments, and the fields that its results become. The result of a body that becomes
            no field is the predicate of a loop: whether it continues.
        carried: For each field of operands that an iteration of a loop replaces, the field of the
            results; these have the operands' values if there is no iteration.
        sliced: The fields of operands of which each iteration gets a slice.
        stacked: The fields of results that are stacked from the iterations.
        predicate: The field of the operand that selects which body runs, if there is one.
        has_rule: Whether a custom rule, which is not a jaxpr, takes the same operands as the body.
            Then all operands must stay, and values that the body passes through may not be
            forwarded.
    """

    operands: tuple[str, ...] = ("operands",)
    results: tuple[str, ...] = ("outs",)
    bodies: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
        ("body", ("operands",), ("outs",)),
    )
    carried: tuple[tuple[str, str], ...] = ()
    sliced: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    predicate: str | None = None
    has_rule: bool = False


@dataclass(frozen=True, eq=False)
class View:
    """The base class of views: their equation, and the construction of a new one from it.

    A subclass has a field for each group of operands or results, and for each body. Its `of` fills
    them from an equation, and `params` returns the parameters that depend on them. A view that is
    added to the table `views`, by `@rule("view", "my_primitive")`, is used by all passes.
    """

    eqn: JaxprEqn

    #: The names of the view's primitives.
    primitives: ClassVar[tuple[str, ...]] = ()
    #: None if the equation is defined by an object, and the bodies only represent what it computes.
    edges: ClassVar[Edges | None] = Edges()

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        """Return the view of an equation of one of the primitives."""
        raise NotImplementedError

    def rebuild(self, **changes: Any) -> JaxprEqn:
        """Return an equation like this one with some of the view's fields changed."""
        return replace(self, **changes)._equation()

    def entries(self, operands: Sequence[int | None], results: Sequence[int | None]) -> Params:
        """Return the parameters with an entry per operand or result, for a selection of these.

        Args:
            operands: For each operand of the new equation its position in this one, or None.
            results: The same for each result.
        """
        return {}

    @property
    def trips(self) -> Any:
        """The trip count of the bodies: a number, a symbolic dimension, or None if unknown."""
        return 1

    def params(self) -> Params:
        """Return the parameters that depend on the fields."""
        raise NotImplementedError

    def _effects(self) -> set[Effect]:
        """Return the effects of the bodies, on the equation's operands."""
        assert self.edges is not None
        effects: set[Any] = set()
        for field, arguments, _ in self.edges.bodies:
            operands = [atom for name in arguments for atom in getattr(self, name)]
            for body in as_tuple(getattr(self, field)):
                effects |= jaxcompat.operand_effects(body, operands)
        return effects

    def _equation(self) -> JaxprEqn:
        eqn, edges = self.eqn, self.edges
        assert edges is not None
        operands = [atom for name in edges.operands for atom in as_tuple(getattr(self, name))]
        outs = [var for name in edges.results for var in getattr(self, name)]
        params = {**eqn.params, **self.params()}
        return jaxcompat.new_jaxpr_eqn(
            operands, outs, eqn.primitive, params, self._effects(), eqn.source_info, eqn.ctx
        )

    def _as_held(self, name: str, body: ClosedJaxpr) -> AnyJaxpr:
        """Return `body` in the form of this primitive's parameter `name`: open or closed."""
        old = self.eqn.params[name]
        return body if isinstance(old, ClosedJaxpr) else jaxcompat.open_jaxpr(body)


@dataclass(frozen=True, eq=False)
class Scan(View):
    """`scan`: body(*consts, *carry, *x) -> (*carry, *y), over the leading axis of each of `xs`."""

    consts: tuple[Atom, ...]
    carry: tuple[Atom, ...]
    xs: tuple[Atom, ...]
    carry_outs: tuple[Var, ...]
    ys: tuple[Var, ...]
    body: ClosedJaxpr
    length: int
    reverse: bool
    unroll: int

    primitives: ClassVar[tuple[str, ...]] = ("scan",)
    edges: ClassVar[Edges | None] = Edges(
        operands=("consts", "carry", "xs"),
        results=("carry_outs", "ys"),
        bodies=(("body", ("consts", "carry", "xs"), ("carry_outs", "ys")),),
        carried=(("carry", "carry_outs"),),
        sliced=("xs",),
        stacked=("ys",),
    )

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Scan:
        p = eqn.params
        n, k = jaxcompat.scan_counts(p)
        ins, outs = tuple(eqn.invars), tuple(eqn.outvars)
        groups = (ins[:n], ins[n : n + k], ins[n + k :], outs[:k], outs[k:])
        body = jaxcompat.close_jaxpr(p["jaxpr"])
        return cls(eqn, *groups, body, p["length"], p["reverse"], p["unroll"])

    @property
    def trips(self) -> Any:
        return self.length

    def params(self) -> Params:
        counts = len(self.consts), len(self.carry), len(self.xs), len(self.ys)
        return {
            **jaxcompat.scan_count_params(self.eqn.params, *counts),
            "jaxpr": self.body,
            "length": self.length,
            "reverse": self.reverse,
            "unroll": self.unroll,
        }


@dataclass(frozen=True, eq=False)
class While(View):
    """`while`: body(*body_consts, *carry) -> carry, while cond(*cond_consts, *carry) holds."""

    cond_consts: tuple[Atom, ...]
    body_consts: tuple[Atom, ...]
    carry: tuple[Atom, ...]
    outs: tuple[Var, ...]
    cond: ClosedJaxpr
    body: ClosedJaxpr

    primitives: ClassVar[tuple[str, ...]] = ("while",)
    edges: ClassVar[Edges | None] = Edges(
        operands=("cond_consts", "body_consts", "carry"),
        bodies=(
            ("cond", ("cond_consts", "carry"), ()),
            ("body", ("body_consts", "carry"), ("outs",)),
        ),
        carried=(("carry", "outs"),),
    )

    @classmethod
    def of(cls, eqn: JaxprEqn) -> While:
        p, ins = eqn.params, tuple(eqn.invars)
        c, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        cond, body = jaxcompat.close_jaxpr(p["cond_jaxpr"]), jaxcompat.close_jaxpr(p["body_jaxpr"])
        return cls(eqn, ins[:c], ins[c:b], ins[b:], tuple(eqn.outvars), cond, body)

    @property
    def trips(self) -> Any:
        return None

    def params(self) -> Params:
        return {
            "cond_nconsts": len(self.cond_consts),
            "cond_jaxpr": self.cond,
            "body_nconsts": len(self.body_consts),
            "body_jaxpr": self.body,
        }


@dataclass(frozen=True, eq=False)
class Cond(View):
    """`cond` and `switch`: branches[clamp(index)](*operands)."""

    index: Atom
    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    branches: tuple[ClosedJaxpr, ...]

    primitives: ClassVar[tuple[str, ...]] = ("cond",)
    edges: ClassVar[Edges | None] = Edges(
        operands=("index", "operands"),
        bodies=(("branches", ("operands",), ("outs",)),),
        predicate="index",
    )

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Cond:
        index, *operands = eqn.invars
        branches = tuple(map(jaxcompat.close_jaxpr, eqn.params["branches"]))
        return cls(eqn, index, tuple(operands), tuple(eqn.outvars), branches)

    def params(self) -> Params:
        return {"branches": tuple(self.branches)}


@dataclass(frozen=True, eq=False)
class Call(View):
    """A plain call, `body(*operands)`: jit, closed_call (eval_jaxpr in 0.12), remat.

    `operand_params` and `out_params` hold the parameters with one entry per operand and per result:
    jit's shardings, layouts and donation. A rebuild that changes the number of operands or results
    makes new ones.
    """

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: ClosedJaxpr
    operand_params: dict[str, tuple[Any, ...]]
    out_params: dict[str, tuple[Any, ...]]

    primitives: ClassVar[tuple[str, ...]] = tuple(CALLS)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Call:
        body, per_operand, per_out = CALLS[eqn.primitive.name]
        params = eqn.params
        return cls(
            eqn,
            tuple(eqn.invars),
            tuple(eqn.outvars),
            jaxcompat.close_jaxpr(params[body]),
            {k: params[k] for k in per_operand if isinstance(params.get(k), tuple)},
            {k: params[k] for k in per_out if isinstance(params.get(k), tuple)},
        )

    def entries(self, operands: Sequence[int | None], results: Sequence[int | None]) -> Params:
        """Return the parameters with an entry per operand or result; new ones have no options."""
        pairs = ("operand_params", operands), ("out_params", results)
        return {
            field: {
                k: tuple(NO_OPTIONS[k] if i is None else values[i] for i in positions)
                for k, values in getattr(self, field).items()
            }
            for field, positions in pairs
        }

    def params(self) -> Params:
        name = CALLS[self.eqn.primitive.name][0]
        body = self._as_held(name, self.body)
        return {**self.operand_params, **self.out_params, name: body}


@dataclass(frozen=True, eq=False)
class CustomJVP(View):
    """`custom_jvp_call`: body(*operands), differentiated by the user's rule.

    The rule is a Python closure over flat values; it stays valid while the operands and results
    stay the same in number and type. `with_outputs` restricts it to some of the results.
    """

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: ClosedJaxpr

    primitives: ClassVar[tuple[str, ...]] = ("custom_jvp_call",)
    edges: ClassVar[Edges | None] = Edges(has_rule=True)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        body = jaxcompat.close_jaxpr(eqn.params["call_jaxpr"])
        return cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body)

    def with_outputs(self, used_outs: Sequence[bool]) -> Any:
        """Return the view of the same call, and its rule, with only the results marked used.

        JAX restricts the rule; all operands stay, since the rule may read them.
        """
        if all(used_outs):
            return self
        _, eqn = jaxcompat.apply_jax_dce_rule(used_outs, self.eqn)
        return self.of(eqn)

    def params(self) -> Params:
        return {"call_jaxpr": self._as_held("call_jaxpr", self.body)}


@dataclass(frozen=True, eq=False)
class CustomVJP(CustomJVP):
    """`custom_vjp_call`: body(*operands), differentiated in reverse by the user's two rules."""

    primitives: ClassVar[tuple[str, ...]] = ("custom_vjp_call",)


@dataclass(frozen=True, eq=False)
class High(CustomJVP):
    """`call_hi_primitive`: body(*operands), with derivatives and batching of its own.

    JAX replaces the equation by the body before it compiles. A rebuild changes only the body; all
    else is defined by the equation's object.
    """

    primitives: ClassVar[tuple[str, ...]] = (jaxcompat.CALL_HIGH,)
    edges: ClassVar[Edges | None] = None

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        body = jaxcompat.high_body(eqn)
        return None if body is None else cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body)

    def _equation(self) -> JaxprEqn:
        return self.eqn.replace(params={"_prim": jaxcompat.with_high_body(self.eqn, self.body)})


@dataclass(frozen=True, eq=False)
class ShardMap(View):
    """`shard_map`: body on each shard of the operands, over the manual axes of a mesh."""

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: ClosedJaxpr
    mesh: Mesh
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]

    primitives: ClassVar[tuple[str, ...]] = ("shard_map",)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> ShardMap:
        p = eqn.params
        body = jaxcompat.close_jaxpr(p["jaxpr"])
        specs = tuple(p["in_specs"]), tuple(p["out_specs"])
        return cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body, p["mesh"], *specs)

    def entries(self, operands: Sequence[int | None], results: Sequence[int | None]) -> Params:
        """Return the parameters with an entry per operand or result; new ones are unsharded."""
        pairs = ("in_specs", operands), ("out_specs", results)
        return {
            field: tuple(PartitionSpec() if i is None else getattr(self, field)[i] for i in places)
            for field, places in pairs
        }

    def params(self) -> Params:
        return {
            "jaxpr": self._as_held("jaxpr", self.body),
            "mesh": self.mesh,
            "in_specs": tuple(self.in_specs),
            "out_specs": tuple(self.out_specs),
        }

    def _effects(self) -> set[Effect]:
        return jaxcompat.without_named_axes(super()._effects(), self.mesh.axis_names)


#: The open table of views: all that a plug-in needs to add for its own loop, branch or call.
views: RuleTable[type[View]] = RuleTable()

for _cls in (Scan, While, Cond, Call, CustomJVP, CustomVJP, High, ShardMap):
    rule(views, *_cls.primitives)(_cls)


def view(eqn: JaxprEqn) -> Any:
    """Return the structured view of a higher-order equation, or None if its primitive has none."""
    cls = views.get(eqn.primitive.name)
    return None if cls is None else cls.of(eqn)


def called_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the body of a plain call; None for an equation of any other primitive."""
    call = CALLS.get(eqn.primitive.name)
    return None if call is None else jaxcompat.close_jaxpr(eqn.params[call[0]])


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return the values of a field that holds several values, or one, as a tuple."""
    return tuple(value) if isinstance(value, _SEQUENCES) else (value,)


def keep(values: Sequence[Any], used: Sequence[bool]) -> tuple[Any, ...]:
    """Return the elements of `values` that are marked used; both must have the same length."""
    if len(values) != len(used):
        raise ValueError(f"{len(used)} marks for {len(values)} values")
    return tuple(compress(values, used))


def call(
    body: ClosedJaxpr, operands: Sequence[Atom], outs: Sequence[Var], like: JaxprEqn
) -> JaxprEqn:
    """Return a jit call of a closed jaxpr, with its name, in the place and context of `like`."""
    empty = jaxcompat.traced_like(like, jax.jit(list), ()).eqns[0]
    unasked = {
        name: {k: (NO_OPTIONS[k],) * len(values) for k in CALLS["jit"][i]}
        for i, (name, values) in enumerate((("operand_params", operands), ("out_params", outs)), 1)
    }
    eqn = Call.of(empty).rebuild(operands=tuple(operands), outs=tuple(outs), body=body, **unasked)
    params = {**eqn.params, "name": body.debug_info.func_name}
    return eqn.replace(params=params, source_info=like.source_info)


def scan(
    body: ClosedJaxpr,
    operands: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    results: tuple[Sequence[Var], Sequence[Var]],
    length: int,
    reverse: bool,
    like: JaxprEqn,
) -> JaxprEqn:
    """Return a scan of a closed jaxpr, in the place and context of `like`.

    Args:
        body: Takes (consts, carry, slices of xs), and returns (carry, slices of ys).
        operands: The consts, the carry and the xs.
        results: The last carry and the ys.
        length: The number of iterations.
        reverse: Whether the first iteration takes the last slice.
        like: Another equation.
    """

    def empty() -> list[Any]:
        return [jax.lax.scan(lambda carry, _: (carry, None), 0, None, length=1)[0]]

    template = Scan.of(jaxcompat.traced_like(like, empty, ()).eqns[0])
    fields = ("consts", "carry", "xs", "carry_outs", "ys")
    groups = dict(zip(fields, map(tuple, (*operands, *results)), strict=True))
    eqn = template.rebuild(**groups, body=body, length=length, reverse=reverse)
    return eqn.replace(source_info=like.source_info)


# --- every jaxpr an equation holds, known primitive or not -------------------------------------


_JAXPRS = (Jaxpr, ClosedJaxpr)
_HOLDERS = (*_JAXPRS, jaxcompat.HighPrimitive)
_SEQUENCES = (tuple, list)
_LEAF, _SEQUENCE, _HOLDER = range(3)


class _JaxprKinds(dict[type, int]):
    """Whether values of a type are jaxprs, may contain jaxprs, or neither."""

    def __missing__(self, kind: type) -> int:
        category = _SEQUENCE if issubclass(kind, _SEQUENCES) else _LEAF
        self[kind] = _HOLDER if issubclass(kind, _HOLDERS) else category
        return self[kind]


_KINDS = _JaxprKinds()


def copies_of_body(eqn: JaxprEqn) -> int:
    """Return how often JAX lowers the body of an equation because of its option `unroll`; else 1.

    In JAX 0.12, `jnp.polyval` is one equation with this option, whose body has no jaxpr.
    """
    unroll = eqn.params.get("unroll", 1)
    length = eqn.params.get("length", len(eqn.invars) - 1)
    if not isinstance(length, int) or unroll <= 1:
        return int(unroll)
    return length if unroll >= length else unroll + length % unroll


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[tuple[str, AnyJaxpr]]:
    """Yield each jaxpr in the equation's parameters, as held, with a path such as `branches[1]`."""
    primitive, params = eqn.primitive.name, eqn.params
    if primitive in CALLS:
        name = CALLS[primitive][0]
        yield name, params[name]
    elif primitive in High.primitives:
        body = jaxcompat.high_body(eqn)
        yield from () if body is None else [("expand", body)]
    elif holds_jaxpr(params.values()):
        for name in sorted(params):
            yield from _jaxprs_in(name, params[name])


#: The path of the body that runs, for primitives that hold others for their derivatives.
_RUN_BODIES = {"custom_linear_solve": "jaxprs.solve"}


def run_jaxprs(eqn: JaxprEqn) -> Iterator[tuple[str, AnyJaxpr]]:
    """Yield those of `sub_jaxprs` that run when the equation does."""
    path = _RUN_BODIES.get(eqn.primitive.name)
    yield from (pair for pair in sub_jaxprs(eqn) if path in (None, pair[0]))


def _jaxprs_in(path: str, value: object) -> Iterator[tuple[str, AnyJaxpr]]:
    if isinstance(value, _JAXPRS):
        yield path, value
    elif isinstance(value, _SEQUENCES):
        names = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from _jaxprs_in(f"{path}.{names[i]}" if names else f"{path}[{i}]", item)


def holds_jaxpr(values: Iterable[Any]) -> bool:
    """Return True if a jaxpr is among parameter values, or in a sequence among them.

    This also holds for most objects in `call_hi_primitive`. Passes call this for every equation,
    so it is faster than `sub_jaxprs`.
    """
    for value in values:
        kind = _KINDS[type(value)]
        if kind and (kind == _HOLDER or holds_jaxpr(value)):
            return True
    return False


def map_sub_jaxprs(function: Callable[[AnyJaxpr], AnyJaxpr], eqn: JaxprEqn) -> Params:
    """Return the equation's parameters with `function` applied to each jaxpr in them.

    `function` gets each jaxpr as held, open or closed, and returns one of the same kind.
    """
    if eqn.primitive.name in High.primitives and (high := High.of(eqn)):
        body = function(high.body)
        return eqn.params if body is high.body else high.rebuild(body=body).params
    return {
        name: value if _KINDS[type(value)] == _LEAF else _map_jaxprs(function, value)
        for name, value in eqn.params.items()
    }


def _map_jaxprs(function: Callable[[AnyJaxpr], AnyJaxpr], value: object) -> Any:
    if isinstance(value, _JAXPRS):
        return function(value)
    if not (isinstance(value, _SEQUENCES) and holds_jaxpr(value)):
        return value
    items = [_map_jaxprs(function, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
