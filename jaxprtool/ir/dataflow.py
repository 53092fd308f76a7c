"""Sources, uses and definitions of values across bodies, slices, and domains of inputs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import or_
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from typing import Literal as OneOf

import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import JaxprCache, cached_method
from jaxprtool.ir.equations import all_jaxprs, bodies, has_ref_type, is_flat, reachable, variables
from jaxprtool.ir.regions import Region, Regions, holds_jaxpr, regions
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var

if TYPE_CHECKING:
    from jaxprtool.ir.kernel_calls import KernelCall, KernelEdge

# --- def use --------------------------------------------------------------------------------------
# Definitions and uses of the variables of a body.


class DefUse:
    """The definitions and uses of variables among equations, each indexed on first use.

    Args:
        eqns: The equations of a body.
    """

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.eqns = eqns

    @cached_property
    def definitions(self) -> dict[Var, tuple[int, int]]:
        """The position of the equation that defines each variable, and of the result."""
        return {v: (i, k) for i, eqn in enumerate(self.eqns) for k, v in enumerate(eqn.outvars)}

    @cached_property
    def uses(self) -> dict[Var, list[tuple[int, int]]]:
        """The positions of the equations that read each variable, and of the operand, in order."""
        uses: dict[Var, list[tuple[int, int]]] = {}
        for i, eqn in enumerate(self.eqns):
            for place, atom in enumerate(eqn.invars):
                if type(atom) is not Literal:
                    uses.setdefault(atom, []).append((i, place))
        return uses

    def position(self, atom: Atom) -> int | None:
        """Return the position of the equation that defines an atom, or None if no equation does."""
        definition = None if type(atom) is Literal else self.definitions.get(atom)
        return None if definition is None else definition[0]

    def equation(self, atom: Atom) -> JaxprEqn | None:
        """Return the equation that defines an atom; None for an argument, constant or literal."""
        position = self.position(atom)
        return None if position is None else self.eqns[position]

    def readers(self, var: Var) -> list[int]:
        """Return the positions of the equations that read a variable, each once, in order."""
        return list(dict.fromkeys(i for i, _ in self.uses.get(var, ())))


# --- dataflow -------------------------------------------------------------------------------------
# Find the sources and uses of the values of a program, across the boundaries of bodies.
#
# A value is a variable of a jaxpr. Its sources and its uses are found along the edges of
# `ir.regions`, one step at a time. A body that several equations share counts for all of them.
# The transitive closure in one direction is a slice: see `ir.dataflow`.

#: A variable, and its jaxpr.
Value: TypeAlias = tuple[Jaxpr, Var]


@dataclass(frozen=True, eq=False)
class Holder:
    """An equation that holds a body.

    Attributes:
        jaxpr: The jaxpr of the equation.
        index: The position of the equation there.
        number: The index of the body in `ir.equations.bodies` of the equation.
    """

    jaxpr: Jaxpr
    index: int
    number: int

    @property
    def eqn(self) -> JaxprEqn:
        return self.jaxpr.eqns[self.index]


class _BodyDefUse(DefUse):
    """The arguments and results of a jaxpr, and the definitions and uses of its variables."""

    def __init__(self, jaxpr: Jaxpr):
        super().__init__(jaxpr.eqns)
        self.arguments = {var: i for i, var in enumerate(jaxpr.invars)}
        self.results: dict[Var, list[int]] = defaultdict(list)
        for i, atom in enumerate(jaxpr.outvars):
            if type(atom) is not Literal:
                self.results[atom].append(i)


class DataFlow:
    """The flow of values in a program, computed lazily.

    Args:
        top: The program's open jaxpr.
    """

    def __init__(self, top: Jaxpr):
        self.top = top

    def definition(self, jaxpr: Jaxpr, var: Var) -> int | None:
        """Return the position of the equation that binds a variable; None if it is an argument."""
        return self._body(jaxpr).position(var)

    def readers(self, jaxpr: Jaxpr, var: Var) -> Sequence[int]:
        """Return the positions of the equations of a jaxpr that read a variable."""
        return self._body(jaxpr).readers(var)

    def argument(self, jaxpr: Jaxpr, var: Var) -> int | None:
        """Return the position of a variable among the arguments of a jaxpr, or None."""
        return self._body(jaxpr).arguments.get(var)

    def results(self, jaxpr: Jaxpr, var: Var) -> Sequence[int]:
        """Return the positions of a variable among the results of a jaxpr."""
        return self._body(jaxpr).results.get(var, ())

    def arguments(self, eqn: JaxprEqn, var: Var) -> list[Value]:
        """Return the arguments of an equation's bodies that have a variable as (initial) value."""
        if (inside := self._regions(eqn)) is None:
            return []
        return [v for place in self._places(eqn).get(var, ()) for v in _arguments(inside, place)]

    @cached_property
    def holders(self) -> dict[Jaxpr, list[Holder]]:
        """The equations that hold each body, callers before callees."""
        by_body: dict[Jaxpr, list[Holder]] = {self.top: []}
        todo = [self.top]
        for jaxpr in todo:
            for index, eqn in enumerate(() if is_flat(jaxpr) else jaxpr.eqns):
                if eqn.params:
                    for number, (_, body) in enumerate(bodies(eqn)):
                        if body not in by_body:
                            by_body[body] = []
                            todo.append(body)
                        by_body[body].append(Holder(jaxpr, index, number))
        return by_body

    def origins(self, holder: Holder, position: int) -> list[tuple[Jaxpr, Atom]]:
        """Return the sources of a body's argument: the operand, and results that are carried back.

        Returns [] if the primitive has no regions.
        """
        inside, region = self._region(holder)
        if inside is None or region is None:
            return []
        operand = region.ins[position]
        later = inside.replacements.get(operand, ())
        results = [(inside.jaxprs[number], atom) for number, atom in later]
        return [(holder.jaxpr, holder.eqn.invars[operand]), *results]

    def destinations(self, holder: Holder, position: int) -> list[Value]:
        """Return the destinations of a result of a body: results, or arguments of bodies."""
        destinations: list[Value] = []
        inside, region = self._region(holder)
        if inside is not None and region is not None:
            if (out := region.outs[position]) is not None:
                destinations.append((holder.jaxpr, holder.eqn.outvars[out]))
            if (operand := region.next_iteration[position]) is not None:
                destinations += _arguments(inside, operand)
        return list(dict.fromkeys(destinations))

    def controlled_results(self, holder: Holder) -> list[Value]:
        """Return the results of a loop if the body computes its predicate, and else []."""
        _, region = self._region(holder)
        if region is None or not region.is_predicate:
            return []
        return [(holder.jaxpr, var) for var in holder.eqn.outvars]

    @cached_method
    def _body(self, jaxpr: Jaxpr) -> _BodyDefUse:
        return _BodyDefUse(jaxpr)

    @cached_method
    def _regions(self, eqn: JaxprEqn) -> Regions | None:
        return regions(eqn)

    @cached_method
    def _places(self, eqn: JaxprEqn) -> dict[Var, list[int]]:
        """Return the positions of each variable among the operands of an equation."""
        return {v: [place for _, place in uses] for v, uses in DefUse([eqn]).uses.items()}

    def _region(self, holder: Holder) -> tuple[Regions | None, Region | None]:
        """Return the regions of an equation, and the region of the held body; None if unknown."""
        inside = self._regions(holder.eqn)
        body = bodies(holder.eqn)[holder.number][1]
        return inside, None if inside is None else inside.region_of(body)


def _arguments(inside: Regions, operand: int) -> list[Value]:
    """Return the arguments of bodies that have an operand as (initial) value."""
    return [(inside.jaxprs[number], var) for number, var in inside.arguments_by_operand[operand]]


# --- defining equations ---------------------------------------------------------------------------
# Find the equation that computes a value, through calls, loops, branches and JAX's additions.


class DefiningEquation(NamedTuple):
    """The equation that computes a value.

    Attributes:
        eqn: The equation, at any depth.
        around: The equations whose bodies contain it, the outermost first.
        operand: The value outside the body, if the body only forwards it.
    """

    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...]
    operand: Atom | None


class DefiningEquations:
    """Finds the equations that compute the values of a jaxpr; visits each body once.

    Args:
        jaxpr: The jaxpr.
    """

    def __init__(self, jaxpr: AnyJaxpr) -> None:
        self._top = DefUse(jaxpr.eqns)
        self._held: dict[int, tuple[Regions, list[list[tuple[int, Atom]]]] | None] = {}

    def __contains__(self, value: object) -> bool:
        """Return True if an equation of the jaxpr binds a value."""
        return value in self._top.definitions

    def of(self, value: Var) -> DefiningEquation:
        """Return the equation that computes a variable that an equation of the jaxpr binds.

        A result of a call, a loop or a branch is followed to the equation inside that computes it.
        It is also followed through the equations that JAX adds to a value that a policy of
        `jax.checkpoint` saves or offloads.
        """
        around: tuple[JaxprEqn, ...] = ()
        defined = self._top
        position, index = defined.definitions[value]
        eqn = defined.eqns[position]
        while True:
            if _is_added(eqn):
                operand = eqn.invars[index]
                definition = defined.equation(operand)
                if definition is not None:
                    eqn, index = definition, definition.outvars.index(operand)
                    continue
                if not around:
                    return DefiningEquation(eqn, around, operand)
            called = self._called(eqn)
            if called is None:
                return DefiningEquation(eqn, around, None)
            inside, sources = called
            for number, atom in sources[index]:
                body, region = inside.jaxprs[number], inside.regions[number]
                within = self._within(body)
                inner = within.equation(atom)
                if inner is not None and not (inside.predicates and _is_filler(inner, within)):
                    around, defined = (*around, eqn), within
                    eqn, index = inner, inner.outvars.index(atom)
                    break
                if not around and len(inside.bodies) == 1 and atom in body.invars:
                    operand = region.ins[body.invars.index(atom)]
                    if operand not in region.next_iteration:
                        return DefiningEquation(eqn, around, eqn.invars[operand])
            else:
                return DefiningEquation(eqn, around, None)

    @cached_method
    def _within(self, body: Jaxpr) -> DefUse:
        return DefUse(body.eqns)

    def _called(self, eqn: JaxprEqn) -> tuple[Regions, list[list[tuple[int, Atom]]]] | None:
        if id(eqn) not in self._held:
            inside = regions(eqn)
            self._held[id(eqn)] = None if inside is None else (inside, inside.sources())
        return self._held[id(eqn)]


def _is_added(eqn: JaxprEqn) -> bool:
    """Return True if JAX added an equation to a residual: rounding to its own precision, or a move.

    See https://github.com/jax-ml/jax/pull/22244; moves that JAX adds have no line in the source.
    """
    if eqn.primitive.name == "device_put":
        return jaxcompat.user_frame(eqn) is None
    if eqn.primitive.name != "reduce_precision":
        return False
    finfo = jnp.finfo(eqn.outvars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (finfo.nexp, finfo.nmant)


def _is_filler(eqn: JaxprEqn, defined: DefUse) -> bool:
    """Return True if an equation only fills an array, as in a branch that lacks this residual."""
    if eqn.primitive.name == "broadcast_in_dim":
        definition = defined.equation(eqn.invars[0])
        return isinstance(eqn.invars[0], Literal) or (
            definition is not None and _is_filler(definition, defined)
        )
    return eqn.primitive.name == "empty2"


# --- slicing --------------------------------------------------------------------------------------
# Slices of a program: the equations that depend on values, and those that values depend on.
#
# Each body is visited once for every combination of flags on its arguments or results, so a call of
# a shared body contains only the values that flow through that call. Along the edges of
# `ir.regions` values pass through calls, branches and loops, through loops until a fixed point is
# reached. All results depend on the predicate of a branch or loop. The contents of a ref depend on
# the values written to it. A kernel is a loop over the steps of its grid, whose results are the
# contents of Refs. For any other equation without regions, each result depends on each operand, and
# all equations in its bodies belong to the slice.

#: Flags of a body's arguments or results.
_Flags: TypeAlias = tuple[bool, ...]


@dataclass(eq=False)
class BodySlice:
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
    inside: dict[int, tuple[BodySlice, ...]] = field(default_factory=dict)

    def members(self) -> frozenset[int]:
        """Return the equations of the slice, by `id`, at every depth."""
        ids: set[int] = set()
        for run in self.runs():
            eqns = run.jaxpr.eqns
            ids.update(id(eqns[i]) for i in run.inside)
        return frozenset(ids)

    def runs(self) -> Iterator[BodySlice]:
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


def forward_slice(top: Jaxpr, start: Start) -> BodySlice:
    """Return the part of a program that depends on values.

    Args:
        top: The program's open jaxpr.
        start: The values, and the equations whose results count too.
    """
    return _ForwardSlicer(start).run(top, (False,) * len(top.invars))


def backward_slice(top: Jaxpr, start: Start) -> BodySlice:
    """Return the part of a program that values depend on.

    Args:
        top: The program's open jaxpr.
        start: The values, and the equations whose operands count too.
    """
    return _BackwardSlicer(start).run(top, (False,) * len(top.outvars), (False,) * len(top.invars))


def live_part(top: Jaxpr) -> BodySlice:
    """Return the part of a program that its results and its effects depend on."""
    effects = dict[Jaxpr, frozenset[int]]()
    for jaxpr in all_jaxprs(top) if top.effects else ():
        eqns = (eqn for eqn in jaxpr.eqns if eqn.effects and regions(eqn) is None)
        lasting = (e for e in eqns if not all(map(jaxcompat.is_removable_effect, e.effects)))
        effects[jaxpr] = frozenset(map(id, lasting))
    start = Start(equations={jaxpr: ids for jaxpr, ids in effects.items() if ids})
    return _BackwardSlicer(start).run(top, (True,) * len(top.outvars), (False,) * len(top.invars))


def everything(top: Jaxpr) -> BodySlice:
    """Return the whole program as a slice."""
    return _Everything().run(top)


class _Everything:
    """All equations of bodies."""

    @cached_method
    def run(self, jaxpr: Jaxpr) -> BodySlice:
        inside: dict[int, tuple[BodySlice, ...]] = dict.fromkeys(range(len(jaxpr.eqns)), ())
        if not is_flat(jaxpr):
            inside = {i: self.within(eqn) for i, eqn in enumerate(jaxpr.eqns)}
        ins, outs = (True,) * len(jaxpr.invars), (True,) * len(jaxpr.outvars)
        return BodySlice(jaxpr, ins, outs, inside)

    def within(self, eqn: JaxprEqn) -> tuple[BodySlice, ...]:
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


class _ForwardSlicer(_Slicer):
    @cached_method
    def run(self, jaxpr: Jaxpr, flags: _Flags) -> BodySlice:
        """Return the part of a body that some of its arguments reach."""
        reached = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
        reached |= self._values.get(jaxpr, set())
        begins = self._equations.get(jaxpr, ())
        inside: dict[int, tuple[BodySlice, ...]] = {}
        flat = is_flat(jaxpr)
        for i, eqn in enumerate(jaxpr.eqns):
            first = id(eqn) in begins
            eqn_regions = None if flat else regions(eqn)
            kernel = None if flat else _kernel(eqn)
            if not (
                first
                or any(type(v) is not Literal and v in reached for v in eqn.invars)
                or ((eqn_regions or kernel) is not None and self._starts_inside(eqn))
            ):
                continue
            runs: tuple[BodySlice, ...] | None
            if kernel is not None and not first:
                runs = self._through_kernel(kernel, reached)
            elif eqn_regions is None or first:
                runs = self._everything.within(eqn)
                reached.update(eqn.outvars, _written_refs(eqn))
            else:
                runs = self._through(eqn, eqn_regions, reached)
            if runs is not None:
                inside[i] = runs
        return BodySlice(
            jaxpr,
            tuple(var in reached for var in jaxpr.invars),
            tuple(type(v) is not Literal and v in reached for v in jaxpr.outvars),
            inside,
        )

    def _through(
        self, eqn: JaxprEqn, inside: Regions, reached: set[Var]
    ) -> tuple[BodySlice, ...] | None:
        """Add the values reached through bodies; return None if nothing in them is reached."""
        operands = [type(v) is not Literal and v in reached for v in eqn.invars]
        opened = inside.jaxprs
        runs: dict[int, BodySlice] = {}

        def through(number: int, facts: list[bool]) -> _Flags:
            run = runs[number] = self.run(opened[number], tuple(facts))
            for place, arg, flag in zip(
                inside.regions[number].ins, opened[number].invars, run.arguments, strict=True
            ):
                if flag and has_ref_type(arg):
                    operands[place] = True
            return run.results

        while True:
            previous = list(operands)
            _, results = inside.forward(operands, through, or_, control=True)
            if operands == previous:
                break
        reached.update(var for var, flag in zip(eqn.outvars, results, strict=True) if flag)
        written = [
            v for v, flag in zip(eqn.invars, operands, strict=True) if flag and has_ref_type(v)
        ]
        reached.update(v for v in written if type(v) is not Literal)
        if not (any(results) or any(run.inside for run in runs.values())):
            return None
        return tuple(runs[i] for i in range(len(opened)))

    def _through_kernel(
        self, kernel: KernelCall, reached: set[Var]
    ) -> tuple[BodySlice, ...] | None:
        """Add the results of a kernel that are reached; return None if nothing in it is."""
        eqn, edges, flags = kernel.eqn, kernel.edges, list[bool]()
        ins = [type(v) is not Literal and v in reached for v in eqn.invars]
        all_results = any(ins[i] for i in kernel.controls)
        new = [
            (e.operand is not None and ins[e.operand]) or (e.result is not None and all_results)
            for e in edges
        ]
        while new != flags:
            flags = _with_aliases(edges, new)
            run = self.run(jaxcompat.open_jaxpr(kernel.body), tuple(flags))
            new = [*run.arguments]
        results = [e.result for e, flag in zip(edges, flags, strict=True) if flag]
        reached.update(eqn.outvars[i] for i in results if i is not None)
        return (run,) if run.inside or any(flags) else None


class _BackwardSlicer(_Slicer):
    @cached_method
    def run(self, jaxpr: Jaxpr, wanted: _Flags, later: _Flags) -> BodySlice:
        """Return the part of a body that some of its results depend on.

        `later` flags the arguments that are refs and are read after the body.
        """
        ends = zip(jaxpr.outvars, wanted, strict=True)
        needed = {v for v, flag in ends if flag and type(v) is not Literal}
        needed.update(v for v, flag in zip(jaxpr.invars, later, strict=True) if flag)
        needed |= self._values.get(jaxpr, set())
        begins = self._equations.get(jaxpr, ())
        inside: dict[int, tuple[BodySlice, ...]] = {}
        flat, eqns = is_flat(jaxpr), jaxpr.eqns
        for i in range(len(eqns) - 1, -1, -1):
            eqn = eqns[i]
            first = id(eqn) in begins
            eqn_regions = None if flat else regions(eqn)
            kernel = None if flat else _kernel(eqn)
            if not (
                first
                or not needed.isdisjoint(eqn.outvars)
                or not needed.isdisjoint(_written_refs(eqn))
                or ((eqn_regions or kernel) is not None and self._starts_inside(eqn))
            ):
                continue
            if kernel is not None:
                inside[i] = self._through_kernel(kernel, needed, first)
            elif eqn_regions is None:
                inside[i] = self._everything.within(eqn)
                needed.update(variables(eqn.invars))
            else:
                inside[i] = self._through(eqn, eqn_regions, needed, first)
        arguments = tuple(v in needed for v in jaxpr.invars)
        return BodySlice(jaxpr, arguments, wanted, dict(reversed(inside.items())))

    def _through(
        self, eqn: JaxprEqn, inside: Regions, needed: set[Var], first: bool
    ) -> tuple[BodySlice, ...]:
        """Add the parts of bodies that the needed results of an equation depend on.

        If `first`, the slice starts from the equation, and all its results are needed.
        """
        results = [first or v in needed for v in eqn.outvars]
        later = [type(v) is not Literal and v in needed and has_ref_type(v) for v in eqn.invars]
        opened = inside.jaxprs
        runs: dict[int, BodySlice] = {}

        def through(number: int, asked: list[bool]) -> _Flags:
            refs = tuple(later[place] for place in inside.regions[number].ins)
            run = runs[number] = self.run(opened[number], tuple(asked), refs)
            return run.arguments

        while True:
            previous = list(later)
            operands = inside.backward(results, through, control=True)
            if inside.repeats:  # an iteration may read what the previous one wrote
                read = [
                    asked and has_ref_type(v) for v, asked in zip(eqn.invars, operands, strict=True)
                ]
                later = [a or b for a, b in zip(later, read, strict=True)]
            if later == previous:
                break
        pairs = zip(eqn.invars, operands, strict=True)
        needed.update(v for v, flag in pairs if flag and type(v) is not Literal)
        return tuple(runs[i] for i in range(len(opened)))

    def _through_kernel(
        self, kernel: KernelCall, needed: set[Var], first: bool
    ) -> tuple[BodySlice, ...]:
        """Add the part of a kernel that its needed results depend on.

        A step of the grid may read what an earlier one wrote.
        """
        eqn, edges, flags = kernel.eqn, kernel.edges, list[bool]()
        new = [e.result is not None and (first or eqn.outvars[e.result] in needed) for e in edges]
        while new != flags:
            flags = _with_aliases(edges, new)
            run = self.run(jaxcompat.open_jaxpr(kernel.body), (), tuple(flags))
            new = [a or b for a, b in zip(flags, run.arguments, strict=True)]
        operands = [e.operand for e, flag in zip(edges, flags, strict=True) if flag]
        operands += kernel.controls if any(flags) else ()
        needed.update(variables([eqn.invars[i] for i in operands if i is not None]))
        return (run,)


def _kernel(eqn: JaxprEqn) -> KernelCall | None:
    """Return the view of a kernel, unless it closes over Refs."""
    if eqn.primitive.name != "pallas_call":
        return None
    from jaxprtool.ir.kernel_calls import kernel_call  # few programs have kernels

    kernel = kernel_call(eqn)
    return None if kernel is None or kernel.captured else kernel


def _with_aliases(edges: Sequence[KernelEdge], flags: Sequence[bool]) -> list[bool]:
    """Return the flags of a kernel's arguments, the same for two arguments in the same memory."""
    by_operand = dict[int | None, bool]()
    for edge, flag in zip(edges, flags, strict=True):
        by_operand[edge.operand] = by_operand.get(edge.operand, False) or flag
    return [
        flag if edge.operand is None else by_operand[edge.operand]
        for edge, flag in zip(edges, flags, strict=True)
    ]


def _written_refs(eqn: JaxprEqn) -> Iterable[Var]:
    """Return the refs that an equation writes to.

    Some operations of kernels do not declare what they write. They have no results.
    """
    if eqn.outvars and not eqn.effects:
        return ()
    refs = (jaxcompat.ref_of(e) for e in eqn.effects if not jaxcompat.is_removable_effect(e))
    written = [ref for ref in refs if ref is not None]
    return written or ([] if eqn.outvars else [v for v in variables(eqn.invars) if has_ref_type(v)])


# --- input domains --------------------------------------------------------------------------------
# Find the interval of each argument for which the program gives finite results.
#
# A square root needs an operand that is not negative, a logarithm a positive one, an arc sine one
# between -1 and 1. `input_domains` propagates these intervals back to the arguments, through
# arithmetic with numbers, changes of layout, calls, branches and loops. The second moment of an
# optimizer, for example, is known to be positive since the step takes its square root.
#
# The result is a guide for choosing example values, not a proof: both factors of a product of two
# variables are assumed to be positive, and so is the first operand of a difference.

#: The ends of an open interval.
Interval: TypeAlias = tuple[float, float]

#: The values that an argument is drawn from. Matrices are along the last two axes.
Domain: TypeAlias = Interval | OneOf["positive definite"]

POSITIVE: Interval = (0.0, math.inf)

#: The number of times that the body of a loop is visited to propagate intervals between iterations.
_ITERATIONS = 3

_cache = JaxprCache()


def input_domains(jaxpr: AnyJaxpr) -> list[Interval | None]:
    """Return the open interval that each argument must be in; None if any number is valid."""
    opened = jaxcompat.open_jaxpr(jaxpr)
    domains = _domains(opened, (None,) * len(opened.outvars))
    return [
        POSITIVE if domain is not None and _is_nearly_positive(domain) else domain
        for domain in domains
    ]


def _is_nearly_positive(interval: Interval) -> bool:
    """Return True if an interval begins just below zero, as when an epsilon is added."""
    low, high = interval
    return -0.1 < low <= 0 and math.isinf(high)


def domain_text(interval: Domain) -> str:
    """Describe a domain in words: `positive`, `above -1`, `between -1 and 1`."""
    if interval == "positive definite":
        return interval
    low, high = interval
    if interval == POSITIVE:
        return "positive"
    if math.isinf(low) and high == 0:
        return "negative"
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"between {low:g} and {high:g}"


def _domains(jaxpr: AnyJaxpr, wanted: tuple[Interval | None, ...]) -> tuple[Interval | None, ...]:
    """Return the intervals of a body's arguments, given those of its results."""
    cached = _cache.of(jaxpr)
    if wanted not in cached:
        cached[wanted] = (None,) * len(jaxpr.invars)  # in case the body contains itself
        cached[wanted] = _IntervalPropagator(jaxpr).arguments(wanted)
    intervals: tuple[Interval | None, ...] = cached[wanted]
    return intervals


class _IntervalPropagator:
    """Propagates intervals through one body, from its results back to its arguments."""

    def __init__(self, jaxpr: AnyJaxpr):
        self._jaxpr = jaxpr
        self._intervals: dict[Var, Interval] = {}
        #: The numbers that variables are known to be, such as a broadcast literal.
        self._numbers: dict[Var, float] = {}

    def arguments(self, wanted: Sequence[Interval | None]) -> tuple[Interval | None, ...]:
        for eqn in self._jaxpr.eqns:
            if traits(eqn).gives and len(eqn.invars) == 1:
                number = self._number(eqn.invars[0])
                if number is not None:
                    self._numbers[eqn.outvars[0]] = number
        for atom, interval in zip(self._jaxpr.outvars, wanted, strict=True):
            self._restrict(atom, interval)
        for eqn in reversed(self._jaxpr.eqns):
            inside = regions(eqn)
            if inside is not None:
                self._bodies(eqn, inside)
                continue
            if (domain := traits(eqn).finite_between) is not None:
                self._restrict(eqn.invars[0], domain)
            if eqn.outvars and (interval := self._intervals.get(eqn.outvars[0])) is not None:
                self._propagate_back(eqn, interval)
        return tuple(self._intervals.get(var) for var in self._jaxpr.invars)

    def _restrict(self, atom: Atom, interval: Interval | None) -> None:
        """Restrict a variable to an interval; keep the old interval if the two are disjoint."""
        if interval is None or type(atom) is Literal:
            return
        old = self._intervals.get(atom, interval)
        both = max(old[0], interval[0]), min(old[1], interval[1])
        self._intervals[atom] = both if both[0] < both[1] else old

    def _number(self, atom: Atom) -> float | None:
        """Return the number that all elements of an atom are equal to, or None if unknown."""
        if type(atom) is not Literal:
            return self._numbers.get(atom)
        value = np.asarray(atom.val)
        real = jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.kind in "iu"
        return float(value) if value.ndim == 0 and real else None

    def _propagate_back(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict the operands of an equation, given the interval of a result."""
        rule = _BACK.get(eqn.primitive.name)
        if rule is not None:
            rule(self, eqn, interval)
        elif traits(eqn).gives or traits(eqn).reduces:
            self._restrict(eqn.invars[0], interval)

    def _every(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict all operands to the interval of the result."""
        for atom in eqn.invars:
            self._restrict(atom, interval)

    def _cases(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict all cases of a selection to the interval of the result."""
        for atom in eqn.invars[1:]:
            self._restrict(atom, interval)

    def _negation(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict the operand to the negated interval."""
        self._restrict(eqn.invars[0], (-interval[1], -interval[0]))

    def _arithmetic(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict the operands of a sum, difference, product or quotient."""
        name, (low, high) = eqn.primitive.name, interval
        a, b = eqn.invars
        first, second = self._number(a), self._number(b)
        if first is None and second is None:
            if low <= 0 and math.isinf(high) and a is not b:
                self._restrict(a, POSITIVE)
                if name != "sub":
                    self._restrict(b, POSITIVE)
        elif name == "sub":
            if second is not None:
                self._restrict(a, (low + second, high + second))
            elif first is not None:
                self._restrict(b, (first - high, first - low))
        elif name == "add":
            number, other = (first, b) if first is not None else (second, a)
            assert number is not None
            self._restrict(other, (low - number, high - number))
        else:
            number, other = (second, a) if second is not None else (first, b)
            if number is None or not number or (name == "div" and second is None):
                return
            ends = (low / number, high / number) if name == "mul" else (low * number, high * number)
            self._restrict(other, (min(ends), max(ends)))

    def _bodies(self, eqn: JaxprEqn, inside: Regions) -> None:
        """Propagate through the bodies of an equation, and through those of loops several times."""
        for _ in range(_ITERATIONS if inside.repeats else 1):
            previous = [self._intervals.get(v) for v in eqn.invars if type(v) is not Literal]
            for body, region in zip(inside.bodies, inside.regions, strict=True):
                wanted: list[Interval | None] = []
                for out, carried in zip(region.outs, region.next_iteration, strict=True):
                    atoms = [eqn.outvars[out]] if out is not None else []
                    atoms += [eqn.invars[carried]] if carried is not None else []
                    intervals = [self._intervals[v] for v in atoms if _has(self._intervals, v)]
                    wanted.append(intervals[0] if intervals else None)
                domains = _domains(jaxcompat.open_jaxpr(body), tuple(wanted))
                for operand, interval in zip(region.ins, domains, strict=True):
                    self._restrict(eqn.invars[operand], interval)
            if previous == [self._intervals.get(v) for v in eqn.invars if type(v) is not Literal]:
                return


#: How the interval of a result restricts operands. For other primitives that move or reduce
#: elements, the first operand is in the same interval.
_BACK: dict[str, Callable[[_IntervalPropagator, JaxprEqn, Interval], None]] = {
    "max": _IntervalPropagator._every,
    "min": _IntervalPropagator._every,
    "concatenate": _IntervalPropagator._every,
    "select_n": _IntervalPropagator._cases,
    "neg": _IntervalPropagator._negation,
    "add": _IntervalPropagator._arithmetic,
    "sub": _IntervalPropagator._arithmetic,
    "mul": _IntervalPropagator._arithmetic,
    "div": _IntervalPropagator._arithmetic,
}


def _has(intervals: dict[Var, Interval], atom: Atom) -> bool:
    return type(atom) is not Literal and atom in intervals
