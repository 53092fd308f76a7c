"""The residuals of a backward pass: what is kept, recomputed, and best saved within a budget.

The two halves are those of the pass `vjp`. A residual is an argument, or the result of an equation
of the forward half; it is needed where the backward half reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.commands.cost.bodies import Operations
from jaxprtool.commands.cost.rules import runs_of
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dataflow import DataFlow, DefiningEquation, DefiningEquations, DefUse, Value
from jaxprtool.ir.documents import Number, Printed, document
from jaxprtool.ir.equations import equations, is_inexact, reachable, size_of, type_of
from jaxprtool.ir.frames import Frames, SourceNames, frames_now, range_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Regions, regions
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import filled
from jaxprtool.jaxcompat import Atom, Aval, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import UserFrame

# --- residuals ------------------------------------------------------------------------------------
# Find the residuals that the forward half of a program passes to the backward half.


@document(names={"source": "place"})
@dataclass(frozen=True)
class Reader:
    """An equation of the backward half that reads a residual.

    Attributes:
        primitive: Its primitive.
        source: The user's line of the equation; "" if unknown.
    """

    primitive: str
    source: Place


@document(names={"source": "place"})
@dataclass(frozen=True)
class Residual:
    """A value that the backward half needs.

    Attributes:
        type: Its type.
        bytes: Its size in bytes; None if symbolic.
        primitive: The primitive that computes it; "" for an argument.
        argument: The name of the argument; "" for a computed value.
        source: The user's line that computes it, followed by the library's.
        name: Its name from `checkpoint_name`, or "".
        readers: The equations of the backward half that read it, products first.
        recompute: The FLOPs and transcendentals needed to recompute it from the other residuals and
            the arguments; None if the cost of an equation for it is unknown.
        policies: The policies of `jax.checkpoint` that would not save it.
    """

    type: str
    bytes: int | None
    primitive: str
    argument: str
    source: Place
    name: str
    readers: tuple[Reader, ...]
    recompute: Number | None
    policies: tuple[str, ...]


@document(names={"source": "place"})
@dataclass(frozen=True)
class SavedValue:
    """A value that a proposal saves.

    Attributes:
        name: Its name from `checkpoint_name`.
        source: The user's line, `model.py:13`.
        code: The expression to wrap in `checkpoint_name`; "" if it has the name already, or the
            source file does not exist any more.
        bytes: The bytes that saving it takes, in all iterations of loops.
    """

    name: str
    source: Place
    code: str
    bytes: int


@document(also=("passes",))
@dataclass(frozen=True)
class Placement:
    """The cost of a gradient with `jax.checkpoint` at some place of the program.

    Attributes:
        only: The patterns of the scopes or loop bodies under `jax.checkpoint`, the outermost first;
            () for the whole function.
        policy: The policy, as source; "" without `jax.checkpoint`.
        total_bytes: The bytes that are saved.
        peak_bytes: The estimated peak memory of the gradient in bytes, with arguments and results,
            without values offloaded to the host.
        flops: The FLOPs of the gradient.
        compiled_bytes: The peak memory that XLA states for the compiled gradient; None if it was
            not compiled.
        unknown: The primitives whose memory `peak_bytes` does not count, besides that of their
            operands and results.
    """

    only: tuple[str, ...]
    policy: str
    total_bytes: int
    peak_bytes: int
    flops: int
    compiled_bytes: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def passes(self) -> str:
        """The passes that put `jax.checkpoint` there, as source; "" without `jax.checkpoint`."""
        policy = f"policy={self.policy}"
        if not self.only:
            return f"checkpoint({policy})" if self.policy else ""
        parts = (f"checkpoint(only={name!r}, {policy})" for name in reversed(self.only))
        return ", ".join(parts)


@dataclass(frozen=True)
class Proposal:
    """The values to save so that a gradient fits a memory budget.

    Attributes:
        budget: The bytes that may be saved.
        policy: The policy of `jax.checkpoint`, as source; "" if everything fits without one.
        values: The saved values, the largest first.
        total_bytes: The bytes that are saved, measured by differentiating the program with the
            policy.
        flops: The FLOPs of the gradient with the policy.
        flops_before: The FLOPs of the gradient without the policy.
        before: The gradient without the policy.
        placement: The place and the policy within the budget that lower the peak most; None if no
            place lowers it.
        cheaper: A place and a policy with fewer FLOPs, that lower the peak at least half as much;
            None if there are none.
    """

    budget: int
    policy: str
    values: tuple[SavedValue, ...]
    total_bytes: int
    flops: int
    flops_before: int
    before: Placement | None = None
    placement: Placement | None = None
    cheaper: Placement | None = None


@dataclass(frozen=True)
class Residuals(Printed):
    """The values of the forward pass that the backward pass needs.

    Attributes:
        name: The name of the program.
        total_bytes: The bytes of all residuals; None if sizes are symbolic.
        residuals: The residuals, the largest first.
        policies: The bytes that are saved under each policy of `jax.checkpoint` around the whole
            program.
        proposal: The values to save within a budget; None if no budget was given.
        placements: The peaks of the gradient: without `jax.checkpoint`, and under each policy at
            each place; empty if not requested.
        is_inside: Whether the program is a training step with the gradient inside, which has no
            policies.
        argnums: The positional arguments that the program is differentiated with respect to; empty
            for a training step.
        with_respect_to: The names of these arguments.
    """

    name: str
    total_bytes: int | None
    residuals: tuple[Residual, ...]
    policies: Mapping[str, int | None]
    proposal: Proposal | None = None
    placements: tuple[Placement, ...] = ()
    is_inside: bool = False
    argnums: tuple[int, ...] = ()
    with_respect_to: tuple[str, ...] = ()


def passed_residuals(
    forward: Program, backward: Program, policies: Mapping[str, Callable[..., Any]]
) -> tuple[Residual, ...]:
    """Return the residuals that the forward half passes to the backward half, the largest first.

    Args:
        forward: The forward half, as returned by the pass `vjp`.
        backward: The backward half.
        policies: Policies of `jax.checkpoint` by name.
    """
    reading = _ResidualReader(forward, backward, policies)
    listed = [reading.residual(*pair) for pair in reading.pairs]
    return tuple(sorted(listed, key=lambda residual: -(residual.bytes or 0)))


def placement_peak(placement: Placement) -> int:
    """Return the peak of a gradient in bytes: the one that XLA states, or else the estimate."""
    compiled = placement.compiled_bytes
    return placement.peak_bytes if compiled is None else compiled


def kept_values(forward: Program, backward: Program) -> list[Atom]:
    """Return the results of the forward half that the backward half takes as residuals."""
    main = filled(forward.out_tree, range(forward.out_tree.num_leaves))[0]
    first = len(jax.tree.leaves(main))
    return jaxcompat.open_jaxpr(forward.jaxpr).outvars[first : first + residual_count(backward)]


def total_bytes(backward: Program) -> int | None:
    """Return the bytes of all residuals that a backward half takes; None if one is symbolic."""
    return total_size(backward.in_avals[: residual_count(backward)])


def total_size(avals: Iterable[Aval]) -> int | None:
    """Return the bytes of values of some types; None if one is symbolic."""
    sizes = list(map(size_of, avals))
    return None if None in sizes else sum(size or 0 for size in sizes)


def residual_count(backward: Program) -> int:
    """Return the number of residuals that a backward half takes as its first arguments."""
    args, _ = filled(backward.in_tree, range(backward.in_tree.num_leaves))
    return len(jax.tree.leaves(args[0]))


class ResidualOrigins:
    """Where a forward half computes the residuals of a program.

    Args:
        forward: The forward half, as returned by the pass `vjp`.
        backward: The backward half.
    """

    def __init__(self, forward: Program, backward: Program) -> None:
        self.frames = frames_now(forward.roots)
        self.jaxpr = jaxcompat.open_jaxpr(forward.jaxpr)
        #: Each residual as a variable of the forward half.
        self.kept = kept_values(forward, backward)
        self._arguments = dict(zip(self.jaxpr.invars, forward.arg_names, strict=True))
        self._defining_equations = DefiningEquations(self.jaxpr)
        self.definitions = {v: self._definition_of(v) for v in self.kept if type(v) is not Literal}

    def definition(self, value: Atom) -> DefiningEquation | None:
        """Return the equation that computes a residual; None for arguments and literals."""
        return None if type(value) is Literal else self.definitions[value]

    def argument(self, value: Atom) -> str:
        """Return the name of the argument that a residual is; "" if it is none."""
        return "" if type(value) is Literal else self._arguments.get(value, "")

    def place(self, value: Atom) -> Place:
        """Return the line that computes a residual."""
        definition = self.definition(value)
        if definition is None:
            return UNKNOWN
        return self.frames.line_of((*definition.around, definition.eqn))

    def _definition_of(self, value: Var) -> DefiningEquation | None:
        while value in self._defining_equations:
            definition = self._defining_equations.of(value)
            if not isinstance(definition.operand, Var):
                return definition
            value = definition.operand
        return None


class _ResidualReader:
    """Reads the residuals of a program from its halves."""

    def __init__(
        self, forward: Program, backward: Program, policies: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._policies = policies
        self._origins = ResidualOrigins(forward, backward)
        back_jaxpr = jaxcompat.open_jaxpr(backward.jaxpr)
        self._flow = DataFlow(back_jaxpr)
        kept, definitions = self._origins.kept, self._origins.definitions
        #: Each residual as a variable of the forward half, and as a variable of the backward half.
        self.pairs = list(zip(kept, back_jaxpr.invars, strict=False))
        asked = [definition for definition in definitions.values() if definition is not None]
        self._recomputation = Recomputation(self._origins.jaxpr, frozenset(definitions), asked)

    def residual(self, value: Atom, taken: Var) -> Residual:
        """Return the description of a residual."""
        definition = self._origins.definition(value)
        eqn = None if definition is None else definition.eqn
        return Residual(
            type_of(value.aval),
            size_of(value.aval),
            "" if eqn is None else str(eqn.primitive.name),
            self._origins.argument(value),
            self._origins.place(value),
            str(eqn.params["name"]) if eqn is not None and eqn.primitive.name == "name" else "",
            tuple(self._readers(taken)),
            0 if definition is None else self._recomputation.operations(definition),
            () if eqn is None else tuple(self._dropping(eqn)),
        )

    def _readers(self, taken: Var) -> Iterator[Reader]:
        readers = dict.fromkeys(
            Reader(str(eqn.primitive.name), self._origins.frames.line_of((eqn,)))
            for eqn in _reading(self._flow, taken)
        )
        yield from sorted(readers, key=lambda reader: not traits(reader.primitive).expensive)

    def _dropping(self, eqn: JaxprEqn) -> Iterator[str]:
        """Yield the policies that would not save the results of an equation."""
        for name, policy in self._policies.items():
            if not jaxcompat.policy_keeps(policy, eqn):
                yield name


def _reading(flow: DataFlow, value: Var) -> Iterator[JaxprEqn]:
    """Yield the equations that compute with a value, looking through moves, casts and bodies."""
    todo, seen = [(flow.top, value)], {(flow.top, value)}
    while todo:
        jaxpr, var = todo.pop()
        new: list[tuple[Jaxpr, Var]] = []
        for position in flow.readers(jaxpr, var):
            eqn = jaxpr.eqns[position]
            like = traits(eqn)
            inside = flow.arguments(eqn, var)
            if inside:
                new += inside
            elif like.moves or like.gives:
                new += [(jaxpr, out) for out in eqn.outvars]
            else:
                yield eqn
        fresh = [pair for pair in new if pair not in seen]
        seen.update(fresh)
        todo += fresh


# --- recomputation --------------------------------------------------------------------------------
# Count the operations that recompute a residual from the other residuals and the arguments.
#
# The backward slices of values overlap. A slice is a bit set in one integer, so one walk over a
# jaxpr finds the slices of all equations, and counting bits gives their costs. A value in the body
# of a loop is recomputed from the values at the start of its iteration.

#: The position of a jaxpr in a program: the `id` of each equation around it, and the number of its
#: body.
_Key: TypeAlias = tuple[tuple[int, int], ...]


class Recomputation:
    """The cost of recomputing values of a program.

    Args:
        jaxpr: The program's open jaxpr.
        kept: The variables of the top level that are kept, and so cost nothing.
        asked: The equations that `operations` will be called with.
    """

    def __init__(
        self, jaxpr: Jaxpr, kept: Collection[Atom], asked: Iterable[DefiningEquation]
    ) -> None:
        self._top = _PathLevel(None, jaxpr, 0, frozenset(kept))
        self._held: dict[int, tuple[Regions, dict[int, int]]] = {}
        self._levels: dict[_Key, _PathLevel] = {(): self._top}
        self._operations = Operations()
        #: By jaxpr: the requested equations, and those whose bodies have such equations.
        self._definitions = defaultdict[_Key, set[int]](set)
        self._holders = defaultdict[_Key, set[int]](set)
        for definition in asked:
            *outer, key = self._keys((*definition.around, definition.eqn))
            self._definitions[key].add(id(definition.eqn))
            for around, holder in zip(outer, definition.around, strict=True):
                self._holders[around].add(id(holder))

    def operations(self, definition: DefiningEquation) -> Any:
        """Return the FLOPs and transcendentals that recompute the results of an equation.

        None if the cost of an equation that runs again is unknown.
        """
        path = (*definition.around, definition.eqn)
        keys = self._keys(path)
        levels = [self._top, *map(self._level, definition.around, keys[1:])]
        runs = [1]
        for level in levels[1:]:
            runs.append(runs[-1] * (runs_of(level.held) or 1))
        slices = list(map(self._slices_of, keys, levels))
        part = slices[-1].of_results(definition.eqn)
        works = [(part.work, runs[-1])]
        for depth in range(len(path) - 2, -1, -1):
            operands = _begins_with(levels[depth + 1], part.arguments)
            part = slices[depth].of_operands(operands)
            works.append((part.work, runs[depth]))
        if any(work is None for work, _ in works):
            return None
        return sum(work * times for work, times in works)

    def _keys(self, path: Sequence[JaxprEqn]) -> list[_Key]:
        """Return the key of the jaxpr that each equation of a path is in."""
        steps = [(id(eqn), self._regions(eqn)[1][id(inner)]) for eqn, inner in pairwise(path)]
        return [tuple(steps[:depth]) for depth in range(len(path))]

    @cached_method
    def _slices_of(self, key: _Key, level: _PathLevel) -> _BackwardSlices:
        asked = self._definitions[key], self._holders[key]
        return _BackwardSlices(level.jaxpr, level.kept, *asked, self._operations)

    def _level(self, eqn: JaxprEqn, key: _Key) -> _PathLevel:
        """Return a body of an equation."""
        if key not in self._levels:
            control, number = self._regions(eqn)[0], key[-1][1]
            body = control.jaxprs[number]
            around = self._levels[key[:-1]].kept
            pairs = zip(control.regions[number].outs, body.outvars, strict=True)
            kept = {
                atom
                for out, atom in pairs
                if type(atom) is not Literal and out is not None and eqn.outvars[out] in around
            }
            self._levels[key] = _PathLevel(
                control, body, number, frozenset(kept - set(body.invars))
            )
        return self._levels[key]

    def _regions(self, eqn: JaxprEqn) -> tuple[Regions, dict[int, int]]:
        """Return the regions of an equation, and by `id` the region of each equation in them."""
        if id(eqn) not in self._held:
            control = regions(eqn)
            assert control is not None
            bodies = list(enumerate(control.jaxprs))[::-1]
            self._held[id(eqn)] = control, {id(e): number for number, b in bodies for e in b.eqns}
        return self._held[id(eqn)]


class _PathLevel(NamedTuple):
    """A jaxpr on the path to a value.

    Attributes:
        held: The regions of the equation that holds it; None for the program itself.
        jaxpr: The open jaxpr.
        number: The number of the body in that equation.
        kept: The variables that are kept.
    """

    held: Regions | None
    jaxpr: Jaxpr
    number: int
    kept: frozenset[Atom]


def _begins_with(level: _PathLevel, arguments: Sequence[int]) -> list[Atom]:
    """Return the operands of the equation that arguments of its body read, without carries."""
    control = level.held
    assert control is not None
    region = control.regions[level.number]
    places = (region.ins[i] for i in arguments)
    return [control.eqn.invars[place] for place in places if place not in control.replacements]


class _BackwardSlice(NamedTuple):
    """The backward slice of some values within a jaxpr.

    Attributes:
        work: The operations of its equations; None if that of one is unknown.
        bits: The jaxpr's arguments in it, as a bit set.
    """

    work: Any
    bits: int

    @property
    def arguments(self) -> list[int]:
        """The positions of the jaxpr's arguments in it."""
        return [i for i, bit in enumerate(reversed(f"{self.bits:b}")) if bit == "1"]


class _BackwardSlices:
    """The backward slices of values of a jaxpr, as bit sets: first its arguments, then equations.

    Args:
        jaxpr: The jaxpr.
        kept: The variables that are kept; slices end there.
        definitions: The `id`s of the equations that `of_results` will be called with.
        holders: The `id`s of the equations whose operands `of_operands` will be called with.
        operations: The costs of equations.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        kept: frozenset[Atom],
        definitions: Collection[int],
        holders: Collection[int],
        operations: Operations,
    ) -> None:
        first = len(jaxpr.invars)
        self._arguments = (1 << first) - 1
        self._weights = list(_weights(jaxpr, first, operations))
        unknown = [i for i, e in enumerate(jaxpr.eqns, first) if not operations.is_known(e)]
        self._unknown = _bits(unknown) if unknown else 0
        self._definitions: dict[int, _BackwardSlice] = {}
        self._values = {v: 1 << i for i, v in enumerate(jaxpr.invars) if v not in kept}
        # Drop a slice after its last reader: together they would take quadratic memory.
        last = {v: uses[-1][0] for v, uses in DefUse(jaxpr.eqns).uses.items()}
        operands = (v for e in jaxpr.eqns if id(e) in holders for v in e.invars)
        always = {v for v in operands if type(v) is not Literal}
        for i, eqn in enumerate(jaxpr.eqns):
            whole = 1 << first + i
            for v in eqn.invars:
                if type(v) is not Literal and v in self._values:
                    whole |= self._values[v]
                    if last[v] == i and v not in always:
                        del self._values[v]
            if id(eqn) in definitions:
                self._definitions[id(eqn)] = self._slice(whole)
            for v in eqn.outvars:
                if v in last and v not in kept:
                    self._values[v] = whole

    def of_results(self, eqn: JaxprEqn) -> _BackwardSlice:
        """Return the slice of an equation's results."""
        return self._definitions[id(eqn)]

    def of_operands(self, operands: Iterable[Atom]) -> _BackwardSlice:
        """Return the slice of some operands of an equation with a body."""
        masks = (self._values.get(v, 0) for v in operands if type(v) is not Literal)
        return self._slice(reduce(or_, masks, 0))

    def _slice(self, bits: int) -> _BackwardSlice:
        work = None
        if not bits & self._unknown:
            work = sum(amount * (bits & same).bit_count() for amount, same in self._weights)
        return _BackwardSlice(work, bits & self._arguments)


def _weights(jaxpr: Jaxpr, first: int, operations: Operations) -> Iterator[tuple[Any, int]]:
    """Yield each cost other than 0, with the bit set of the equations that have it."""
    same: dict[Any, list[int]] = {}
    for place, eqn in enumerate(jaxpr.eqns, first):
        if not _is_zero(amount := operations.of(eqn)):
            same.setdefault(amount, []).append(place)
    for amount, places in same.items():
        yield amount, _bits(places)


def _is_zero(amount: Any) -> bool:
    return type(amount) is int and amount == 0


def _bits(places: Sequence[int]) -> int:
    """Return the integer with these bits set. The places are in ascending order."""
    whole = bytearray(places[-1] // 8 + 1)
    for place in places:
        whole[place // 8] |= 1 << place % 8
    return int.from_bytes(whole, "little")


# --- saving ---------------------------------------------------------------------------------------
# Choose the named values to save within a memory budget, to minimize recomputation.
#
# The names are those of `jax.checkpoint` with `save_only_these_names`. The choice is an integer
# program, a knapsack problem in which the worth of a value depends on the other saved values, as in
# Checkmate (Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
# Rematerialization", MLSys 2020, arXiv:1910.02653):
#
#     minimize    sum of operations[e] * run[e]
#     subject to  run[e] = 1                          if e computes a residual
#                 run[d] >= run[e]                    if e reads a result of d
#                 run[d] >= run[e] - save[name]       if e is the `name` equation of a result of d
#                 sum of bytes * save + sum of bytes * run of arguments <= budget
#
# `save` is 0 or 1. `run` marks the equations and arguments that are needed again; it is 0 or 1
# without a constraint. SciPy's `milp` (HiGHS) solves the program by branch and bound.
#
# An argument is kept if a recomputed equation reads it. A value in a loop counts in all iterations,
# and a carried value is recomputed from the first iteration on, unless each iteration saves it.

#: Small costs, as fractions of all operations: of saving all values, of a name that the program
#: has, and of a new name. They break ties, so that a value is only named if that saves something.
_ALL_BYTES, _ONE_NAME, _NEW_NAME = 1e-2, 1e-3, 2e-3

#: The relative gap to the optimum at which the search stops, and the maximum number of nodes that
#: it visits. A time limit would make the choice depend on the machine.
_GAP, _NODES = 1e-3, 500


class Saving:
    """The integer program of the named values to save.

    Args:
        jaxpr: The open jaxpr of the forward pass, with `name` equations.
        residuals: Its results that the backward pass reads.
        given: The names that the user's program has.
    """

    def __init__(self, jaxpr: Jaxpr, residuals: list[Atom], given: Collection[str] = ()) -> None:
        self._given = given
        self._flow, self._operations = DataFlow(jaxpr), Operations()
        self._times = {jaxpr: 1}
        self._numbers: dict[Any, int] = {}
        self._work: list[int] = []
        #: The edges: a reader, the node it reads, and the name that cuts the edge if saved, or -1.
        self._edges: list[tuple[int, int, int]] = []
        self._arguments: dict[int, int] = {}
        #: The bytes that saving each name takes.
        self.bytes: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._todo: list[tuple[int, Value]] = []
        seeds = [self._number(jaxpr, atom) for atom in residuals if type(atom) is not Literal]
        self._seeds = [seed for seed in seeds if seed is not None]
        for number, (body, var) in self._todo:
            self._expand(number, body, var)

    def choose(self, budget: int) -> tuple[str, ...] | None:
        """Return the names to save within a budget in bytes, or None if no choice fits."""
        count, names = len(self._work), len(self._order)
        whole, sizes = sum(self._work) or 1, self._sizes()
        cost = np.concatenate([np.array(self._work, float) / whole, np.zeros(names)])
        cost += sizes / (sizes.sum() or 1) * _ALL_BYTES
        cost[count:] += [_ONE_NAME if name in self._given else _NEW_NAME for name in self._order]
        return self._solve(cost, budget)

    def least(self) -> tuple[str, ...]:
        """Return the names to save so that as few bytes as possible are kept."""
        sizes = self._sizes()
        names = self._solve(sizes / (sizes.sum() or 1), None)
        assert names is not None
        return names

    def kept(self, names: tuple[str, ...]) -> int:
        """Return the bytes that are kept if some names are saved: of values and arguments."""
        cut = {self._order[name] for name in names}
        after: dict[int, list[int]] = {}
        for reader, read, name in self._edges:
            if name not in cut:
                after.setdefault(reader, []).append(read)
        needed = set(reachable(self._seeds, lambda number: after.get(number, ())))
        arguments = sum(size for number, size in self._arguments.items() if number in needed)
        return arguments + sum(self.bytes[name] for name in names)

    # --- the dataflow graph -----------------------------------------------------------------------

    def _number(self, jaxpr: Jaxpr, atom: Atom) -> int | None:
        """Return the number of a value's node: an equation, an argument, or a result of a body.

        Returns None for a literal. A new node is queued for `_expand`.
        """
        if type(atom) is Literal:
            return None
        position = self._flow.definition(jaxpr, atom)
        eqn = None if position is None else jaxpr.eqns[position]
        plain = eqn is not None and regions(eqn) is None
        key = id(eqn) if plain else atom
        if key not in self._numbers:
            self._numbers[key] = len(self._work)
            work = self._operations.of(eqn) * self._runs(jaxpr) if eqn is not None and plain else 0
            self._work.append(work)
            self._todo.append((self._numbers[key], (jaxpr, atom)))
        return self._numbers[key]

    def _expand(self, number: int, jaxpr: Jaxpr, var: Any) -> None:
        """Add the edges from a node to the values that it reads."""
        position = self._flow.definition(jaxpr, var)
        if position is None:
            self._expand_argument(number, jaxpr, var)
            return
        eqn, name = jaxpr.eqns[position], -1
        if traits(eqn).names_value and "name" in eqn.params:
            label = str(eqn.params["name"])
            name = self._order.setdefault(label, len(self._order))
            size = size_of(var.aval, 0) * self._runs(jaxpr)
            self.bytes[label] = self.bytes.get(label, 0) + size
        self._read(number, self._sources(jaxpr, position, var), name)

    def _expand_argument(self, number: int, jaxpr: Jaxpr, var: Any) -> None:
        place = self._flow.argument(jaxpr, var)
        if place is None:
            return  # a constant
        if jaxpr is self._flow.top:
            self._arguments[number] = size_of(var.aval, 0)
            return
        for holder in self._flow.holders[jaxpr]:
            self._read(number, self._flow.origins(holder, place))

    def _sources(self, jaxpr: Jaxpr, position: int, var: Any) -> Iterator[tuple[Jaxpr, Atom]]:
        """Yield the values that a result of an equation is computed from."""
        eqn = jaxpr.eqns[position]
        control = regions(eqn)
        if control is None:
            yield from ((jaxpr, atom) for atom in eqn.invars)
            return
        yield from ((jaxpr, eqn.invars[i]) for i in control.predicates)
        yield from self._results_inside(jaxpr, position)[var]

    @cached_method
    def _results_inside(self, jaxpr: Jaxpr, position: int) -> dict[Any, list[tuple[Jaxpr, Atom]]]:
        """Return the results of bodies that each result of an equation with bodies may be."""
        control = regions(jaxpr.eqns[position])
        assert control is not None
        return {
            var: [(control.jaxprs[number], atom) for number, atom in sources]
            for var, sources in zip(control.eqn.outvars, control.sources(), strict=True)
        }

    def _read(self, reader: int, values: Any, name: int = -1) -> None:
        for jaxpr, atom in values:
            read = self._number(jaxpr, atom)
            if read is not None:
                self._edges.append((reader, read, name))

    def _runs(self, jaxpr: Jaxpr) -> int:
        """Return the number of times that a body runs; an unknown trip count counts as one."""
        if jaxpr not in self._times:
            times = 0
            for holder in self._flow.holders[jaxpr]:
                times += self._runs(holder.jaxpr) * runs_of(regions(holder.eqn))
            self._times[jaxpr] = times
        return self._times[jaxpr]

    # --- the integer program ----------------------------------------------------------------------

    def _sizes(self) -> Any:
        """Return the bytes of each variable of the program; only arguments and names have any."""
        sizes = np.zeros(len(self._work) + len(self._order))
        for number, size in self._arguments.items():
            sizes[number] = size
        for name, place in self._order.items():
            sizes[len(self._work) + place] = self.bytes[name]
        return sizes

    def _solve(self, cost: Any, budget: int | None) -> tuple[str, ...] | None:
        # Imported here because it is slow and seldom needed.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        count, names = len(self._work), len(self._order)
        lower = np.zeros(count + names)
        lower[self._seeds] = 1
        is_integer = np.concatenate([np.zeros(count), np.ones(names)])
        constraints = []
        if self._edges:
            readers, read, cuts = np.array(self._edges).T
            rows = np.arange(len(self._edges))
            cut = cuts >= 0
            entries = np.concatenate([np.ones(len(rows)), -np.ones(len(rows)), np.ones(cut.sum())])
            places = (
                np.concatenate([rows, rows, rows[cut]]),
                np.concatenate([read, readers, count + cuts[cut]]),
            )
            edges = coo_array((entries, places), shape=(len(rows), count + names)).tocsr()
            constraints.append(LinearConstraint(edges, 0, np.inf))
        if budget is not None:
            unit = max(budget, 1)
            constraints.append(LinearConstraint(self._sizes()[None] / unit, -np.inf, budget / unit))
        options = {"mip_rel_gap": _GAP, "node_limit": _NODES}
        solution = milp(
            cost,
            integrality=is_integer,
            bounds=Bounds(lower, 1),
            constraints=constraints,
            options=options,
        )
        if solution.x is None:
            return None
        return tuple(name for name, place in self._order.items() if solution.x[count + place] > 0.5)


# --- expressions ----------------------------------------------------------------------------------
# The expressions in the user's code whose values `checkpoint_name` can name.
#
#     hidden = jnp.tanh(x @ w)        x @ w, and jnp.tanh(x @ w)
#
# The values of an expression are those that equations of other expressions read. Values that a
# library computes within one expression of the user's code cannot be named.


def nameable_values(jaxpr: Jaxpr, frames: Frames) -> dict[UserFrame, list[Var]]:
    """Return the values of each expression of the user's code in a jaxpr, at every depth.

    Only computed values of inexact dtypes are returned, without values that are only moved, values
    inside a custom derivative, whose rule replaces them, values that `checkpoint_name` has named,
    and values that only such an equation reads.
    """
    return _ExpressionSearch(jaxpr, frames).found


class Named(NamedTuple):
    """The name for an expression's value.

    Attributes:
        name: The name.
        source: The location of the expression: `model.py:13`.
        code: The expression; "" if the file does not exist any more.
    """

    name: str
    source: Place
    code: str


def named_values(
    expressions: Mapping[UserFrame, Sequence[Var]], primitives: Mapping[Var, str], frames: Frames
) -> list[Named]:
    """Return names for the values of expressions: from the source if possible, else the primitive.

    Several expressions may have the same name.

    Args:
        expressions: The values of each expression.
        primitives: The primitive that computes each value.
        frames: Returns the names of files.
    """
    names = SourceNames()
    places = set(map(range_of, expressions))
    called = []
    for frame, values in expressions.items():
        name = names.target(frame) or names.called(frame)
        if name is None and names.returned(frame, places - {range_of(frame)}):
            name = _function(frame)
        called.append(name or primitives[values[0]])
    texts = (names.text(frame) or "" for frame in expressions)
    sources = map(frames.text, expressions)
    return list(map(Named, called, sources, texts))


def _function(frame: UserFrame) -> str | None:
    """Return the function of a frame, or its class: `Block` for `Block.__call__`."""
    names = [name for name in frame.function.split(".") if name.isidentifier()]
    return next((name for name in reversed(names) if not name.startswith("__")), None)


class _ExpressionSearch:
    def __init__(self, jaxpr: Jaxpr, frames: Frames) -> None:
        self._frames = frames
        self._flow = DataFlow(jaxpr)
        self.found: dict[UserFrame, list[Var]] = {}
        todo, seen = [jaxpr], {jaxpr}
        for body in todo:
            for eqn in body.eqns:
                for inner in self._look_at(body, eqn):
                    if inner not in seen:
                        seen.add(inner)
                        todo.append(inner)

    def _look_at(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> Sequence[Jaxpr]:
        """Add the values of an equation that can be named, and return the bodies to visit."""
        frame, like = self._frame(eqn), traits(eqn)
        if frame is not None and not like.moves and not like.names_value:
            for var in eqn.outvars:
                if type(var) is not DropVar and is_inexact(var) and self._leaves(jaxpr, var, frame):
                    self.found.setdefault(frame, []).append(var)
        control = None if like.custom_derivative else regions(eqn)
        return () if control is None or not self._opens(control) else control.jaxprs

    def _frame(self, eqn: JaxprEqn) -> UserFrame | None:
        location = self._frames.location(eqn)
        return (
            location.frame
            if location is not None and self._frames.is_users(location.frame.file)
            else None
        )

    def _leaves(self, jaxpr: Jaxpr, var: Var, frame: UserFrame) -> bool:
        """Return True if a value is a result, or another expression reads it, except to name it."""
        readers = (jaxpr.eqns[position] for position in self._flow.readers(jaxpr, var))
        return bool(self._flow.results(jaxpr, var)) or any(
            self._frame(eqn) != frame and not traits(eqn).names_value for eqn in readers
        )

    def _opens(self, control: Regions) -> bool:
        """Return False for a call whose equations all belong to one expression."""
        if control.kind != "call":
            return True
        (body,) = control.jaxprs
        return self._has_several(body)

    @cached_method
    def _has_several(self, body: Jaxpr) -> bool:
        """Return True if the equations of a body belong to several expressions."""
        return len(set(map(self._frame, equations(body)))) > 1
