"""Choose variables for a function that declares none, and name them.

The cut is the cheapest set of values that separates the values a function needs late from those it
gets early (see `flow` and `cut`): the set with the fewest bytes, and on a tie the one nearest to
its uses, so that the least work is left. A key is chosen only if the key itself is needed late.

The program is returned with a `sow` on each of these values, at any depth, under a tag of our own.
Then it is unzipped as if its author had written these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias

import jax
from jax import numpy as jnp
from jax.extend.core import DebugInfo

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.equations import (
    has_ref_type,
    needed_equations,
    size_of,
    substitute,
    variables,
    with_operands,
)
from jaxprtool.ir.frames import Range, SourceNames, range_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import (
    Call,
    Regions,
    Scan,
    ShardMap,
    View,
    While,
    open_regions,
    regions,
    view,
)
from jaxprtool.ir.rewrite import partition
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AbstractRef, Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import UserFrame, is_installed, is_users_file, user_frames
from jaxprtool.passes.cleanup.dce import Dce, has_lasting_effect
from jaxprtool.passes.unzip.split import (
    BOTH,
    EARLY,
    READY,
    SEPARATOR,
    Context,
    Split,
    as_scan,
    is_of,
    meet,
    operand_of,
    split_body,
)
from jaxprtool.primitives import scope_of, sow_p

# --- flow -----------------------------------------------------------------------------------------
# The graph of early values, and its cheapest cut.
#
# `FlowGraph.minimum_cut` is exact: no other set costs less, and of those with the same cost it is
# the one nearest the sink. Costs are integers of any size, or `math.inf` for nodes that cannot be
# chosen.
#
# Graphs of programs are large and nearly trees, so most of the work is done by `FlowGraph.reduce`,
# in time linear in the graph. For most nodes, bounds from both sides prove that other nodes cut at
# a lower cost, or nearer the sink; such nodes are merged into their neighbours. A node that is then
# alone between source and sink must be chosen. The rest, one connected part at a time, is cut by
# the maximum flow that NetworkX finds. The cut is taken from the sink's side, where the nearest one
# is (Picard and Queyranne, On the structure of all minimum cuts in a network, 1980).

# --- cut ------------------------------------------------------------------------------------------
# Find the cheapest set of a graph's nodes that cuts its sink off from its source.

#: The two nodes that every graph has. They cannot be chosen.
SOURCE, SINK = 0, 1

_NO_CUT = "no cut: a path from the source to the sink has only nodes that cannot be chosen"


class FlowGraph:
    """A directed graph of nodes that have a cost; nodes are numbered as they are added.

    Edges may form cycles. Reductions work best if edges run from lower numbers to higher ones, as
    they do where nodes are added in the order of computation.
    """

    def __init__(self) -> None:
        self.costs: list[float] = [math.inf, math.inf]
        self.after: list[set[int]] = [set(), set()]
        self.before: list[set[int]] = [set(), set()]

    def add(self, cost: float) -> int:
        """Add a node that costs `cost`, an int or `math.inf`, and return it."""
        self.costs.append(cost)
        self.after.append(set())
        self.before.append(set())
        return len(self.costs) - 1

    def link(self, start: int, end: int) -> None:
        """Add an edge: `end` is not cut off unless `start` is, or one of the two is chosen."""
        if start != end:
            self.after[start].add(end)
            self.before[end].add(start)

    def unlink(self, start: int, end: int) -> None:
        """Remove an edge."""
        self.after[start].discard(end)
        self.before[end].discard(start)

    def part(self, nodes: Collection[int]) -> FlowGraph:
        """Return the subgraph of some nodes, the source and the sink."""
        part, kept = FlowGraph(), {SOURCE, SINK, *nodes}
        part.costs = list(self.costs)
        empty: set[int] = set()
        part.after, part.before = ([empty] * len(self.costs) for _ in range(2))
        for node in kept:
            part.after[node] = self.after[node] & kept
            part.before[node] = self.before[node] & kept
        return part

    def leading_to_sink(self, nodes: Set[int]) -> set[int]:
        """Return the sink, and the nodes among `nodes` that lead to it through one another."""
        return _reached((SINK,), self.before, nodes)

    @property
    def nodes(self) -> list[int]:
        """The nodes that have edges, without source and sink, in order."""
        return [n for n in range(2, len(self.costs)) if self.after[n] or self.before[n]]

    def minimum_cut(self) -> list[int]:
        """Return the chosen nodes, in order. Destroys the graph.

        Raises ValueError if every cut has a node that cannot be chosen.
        """
        chosen: list[int] = []
        previous, count = math.inf, len(self.nodes)
        while 0 < count < 0.9 * previous:  # bounds the cost of all repetitions by that of ten
            self.reduce()
            forced = self.after[SOURCE] & self.before[SINK]
            chosen += forced
            for node in forced:
                self._unlink(node)
            previous, count = count, len(self.nodes)
        if SINK in self.after[SOURCE]:
            raise ValueError(_NO_CUT)
        for part in self._parts():
            chosen += _cut_by_flow(self, part)
        return sorted(chosen)

    # --- reductions ---------------------------------------------------------------------------

    def reduce(self, fixed: Collection[int] = ()) -> None:
        """Make the graph smaller without changing its cut.

        `fixed` are nodes where a larger graph will be connected: they stay, and so do all nodes
        that the cut of any such graph could choose.
        """
        fixed = frozenset(fixed)
        self._drop_dead(fixed)
        self._forbid_dominated(fixed)
        inner = [n for n in self.nodes if n not in fixed and self.costs[n] == math.inf]
        # In this order, a node's many edges are moved once, not once for each node of a chain.
        for node in inner:
            if len(self.before[node]) == 1 or SOURCE in self.before[node]:
                self._bypass(node)
        for node in reversed(inner):
            if len(self.after[node]) == 1 or SINK in self.after[node]:
                self._bypass(node)

    def _drop_dead(self, fixed: Collection[int]) -> None:
        """Remove nodes on no path from the source or a fixed node to the sink or a fixed node."""
        forwards = _reached((SOURCE, *fixed), self.after)
        backwards = _reached((SINK, *fixed), self.before)
        for node in self.nodes:
            if node not in fixed and not (node in forwards and node in backwards):
                self._unlink(node)

    def _forbid_dominated(self, fixed: Collection[int]) -> None:
        """Set the cost to infinity for nodes that are in no minimum cut, or none nearest the sink.

        A node is not chosen if its successors can be cut off from the sink for no more, or its
        predecessors from the source for less. The bounds choose each node, or a set that cuts off
        each of its neighbours, and may count a node twice.
        """
        costs, nodes = self.costs, self.nodes
        below, above = list(costs), list(costs)
        forbidden = []
        for node in reversed(nodes):
            if node not in fixed:
                bound = sum(below[n] if n > node else costs[n] for n in self.after[node])
                if bound <= costs[node]:
                    below[node] = bound
                    forbidden.append(node)
        for node in nodes:
            if node not in fixed:
                bound = sum(above[n] if n < node else costs[n] for n in self.before[node])
                if bound < costs[node]:
                    above[node] = bound
                    forbidden.append(node)
        for node in forbidden:
            costs[node] = math.inf

    def _bypass(self, node: int) -> None:
        """Remove a node that cannot be chosen, and connect its predecessors to its successors."""
        before = [SOURCE] if SOURCE in self.before[node] else list(self.before[node])
        after = [SINK] if SINK in self.after[node] else list(self.after[node])
        self._unlink(node)
        for start in before:
            for end in after:
                self.link(start, end)

    def _unlink(self, node: int) -> None:
        for other in self.before[node]:
            self.after[other].discard(node)
        for other in self.after[node]:
            self.before[other].discard(node)
        self.after[node], self.before[node] = set(), set()

    # --- the remaining graph ------------------------------------------------------------------

    def _parts(self) -> Iterator[list[int]]:
        """Yield the nodes of each connected part, without source and sink."""
        around = [after | before for after, before in zip(self.after, self.before, strict=True)]
        left = set(self.nodes)
        for node in self.nodes:
            if node in left:
                part = _reached((node,), around, left)
                left -= part
                yield sorted(part)


def _reached(
    start: Iterable[int], edges: Sequence[set[int]], among: Set[int] | None = None
) -> set[int]:
    """Return the nodes reachable from `start`; if `among` is given, only through these nodes."""
    reached = set(start)
    todo = list(reached)
    while todo:
        new = edges[todo.pop()] - reached
        new = new if among is None else new & among
        reached |= new
        todo += new
    return reached


def _cut_by_flow(graph: FlowGraph, part: Sequence[int]) -> list[int]:
    """Return the cut of a part of a graph: nodes are arcs of their cost, edges have no limit."""
    import networkx  # only used here, and slow to import

    network = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    for node in part:
        finite = {} if graph.costs[node] == math.inf else {"capacity": graph.costs[node]}
        network.add_edge((node, "in"), (node, "out"), **finite)
        if SOURCE in graph.before[node]:
            network.add_edge(SOURCE, (node, "in"))
        for other in graph.after[node]:
            network.add_edge((node, "out"), SINK if other == SINK else (other, "in"))
    try:
        residual = networkx.flow.preflow_push(network, SOURCE, SINK)
    except networkx.NetworkXUnbounded:
        raise ValueError(_NO_CUT) from None
    # The nodes that still lead to the sink in the residual: the side of the nearest cut.
    arcs = residual.edges
    has_room = networkx.subgraph_view(
        residual, filter_edge=lambda a, b: arcs[a, b]["flow"] < arcs[a, b]["capacity"]
    )
    behind = networkx.ancestors(has_room, SINK)
    return [node for node in part if (node, "in") not in behind and (node, "out") in behind]


# --- flow -----------------------------------------------------------------------------------------
# The graph of early values: their operands, the cost of storing them, and their later uses.
#
# The nodes of a body's `Flow` are its early values that are not ready (see `binding_times`). An
# edge leads from each to the values computed from it, and to the sink if a value that is not early
# needs it. If the values of a cut are sown as variables, everything that is needed later is ready.
#
# Structured equations connect to the bodies inside: an operand and the argument for it are one
# node, outside. A value in the body of a loop costs as much as its values in all iterations. A
# carry has a node of its own, which needs the initial value and the body's result for it. Where no
# variable can be extracted from a body, its values cost infinity, so that a cut avoids them.
#
# A body's flow is computed once and reduced (see `cut`), so that the many calls of an initializer
# cost a few nodes each.

#: The cost of a bit. Smaller differences in cost only decide between cuts of equal size.
BIT = 1 << 24

#: A key costs more than any number of bits.
KEY = BIT << 80

#: The location of a value: a variable of the body itself, or the position of an equation, the index
#: of one of its bodies, and the location in that.
Location: TypeAlias = Var | tuple[int, int, "Location"]

#: A manual mesh axis, its size, and whether types state which values vary over it.
ManualAxis: TypeAlias = tuple[Hashable, int, bool]


@dataclass(frozen=True)
class CutConstraints:
    """The constraints and costs of a cut.

    With `once`, early values are computed early: `apply` may only change their layout. Otherwise it
    may recompute anything, and keys cost more than any value computed from them.
    """

    once: bool
    context: Context
    made: dict[Hashable, Flow] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Flow:
    """The graph of a body: the locations of its nodes, and the nodes of its arguments and results.

    `extras` are the extra costs of the results (see `flow_of`).
    """

    graph: FlowGraph
    locations: dict[int, Location]
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    extras: tuple[float, ...]


def flow_of(
    part: Split,
    extras: Sequence[float],
    constraints: CutConstraints,
    axes: Sequence[ManualAxis] = (),
) -> Flow:
    """Return the reduced flow of a body.

    `extras` are the costs of its arguments besides their bits: `KEY` for keys and equivalent
    values, infinity if they cannot be variables, else 0. `axes` are the manual axes around it.
    """
    request = part, tuple(extras), constraints.once, tuple(axes)
    if request not in constraints.made:
        constraints.made[request] = _FlowBuilder(part, extras, constraints, tuple(axes)).flow()
    return constraints.made[request]


def parts_of(part: Split, position: int, context: Context) -> tuple[Split, ...]:
    """Return the splits of the bodies of an equation, as if variables were sown in them."""
    eqn = part.body.eqns[position]
    inside = regions(eqn) if position in part.parts else None
    if inside is None or not inside.predicates:
        return part.parts.get(position, ())
    # Variables of branches are computed whichever is taken: the index does not matter.
    times = [part.times[v] if isinstance(v, Var) else BOTH for v in eqn.invars]
    with context.under(meet((part.reached, *(times[i] for i in inside.predicates)))):
        return tuple(
            split_body(body, [times[i] for i in region.ins], context)
            for body, region in zip(inside.bodies, inside.regions, strict=True)
        )


class _FlowBuilder:
    """The state of building the flow of a body, equation by equation."""

    def __init__(
        self,
        part: Split,
        extras: Sequence[float],
        constraints: CutConstraints,
        axes: tuple[ManualAxis, ...],
    ):
        self.part, self.constraints, self.axes = part, constraints, axes
        self.graph = FlowGraph()
        self.nodes: dict[Atom, int] = {}
        self.locations: dict[int, Location] = {}
        self.extras: dict[Atom, float] = {}
        for var, extra in zip(part.body.invars, extras, strict=True):
            self.mark(var, extra)
            if part.times[var] == EARLY:
                # Its cost is set by the outer body, where it is an operand.
                self.nodes[var] = self.graph.add(math.inf)

    def flow(self) -> Flow:
        """Return the flow of the whole body."""
        body, context = self.part.body, self.constraints.context
        context.bodies.append(body)
        for position, eqn in enumerate(body.eqns):
            if all(self.node(atom) is None for atom in eqn.invars):
                continue  # no operand is early and not ready
            parts = parts_of(self.part, position, context)
            inside = regions(eqn) if parts else None
            if inside is None or self._is_whole(inside):
                self.whole(eqn)
            else:
                self.through(position, inside, parts)
        context.bodies.pop()
        ins, outs = (tuple(map(self.node, atoms)) for atoms in (body.invars, body.outvars))
        self.graph.reduce({n for n in (*ins, *outs) if n is not None})
        return Flow(self.graph, self.locations, ins, outs, tuple(map(self.extra, body.outvars)))

    def _is_whole(self, inside: Regions) -> bool:
        """Return True if the bodies of an equation are not entered.

        That is so if it has a user's rule, or if the early part of a loop or branch must be
        computed once, and so as a whole.
        """
        calls = isinstance(inside.view, Call)
        early = self.constraints.once and not calls and not self.is_late(inside.eqn)
        return early or inside.edges.has_rule

    # --- values -------------------------------------------------------------------------------

    def node(self, atom: Atom) -> int | None:
        """Return the node of a value; None if it is ready, or not early."""
        return None if type(atom) is Literal else self.nodes.get(atom)

    def extra(self, atom: Atom) -> float:
        """Return the cost of a value besides its bits."""
        return 0 if type(atom) is Literal else self.extras.get(atom, 0)

    def mark(self, var: Var, extra: float) -> None:
        """Record the cost of a value besides its bits."""
        if not self.constraints.once and is_of(var.aval, jax.dtypes.prng_key):
            extra = max(extra, KEY)
        if extra:
            self.extras[var] = extra

    def is_late(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation is left for apply, at least in part.

        One with an effect is late if init does not know whether it is run, whatever its operands.
        """
        if has_lasting_effect(eqn) and not self.part.reached.early:
            return True
        return not all(self.part.of(atom).early for atom in (*eqn.invars, *eqn.outvars))

    def add(self, var: Var, location: Location, factor: float = 1) -> int:
        """Return a node for a value that occurs `factor` times."""
        cost = self.extra(var) + BIT * bits_of(var.aval)
        for axis, size, checked in self.axes:
            if not checked or axis in jaxcompat.varying_axes(var.aval):
                cost = _times(cost, size)
        node = self.graph.add(_times(cost, factor))
        self.locations[node] = location
        return node

    def result(self, var: Var, extra: float, sources: Sequence[int | None]) -> None:
        """Add a node for an early result of an equation; a late result needs `sources`."""
        self.mark(var, extra)
        binding_time = self.part.times[var]
        if binding_time == EARLY:
            node = self.nodes[var] = self.add(var, var)
            self.need(sources, node)
        elif not binding_time.early:
            self.need(sources)

    def need(self, sources: Sequence[int | None], node: int = SINK) -> None:
        """Add edges from the nodes that `node` needs; None is ignored."""
        for source in sources:
            if source is not None:
                self.graph.link(source, node)

    # --- equations ----------------------------------------------------------------------------

    def whole(self, eqn: JaxprEqn) -> None:
        """Add an equation whose bodies are not entered: all results need all operands."""
        operands = list(map(self.node, eqn.invars))
        if self.is_late(eqn):
            self.need(operands)
        extra = max((self.extra(atom) for atom in eqn.invars), default=0)
        if any(map(has_ref_type, (*eqn.invars, *eqn.outvars))):
            # Effects on a ref happen in apply only. So values read from a ref are not variables,
            # and apply needs the values written to it.
            extra = math.inf
            self.need(operands)
        again = extra == math.inf or not self.constraints.once or _is_layout(eqn)
        sources = operands if again else [SOURCE]
        like = traits(eqn)
        # Prefer a variable for the value itself, as in the source, to another layout of it. In
        # `first, second = x`, the source has the squeezed values.
        anew = like.gives == "layout" and eqn.primitive.name != "squeeze"
        for var in eqn.outvars:
            # Integers computed from keys are equivalent to keys, if they are not random numbers.
            integer = is_of(var.aval, jnp.integer) and not like.draws
            same = integer or like.gives == "layout" or extra == math.inf
            if self.part.times[var] == EARLY:
                self.result(var, extra if same else 0, sources)
                self.graph.costs[self.nodes[var]] += anew

    def through(self, position: int, inside: Regions, parts: Sequence[Split]) -> None:
        """Add an equation whose bodies are entered: values pass along its edges.

        A carry is early if its initial value and the body's result for it are; it needs both, and
        so does its last value. All values that a predicate selects need the predicate.
        """
        eqn, late = inside.eqn, self.is_late(inside.eqn)
        factors = [self._factor(inside, number, parts) for number in range(len(parts))]
        start = list(map(self.node, eqn.invars))
        carry = self._carries(position, inside, parts, factors)
        ins = [carry.get(i, node) for i, node in enumerate(start)]
        predicates = [start[i] for i in inside.predicates]
        sources: list[list[int | None]] = [[] for _ in eqn.outvars]
        extras: list[float] = [0] * len(eqn.outvars)
        for i, last in inside.carried:
            sources[last].append(start[i])
        axes = self._axes(inside.view)
        for number, (region, part) in enumerate(zip(inside.regions, parts, strict=True)):
            operands, nodes = ([values[i] for i in region.ins] for values in (eqn.invars, ins))
            location = position, number
            outs, costs = self.enter(location, part, operands, nodes, factors[number], axes)
            times = dict(zip(region.ins, part.ins, strict=True))
            ends = zip(outs, costs, region.outs, region.next_iteration, strict=True)
            for end, extra, out, operand in ends:
                if out is None:
                    predicates.append(end)
                    continue
                sources[out].append(end)
                extras[out] = max(extras[out], extra)
                if operand is not None and (node := carry[operand]) is not None:
                    self.need([end], node)
                elif operand is not None and not times[operand].early:
                    self.need([start[operand], end])
        if late:
            self.need(predicates)
        for var, extra, needed in zip(eqn.outvars, extras, sources, strict=True):
            self.result(var, extra, [*predicates, *needed])
            has_predicate = any(region.is_predicate for region in inside.regions)
            if self.constraints.once and self.part.of(var) == EARLY and has_predicate:
                self.need([SOURCE], self.nodes[var])

    def _factor(self, inside: Regions, number: int, parts: Sequence[Split]) -> float:
        """Return how often a body runs; infinity if no variable can be extracted from it."""
        eqn, trips = inside.eqn, inside.view.trips
        if inside.regions[number].is_predicate:
            return math.inf
        if inside.predicates:
            # Init cannot know whether a branch will be taken, and so may not run its effects.
            return math.inf if parts[number].early.effects else 1
        if isinstance(inside.view, While) and self.is_late(eqn) and parts[0].outs[0].ready:
            with suppress(UnsupportedError):
                trips = Scan.of(as_scan(eqn, self.constraints.context)).length
        return math.inf if trips is None else trips

    def _carries(
        self, position: int, inside: Regions, parts: Sequence[Split], factors: Sequence[float]
    ) -> dict[int, int | None]:
        """Return a node for each carry operand that is early in all iterations, else None."""
        nodes: dict[int, int | None] = {}
        for number, (region, part) in enumerate(zip(inside.regions, parts, strict=True)):
            for i, var in zip(region.ins, part.body.invars, strict=True):
                if i not in region.next_iteration:
                    continue
                nodes[i] = None
                if part.times[var] == EARLY:
                    atom = inside.eqn.invars[i]
                    self.mark(var, self.extra(atom))
                    node = nodes[i] = self.add(var, (position, number, var), factors[number])
                    self.need([self.node(atom)], node)
        return nodes

    def _axes(self, structured: View) -> list[ManualAxis]:
        """Return the manual axes that an equation adds around its body."""
        if not isinstance(structured, ShardMap):
            return []
        manual, checked = (structured.eqn.params[k] for k in ("newly_manual_axes", "check_vma"))
        sizes = structured.mesh.shape
        return [(axis, sizes[axis], checked) for axis in sizes if axis in manual]

    def enter(
        self,
        location: tuple[int, int],
        part: Split,
        operands: Sequence[Atom],
        ins: Sequence[int | None],
        factor: float = 1,
        axes: Sequence[ManualAxis] = (),
    ) -> tuple[list[int | None], tuple[float, ...]]:
        """Add the flow of a body; return the nodes and extra costs of its results.

        Its arguments come from `operands`, and are the nodes `ins`. It runs `factor` times; no
        variable can be extracted from it if that is infinite.
        """
        constraints = self.constraints
        if factor == math.inf:
            constraints = replace(constraints, once=False)
        flow = flow_of(part, list(map(self.extra, operands)), constraints, (*self.axes, *axes))
        inner, outer = flow.graph, self.graph
        nodes = {SOURCE: SOURCE, SINK: SINK}
        for start, node in zip(flow.ins, ins, strict=True):
            if start is None:
                self.need([node])  # the equation keeps its body's argument from being early
            else:
                # With an early condition, a loop constant may be early only inside: the condition's
                # node covers it.
                nodes[start] = outer.add(math.inf) if node is None else node
        for old in (*inner.nodes, *(n for n in flow.outs if n is not None)):
            if old not in nodes:
                nodes[old] = outer.add(_times(inner.costs[old], factor))
                self.locations[nodes[old]] = (*location, flow.locations[old])
        for old in (SOURCE, *inner.nodes):
            for after in inner.after[old]:
                outer.link(nodes[old], nodes[after])
        return [None if n is None else nodes[n] for n in flow.outs], flow.extras


# --- properties of values -----------------------------------------------------------------------


def bits_of(aval: Aval) -> float:
    """Return the bits of a value; infinity if no variable can hold it or its size is unknown."""
    if isinstance(aval, AbstractRef) or (size := size_of(aval)) is None:
        return math.inf
    if is_of(aval, jax.dtypes.extended):
        return 8 * size
    return jax.dtypes.itemsize_bits(aval.dtype) * math.prod(aval.shape)


def _is_layout(eqn: JaxprEqn) -> bool:
    """Return True if an equation only changes the layout of a value, or widens its type."""
    if eqn.primitive.name == "convert_element_type":
        return bits_of(eqn.outvars[0].aval) > bits_of(eqn.invars[0].aval)
    return traits(eqn).gives == "layout"


def _times(cost: float, factor: float) -> float:
    return math.inf if math.inf in (cost, factor) else cost * factor


# --- hoist ----------------------------------------------------------------------------------------
# Hoisting of loop-invariant computations on early values.
#
# A variable sown in a loop is one value for each iteration. If all of these are equal, one value
# before the loop suffices, even if the length of the loop is unknown.


def hoisted(part: Split, context: Context) -> ClosedJaxpr:
    """Return the body of a split with computations on early constants moved out of its loops.

    Here, early values are those that are early and not ready. If nothing moves, the body stays the
    same object.
    """
    eqns: list[JaxprEqn] = []
    changed = False
    for position, eqn in enumerate(part.body.eqns):
        early = {v for v in eqn.invars if isinstance(v, Var) and part.times[v] == EARLY}
        new = eqn
        moved: list[JaxprEqn] = []
        inside = open_regions(eqn) if early else None
        if inside is not None:
            parts = parts_of(part, position, context)
            inner = [hoisted(nested, context) for nested in parts]
            if any(body is not nested.body for body, nested in zip(inner, parts, strict=True)):
                new = inside.rebuild(inner)
                inside = regions(new)
            if inside is not None and inside.repeats:
                moved, new = _moved_out(inside, early)
        eqns += [*moved, new]
        changed |= new is not eqn
    return jaxcompat.replace_jaxpr(part.body, eqns=eqns) if changed else part.body


def _moved_out(inside: Regions, early: set[Var]) -> tuple[list[JaxprEqn], JaxprEqn]:
    """Return the equations that are moved out of a loop, and the loop without them.

    These have no effect, and depend only on constants of the loop, some of which are early.
    """
    number = len(inside.bodies) - 1
    body, region = inside.bodies[number], inside.regions[number]
    pairs = zip(body.invars, region.ins, region.loop_invariant, strict=True)
    outside: dict[Var, Atom] = {
        var: inside.eqn.invars[i] for var, i, is_invariant in pairs if is_invariant
    }
    from_early = {var for var, atom in outside.items() if isinstance(atom, Var) and atom in early}
    same: list[JaxprEqn] = []
    for eqn in body.eqns:
        operands = variables(eqn.invars)
        if not eqn.effects and all(v in outside for v in operands):
            same.append(eqn)
            outside.update((v, Var(v.aval)) for v in eqn.outvars)
            if not from_early.isdisjoint(operands):
                from_early.update(eqn.outvars)
    taken = needed_equations(same, (), lambda eqn: not from_early.isdisjoint(eqn.outvars))
    if not taken or region.constants is None:
        return [], inside.eqn
    eqns, moved_vars = partition(body, taken)
    invars = inside.arguments(region, body.invars, {region.constants: moved_vars})
    bodies = [*inside.bodies[:number], jaxcompat.replace_jaxpr(body, invars=invars, eqns=eqns)]
    new = inside.rebuild(bodies, more={region.constants: [outside[v] for v in moved_vars]})
    moved = [with_operands(eqn, outside) for eqn in taken]
    return [eqn.replace(outvars=substitute(eqn.outvars, outside)) for eqn in moved], new


# --- auto -----------------------------------------------------------------------------------------

_LEAF = jax.tree.structure(0)


def sow_cut(program: Program, early: Sequence[bool], tag: str, computed_once: bool) -> Program:
    """Return the program with a cut between `early` arguments and its results sown under `tag`.

    `early` has an entry for each flat argument. The names are unique paths, joined by `SEPARATOR`.
    If `computed_once`, everything that depends only on early arguments is computed before the cut,
    except changes of a value to another layout or a wider type. Otherwise the early arguments are
    keys, and the values that are cheapest to store are sown. Dead code is removed. If there is no
    cut, nothing is sown.
    """
    program = Dce()(program)
    context = Context(tag=None)
    ins = [EARLY if flag else READY for flag in early]
    part = split_body(program.jaxpr, ins, context)
    if (body := hoisted(part, context)) is not part.body:
        program = Dce()(program.replace(jaxpr=body))
        part = split_body(program.jaxpr, ins, context)
    chosen = _CutValues()
    for location in _cut(part, early, CutConstraints(computed_once, context)):
        chosen.add(location)
    values = list(_values(chosen, (part,), (), context))
    names = iter(unique_names(values, program.arg_names, context))
    return program.replace(jaxpr=_sown(program.jaxpr, chosen, tag, names))


def _cut(part: Split, early: Sequence[bool], constraints: CutConstraints) -> list[Location]:
    """Return the locations of the values to sow; empty if there is no cut."""
    extra: float = 0 if constraints.once else KEY
    flow = flow_of(part, [extra if flag else 0 for flag in early], constraints)
    graph, locations = flow.graph, dict(flow.locations)
    for var, node in zip(part.body.invars, flow.ins, strict=True):
        if node is not None:
            graph.costs[node] = extra + BIT * bits_of(var.aval)
            graph.link(SOURCE, node)
            locations[node] = var
    for node in flow.outs:
        if node is not None:
            graph.link(node, SINK)
    try:
        keys = _cut_off_keys(graph)
        return [locations[node] for node in (*keys, *graph.minimum_cut())]
    except ValueError:
        return []  # unzip then reports the values that need a key


def _cut_off_keys(graph: FlowGraph) -> list[int]:
    """Return the keys that are needed late themselves, and remove keys from the choice.

    If they were chosen together with other values, they would be the only ones: all the rest can
    be computed from keys.
    """
    hard = {n for n in graph.nodes if graph.costs[n] >= KEY}
    keys = graph.part(hard).minimum_cut()
    late = graph.leading_to_sink(hard.difference(keys))
    for key in keys:
        for node in graph.after[key] & late:
            graph.unlink(key, node)
    for node in hard:
        graph.costs[node] = math.inf
    return keys


# --- the chosen values, body by body --------------------------------------------------------------


@dataclass
class _CutValues:
    """The chosen values of a body: its own variables, and those of the bodies inside."""

    own: set[Var] = field(default_factory=set)
    inner: dict[int, dict[int, _CutValues]] = field(default_factory=dict)

    def add(self, location: Location) -> None:
        if isinstance(location, Var):
            self.own.add(location)
        else:
            position, index, location = location
            bodies = self.inner.setdefault(position, {})
            bodies.setdefault(index, _CutValues()).add(location)


def _values(
    chosen: _CutValues, parts: tuple[Split, ...], calls: tuple[JaxprEqn, ...], context: Context
) -> Iterator[NestedValue]:
    """Yield the chosen values in program order: the order in which `_sown` sows them."""
    part = parts[-1]
    for var in part.body.invars:
        if var in chosen.own:
            yield NestedValue(parts, calls, var)
    for position, eqn in enumerate(part.body.eqns):
        for index, inside in sorted(chosen.inner.get(position, {}).items()):
            inner = parts_of(part, position, context)[index]
            yield from _values(inside, (*parts, inner), (*calls, eqn), context)
        for var in eqn.outvars:
            if var in chosen.own:
                yield NestedValue(parts, calls, var)


def _sown(body: ClosedJaxpr, chosen: _CutValues, tag: str, names: Iterator[str]) -> ClosedJaxpr:
    """Return a closed jaxpr with the chosen values sown; later equations use the sown values."""
    sown: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []

    def sow(values: Sequence[Var], context: object, source_info: object = None) -> None:
        for var in values:
            if var in chosen.own:
                sown[var] = Var(var.aval)
                params = {"tag": tag, "name": next(names), "mode": "strict", "tree": _LEAF}
                eqns.append(
                    jaxcompat.new_jaxpr_eqn(
                        [var], [sown[var]], sow_p, params, set(), source_info, context
                    )
                )

    sow(body.invars, body.eqns[0].ctx if body.eqns else None)
    for position, eqn in enumerate(body.eqns):
        eqn = with_operands(eqn, sown)
        if position in chosen.inner and (inside := regions(eqn)) is not None:
            bodies = list(inside.bodies)
            for index, within in sorted(chosen.inner[position].items()):
                bodies[index] = _sown(bodies[index], within, tag, names)
            eqn = inside.rebuild(bodies)
        eqns.append(eqn)
        sow(eqn.outvars, eqn.ctx, eqn.source_info)
    return jaxcompat.replace_jaxpr(body, outvars=substitute(body.outvars, sown), eqns=eqns)


# --- naming ---------------------------------------------------------------------------------------
# Name the values that have no name: after arguments, the user's source, and scopes.
#
# A value gets the first of these names that exists:
#
# *   the path of the argument that it is: `params['w']` becomes `params/w`;
# *   the name that it was sown or checkpointed under;
# *   the name that the user's source assigns it to, in the function that computes it, or else in
#     its caller, and so on outwards; a name in a library's source is nested under the first in the
#     user's own, unless the library's caller passes a name for it as a string;
# *   for a value in another layout, the name of the value;
# *   the parameter of a jitted function that it is passed to;
# *   the function that computes it.
#
# It is preceded by the `jax.named_scope`s around it. Names that are still equal are numbered.

_WORD = re.compile(r"[^\[\]'\"./~]+")
_SCOPE = re.compile(r"[^/~]+")
_TRANSFORM = re.compile(r"[\w.]+\(|\)")
_FUNCTION = re.compile(r"(\S+) at (.+):\d+")


@dataclass(frozen=True, eq=False)
class NestedValue:
    """A value of a program: the bodies around it, the calls that hold these, and its variable.

    The outermost body is first; `calls[i]` is an equation of `parts[i]` and holds `parts[i + 1]`.
    """

    parts: tuple[Split, ...]
    calls: tuple[JaxprEqn, ...]
    var: Var


def unique_names(
    values: Sequence[NestedValue], arg_names: Sequence[str], context: Context
) -> list[str]:
    """Return a unique name for each value, none of which is the scope of another.

    `arg_names` are those of the program's flat arguments. Scopes of `nest`, which precede the names
    of all variables inside, count for uniqueness but are not written.
    """
    namer = _Namer(arg_names, context)
    nests = [tuple(scope for call in v.calls if (scope := scope_of(call))) for v in values]
    paths = [(*nest, *namer.path(v)) for nest, v in zip(nests, values, strict=True)]
    pairs = zip(nests, _distinct(paths), strict=True)
    return [SEPARATOR.join(path[len(nest) :]) for nest, path in pairs]


def _distinct(paths: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the paths, numbered where they would equal another path or its scope."""
    taken = {path[:depth] for path in paths for depth in range(1, len(path))}
    wanted = set(paths)
    numbers: dict[tuple[str, ...], int] = {}
    for path in paths:
        free = path
        while free in taken or (free is not path and free in wanted):
            numbers[path] = numbers.get(path, 0) + 1
            free = (*path[:-1], f"{path[-1]}_{numbers[path]}")
        taken.add(free)
        yield free


class _Namer:
    """Find names; reads each source file once, and visits each body once."""

    def __init__(self, arg_names: Sequence[str], context: Context):
        self.arg_names, self.context = arg_names, context
        self.sources = SourceNames()

    def path(self, value: NestedValue) -> tuple[str, ...]:
        """Return the scopes and the name of a value."""
        inner = self.made(value)
        eqns = [*inner.calls, *filter(None, [self.eqn(inner)])]
        stacks = (_TRANSFORM.sub("", jaxcompat.name_stack(eqn)) for eqn in eqns)
        scopes = tuple(scope for stack in stacks for scope in _SCOPE.findall(stack))
        name = self.name(inner) or (self.function(value),)
        return (*scopes, name[-1]) if scopes else name

    @cached_method
    def body(self, part: Split) -> DefUse:
        """Return the definitions and uses of a body."""
        return DefUse(part.body.eqns)

    def eqn(self, value: NestedValue) -> JaxprEqn | None:
        """Return the equation that computes a value; None for an argument of its body."""
        return self.body(value.parts[-1]).equation(value.var)

    def made(self, value: NestedValue) -> NestedValue:
        """Return the value in the innermost body that computes it."""
        part = value.parts[-1]
        if (eqn := self.eqn(value)) is None:
            return value
        if eqn.primitive.name == "squeeze":  # the second step of `first, second = operand`
            operand = NestedValue(value.parts, value.calls, eqn.invars[0])
            whole = self.eqn(operand)
            return operand if whole is not None and whole.primitive.name == "slice" else value
        for body in parts_of(part, self.body(part).definitions[value.var][0], self.context)[-1:]:
            outs = body.body.outvars
            inner = outs[eqn.outvars.index(value.var)] if len(outs) == len(eqn.outvars) else None
            if isinstance(inner, Var) and inner in self.body(body).definitions:
                return self.made(NestedValue((*value.parts, body), (*value.calls, eqn), inner))
        return value

    def name(self, value: NestedValue) -> tuple[str, ...] | None:
        """Return the name of a value, and its scopes."""
        value = self.made(value)
        eqn = self.eqn(value)
        if eqn is None:
            return self.argument(value)
        if traits(eqn).names_value and eqn.params["name"]:
            return (eqn.params["name"],)
        if (names := self.assigned(value, eqn)) is not None:
            return names
        source = operand_of(eqn, eqn.outvars.index(value.var))
        if source is not None and isinstance(operand := eqn.invars[source], Var):
            return self.name(NestedValue(value.parts, value.calls, operand))
        return self.parameter(value)

    def argument(self, value: NestedValue) -> tuple[str, ...] | None:
        """Return the name of an argument of the program, or that of a body argument's operand."""
        index = value.parts[-1].body.invars.index(value.var)
        if not value.calls:
            return tuple(_words(self.arg_names[index])) or None
        *_, call = value.calls
        operand = call.invars[_operand(call, value.parts[-1].body, index)]
        if isinstance(operand, Literal):
            return None
        return self.name(NestedValue(value.parts[:-1], value.calls[:-1], operand))

    # --- the source ---------------------------------------------------------------------------

    def assigned(self, value: NestedValue, eqn: JaxprEqn) -> tuple[str, ...] | None:
        """Return the name in the source; for a library's name, preceded by that in the user's."""
        others: dict[str, set[Range]] = {}
        for calls, user, _ in self.late_users(value):
            for caller in (*calls, user):
                for frame in user_frames(caller):
                    others.setdefault(frame.file, set()).add(range_of(frame))
        library_name: str | None = None
        for depth, (frame, result) in enumerate(_frames_of(value, eqn)):
            late = others.get(frame.file, set())
            if depth and range_of(frame) not in late and (name := self.sources.given(frame)):
                return tuple(_words(name))
            if (name := self.sources.assigned(frame, late, result)) is None:
                continue
            if not is_installed(frame.file):
                return (name,) if library_name is None else (name, library_name)
            library_name = library_name or name
        return None if library_name is None else (library_name,)

    def late_users(
        self, value: NestedValue
    ) -> Iterator[tuple[tuple[JaxprEqn, ...], JaxprEqn, Var]]:
        """Yield the equations that need a value late, their calls, and its variable there."""
        part, var = value.parts[-1], value.var
        for eqn in (part.body.eqns[i] for i in self.body(part).readers(var)):
            if not all(part.times[v].early for v in eqn.outvars):
                yield value.calls, eqn, var
                continue
            for i, out in enumerate(eqn.outvars):
                source = operand_of(eqn, i)
                if source is not None and eqn.invars[source] is var:
                    yield from self.late_users(NestedValue(value.parts, value.calls, out))
        if value.calls:
            outs = value.calls[-1].outvars
            for i, atom in enumerate(part.body.outvars[: len(outs)]):
                if atom is var:
                    yield from self.late_users(
                        NestedValue(value.parts[:-1], value.calls[:-1], outs[i])
                    )

    # --- names of functions and of their parameters -------------------------------------------

    def parameter(self, value: NestedValue) -> tuple[str, ...] | None:
        """Return the parameter of a user's jitted function that needs a value late."""
        for _, user, var in self.late_users(value):
            if not isinstance(called := view(user), Call):
                continue
            debug = called.body.debug_info
            if _file(debug) is None or len(debug.arg_names or ()) != len(user.invars):
                continue
            words = _words(debug.arg_names[user.invars.index(var)])
            if words:
                return (words[-1],)
        return None

    def function(self, value: NestedValue) -> str:
        """Return the function that computes a value."""
        eqn = self.eqn(value)
        if eqn is None:
            return "carry"
        if isinstance(view(eqn), Call) and "name" in eqn.params:
            words = _words(eqn.params["name"].strip("_"))
        else:
            frames = (frame for frame, _ in _frames_of(value, eqn))
            words = [w for frame in islice(frames, 1) for w in _words(frame.function)]
            words = [word for word in words if word[0] != "<"]
        return words[-1] if words else eqn.primitive.name


def _words(text: str) -> list[str]:
    """Return the names in a path, as `params['w']` or `outer/inner`."""
    return _WORD.findall(text)


def _frames_of(
    value: NestedValue, eqn: JaxprEqn
) -> Iterator[tuple[UserFrame, tuple[int, int] | None]]:
    """Yield the user's frames around a value's equation, the innermost first, through the calls.

    An equation only has the frames of its body. The frame of a call that returns the value comes
    with the index of the result, and the number of results.
    """
    var = value.var
    result = _unpacked(eqn, var)
    for frame in user_frames(eqn):
        yield frame, result
        result = None
    for call, part in zip(reversed(value.calls), reversed(value.parts), strict=False):
        result = None
        outs = part.body.outvars[: len(call.outvars)]
        if var in outs:
            index = outs.index(var)
            var, result = call.outvars[index], (index, len(call.outvars))
            if isinstance(loop := view(call), Scan):
                result = int(index >= len(loop.carry)), 2  # a pair of the carry and the rest
        for frame in user_frames(call):
            yield frame, result
            result = None


def _unpacked(eqn: JaxprEqn, var: Var) -> tuple[int, int] | None:
    """Return the index and count of a part in an unpacking such as `first, second = operand`."""
    match eqn.primitive.name:
        case "unstack" | "split" | "optimization_barrier":
            return eqn.outvars.index(var), len(eqn.outvars)
        case "slice":
            return eqn.params["start_indices"][0], eqn.invars[0].aval.shape[0]
    return None


def _operand(call: JaxprEqn, body: ClosedJaxpr, argument: int) -> int:
    """Return the position of the operand for an argument of one of a call's bodies."""
    inside = regions(call)
    region = None if inside is None else inside.region_of(jaxcompat.open_jaxpr(body))
    return argument if region is None else region.ins[argument]


def _file(debug: DebugInfo) -> str | None:
    """Return the file of a jaxpr's function, if it is known and the user's."""
    match = _FUNCTION.fullmatch(debug.func_src_info)
    return match[2] if match and is_users_file(match[2]) else None
