"""Early values as a graph: what each is computed from, what it costs to keep, who needs it later.

The nodes of a body's `Flow` are its early values that are not ready (see `known`). An edge leads
from each to what is computed from it, and to the sink where something that is not early needs it.
A set of nodes that cuts the sink off is a set of values which, sown as variables, make all that is
needed later ready.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.structured import Call, Cond, Scan, ShardMap, While, view
from jaxprtool.jaxcompat import AbstractRef, Atom, JaxprEqn, Literal, Var
from jaxprtool.passes.unzip.cut import SINK, SOURCE, Graph
from jaxprtool.passes.unzip.known import BOTH, EARLY, Context, Known
from jaxprtool.passes.unzip.loops import as_scan
from jaxprtool.passes.unzip.split import Split, split

#: A key costs more than any number of bits.
KEY = 1 << 80

#: Where a value is: a variable of the body itself, or the position of an equation, which of its
#: bodies, and where in that.
Place: TypeAlias = Var | tuple[int, int, "Place"]

#: A manual mesh axis, its size, and whether types tell which values vary over it.
Axis: TypeAlias = tuple[Any, int, bool]

#: What draws random numbers from a key. Other integers computed from keys are as good as keys.
DRAWS = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator"})

#: What `apply` may do again even if all that is known is computed once.
LAYOUT = frozenset(
    {"broadcast_in_dim", "expand_dims", "reshape", "rev", "squeeze", "transpose", "copy"}
)


@dataclass(frozen=True)
class Terms:
    """What a cut may do, and what it costs.

    With `once`, what is early is computed early: `apply` may only lay it out anew. Else it may
    compute again whatever it likes, and keys are worth more than anything made from them.
    """

    once: bool
    context: Context
    made: dict[Any, Flow] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Flow:
    """The graph of a body: where its nodes are, and which are its arguments and results, if any.

    `keys` marks the results that are keys, or as good.
    """

    graph: Graph
    places: dict[int, Place]
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    keys: tuple[bool, ...]


def flow_of(part: Split, keys: Sequence[bool], terms: Terms, axes: Sequence[Axis] = ()) -> Flow:
    """The reduced flow of a body; `keys` marks arguments that are keys, or as good.

    `axes` are the manual axes around the body, with their sizes.
    """
    request = part, tuple(keys), terms.once, tuple(axes)
    if request not in terms.made:
        terms.made[request] = _Walk(part, keys, terms, tuple(axes)).flow()
    return terms.made[request]


def parts_of(part: Split, position: int, context: Context) -> tuple[Split, ...]:
    """The splits of the bodies of an equation, as they are if variables are sown in them."""
    eqn = part.body.eqns[position]
    if position in part.parts and isinstance(cond := view(eqn), Cond):
        # Variables of branches are computed whichever is taken: the index does not matter.
        known = [part.known[v] if isinstance(v, Var) else BOTH for v in cond.operands]
        return tuple(split(branch, known, context) for branch in cond.branches)
    return part.parts.get(position, ())


class _Walk:
    """The flow of a body, as far as its equations have been gone through."""

    def __init__(self, part: Split, keys: Sequence[bool], terms: Terms, axes: tuple[Axis, ...]):
        self.part, self.terms, self.axes = part, terms, axes
        self.graph = Graph()
        self.nodes: dict[Var, int] = {}
        self.places: dict[int, Place] = {}
        self.keys: set[Var] = set()
        for var, is_key in zip(part.body.invars, keys, strict=True):
            self.mark(var, is_key)
            if part.known[var] == EARLY:
                # What it costs is for the body around to say, which has it as an operand.
                self.nodes[var] = self.graph.add(math.inf)

    def flow(self) -> Flow:
        """The flow of the whole body."""
        body, context = self.part.body, self.terms.context
        context.bodies.append(body)
        for position, eqn in enumerate(body.eqns):
            walk = _WALKS.get(eqn.primitive.name)
            parts = parts_of(self.part, position, context)
            if walk is None or not parts or self._is_whole(eqn):
                self.whole(eqn)
            else:
                walk(self, position, eqn, parts)
        context.bodies.pop()
        ins = tuple(map(self.nodes.get, body.invars))
        outs = tuple(map(self.node, body.outvars))
        self.graph.reduce({n for n in (*ins, *outs) if n is not None})
        keys = tuple(type(v) is not Literal and v in self.keys for v in body.outvars)
        return Flow(self.graph, self.places, ins, outs, keys)

    # --- values -------------------------------------------------------------------------------

    def known(self, atom: Atom) -> Known:
        return BOTH if type(atom) is Literal else self.part.known[atom]

    def node(self, atom: Atom) -> int | None:
        """The node of a value; None if it is ready, or not early."""
        return None if type(atom) is Literal else self.nodes.get(atom)

    def is_late(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is left for apply, or a part of it."""
        values = map(self.known, eqn.outvars or eqn.invars)
        return not all(known.early for known in values)

    def _is_whole(self, eqn: JaxprEqn) -> bool:
        """Whether what is early of a loop or branch is to be computed once, and so all of it."""
        return (
            self.terms.once and eqn.primitive.name not in Call.primitives and not self.is_late(eqn)
        )

    def mark(self, var: Var, is_key: bool) -> None:
        """Note whether a value is a key, or as good."""
        dtype = getattr(var.aval, "dtype", None)
        if not self.terms.once and (is_key or _is(dtype, jax.dtypes.prng_key)):
            self.keys.add(var)

    def is_key(self, atom: Atom) -> bool:
        return type(atom) is not Literal and atom in self.keys

    def add(self, var: Var, place: Place, factor: float = 1) -> int:
        """A node for a value."""
        node = self.graph.add(_times(self._cost(var), factor))
        self.places[node] = place
        return node

    def _cost(self, var: Var) -> float:
        aval = var.aval
        bits = bits_of(aval)
        for axis, size, checked in self.axes:
            if not checked or axis in jaxcompat.varying_axes(aval):
                bits = _times(bits, size)
        return bits + KEY if var in self.keys else bits

    def result(self, var: Var, before: Sequence[int | None]) -> None:
        """A result of an equation: it has a node if it is early; if it is late, it needs these."""
        known = self.part.known[var]
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
        operands = [self.node(atom) for atom in eqn.invars]
        if self.is_late(eqn):
            self.need(operands)
        before = [SOURCE] if self.terms.once and not _is_layout(eqn) else operands
        made = eqn.primitive.name not in DRAWS and any(map(self.is_key, eqn.invars))
        for var in eqn.outvars:
            self.mark(var, made and _is(getattr(var.aval, "dtype", None), jnp.integer))
            if self.part.known[var] == EARLY:
                self.result(var, before)

    def enter(
        self,
        place: tuple[int, int],
        part: Split,
        operands: Sequence[Atom],
        ins: Sequence[int | None],
        factor: float = 1,
        axes: Sequence[Axis] = (),
    ) -> tuple[list[int | None], tuple[bool, ...]]:
        """Join the flow of a body on. Gives its results' nodes, and which of them are keys.

        Its arguments come from `operands`, and are the nodes `ins`. It runs `factor` times; no
        variable can be taken out of it if that is infinite.
        """
        terms = self.terms
        if factor == math.inf:
            terms = replace(terms, once=False)
        flow = flow_of(part, list(map(self.is_key, operands)), terms, (*self.axes, *axes))
        inner, outer = flow.graph, self.graph
        nodes = {SOURCE: SOURCE, SINK: SINK}
        for start, node in zip(flow.ins, ins, strict=True):
            if start is None:
                self.need([node])  # what is around the body keeps its argument from being early
            else:
                assert node is not None
                nodes[start] = node
        for old in (*inner.nodes, *(n for n in flow.outs if n is not None)):
            if old not in nodes:
                nodes[old] = outer.add(_times(inner.costs[old], factor))
                self.places[nodes[old]] = (*place, flow.places[old])
        for old in (SOURCE, *inner.nodes):
            for after in inner.after[old]:
                outer.link(nodes[old], nodes[after])
        return [None if n is None else nodes[n] for n in flow.outs], flow.keys

    def results(
        self, eqn: JaxprEqn, outs: Sequence[int | None], keys: Sequence[bool], *others: int | None
    ) -> None:
        """The results of an equation are those of its body, and need `others` as well."""
        for var, out, is_key in zip(eqn.outvars, outs, keys, strict=True):
            self.mark(var, is_key)
            self.result(var, [out, *others])


# --- structured equations -----------------------------------------------------------------------


def _call(walk: _Walk, position: int, eqn: JaxprEqn, parts: Sequence[Split]) -> None:
    ins = list(map(walk.node, eqn.invars))
    walk.results(eqn, *walk.enter((position, 0), parts[0], eqn.invars, ins))


def _shard_map(walk: _Walk, position: int, eqn: JaxprEqn, parts: Sequence[Split]) -> None:
    manual, checked = eqn.params["newly_manual_axes"], eqn.params["check_vma"]
    sizes = ShardMap.of(eqn).mesh.shape
    axes = [(axis, sizes[axis], checked) for axis in sizes if axis in manual]
    ins = list(map(walk.node, eqn.invars))
    walk.results(eqn, *walk.enter((position, 0), parts[0], eqn.invars, ins, axes=axes))


def _scan(walk: _Walk, position: int, eqn: JaxprEqn, parts: Sequence[Split]) -> None:
    scan = Scan.of(eqn)
    _loop(walk, (position, 0), parts[0], (scan.consts, scan.carry, scan.xs), scan.length)


def _while(walk: _Walk, position: int, eqn: JaxprEqn, parts: Sequence[Split]) -> None:
    loop, (cond, body) = While.of(eqn), parts
    factor = math.inf
    if walk.is_late(eqn) and all(known.ready for known in cond.outs):
        with suppress(UnsupportedError):
            factor = Scan.of(as_scan(eqn, walk.terms.context)).length
    carry = _loop(walk, (position, 1), body, (loop.body_consts, loop.carry, ()), factor)
    operands = (*loop.cond_consts, *loop.carry)
    ins = [*map(walk.node, loop.cond_consts), *carry]
    (again,), _ = walk.enter((position, 0), cond, operands, ins, math.inf)
    for var in eqn.outvars:
        if walk.known(var) == EARLY:
            walk.need([again, SOURCE if walk.terms.once else None], walk.nodes[var])
        elif not walk.known(var).early:
            walk.need([again])


def _loop(
    walk: _Walk,
    place: tuple[int, int],
    part: Split,
    operands: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    factor: float,
) -> list[int | None]:
    """A loop over `operands`: constants, carries, what is scanned over. Gives the carries' nodes.

    A carry is early if its initial value is, and what the body makes of it; both are needed for
    it, and for its last value.
    """
    eqn = walk.part.body.eqns[place[0]]
    consts, inits, xs = ([walk.node(atom) for atom in group] for group in operands)
    carry: list[int | None] = []
    vars_in = part.body.invars[len(consts) : len(consts) + len(inits)]
    for var, atom, init in zip(vars_in, operands[1], inits, strict=True):
        node = None
        if part.known[var] == EARLY:
            walk.mark(var, walk.is_key(atom))
            node = walk.add(var, (*place, var), factor)
            walk.need([init], node)
        carry.append(node)
    flat = [atom for group in operands for atom in group]
    outs, keys = walk.enter(place, part, flat, [*consts, *carry, *xs], factor)
    for var, init, node, out in zip(vars_in, inits, carry, outs, strict=False):
        if node is not None:
            walk.need([out], node)
        elif not part.known[var].early:
            walk.need([init, out])
    ends = [*inits, *[None] * (len(outs) - len(inits))]
    for var, init, out, is_key in zip(eqn.outvars, ends, outs, keys, strict=True):
        walk.mark(var, is_key)
        walk.result(var, [init, out])
    return carry


def _cond(walk: _Walk, position: int, eqn: JaxprEqn, parts: Sequence[Split]) -> None:
    cond = Cond.of(eqn)
    index = walk.node(cond.index)
    ins = list(map(walk.node, cond.operands))
    if walk.is_late(eqn):
        walk.need([index])
    ends = []
    for i, part in enumerate(parts):
        # Init cannot know whether a branch will be taken, and so may not have its effects.
        factor = math.inf if part.early.effects else 1
        ends.append(walk.enter((position, i), part, cond.operands, ins, factor))
    for i, var in enumerate(eqn.outvars):
        walk.mark(var, any(keys[i] for _, keys in ends))
        walk.result(var, [index, *(outs[i] for outs, _ in ends)])


_WALKS: dict[str, Callable[[_Walk, int, JaxprEqn, Sequence[Split]], None]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    **dict.fromkeys(Call.primitives, _call),
}


# --- what values are ----------------------------------------------------------------------------


def bits_of(aval: Any) -> float:
    """The size of a value; infinite for what no variable can hold or whose size is not known."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None or isinstance(aval, AbstractRef):
        return math.inf
    if not all(isinstance(n, int) for n in shape):
        return math.inf
    if _is(dtype, jax.dtypes.extended):
        return 8 * dtype.itemsize * math.prod(shape)
    return jax.dtypes.itemsize_bits(dtype) * math.prod(shape)


def _is(dtype: Any, kind: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, kind)


def _is_layout(eqn: JaxprEqn) -> bool:
    """Whether an equation lays a value out anew, or gives it in a wider type."""
    if eqn.primitive.name == "convert_element_type":
        return bits_of(eqn.outvars[0].aval) > bits_of(eqn.invars[0].aval)
    return eqn.primitive.name in LAYOUT


def _times(cost: float, factor: float) -> float:
    return math.inf if math.inf in (cost, factor) else cost * factor
