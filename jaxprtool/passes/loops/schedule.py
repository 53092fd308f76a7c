"""Hoisting out of loops, and scheduling, to keep fewer bytes alive at once; values do not change.

The model of liveness is that of `liveness`. Equations with effects, sown values and equations on
refs keep their order among themselves. A value is read before it is donated. If a custom derivative
reads a weakly typed value, the last reader of the value stays the last. Apart from that, only
operands matter. Bodies are scheduled from the inside out, so that a loop or call counts with its
own peak. A body keeps its order, and stays the same object, unless the new order's peak is strictly
lower.

`sink` moves equations towards their first readers, in one pass. `schedule` takes the best of
several orders: the original one, that of `sink`, list schedules from the front and from the back
that greedily take the equation that frees most (as XLA's list scheduler for memory does), and
depth-first from the results, where the operands that need most memory come first (R. Sethi and J.
D. Ullman, "The generation of optimal code for arithmetic expressions", 1970). Finding the best
order is NP-hard (R. Sethi, "Complete register allocation problems", 1975); these heuristics take n
log n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from operator import is_not
from typing import Any, ClassVar

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.equations import (
    Contains,
    bodies,
    donated_operands,
    free_variables,
    is_array,
    is_flat,
    is_weak,
    needed_equations,
    size_in_bytes,
    size_of,
    variables,
)
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Regions, holds_jaxpr, keep, regions
from jaxprtool.ir.rewrite import Memo, RewriteRule, Writer, narrow, partition, rewrite, with_bodies
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)
from jaxprtool.passes import Pass
from jaxprtool.primitives import sow_p

# --- hoist ----------------------------------------------------------------------------------------
# Hoisting: compute loop-invariant values of a scan or a while loop once, before the loop.
#
# An equation of a loop's body, or of a while's condition, is *invariant* if it only reads literals,
# constants of the loop and results of invariant equations. Bodies are visited from the inside out,
# so that an equation leaves as many loops as it is invariant in.
#
# Which of the invariant equations are hoisted:
#
# *   An equation that computes is hoisted, together with the equations that it needs, if its result
#     has no more bytes than the largest constant that it is computed from, or no more than `SMALL`;
#     or if it costs far more than reading its result (`Traits.expensive`, and equations that hold
#     jaxprs).
#
# *   An equation that only moves, repeats or generates values (`Traits.moves`: broadcasts, iotas,
#     ...), or whose result is larger than everything it is computed from, is hoisted only if a
#     hoisted equation needs it. By itself it would save little and occupy memory while the loop
#     runs, whereas in the loop it is fused into its uses.
#
# *   The same holds for an equation of literals alone: in the loop it is known to be constant.
#
# These are never hoisted: equations with effects and those on refs; collectives and equations that
# place values or keep computations apart (`Traits.may_hoist`); user code that runs outside of JAX.
# A loop that may run no iteration is assumed to run: hoisted equations are pure, and at worst
# computed unnecessarily. But a while loop, which may never end, is not moved out of such a loop.
#
# Compare XLA's WhileLoopInvariantCodeMotion, which also skips values that are not worth their
# memory.

#: Results of at most this many bytes may leave a loop whatever they are computed from.
SMALL = 65536


@dataclass(frozen=True)
class Hoist(Pass):
    """Move loop-invariant equations out of scans and while loops.

    An equation is moved before the loop if it reads only loop-invariant values, and if its result
    is small or costs far more to compute than to read.

    Note:
        Equations with effects, collectives and calls of Python functions stay in their loop. So do
        equations that only repeat or generate values, since computing these again is cheaper than
        storing them.

    Example:
        def f(x, c):
            return jax.lax.fori_loop(0, 2, lambda i, x: x * jnp.exp(c), x)

        $ jaxprtool opt f.py:f --args "f32[], f32[]" -p "hoist, unroll, dce"
        { lambda ; a:f32[] b:f32[]. let
            c:f32[] = exp b
            d:f32[] = mul a c
            e:f32[] = mul d c
          in (e,) }
    """

    name: ClassVar[str] = "hoist"
    group: ClassVar[str] = "schedule and compile"

    def __call__(self, program: Program) -> Program:
        return program.replace(jaxpr=rewrite(program.jaxpr, _Hoister().visit, flat=False))


@dataclass(frozen=True)
class _HoistedBody:
    """A body in two: the hoisted part, which only reads the loop's constants, and the rest.

    `used` marks the arguments that the rest still takes; it also takes the results of `left`.
    """

    left: ClosedJaxpr
    used: list[bool]
    rest: ClosedJaxpr


class _Hoister:
    """The state of one run: shared bodies are analysed once."""

    def __init__(self) -> None:
        self._taken = Memo()
        #: Equations that must not leave a loop, by whether the loop is known to run.
        self._staying = {True: Contains(_must_stay), False: Contains(_must_stay_if_idle)}

    def visit(self, writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            inside = regions(eqn)
            return None if inside is None or not inside.repeats else self._loop(writer, inside)

        return rule

    def _loop(self, writer: Writer, inside: Regions) -> Sequence[Atom] | None:
        eqn, trips = inside.eqn, inside.view.trips
        if isinstance(trips, int) and trips == 0:
            return None
        bodies = list(inside.bodies)
        stay = [True] * len(eqn.invars)
        more: dict[str, list[Atom]] = {}
        for number, region in enumerate(inside.regions):
            if region.constants is None:
                continue
            # A condition is always evaluated once, whether another body runs or not.
            runs = region.is_predicate or isinstance(trips, int)
            taken = self._split_body(inside, number, writer.holds_constants, runs)
            if taken is None:
                continue
            bodies[number] = taken.rest
            for i, used in zip(region.ins, taken.used, strict=True):
                stay[i] &= used
            operands = [
                eqn.invars[i]
                for i, is_invariant in zip(region.ins, region.loop_invariant, strict=True)
                if is_invariant
            ]
            more.setdefault(region.constants, []).extend(writer.splice(taken.left, operands, eqn))
        if not more:
            return None
        writer.add(inside.rebuild(bodies, stay, more=more))
        return eqn.outvars

    def _split_body(
        self, inside: Regions, number: int, holds_constants: bool, runs: bool
    ) -> _HoistedBody | None:
        """Return a body in two; None if nothing is hoisted.

        `holds_constants` is True if constants may be used outside, and `runs` if the body is known
        to run at least once.
        """
        body, region = inside.bodies[number], inside.regions[number]

        def take() -> _HoistedBody | None:
            constants = keep(body.invars, region.loop_invariant)
            if holds_constants:
                constants = (*constants, *body.constvars)
            leaving = self._hoistable(body.eqns, constants, runs)
            return _split(inside, number, leaving) if leaving else None

        return self._taken(take, body, region, holds_constants, runs)

    def _hoistable(
        self, eqns: Sequence[JaxprEqn], constants: Sequence[Var], runs: bool
    ) -> list[JaxprEqn]:
        """Return the equations to hoist from a body, in order."""
        # For each invariant value, the bytes of the largest value outside the loop among itself and
        # the values that it is computed from.
        origin = {v: size_in_bytes(v.aval) for v in constants if is_array(v.aval)}
        invariant: list[JaxprEqn] = []
        paying: set[int] = set()
        for eqn in eqns:
            if eqn.effects or not all(type(v) is Literal or v in origin for v in eqn.invars):
                continue
            if self._staying[runs].at(eqn) or not all(is_array(v.aval) for v in eqn.outvars):
                continue
            source = 0
            for v in variables(eqn.invars):
                if _at_most(source, origin[v]):
                    source = origin[v]
            result = sum(size_in_bytes(v.aval) for v in eqn.outvars)
            pays = _is_worth_storing(eqn, result, source)
            grown = result if pays and _at_most(source, result) else source
            origin.update((v, grown) for v in eqn.outvars)
            invariant.append(eqn)
            if pays:
                paying.add(id(eqn))
        return needed_equations(invariant, (), lambda eqn: id(eqn) in paying)


def _must_stay(eqn: JaxprEqn) -> bool:
    return not traits(eqn).may_hoist


def _must_stay_if_idle(eqn: JaxprEqn) -> bool:
    """Return True if an equation must stay in a loop that may run no iteration: a `while`."""
    return _must_stay(eqn) or eqn.primitive.name == "while"


def _is_worth_storing(eqn: JaxprEqn, result: Any, source: Any) -> bool:
    """Return True if storing `result` bytes is cheaper than recomputing them in the loop.

    They are computed from values of at most `source` bytes.
    """
    like = traits(eqn)
    if like.moves:
        return False
    if source != 0 and (_at_most(result, SMALL) or _at_most(result, source)):
        return True
    return like.expensive or holds_jaxpr(eqn.params.values())


def _at_most(size: Any, limit: Any) -> bool:
    """Return True if one size is known to be no larger than another."""
    try:
        return bool(size <= limit)
    except jax.errors.InconclusiveDimensionOperation:
        return False


# --- the loop without the hoisted equations -------------------------------------------------------


def _split(inside: Regions, number: int, leaving: list[JaxprEqn]) -> _HoistedBody:
    """Split a body into the hoisted equations and the rest."""
    body, region = inside.bodies[number], inside.regions[number]
    assert region.constants is not None
    eqns, hoisted = partition(body, leaving)
    read = free_variables(eqns, body.outvars)
    # A constant that other bodies also take stays, whether it is read or not.
    constants = inside.operands[region.constants]
    used = [i not in constants or v in read for i, v in zip(region.ins, body.invars, strict=True)]
    stay = dict(zip(region.ins, used, strict=True))
    flags = [stay.get(i, True) for i in range(len(inside.eqn.invars))]
    invars = inside.arguments(region, body.invars, {region.constants: hoisted}, flags)
    rest = narrow(body, invars, body.outvars, eqns)
    return _HoistedBody(
        narrow(body, keep(body.invars, region.loop_invariant), hoisted, leaving), used, rest
    )


# --- schedule -------------------------------------------------------------------------------------

#: The equations of a body in another order, as numbers.
Order = list[int]


@dataclass(frozen=True)
class Sink(Pass):
    """Move each equation to just before its first reader, if that lowers peak memory.

    Values are computed when they are needed, so fewer are alive at once. A body keeps its order
    unless the new order has a strictly lower peak.

    Note:
        `schedule` compares this order with others, and uses the best.

    Example:
        def f(x):
            a, b = jnp.sin(x), jnp.exp(x)
            return jnp.cos(b.sum()) + a.sum()

        $ jaxprtool opt f.py:f --args "f32[9]" -p sink
        { lambda ; a:f32[9]. let
            b:f32[9] = exp a
            c:f32[] = reduce_sum[axes=(0,) out_sharding=None] b
            d:f32[9] = sin a
            e:f32[] = reduce_sum[axes=(0,) out_sharding=None] d
            f:f32[] = cos c
            g:f32[] = add f e
          in (g,) }
    """

    name: ClassVar[str] = "sink"
    group: ClassVar[str] = "schedule and compile"

    def __call__(self, program: Program) -> Program:
        return program.replace(jaxpr=_Scheduler(lambda graph: [sunk(graph)])(program.jaxpr))


@dataclass(frozen=True)
class Schedule(Pass):
    """Reorder equations, at every depth, to lower the peak of live bytes.

    The best of several orders is used; the peak never rises. Effects keep their order, and values
    do not change.

    Args:
        memory: Minimize the peak. If False, move each equation close to its readers, whatever the
            peak.

    Note:
        XLA schedules again when it compiles. The new order matters most where a program runs
        equation by equation, and in listings.
    """

    name: ClassVar[str] = "schedule"
    group: ClassVar[str] = "schedule and compile"

    memory: bool = True

    def __call__(self, program: Program) -> Program:
        scheduler = _Scheduler(_orders if self.memory else _close, always=not self.memory)
        return program.replace(jaxpr=scheduler(program.jaxpr))


# --- the walk ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DependencyGraph:
    """The equations of a body by number: their values, and which must run before and after each.

    The numbers of `before` are in rising order. `pinned` are those that keep their order.
    """

    lifetimes: Lifetimes
    before: list[list[int]]
    after: list[list[int]]
    pinned: list[bool]


class _Scheduler:
    """Reorder the bodies of a program, each by the best of the orders that `orders` returns.

    With `always` the first is taken, even if it is not better.
    """

    def __init__(self, orders: Callable[[DependencyGraph], Iterable[Order]], always: bool = False):
        self._orders = orders
        self._always = always
        self._liveness = Liveness()
        self._memo = Memo()
        self._sows = Contains(lambda eqn: eqn.primitive is sow_p)
        self._has_rule = Contains(lambda eqn: traits(eqn).custom_derivative)

    def __call__(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr, closed or open, reordered at every depth; itself if that is no better."""
        return self._memo(lambda: self._reordered(jaxpr), jaxpr)

    def _reordered(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        body = jaxcompat.open_jaxpr(jaxpr)
        eqns = body.eqns if is_flat(body) else [with_bodies(eqn, self) for eqn in body.eqns]
        order = self._order(eqns, body.outvars)
        if order is not None:
            eqns = [eqns[i] for i in order]
        elif not any(map(is_not, eqns, body.eqns)):
            return jaxpr
        return jaxcompat.replace_jaxpr(jaxpr, eqns=eqns)

    def _order(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> Order | None:
        """Return the best order; None if it is the current one, or liveness is not known."""
        lifetimes = self._liveness.lifetimes(eqns, results)
        if lifetimes is None:
            return None
        lowest = lifetimes.peak(range(len(eqns)))
        bound = _bound(lifetimes)
        best: Order | None = None
        if not self._always and lowest <= bound:
            return None
        for order in self._orders(self._graph(eqns, lifetimes)):
            peak = lifetimes.peak(order)
            if peak < lowest or self._always:
                best, lowest = order, peak
                if peak <= bound:
                    break
        return None if best == list(range(len(eqns))) else best

    def _graph(self, eqns: Sequence[JaxprEqn], lifetimes: Lifetimes) -> DependencyGraph:
        pinned = keep_order(eqns, self._sows)
        needs = [{lifetimes.defined_by[value] for value in reads} for reads in lifetimes.reads]
        in_order = pairwise(i for i, flag in enumerate(pinned) if flag)
        for i, j in (*in_order, *_donations(eqns), *_last_readers(eqns, self._has_rule)):
            needs[j].add(i)
        before = list(map(sorted, needs))
        after: list[list[int]] = [[] for _ in eqns]
        for i, earlier in enumerate(before):
            for j in earlier:
                after[j].append(i)
        return DependencyGraph(lifetimes, before, after, pinned)


def keep_order(eqns: Sequence[JaxprEqn], sows: Contains) -> list[bool]:
    """Return which equations keep their order: those with effects, that sow, or on refs.

    Args:
        eqns: The equations of a body.
        sows: Whether an equation sows a value.
    """
    pinned = [bool(eqn.effects) or sows.at(eqn) for eqn in eqns]
    if any(pinned):  # if no equation has effects, no ref is written: reads may be reordered
        for i, eqn in enumerate(eqns):
            atoms = *eqn.invars, *eqn.outvars
            pinned[i] |= any(isinstance(v.aval, jaxcompat.AbstractRef) for v in atoms)
    return pinned


def _donations(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[int, int]]:
    """Yield calls that donate an operand and its other readers, as pairs with a fixed order."""
    variables = DefUse(eqns)
    for v, i in donated_operands(eqns):
        yield from ((min(i, j), max(i, j)) for j in variables.readers(v) if j != i)


def _last_readers(eqns: Sequence[JaxprEqn], has_rule: Contains) -> Iterator[tuple[int, int]]:
    """Yield readers of a weakly typed value and the last of them, if one has a derivative rule.

    Each pair must keep its order. JAX adds cotangents from the last reader on, and a sum is as
    weakly typed as its first term; a user's rule may return a strongly typed one.
    """
    variables = DefUse(eqns)
    for v in variables.uses:
        if is_weak(v.aval):
            *others, last = variables.readers(v)
            if others and any(has_rule.at(eqns[i]) for i in (*others, last)):
                yield from ((i, last) for i in others)


def _bound(lifetimes: Lifetimes) -> int:
    """Return a lower bound of the peak of every order: around some equation, or at the end."""
    sizes = lifetimes.sizes
    around = (
        working + sum(sizes[value] for value in reads)
        for working, reads in zip(lifetimes.working, lifetimes.reads, strict=True)
    )
    return max(max(around, default=0), sum(sizes[value] for value in lifetimes.kept))


# --- orders -----------------------------------------------------------------------------------


def _orders(graph: DependencyGraph) -> Iterator[Order]:
    yield sunk(graph)
    for greedy in (False, True):
        yield forward_order(graph, greedy)
        yield backward_order(graph, greedy)
    yield depth_first(graph, by_need=True)


def _close(graph: DependencyGraph) -> Iterator[Order]:
    yield depth_first(graph, by_need=False)


def sunk(graph: DependencyGraph) -> Order:
    """Return the order with equations just before their first readers.

    Equations that free more bytes than they allocate stay in place.
    """
    lifetimes = graph.lifetimes
    staying = []
    for i, makes in enumerate(lifetimes.makes):
        allocated = sum(lifetimes.sizes[value] for value in makes)
        freed = sum(
            lifetimes.sizes[value]
            for value in lifetimes.reads[i]
            if lifetimes.readers[value][-1] == i and value not in lifetimes.kept
        )
        read = any(lifetimes.readers[value] or value in lifetimes.kept for value in makes)
        staying.append(graph.pinned[i] or not read or freed > allocated)
    roots = [i for i, stays in enumerate(staying) if stays]
    return _from_roots(graph.before, (*roots, *range(len(staying))))


def depth_first(graph: DependencyGraph, *, by_need: bool) -> Order:
    """Return the order with each result after the equations it needs, depth first.

    `by_need` computes first the operands that need most bytes beyond those of their own results;
    otherwise the operands keep their original order.
    """
    before = graph.before
    if by_need:
        before = []
        needs: list[int] = []
        extra: list[int] = []
        result_bytes = [
            sum(graph.lifetimes.sizes[v] for v in makes) for makes in graph.lifetimes.makes
        ]
        for i, earlier in enumerate(graph.before):
            inner = sorted(earlier, key=extra.__getitem__, reverse=True)
            before.append(inner)
            allocated = need = 0
            for j in inner:
                need = max(need, allocated + needs[j])
                allocated += result_bytes[j]
            needs.append(max(need, allocated + graph.lifetimes.working[i]))
            extra.append(needs[i] - result_bytes[i])
    roots = [i for i, later in enumerate(graph.after) if not later]
    return _from_roots(before, roots)


def _from_roots(before: Sequence[Sequence[int]], roots: Sequence[int]) -> Order:
    """Return the roots in order, each after the equations it needs that are still missing."""
    order: Order = []
    state = [0] * len(before)  # 1 if it is waited for, 2 if it is in the order
    stack: list[int] = []
    for root in roots:
        stack.append(root)
        while stack:
            i = stack[-1]
            if state[i] == 0:
                state[i] = 1
                stack.extend(j for j in reversed(before[i]) if state[j] == 0)
                continue
            stack.pop()
            if state[i] == 1:
                state[i] = 2
                order.append(i)
    return order


def forward_order(graph: DependencyGraph, greedy: bool) -> Order:
    """Return a list schedule from the front: ready equations that shrink the live bytes come first.

    Among the others, the one that adds the fewest bytes comes next if `greedy`, else the first in
    the original order.
    """
    lifetimes, sizes = graph.lifetimes, graph.lifetimes.sizes
    left = [len(readers) for readers in lifetimes.readers]
    # The sum of the numbers of the remaining readers: for the last one, its own.
    rest = [sum(readers) for readers in lifetimes.readers]
    change = [
        sum(sizes[v] for v in makes if lifetimes.readers[v] or v in lifetimes.kept)
        for makes in lifetimes.makes
    ]
    for value, count in enumerate(left):
        if count == 1 and value not in lifetimes.kept:
            change[rest[value]] -= sizes[value]

    def take(i: int) -> Iterator[int]:
        for value in lifetimes.reads[i]:
            left[value] -= 1
            rest[value] -= i
            if left[value] == 1 and value not in lifetimes.kept:
                change[rest[value]] -= sizes[value]
                yield rest[value]

    return _by_change(change, take, graph.before, graph.after, greedy, sign=1)


def backward_order(graph: DependencyGraph, greedy: bool) -> Order:
    """Return a list schedule from the back, of equations that nothing remaining needs."""
    lifetimes, sizes = graph.lifetimes, graph.lifetimes.sizes
    live = [value in lifetimes.kept for value in range(len(sizes))]
    change = [
        sum(sizes[v] for v in reads if not live[v])
        - sum(sizes[v] for v in makes if lifetimes.readers[v] or live[v])
        for reads, makes in zip(lifetimes.reads, lifetimes.makes, strict=True)
    ]

    def take(i: int) -> Iterator[int]:
        for value in lifetimes.reads[i]:
            if not live[value]:
                live[value] = True
                for j in lifetimes.readers[value]:
                    change[j] -= sizes[value]
                    yield j

    return _by_change(change, take, graph.after, graph.before, greedy, sign=-1)[::-1]


def _by_change(
    change: Sequence[int],
    take: Callable[[int], Iterator[int]],
    waits_for: Sequence[Sequence[int]],
    nexts: Sequence[Sequence[int]],
    greedy: bool,
    sign: int,
) -> Order:
    """Take the equations one by one: among those that wait for none, the one with least change.

    `take` lowers the changes of other equations after one is taken, and yields these. On a tie the
    first is taken, or with the sign -1 the last; increases are equal unless `greedy`.
    """
    waiting, done = [len(others) for others in waits_for], [False] * len(change)
    order: Order = []
    heap: list[tuple[int, int]] = []

    def push(i: int) -> None:
        if not (waiting[i] or done[i]):
            heappush(heap, (change[i] if greedy else min(change[i], 0), sign * i))

    for i in range(len(change)):
        push(i)
    while heap:
        i = sign * heappop(heap)[1]
        if done[i]:
            continue
        done[i] = True
        order.append(i)
        for j in take(i):
            push(j)
        for j in nexts[i]:
            waiting[j] -= 1
            push(j)
    return order


# --- liveness -------------------------------------------------------------------------------------
# Compute how many bytes of a program's own values are alive at once, equation by equation.
#
# A value lives from the equation that defines it to its last use, and a result of the program to
# the end; arguments and constants belong to the caller. Nothing is computed in place. An equation
# with bodies also needs the largest peak of its bodies; a loop needs its own results besides, while
# the results of a call or branch are those of its body. The peak of a body with a value of symbolic
# size is unknown, and so is that of a body that holds such a body.


@dataclass(frozen=True)
class Lifetimes:
    """The values of a body's equations, as numbers, with their definitions and uses.

    `makes[i]` and `reads[i]` are the values of equation `i`, without duplicates, and `working[i]`
    the bytes that it needs while it runs, including its results. `sizes`, `defined_by` and
    `readers` have an entry per value; the results of the body, `kept`, are alive to the end.
    """

    makes: list[list[int]]
    reads: list[list[int]]
    working: list[int]
    sizes: list[int]
    defined_by: list[int]
    readers: list[list[int]]
    kept: frozenset[int]

    def peak(self, order: Sequence[int]) -> int:
        """Return the largest number of bytes alive at once if the equations run in this order."""
        left = [len(readers) for readers in self.readers]
        for value in self.kept:
            left[value] += 1
        live = most = 0
        sizes = self.sizes
        for i in order:
            most = max(most, live + self.working[i])
            for value in self.makes[i]:
                if left[value]:
                    live += sizes[value]
            for value in self.reads[i]:
                left[value] -= 1
                if not left[value]:
                    live -= sizes[value]
        return most


class Liveness:
    """Computes the peaks of bodies, each once, since equations may share them."""

    def __init__(self) -> None:
        self._peaks: dict[Jaxpr, int | None] = {}

    def peak(self, jaxpr: AnyJaxpr) -> int | None:
        """Return the most bytes of a jaxpr's own values alive at once, or None if unknown."""
        anchor = jaxcompat.open_jaxpr(jaxpr)
        if anchor not in self._peaks:
            lifetimes = self.lifetimes(anchor.eqns, anchor.outvars)
            order = range(len(anchor.eqns))
            self._peaks[anchor] = None if lifetimes is None else lifetimes.peak(order)
        return self._peaks[anchor]

    def lifetimes(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> Lifetimes | None:
        """Return the definitions and uses of the values of equations; None if a size is unknown."""
        number: dict[Var, int] = {}
        lifetimes = Lifetimes([], [], [], [], [], [], frozenset())
        for i, eqn in enumerate(eqns):
            reads = {number[v] for v in eqn.invars if type(v) is not Literal and v in number}
            for value in reads:
                lifetimes.readers[value].append(i)
            lifetimes.reads.append(sorted(reads))
            total, makes = 0, []
            for var in eqn.outvars:
                size = _size(var.aval)
                if size is None:
                    return None
                total += size
                if isinstance(var, DropVar):
                    continue
                number[var] = len(lifetimes.sizes)
                makes.append(number[var])
                lifetimes.sizes.append(size)
                lifetimes.defined_by.append(i)
                lifetimes.readers.append([])
            working = self._working(eqn, total)
            if working is None:
                return None
            lifetimes.makes.append(makes)
            lifetimes.working.append(working)
        kept = frozenset(number[v] for v in results if type(v) is not Literal and v in number)
        return Lifetimes(**{**vars(lifetimes), "kept": kept})

    def _working(self, eqn: JaxprEqn, results: int) -> int | None:
        """Return the bytes that an equation needs, given those of its results; None if unknown."""
        if not eqn.params or not holds_jaxpr(eqn.params.values()):
            return results
        peaks = [self.peak(body) for _, body in bodies(eqn)]
        known = [peak for peak in peaks if peak is not None]
        if len(known) != len(peaks):
            return None
        hungriest = max(known, default=0)
        inside = regions(eqn)
        # The results of a loop are allocated in addition to those of its body.
        loop = inside is not None and inside.repeats
        return results + hungriest if loop else max(results, hungriest)


def _size(aval: Aval) -> int | None:
    """Return the bytes of a value; 0 for a token, and None for a symbolic size."""
    return size_of(aval) if hasattr(aval, "shape") else 0
