"""Estimate the cost of the equations of each body of a program, for one run of the body.

Bytes are those that remain after fusion, by the model of `analysis.kernels`: an equation reads the
operands that are in memory, and writes the results that are written there. Calls are opened, unless
there would be too many equations; loops and branches have bodies of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.analysis.cost.rules import (
    collective,
    cost_rules,
    product_of,
    work_of,
)
from jaxprtool.analysis.cost.work import NOTHING, Work
from jaxprtool.analysis.kernels import Kernels, Node
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import size_in_bytes
from jaxprtool.ir.core.regions import Regions
from jaxprtool.ir.core.structured import ShardMap, run_jaxprs, view
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.shapes.symbols import Sizes
from jaxprtool.jaxcompat import DropVar, Jaxpr, JaxprEqn


@dataclass(slots=True)
class Item:
    """An equation of a body or of an opened call in it.

    Attributes:
        node: The equation, and the values that it reads and computes.
        work: The cost of one run, without its bodies.
        bodies: The bodies that it runs.
        devices: The number of devices that it runs on: those of the `shard_map` it is or is in.
        product: The precision of a matrix product (`rules.product_of`); "" for other equations.
    """

    node: Node
    work: Work
    bodies: tuple[Jaxpr, ...]
    devices: int
    product: str = ""

    @property
    def eqn(self) -> JaxprEqn:
        """The equation."""
        return self.node.eqn

    @property
    def held(self) -> Regions | None:
        """The regions of the equation, if it has any."""
        return self.node.held


@dataclass(frozen=True)
class CostedBody:
    """The equations of a body with their costs.

    Attributes:
        kernels: The fusion of the body.
        items: The equations, in order.
    """

    kernels: Kernels
    items: tuple[Item, ...]


class Bodies:
    """The bodies of a program, each visited once.

    Args:
        symbols: The sizes of symbolic dimensions at which fusion is decided.
    """

    def __init__(self, symbols: Sizes) -> None:
        self._symbols = symbols
        self._meshes: dict[int, int] = {}
        #: The number of equations of each primitive whose cost is unknown.
        self.unknown: Counter[str] = Counter()
        #: Whether the program has a collective.
        self.communicates = False

    @cached_method
    def __getitem__(self, body: Jaxpr) -> CostedBody:
        kernels = Kernels(body, symbols=self._symbols)
        sizes = _sizes(body, kernels) if self._symbols else kernels.sizes
        read = {value for node in kernels.nodes for value in node.reads} | set(kernels.results)
        items = tuple(
            self._item(node, kernels, sizes, read)
            for node in kernels.nodes
            if node.kind == "equation"
        )
        return CostedBody(kernels, items)

    def _item(
        self, node: Node, kernels: Kernels, sizes: Sequence[Any], read: Container[int]
    ) -> Item:
        eqn, bodies = node.eqn, _run_bodies(node)
        devices = prod(map(self._devices, node.calls)) if node.calls else 1
        if bodies:
            return Item(node, NOTHING, bodies, devices * self._devices(eqn))
        like = traits(eqn)
        if like.collective:
            work: Work | None = collective(eqn)
            self.communicates = True
        else:
            work = work_of(_with_drops(node, read))
        if work is None:
            self.unknown[eqn.primitive.name] += 1
            work = NOTHING
        work = _with_bytes(work, node, kernels, sizes)
        product = product_of(eqn) if like.expensive or like.opaque else ""
        return Item(node, work, (), devices, product)

    def _devices(self, eqn: JaxprEqn) -> int:
        """Return the number of devices that a call runs its body on."""
        if id(eqn) not in self._meshes:
            of = view(eqn)
            self._meshes[id(eqn)] = of.mesh.size if isinstance(of, ShardMap) else 1
        return self._meshes[id(eqn)]

    @property
    def has_mesh(self) -> bool:
        """True if a part of the program runs on several devices."""
        return any(size > 1 for size in self._meshes.values())


def _run_bodies(node: Node) -> tuple[Jaxpr, ...]:
    """Return the bodies of an equation whose cost is that of its bodies."""
    if node.held is not None:
        return node.held.jaxprs
    if not node.eqn.params or cost_rules.get(node.eqn.primitive.name) is not None:
        return ()
    return tuple(jaxcompat.open_jaxpr(body) for _, body in run_jaxprs(node.eqn))


def _with_drops(node: Node, read: Container[int]) -> JaxprEqn:
    """Return the equation of a node, with a `DropVar` for each result that nothing reads."""
    eqn = node.eqn
    if len(eqn.outvars) == 1:
        return eqn
    pairs = zip(eqn.outvars, node.makes, strict=True)
    return eqn.replace(outvars=[v if made in read else DropVar(v.aval) for v, made in pairs])


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


def _with_bytes(work: Work, node: Node, kernels: Kernels, sizes: Sequence[Any]) -> Work:
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
