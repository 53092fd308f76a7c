"""Estimate the cost of the equations of each body, and sum it over all runs and by group.

Bytes are those that remain after fusion, by the model of `analysis.kernels`: an equation reads the
operands that are in memory, and writes the results that are written there. Calls are opened, unless
there would be too many equations; loops and branches have bodies of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax

from jaxprtool import jaxcompat
from jaxprtool.analysis.devices import ANY_UNIT
from jaxprtool.analysis.kernels import KernelNode, Kernels
from jaxprtool.commands.cost.rules import (
    NOTHING,
    Work,
    collective,
    cost_rules,
    maximum_work,
    minimum_work,
    product_of,
    runs_of,
    total,
    trip_count,
    work_of,
)
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.equations import fields_of, size_in_bytes
from jaxprtool.ir.regions import Regions, ShardMap, regions, run_jaxprs
from jaxprtool.ir.rules import rule
from jaxprtool.ir.symbols import Sizes
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import DropVar, Jaxpr, JaxprEqn

if TYPE_CHECKING:
    from jaxprtool.commands.cost.kernels import KernelCost, KernelEquation


@rule(cost_rules, "pallas_call")
def _pallas_call(eqn: JaxprEqn) -> Work | None:
    """Return the cost of a call of a kernel, or the author's estimate if its body is unknown."""
    from jaxprtool.commands.cost.kernels import counted_kernel

    if (cost := counted_kernel(eqn)) is not None:
        read, written = cost.touched("input"), cost.touched("output")
        return cost.most._replace(bytes_read=read, bytes_written=written)
    estimate = fields_of(eqn.params.get("cost_estimate"))
    if estimate is None:
        return None
    _, figures = estimate
    written = sum(size_in_bytes(v.aval) for v in eqn.outvars)
    read = max(figures["bytes_accessed"] - written, 0)
    return Work(figures["flops"], figures["transcendentals"], read, written)


# --- bodies ---------------------------------------------------------------------------------------
# Estimate the cost of the equations of each body of a program, for one run of the body.


@dataclass(slots=True)
class Item:
    """An equation of a body or of an opened call in it.

    Attributes:
        node: The equation, and the values that it reads and computes.
        work: The cost of one run, without its bodies.
        bodies: The bodies that it runs.
        devices: The number of devices that it runs on: those of the `shard_map` it is or is in.
        product: The precision of a matrix product (`rules.product_of`); "" for other equations.
        kernel: The equations of a Pallas kernel, whose operations are not in `work`.
    """

    node: KernelNode
    work: Work
    bodies: tuple[Jaxpr, ...]
    devices: int
    product: str = ""
    kernel: KernelCost | None = None

    @property
    def eqn(self) -> JaxprEqn:
        """The equation."""
        return self.node.eqn

    @property
    def held(self) -> Regions | None:
        """The regions of the equation, if it has any."""
        return self.node.held

    def inside(self, inner: KernelEquation, least: Work, most: Work, product: str) -> Item:
        """Return an equation of the kernel, with its cost in a call, as an item."""
        node = replace(self.node, eqn=inner.eqn, calls=(*self.node.calls, self.eqn, *inner.path))
        return Item(node, most, (), self.devices, product)


@dataclass(frozen=True)
class CostedBody:
    """The equations of a body with their costs.

    Attributes:
        kernels: The fusion of the body.
        items: The equations, in order.
    """

    kernels: Kernels
    items: tuple[Item, ...]


class BodyCosts:
    """The bodies of a program, each visited once.

    Args:
        symbols: The sizes of symbolic dimensions at which fusion is decided.
        has_bytes: Whether costs have the bytes that equations read and write.
    """

    def __init__(self, symbols: Sizes, has_bytes: bool = True) -> None:
        self._symbols, self._has_bytes = symbols, has_bytes
        self._meshes: dict[int, int] = {}
        self._kernels: dict[int, KernelCost | None] = {}
        #: The number of equations of each primitive whose cost is unknown.
        self.unknown: Counter[str] = Counter()
        #: Whether the program has a collective.
        self.communicates = False

    @cached_method
    def __getitem__(self, body: Jaxpr) -> CostedBody:
        kernels = Kernels(body, symbols=self._symbols, fuses=self._has_bytes)
        sizes = _sizes(body, kernels) if self._symbols else kernels.sizes
        read = {value for node in kernels.nodes for value in node.reads} | set(kernels.results)
        items = tuple(
            self._item(node, kernels, sizes, read)
            for node in kernels.nodes
            if node.kind == "equation"
        )
        return CostedBody(kernels, items)

    def _item(
        self, node: KernelNode, kernels: Kernels, sizes: Sequence[Any], read: Container[int]
    ) -> Item:
        eqn, bodies = node.eqn, _run_bodies(node)
        devices = prod(map(self._devices, node.calls)) if node.calls else 1
        if bodies:
            return Item(node, NOTHING, bodies, devices * self._devices(eqn))
        like = traits(eqn)
        kernel = self._kernel(eqn)
        if like.collective:
            work: Work | None = collective(eqn)
            self.communicates = True
        elif kernel is not None:
            work = Work(bytes_read=kernel.touched("input"), bytes_written=kernel.touched("output"))
            self.unknown.update(kernel.uncounted)
        else:
            work = work_of(_with_drops(node, read))
        if work is None:
            self.unknown[eqn.primitive.name] += 1
            work = NOTHING
        if self._has_bytes:
            work = _with_bytes(work, node, kernels, sizes)
        product = product_of(eqn) if like.expensive or like.opaque else ""
        if kernel is not None:
            return Item(node, work, (), devices, kernel=kernel)
        return Item(node, work, (), devices, product)

    def _kernel(self, eqn: JaxprEqn) -> KernelCost | None:
        """Return the cost of a Pallas kernel; None for other equations."""
        if not traits(eqn).opaque:
            return None
        if id(eqn) not in self._kernels:
            from jaxprtool.commands.cost.kernels import counted_kernel  # few programs have kernels

            self._kernels[id(eqn)] = counted_kernel(eqn)
        return self._kernels[id(eqn)]

    def members_of_kernels(self) -> Iterator[int]:
        """Yield the `id` of each equation inside of a kernel; all of them are live."""
        for kernel in filter(None, self._kernels.values()):
            for equation, *_ in kernel.equations:
                yield from map(id, (*equation.path, equation.eqn))

    def _devices(self, eqn: JaxprEqn) -> int:
        """Return the number of devices that a call runs its body on."""
        if eqn.primitive.name not in ShardMap.primitives:
            return 1
        self._meshes[id(eqn)] = size = ShardMap.of(eqn).mesh.size
        return size

    @property
    def has_mesh(self) -> bool:
        """True if a part of the program runs on several devices."""
        return any(size > 1 for size in self._meshes.values())


def _run_bodies(node: KernelNode) -> tuple[Jaxpr, ...]:
    """Return the bodies of an equation whose cost is that of its bodies."""
    if node.held is not None:
        return node.held.jaxprs
    if not node.eqn.params or cost_rules.get(node.eqn.primitive.name) is not None:
        return ()
    return tuple(jaxcompat.open_jaxpr(body) for _, body in run_jaxprs(node.eqn))


def _with_drops(node: KernelNode, read: Container[int]) -> JaxprEqn:
    """Return the equation of a node, with a `DropVar` for each result that nothing reads."""
    eqn = node.eqn
    if len(eqn.outvars) == 1:
        return eqn
    pairs = zip(eqn.outvars, node.makes, strict=True)
    return eqn.replace(outvars=[v if value in read else DropVar(v.aval) for v, value in pairs])


def _sizes(body: Jaxpr, kernels: Kernels) -> list[Any]:
    """Return the bytes of each value, as polynomials in the symbols."""
    sizes = [size_in_bytes(v.aval) for v in (*body.constvars, *body.invars)]
    for node in kernels.nodes:
        if node.kind == "equation":
            sizes += [size_in_bytes(v.aval) for v in node.eqn.outvars]
        elif node.kind == "broadcast":
            (out,), dtype = node.eqn.outvars, node.eqn.invars[0].aval.dtype
            sizes.append(size_in_bytes(out.aval.update(dtype=dtype)))
        else:
            sizes += [sizes[v] for v in node.reads]
    return sizes


def _with_bytes(work: Work, node: KernelNode, kernels: Kernels, sizes: Sequence[Any]) -> Work:
    """Add to the cost of an equation the bytes that it reads from memory and writes to it."""
    read, written = work.bytes_read, work.bytes_written
    if node.absorbed:
        return work
    if not (read or written):
        values = set(node.reads)
        for value in values:
            if kernels.written[value] and not (node.fusible and kernels.inlined[value]):
                read += sizes[value]
    if not written:
        written = sum([sizes[value] for value in node.makes if kernels.written[value]])
    if work is NOTHING and not (read or written):
        return NOTHING
    return Work(
        work.flops,
        work.transcendentals,
        read,
        written,
        work.random_numbers,
        work.bytes_communicated,
    )


# --- tallies --------------------------------------------------------------------------------------
# Sum the costs of a program's equations by group. Each body is summed once.
#
# A body counts as often as it runs: that of a scan in each iteration, that of a call at each call.
# A `cond` has a range of costs, from the cheapest branch to the most expensive. A `while` with an
# unknown trip count counts as one iteration. A `Grouping` determines the group of an equation
# within its body, and lifts the groups of a body to the enclosing equation.

#: The key of a group; any hashable value.
Key: TypeAlias = Any


class Grouping(Protocol):
    """A way to group equations."""

    def key(self, item: Item, body: CostedBody) -> Key:
        """Return the group of an equation, within the body that it is in."""

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        """Return the group, in `body`, of a group in the `number`-th body of an equation."""


@dataclass(slots=True)
class CostTally:
    """The cost of a group.

    Attributes:
        least: The cost with the cheapest branches.
        most: The cost with the most expensive branches.
        per_round: Whether a part is in a loop with an unknown trip count, and counted once.
        products: The maximum number of FLOPs of matrix products by precision, and of what any unit
            may compute (`rules.product_of`).
    """

    least: Work = NOTHING
    most: Work = NOTHING
    per_round: bool = False
    products: dict[str, Any] = field(default_factory=dict)

    def times(self, count: Any) -> CostTally:
        """Return the cost of `count` runs."""
        if count == 1:
            return self
        products = {of: flops * count for of, flops in self.products.items()}
        return CostTally(self.least.times(count), self.most.times(count), self.per_round, products)

    def add_items(self, items: Iterable[tuple[Work, str]]) -> None:
        """Add the costs of equations, each with the precision of a product, or ""."""
        works = []
        for work, product in items:
            works.append(work)
            if product:
                flops = work.flops + (work.transcendentals if product == ANY_UNIT else 0)
                self.products[product] = self.products.get(product, 0) + flops
        done = total(works)
        self.add(CostTally(done, done))

    def add(self, other: CostTally) -> None:
        """Add the cost of another group."""
        same = self.least is self.most and other.least is other.most
        self.most += other.most
        self.least = self.most if same else self.least + other.least
        self.per_round |= other.per_round
        for of, flops in other.products.items():
            self.products[of] = self.products.get(of, 0) + flops


Tallies = dict[Key, CostTally]


class Sums:
    """The costs of a program's bodies, by group.

    Args:
        bodies: The bodies.
        grouping: How equations are grouped.
        all_devices: Whether a `shard_map` counts on all its devices, or on one.
    """

    def __init__(self, bodies: BodyCosts, grouping: Grouping, all_devices: bool = True) -> None:
        self._bodies, self._grouping, self._all_devices = bodies, grouping, all_devices

    @cached_method
    def __getitem__(self, jaxpr: Jaxpr) -> Tallies:
        body, sums = self._bodies[jaxpr], Tallies()
        works: defaultdict[Key, list[tuple[Work, str]]] = defaultdict(list)
        for item in body.items:
            devices = item.devices if self._all_devices else 1
            if item.bodies:
                for key, tally in self.inside(item, body).items():
                    _add(sums, key, tally.times(devices))
            elif item.work is not NOTHING:
                key = self._grouping.key(item, body)
                works[key].append((item.work.times(devices), item.product))
            if item.kernel is not None:
                for key, tally in self._inside_kernel(item, item.kernel, body):
                    _add(sums, key, tally.times(devices))
        for key, items in works.items():
            sums.setdefault(key, CostTally()).add_items(items)
        return sums

    def inside(self, item: Item, body: CostedBody) -> Tallies:
        """Return the groups of an equation's bodies, lifted to it, for one run of the equation."""
        lifted = self._grouping.lifted
        by_body: list[Tallies] = []
        for number, inside in enumerate(item.bodies):
            tallies: Tallies = {}
            for key, tally in self[inside].items():
                _add(tallies, lifted(key, item, body, number), tally)
            by_body.append(tallies)
        if item.held is None:
            return together(by_body)
        if item.held.kind == "branch":
            return either_branch(by_body)
        count = trip_count(item.held)
        if count is not None:
            return {key: tally.times(count) for key, tally in together(by_body).items()}
        for tally in (sums := together(by_body)).values():
            tally.per_round = True
        return sums

    def _inside_kernel(
        self, item: Item, kernel: KernelCost, body: CostedBody
    ) -> Iterator[tuple[Key, CostTally]]:
        """Yield the costs of the equations of a kernel in a call, and their groups."""
        for equation in kernel.equations:
            inner, least, most, product = equation
            key = self._grouping.key(item.inside(*equation), body)
            flops = {product: most.flops} if product else {}
            tally = CostTally(least, most, inner.runs.per_round, flops)
            yield self._grouping.lifted(key, item, body, 0), tally


def _add(sums: Tallies, key: Key, tally: CostTally) -> None:
    there = sums.get(key)
    if there is None:
        sums[key] = replace(tally, products=dict(tally.products))
    else:
        there.add(tally)


def together(by_body: Iterable[Tallies]) -> Tallies:
    """Return the costs of each group over bodies that all run."""
    sums: Tallies = {}
    for tallies in by_body:
        for key, tally in tallies.items():
            _add(sums, key, tally)
    return sums


def either_branch(branches: list[Tallies]) -> Tallies:
    """Return the range of costs of each group, over branches of which one runs."""
    nothing = CostTally()
    ranges: Tallies = {}
    for key in dict.fromkeys(key for tallies in branches for key in tallies):
        costs = [tallies.get(key, nothing) for tallies in branches]
        ranges[key] = CostTally(
            minimum_work(tally.least for tally in costs),
            maximum_work(tally.most for tally in costs),
            any(tally.per_round for tally in costs),
            {of: _most(of, costs) for of in dict.fromkeys(of for t in costs for of in t.products)},
        )
    return ranges


def _most(of: str, tallies: Iterable[CostTally]) -> Any:
    return reduce(jax.core.max_dim, (tally.products.get(of, 0) for tally in tallies))


# --- by equation ----------------------------------------------------------------------------------
# Count the operations of an equation, including its bodies.


class Operations:
    """The FLOPs and transcendentals of equations; each body is visited once.

    The most expensive branch counts, and all devices of a `shard_map`. A loop with an unknown trip
    count counts as one iteration, and an equation with an unknown cost as 0.
    """

    def of(self, eqn: JaxprEqn) -> Any:
        """Return the number of operations of an equation, which may be symbolic."""
        control = regions(eqn)
        if control is not None:
            return self._held(control)
        if inner := _inner(eqn):
            return sum(map(self._body, inner))
        work = None if traits(eqn).collective else work_of(eqn)
        return 0 if work is None else work.flops + work.transcendentals

    def is_known(self, eqn: JaxprEqn) -> bool:
        """Return whether the costs of an equation and of all equations in its bodies are known."""
        control = regions(eqn)
        if bodies := _inner(eqn) if control is None else control.jaxprs:
            return all(map(self._is_known, bodies))
        return traits(eqn).collective or work_of(eqn) is not None

    def _held(self, control: Regions) -> Any:
        counts = list(map(self._body, control.jaxprs))
        if control.kind == "branch":
            return reduce(jax.core.max_dim, counts)
        devices = control.view.mesh.size if isinstance(control.view, ShardMap) else 1
        return sum(counts) * runs_of(control) * devices

    @cached_method
    def _body(self, jaxpr: Jaxpr) -> Any:
        return sum(map(self.of, jaxpr.eqns))

    @cached_method
    def _is_known(self, jaxpr: Jaxpr) -> bool:
        return all(map(self.is_known, jaxpr.eqns))


def _inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs that an equation without regions runs; none if a rule has its cost."""
    if cost_rules.get(eqn.primitive.name) is not None:
        return []
    return [jaxcompat.open_jaxpr(body) for _, body in run_jaxprs(eqn)]
