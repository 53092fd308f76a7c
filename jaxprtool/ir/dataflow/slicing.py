"""Slices of a program: the equations that depend on values, and those that values depend on.

Each body is visited once for every combination of flags on its arguments or results, so a call of a
shared body contains only the values that flow through that call. Along the edges of
`ir.core.regions` values pass through calls, branches and loops, through loops until a fixed point
is reached. All results depend on the predicate of a branch or loop. The contents of a ref depend on
the values written to it. For an equation whose primitive has no regions, each result depends on
each operand, and all equations in its bodies belong to the slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import or_
from typing import TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.basics.reachability import reachable
from jaxprtool.ir.core.equations import all_jaxprs, bodies, is_flat, is_ref, variables
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.dataflow.dataflow import Value
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, Literal, Var

#: Flags of a body's arguments or results.
_Flags: TypeAlias = tuple[bool, ...]


@dataclass(eq=False)
class Run:
    """The part of a body in a slice, for one combination of flags.

    Attributes:
        jaxpr: The body.
        arguments: In a backward slice, which arguments are needed; in a forward slice, which are
            reached on entry, and which refs among them are written to.
        results: In a forward slice, which results are reached; in a backward slice, which are
            needed.
        inside: The equations of the slice by position, each with the runs of its bodies.
    """

    jaxpr: Jaxpr
    arguments: _Flags
    results: _Flags
    inside: dict[int, tuple[Run, ...]] = field(default_factory=dict)

    def members(self) -> frozenset[int]:
        """Return the equations of the slice, by `id`, at every depth."""
        found: set[int] = set()
        for run in self.runs():
            eqns = run.jaxpr.eqns
            found.update(id(eqns[i]) for i in run.inside)
        return frozenset(found)

    def runs(self) -> Iterator[Run]:
        """Yield this run and those inside it, each once."""
        return reachable((self,), lambda run: chain.from_iterable(run.inside.values()))


@dataclass(frozen=True)
class Start:
    """The start of a slice.

    Attributes:
        values: Variables.
        equations: Equations by jaxpr, and by `id`: a forward slice starts from all their results,
            and a backward slice from all their operands.
    """

    values: Sequence[Value] = ()
    equations: Mapping[Jaxpr, frozenset[int]] = field(default_factory=dict)


def forward_slice(top: Jaxpr, start: Start) -> Run:
    """Return the part of a program that depends on values.

    Args:
        top: The program's open jaxpr.
        start: The values, and the equations whose results count too.
    """
    return _Forward(start).run(top, (False,) * len(top.invars))


def backward_slice(top: Jaxpr, start: Start) -> Run:
    """Return the part of a program that values depend on.

    Args:
        top: The program's open jaxpr.
        start: The values, and the equations whose operands count too.
    """
    return _Backward(start).run(top, (False,) * len(top.outvars), (False,) * len(top.invars))


def live_part(top: Jaxpr) -> Run:
    """Return the part of a program that its results and its effects depend on."""
    effects = dict[Jaxpr, frozenset[int]]()
    for jaxpr in all_jaxprs(top) if top.effects else ():
        eqns = (eqn for eqn in jaxpr.eqns if eqn.effects and regions(eqn) is None)
        lasting = (e for e in eqns if not all(map(jaxcompat.is_removable_effect, e.effects)))
        effects[jaxpr] = frozenset(map(id, lasting))
    start = Start(equations={jaxpr: ids for jaxpr, ids in effects.items() if ids})
    return _Backward(start).run(top, (True,) * len(top.outvars), (False,) * len(top.invars))


def everything(top: Jaxpr) -> Run:
    """Return the whole program as a slice."""
    return _Everything().run(top)


class _Everything:
    """All equations of bodies."""

    @cached_method
    def run(self, jaxpr: Jaxpr) -> Run:
        inside: dict[int, tuple[Run, ...]] = dict.fromkeys(range(len(jaxpr.eqns)), ())
        if not is_flat(jaxpr):
            inside = {i: self.within(eqn) for i, eqn in enumerate(jaxpr.eqns)}
        ins, outs = (True,) * len(jaxpr.invars), (True,) * len(jaxpr.outvars)
        return Run(jaxpr, ins, outs, inside)

    def within(self, eqn: JaxprEqn) -> tuple[Run, ...]:
        """Return the runs of all bodies of an equation."""
        if not (eqn.params and holds_jaxpr(eqn.params.values())):
            return ()
        return tuple(self.run(body) for _, body in bodies(eqn))


class _Slicer:
    """The common part of forward and backward slices.

    Args:
        start: The start of the slice.
    """

    def __init__(self, start: Start):
        self._values: dict[Jaxpr, set[Var]] = {}
        for jaxpr, var in start.values:
            self._values.setdefault(jaxpr, set()).add(var)
        self._equations = start.equations
        self._everything = _Everything()

    @cached_method
    def _starts_in(self, jaxpr: Jaxpr) -> bool:
        """Return True if the slice starts in a body, at any depth."""
        starts = jaxpr in self._values or jaxpr in self._equations
        return starts or any(map(self._starts_inside, jaxpr.eqns))

    def _starts_inside(self, eqn: JaxprEqn) -> bool:
        return bool(eqn.params and holds_jaxpr(eqn.params.values())) and any(
            self._starts_in(body) for _, body in bodies(eqn)
        )


class _Forward(_Slicer):
    @cached_method
    def run(self, jaxpr: Jaxpr, given: _Flags) -> Run:
        """Return the part of a body that some of its arguments reach."""
        reached = {var for var, flag in zip(jaxpr.invars, given, strict=True) if flag}
        reached |= self._values.get(jaxpr, set())
        begins = self._equations.get(jaxpr, ())
        inside: dict[int, tuple[Run, ...]] = {}
        flat = is_flat(jaxpr)
        for i, eqn in enumerate(jaxpr.eqns):
            first = id(eqn) in begins
            held = None if flat else regions(eqn)
            if not (
                first
                or any(type(v) is not Literal and v in reached for v in eqn.invars)
                or (held is not None and self._starts_inside(eqn))
            ):
                continue
            runs: tuple[Run, ...] | None
            if held is None or first:
                runs = self._everything.within(eqn)
                reached.update(eqn.outvars, _written_refs(eqn))
            else:
                runs = self._through(eqn, held, reached)
            if runs is not None:
                inside[i] = runs
        return Run(
            jaxpr,
            tuple(var in reached for var in jaxpr.invars),
            tuple(type(v) is not Literal and v in reached for v in jaxpr.outvars),
            inside,
        )

    def _through(self, eqn: JaxprEqn, held: Regions, reached: set[Var]) -> tuple[Run, ...] | None:
        """Add the values reached through bodies; return None if nothing in them is reached."""
        given = [type(v) is not Literal and v in reached for v in eqn.invars]
        opened = held.jaxprs
        runs: dict[int, Run] = {}

        def through(number: int, facts: list[bool]) -> _Flags:
            run = runs[number] = self.run(opened[number], tuple(facts))
            for place, arg, flag in zip(
                held.regions[number].ins, opened[number].invars, run.arguments, strict=True
            ):
                if flag and is_ref(arg):
                    given[place] = True
            return run.results

        while True:
            before = list(given)
            _, results = held.forward(given, through, or_, control=True)
            if given == before:
                break
        reached.update(var for var, flag in zip(eqn.outvars, results, strict=True) if flag)
        written = [v for v, flag in zip(eqn.invars, given, strict=True) if flag and is_ref(v)]
        reached.update(v for v in written if type(v) is not Literal)
        if not (any(results) or any(run.inside for run in runs.values())):
            return None
        return tuple(runs[i] for i in range(len(opened)))


class _Backward(_Slicer):
    @cached_method
    def run(self, jaxpr: Jaxpr, wanted: _Flags, later: _Flags) -> Run:
        """Return the part of a body that some of its results depend on.

        `later` flags the arguments that are refs and are read after the body.
        """
        ends = zip(jaxpr.outvars, wanted, strict=True)
        needed = {v for v, flag in ends if flag and type(v) is not Literal}
        needed.update(v for v, flag in zip(jaxpr.invars, later, strict=True) if flag)
        needed |= self._values.get(jaxpr, set())
        begins = self._equations.get(jaxpr, ())
        inside: dict[int, tuple[Run, ...]] = {}
        flat, eqns = is_flat(jaxpr), jaxpr.eqns
        for i in range(len(eqns) - 1, -1, -1):
            eqn = eqns[i]
            first = id(eqn) in begins
            held = None if flat else regions(eqn)
            if not (
                first
                or not needed.isdisjoint(eqn.outvars)
                or (eqn.effects and not needed.isdisjoint(_written_refs(eqn)))
                or (held is not None and self._starts_inside(eqn))
            ):
                continue
            if held is None:
                inside[i] = self._everything.within(eqn)
                needed.update(variables(eqn.invars))
            else:
                inside[i] = self._through(eqn, held, needed, first)
        arguments = tuple(v in needed for v in jaxpr.invars)
        return Run(jaxpr, arguments, wanted, dict(reversed(inside.items())))

    def _through(
        self, eqn: JaxprEqn, held: Regions, needed: set[Var], first: bool
    ) -> tuple[Run, ...]:
        """Add the parts of bodies that the needed results of an equation depend on.

        If `first`, the slice starts from the equation, and all its results are needed.
        """
        results = [first or v in needed for v in eqn.outvars]
        later = [type(v) is not Literal and v in needed and is_ref(v) for v in eqn.invars]
        opened = held.jaxprs
        runs: dict[int, Run] = {}

        def through(number: int, asked: list[bool]) -> _Flags:
            refs = tuple(later[place] for place in held.regions[number].ins)
            run = runs[number] = self.run(opened[number], tuple(asked), refs)
            return run.arguments

        while True:
            before = list(later)
            operands = held.backward(results, through, control=True)
            if held.repeats:  # an iteration may read what the previous one wrote
                read = [asked and is_ref(v) for v, asked in zip(eqn.invars, operands, strict=True)]
                later = [a or b for a, b in zip(later, read, strict=True)]
            if later == before:
                break
        pairs = zip(eqn.invars, operands, strict=True)
        needed.update(v for v, flag in pairs if flag and type(v) is not Literal)
        return tuple(runs[i] for i in range(len(opened)))


def _written_refs(eqn: JaxprEqn) -> Iterable[Var]:
    """Yield the refs that an equation writes to."""
    refs = (jaxcompat.ref_of(e) for e in eqn.effects if not jaxcompat.is_removable_effect(e))
    return [ref for ref in refs if ref is not None]
