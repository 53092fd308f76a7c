"""Early values as a graph: what each is computed from, what it costs to keep, who needs it later.

The nodes of a body's `Flow` are its early values that are not ready (see `binding_times`). An edge
leads from each to what is computed from it, and to the sink where something that is not early needs
it. Values that cut the sink off make all that is needed later ready if they are sown as variables.

What passes through a structured equation passes through the bodies inside: the operand and the
argument that it becomes are one node, placed outside. A value in the body of a loop costs as much
as its values in all iterations. A carry has a node of its own, which needs the initial value and
what the body makes of it. Where no variable can be taken out of a body, its values cost infinitely
much, and a cut goes around it.

A body's flow is made once and reduced (see `cut`), so that the many calls of an initializer cost
a few nodes each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import is_ref, size_of
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.structured import Call, Scan, ShardMap, View, While
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import AbstractRef, Atom, Aval, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.dce import has_lasting_effect
from jaxprtool.passes.unzip.binding_times import BOTH, EARLY, Context, meet
from jaxprtool.passes.unzip.cut import SINK, SOURCE, Graph
from jaxprtool.passes.unzip.keys import is_of
from jaxprtool.passes.unzip.loops import as_scan
from jaxprtool.passes.unzip.split import Split, split

#: What a bit costs: so much that a difference of less only decides between cuts of one size.
BIT = 1 << 24

#: A key costs more than any number of bits.
KEY = BIT << 80

#: Where a value is: a variable of the body itself, or the position of an equation, which of its
#: bodies, and where in that.
Location: TypeAlias = Var | tuple[int, int, "Location"]

#: A manual mesh axis, its size, and whether types tell which values vary over it.
ManualAxis: TypeAlias = tuple[Hashable, int, bool]


@dataclass(frozen=True)
class Terms:
    """What a cut may do, and what it costs.

    With `once`, what is early is computed early: `apply` may only lay it out anew. Else it may
    compute again whatever it likes, and keys are worth more than anything made from them.
    """

    once: bool
    context: Context
    made: dict[Hashable, Flow] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Flow:
    """The graph of a body: where its nodes are, and which are its arguments and results, if any.

    `extras` are the results' (see `flow_of`).
    """

    graph: Graph
    locations: dict[int, Location]
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    extras: tuple[float, ...]


def flow_of(
    part: Split, extras: Sequence[float], terms: Terms, axes: Sequence[ManualAxis] = ()
) -> Flow:
    """Return the reduced flow of a body.

    `extras` are what its arguments cost beside their bits: `KEY` if they are keys or as good,
    infinity if they cannot be variables, else 0. `axes` are the manual axes around the body.
    """
    request = part, tuple(extras), terms.once, tuple(axes)
    if request not in terms.made:
        terms.made[request] = _Walk(part, extras, terms, tuple(axes)).flow()
    return terms.made[request]


def parts_of(part: Split, position: int, context: Context) -> tuple[Split, ...]:
    """Return the splits of the bodies of an equation, as they are if variables are sown in them."""
    eqn = part.body.eqns[position]
    inside = regions(eqn) if position in part.parts else None
    if inside is None or not inside.deciding:
        return part.parts.get(position, ())
    # Variables of branches are computed whichever is taken: what decides does not matter.
    known = [part.times[v] if isinstance(v, Var) else BOTH for v in eqn.invars]
    with context.under(meet((part.reached, *(known[i] for i in inside.deciding)))):
        return tuple(
            split(body, [known[i] for i in region.ins], context)
            for body, region in zip(inside.bodies, inside.regions, strict=True)
        )


class _Walk:
    """The flow of a body, as far as its equations have been gone through."""

    def __init__(
        self, part: Split, extras: Sequence[float], terms: Terms, axes: tuple[ManualAxis, ...]
    ):
        self.part, self.terms, self.axes = part, terms, axes
        self.graph = Graph()
        self.nodes: dict[Atom, int] = {}
        self.locations: dict[int, Location] = {}
        self.extras: dict[Atom, float] = {}
        for var, extra in zip(part.body.invars, extras, strict=True):
            self.mark(var, extra)
            if part.times[var] == EARLY:
                # What it costs is for the body around to say, which has it as an operand.
                self.nodes[var] = self.graph.add(math.inf)

    def flow(self) -> Flow:
        """Return the flow of the whole body."""
        body, context = self.part.body, self.terms.context
        context.bodies.append(body)
        for position, eqn in enumerate(body.eqns):
            if all(self.node(atom) is None for atom in eqn.invars):
                continue  # nothing of it is early and not ready
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
        """Return whether an equation is not looked into.

        That is so if a user's rule comes with it, and if what is early of a loop or branch is to be
        computed once, and so all of it.
        """
        calls = isinstance(inside.view, Call)
        early = self.terms.once and not calls and not self.is_late(inside.eqn)
        return early or inside.edges.has_rule

    # --- values -------------------------------------------------------------------------------

    def node(self, atom: Atom) -> int | None:
        """Return the node of a value; None if it is ready, or not early."""
        return None if type(atom) is Literal else self.nodes.get(atom)

    def extra(self, atom: Atom) -> float:
        """Return what a value costs beside its bits."""
        return 0 if type(atom) is Literal else self.extras.get(atom, 0)

    def mark(self, var: Var, extra: float) -> None:
        """Note what a value costs beside its bits."""
        if not self.terms.once and is_of(var.aval, jax.dtypes.prng_key):
            extra = max(extra, KEY)
        if extra:
            self.extras[var] = extra

    def is_late(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation is left for apply, or a part of it.

        One with an effect is where init does not know whether it is run, early as its operands are.
        """
        if has_lasting_effect(eqn) and not self.part.reached.early:
            return True
        return not all(self.part.of(atom).early for atom in (*eqn.invars, *eqn.outvars))

    def add(self, var: Var, location: Location, factor: float = 1) -> int:
        """Return a node for a value, which there are `factor` of."""
        cost = self.extra(var) + BIT * bits_of(var.aval)
        for axis, size, checked in self.axes:
            if not checked or axis in jaxcompat.varying_axes(var.aval):
                cost = _times(cost, size)
        node = self.graph.add(_times(cost, factor))
        self.locations[node] = location
        return node

    def result(self, var: Var, extra: float, before: Sequence[int | None]) -> None:
        """A result of an equation: it has a node if it is early; if it is late, it needs these."""
        self.mark(var, extra)
        known = self.part.times[var]
        if known == EARLY:
            node = self.nodes[var] = self.add(var, var)
            self.need(before, node)
        elif not known.early:
            self.need(before)

    def need(self, before: Sequence[int | None], node: int = SINK) -> None:
        """Let a node need others, those that there are."""
        for each in before:
            if each is not None:
                self.graph.link(each, node)

    # --- equations ----------------------------------------------------------------------------

    def whole(self, eqn: JaxprEqn) -> None:
        """An equation that is not looked into: all results need all operands."""
        operands = list(map(self.node, eqn.invars))
        if self.is_late(eqn):
            self.need(operands)
        extra = max((self.extra(atom) for atom in eqn.invars), default=0)
        if any(map(is_ref, (*eqn.invars, *eqn.outvars))):
            # What befalls a ref does so in one program, in apply; so what is read from it is
            # no variable, and it needs what is written to it.
            extra = math.inf
            self.need(operands)
        again = extra == math.inf or not self.terms.once or _is_layout(eqn)
        before = operands if again else [SOURCE]
        like = traits(eqn)
        # Better a variable for the value itself, as the source has it, than for another layout of
        # it. In `first, second = x` it is what has been squeezed that the source has.
        anew = like.gives == "layout" and eqn.primitive.name != "squeeze"
        for var in eqn.outvars:
            # Integers computed from keys are as good as keys, if no random numbers.
            integer = is_of(var.aval, jnp.integer) and not like.draws
            same = integer or like.gives == "layout" or extra == math.inf
            if self.part.times[var] == EARLY:
                self.result(var, extra if same else 0, before)
                self.graph.costs[self.nodes[var]] += anew

    def through(self, position: int, inside: Regions, parts: Sequence[Split]) -> None:
        """An equation whose bodies are looked into: values pass along its edges.

        A carry is early if its initial value is, and what the body makes of it; both are needed for
        it, and for its last value. What decides is needed for all that it decides on.
        """
        eqn, late = inside.eqn, self.is_late(inside.eqn)
        factors = [self._factor(inside, number, parts) for number in range(len(parts))]
        start = list(map(self.node, eqn.invars))
        carry = self._carries(position, inside, parts, factors)
        ins = [carry.get(i, node) for i, node in enumerate(start)]
        deciders = [start[i] for i in inside.deciding]
        before: list[list[int | None]] = [[] for _ in eqn.outvars]
        extras: list[float] = [0] * len(eqn.outvars)
        for i, last in inside.carried:
            before[last].append(start[i])
        axes = self._axes(inside.view)
        for number, (region, part) in enumerate(zip(inside.regions, parts, strict=True)):
            operands, nodes = ([values[i] for i in region.ins] for values in (eqn.invars, ins))
            location = position, number
            outs, costs = self.enter(location, part, operands, nodes, factors[number], axes)
            known = dict(zip(region.ins, part.ins, strict=True))
            ends = zip(outs, costs, region.outs, region.back, strict=True)
            for end, extra, out, back in ends:
                if out is None:
                    deciders.append(end)
                    continue
                before[out].append(end)
                extras[out] = max(extras[out], extra)
                if back is not None and (node := carry[back]) is not None:
                    self.need([end], node)
                elif back is not None and not known[back].early:
                    self.need([start[back], end])
        if late:
            self.need(deciders)
        for var, extra, needed in zip(eqn.outvars, extras, before, strict=True):
            self.result(var, extra, [*deciders, *needed])
            decides = any(region.decides for region in inside.regions)
            if self.terms.once and self.part.of(var) == EARLY and decides:
                self.need([SOURCE], self.nodes[var])

    def _factor(self, inside: Regions, number: int, parts: Sequence[Split]) -> float:
        """Return how often a body runs; infinite if no variable can be taken out of it."""
        eqn, trips = inside.eqn, inside.view.trips
        if inside.regions[number].decides:
            return math.inf
        if inside.deciding:
            # Init cannot know whether a branch will be taken, and so may not have its effects.
            return math.inf if parts[number].early.effects else 1
        if isinstance(inside.view, While) and self.is_late(eqn) and parts[0].outs[0].ready:
            with suppress(UnsupportedError):
                trips = Scan.of(as_scan(eqn, self.terms.context)).length
        return math.inf if trips is None else trips

    def _carries(
        self, position: int, inside: Regions, parts: Sequence[Split], factors: Sequence[float]
    ) -> dict[int, int | None]:
        """Return a node for each operand that a loop carries, if it is early in all rounds."""
        nodes: dict[int, int | None] = {}
        for number, (region, part) in enumerate(zip(inside.regions, parts, strict=True)):
            for i, var in zip(region.ins, part.body.invars, strict=True):
                if i not in region.back:
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
        """Join the flow of a body on. Gives the nodes and extra costs of its results.

        Its arguments come from `operands`, and are the nodes `ins`. It runs `factor` times; no
        variable can be taken out of it if that is infinite.
        """
        terms = self.terms
        if factor == math.inf:
            terms = replace(terms, once=False)
        flow = flow_of(part, list(map(self.extra, operands)), terms, (*self.axes, *axes))
        inner, outer = flow.graph, self.graph
        nodes = {SOURCE: SOURCE, SINK: SINK}
        for start, node in zip(flow.ins, ins, strict=True):
            if start is None:
                self.need([node])  # what is around the body keeps its argument from being early
            else:
                # A constant is early alone in a loop whose condition is; that one stands for it.
                nodes[start] = outer.add(math.inf) if node is None else node
        for old in (*inner.nodes, *(n for n in flow.outs if n is not None)):
            if old not in nodes:
                nodes[old] = outer.add(_times(inner.costs[old], factor))
                self.locations[nodes[old]] = (*location, flow.locations[old])
        for old in (SOURCE, *inner.nodes):
            for after in inner.after[old]:
                outer.link(nodes[old], nodes[after])
        return [None if n is None else nodes[n] for n in flow.outs], flow.extras


# --- what values are ----------------------------------------------------------------------------


def bits_of(aval: Aval) -> float:
    """The size of a value; infinite for what no variable can hold or whose size is not known."""
    if isinstance(aval, AbstractRef) or (size := size_of(aval)) is None:
        return math.inf
    if is_of(aval, jax.dtypes.extended):
        return 8 * size
    return jax.dtypes.itemsize_bits(aval.dtype) * math.prod(aval.shape)


def _is_layout(eqn: JaxprEqn) -> bool:
    """Return whether an equation lays a value out anew, or gives it in a wider type."""
    if eqn.primitive.name == "convert_element_type":
        return bits_of(eqn.outvars[0].aval) > bits_of(eqn.invars[0].aval)
    return traits(eqn).gives == "layout"


def _times(cost: float, factor: float) -> float:
    return math.inf if math.inf in (cost, factor) else cost * factor
