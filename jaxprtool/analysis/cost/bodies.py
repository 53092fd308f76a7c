"""What the equations of each body of a program cost, where it runs once.

Bytes are those that are left once equations are fused, by the model of `analysis.kernels`: of the
values that an equation reads, those that lie in memory, and of those that it gives, those that are
written there. Calls are opened, unless that makes equations without end; loops and branches are
equations that hold bodies of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.analysis.cost.rules import (
    collective,
    cost_rules,
    product_of,
    size_in_bytes,
    work_of,
)
from jaxprtool.analysis.cost.work import NOTHING, Work
from jaxprtool.analysis.kernels import Kernels, Node, Opens
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.regions import Regions
from jaxprtool.ir.structured import ShardMap, sub_jaxprs, view
from jaxprtool.ir.symbols import Sizes
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn

#: Calls within calls may be equations without end.
_MOST = 300_000


@dataclass(slots=True)
class Item:
    """An equation of a body, with the equations of the calls that were opened around it.

    Attributes:
        node: The equation, and which values it reads and makes.
        work: What it does in one run, without the bodies that it holds.
        bodies: The bodies that it holds, and runs.
        devices: On how many devices it runs, inside of the program's: those of a `shard_map`.
        product: What it is a product of, if it is one (`rules.product_of`).
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
        """How values pass into the bodies, if that is known."""
        return self.node.held


@dataclass(frozen=True)
class Body:
    """The equations of a body, and the type of each value by its number."""

    kernels: Kernels
    items: tuple[Item, ...]


class Bodies:
    """The bodies of a program, each looked at once.

    Args:
        symbols: Sizes of the program's symbols at which it is decided what is written to memory.
    """

    def __init__(self, symbols: Sizes) -> None:
        self._symbols = symbols
        self._known: dict[Jaxpr, Body] = {}
        self._meshes: dict[int, int] = {}
        #: How many equations there are of each primitive of which the cost is not known.
        self.unknown: Counter[str] = Counter()
        #: Whether there is a collective.
        self.communicates = False

    def __getitem__(self, jaxpr: AnyJaxpr) -> Body:
        body = jaxcompat.open_jaxpr(jaxpr)
        if body not in self._known:
            opens: Opens = "inlined" if count_equations(body) < _MOST else "none"
            kernels = Kernels(body, opens, self._symbols)
            sizes = _sizes(body, kernels) if self._symbols else kernels.sizes
            items = tuple(self._item(node, kernels, sizes) for node in kernels.nodes)
            self._known[body] = Body(kernels, items)
        return self._known[body]

    def _item(self, node: Node, kernels: Kernels, sizes: Sequence[Any]) -> Item:
        eqn, bodies = node.eqn, _run_bodies(node)
        devices = prod(map(self._devices, node.calls)) if node.calls else 1
        if bodies:
            return Item(node, NOTHING, bodies, devices * self._devices(eqn))
        like = traits(eqn)
        if like.collective:
            work: Work | None = collective(eqn)
            self.communicates = True
        else:
            work = work_of(eqn)
        if work is None:
            self.unknown[eqn.primitive.name] += 1
            work = NOTHING
        work = _with_bytes(work, node, kernels, sizes)
        return Item(node, work, (), devices, product_of(eqn) if like.expensive else "")

    def _devices(self, eqn: JaxprEqn) -> int:
        """Return on how many devices a call runs its body."""
        if id(eqn) not in self._meshes:
            of = view(eqn)
            self._meshes[id(eqn)] = of.mesh.size if isinstance(of, ShardMap) else 1
        return self._meshes[id(eqn)]

    @property
    def has_mesh(self) -> bool:
        """Return True if something runs on several devices."""
        return any(size > 1 for size in self._meshes.values())


def _run_bodies(node: Node) -> tuple[Jaxpr, ...]:
    """Return the bodies of an equation whose cost is that of its bodies."""
    if node.held is not None:
        return tuple(map(jaxcompat.open_jaxpr, node.held.bodies))
    if not node.eqn.params or cost_rules.get(node.eqn.primitive.name) is not None:
        return ()
    return tuple(jaxcompat.open_jaxpr(body) for _, body in sub_jaxprs(node.eqn))


def _sizes(body: Jaxpr, kernels: Kernels) -> list[Any]:
    """Return the bytes of each value, with symbols."""
    sizes = [size_in_bytes(v.aval) for v in (*body.constvars, *body.invars)]
    for node in kernels.nodes:
        sizes += [size_in_bytes(v.aval) for v in node.eqn.outvars]
    return sizes


def _with_bytes(work: Work, node: Node, kernels: Kernels, sizes: Sequence[Any]) -> Work:
    """Return what an equation does, with what it reads from memory and writes to it."""
    read, written = work.bytes_read, work.bytes_written
    if node.absorbed:
        return work
    if not (read or written):
        values = set(node.reads)
        values.update([value for value, _ in node.broadcast])
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
