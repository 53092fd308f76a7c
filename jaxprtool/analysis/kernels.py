"""Which values a compiled program writes to memory: a model of how XLA fuses equations.

An equation that is computed element by element, or only moves elements, is *inlined* in the kernels
that read it, and computed again in each of them. Its value is *written* by a kernel of its own

- if a reader takes operands from memory: a product, a loop, a call that XLA keeps, the caller;
- if it is costly, a division, say, and several kernels read it.

A value that is written is read by all, unless computing it again takes no more than one array. A
reduction takes in the equation whose value it alone reads, and reads that one's operands from
memory, broadcast first if they are smaller. Calls are opened, but for those that XLA keeps, and a
reshape is the array that it is of.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.equations import fuses, size_of
from jaxprtool.ir.regions import Regions, regions
from jaxprtool.ir.symbols import Sizes, value_of
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Aval, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.identity import identity

#: Which calls are opened.
Opens: typing.TypeAlias = typing.Literal["inlined", "all", "none"]

_NO_SIZES: Sizes = MappingProxyType({})


@dataclass(slots=True)
class Node:
    """An equation that is no call that is opened; values are numbers.

    Attributes:
        eqn: The equation.
        held: Its regions, if it has bodies.
        reads: The values that it reads.
        makes: The values that it gives.
        fusible: Whether it may be inlined.
        places: Each operand as a value; None if it is a literal.
        calls: The calls that were opened around it, the outermost first.
        absorbed: Whether the reduction that alone reads it has taken it in.
        broadcast: The operands that are broadcast for a reduction, each with the bytes after.
    """

    eqn: JaxprEqn
    held: Regions | None
    reads: Sequence[int]
    makes: Sequence[int]
    fusible: bool
    places: Sequence[int | None]
    calls: tuple[JaxprEqn, ...] = ()
    absorbed: bool = False
    broadcast: Sequence[tuple[int, int]] = ()


class Kernels:
    """The nodes of a body, and which of its values are written and which inlined.

    Args:
        jaxpr: The body.
        opens: Which calls are opened: "all", "none", or those that are "inlined" by XLA.
        symbols: Sizes of symbols, at which it is decided what is written.

    Raises:
        UnknownSize: If a size is symbolic.
    """

    def __init__(self, jaxpr: Jaxpr, opens: Opens = "inlined", symbols: Sizes = _NO_SIZES) -> None:
        self.jaxpr = jaxpr
        self._opens, self._symbols = opens, symbols
        self.nodes: list[Node] = []
        #: The bytes of each value.
        self.sizes: list[int] = []
        #: The node that makes each value, -1 of arguments.
        self.maker: list[int] = []
        self._counts: list[int] = []
        #: The bytes and the elements of each type that was met, by its identity.
        self._measures: dict[int, tuple[int, int]] = {}
        env: dict[Var, int | None] = {
            v: self._value(v.aval, -1) for v in (*jaxpr.constvars, *jaxpr.invars)
        }
        #: The values that are constants and arguments.
        self.arguments = range(len(env))
        self._open(jaxpr, env, ())
        #: The value that each result is; None if it is a literal.
        self.given = [None if type(v) is Literal else env.get(v) for v in jaxpr.outvars]
        #: The results that are not arguments, each once.
        self.results = [
            v for v in dict.fromkeys(self.given) if v is not None and self.maker[v] >= 0
        ]
        #: Whether each value is written, and whether it is inlined; both, or neither, may be.
        self.written = [True] * len(self.sizes)
        self.inlined = [False] * len(self.sizes)
        self._fuse()

    def kernels(self) -> Iterable[int]:
        """Return the numbers of the nodes that are kernels."""
        for number, node in enumerate(self.nodes):
            if not node.fusible or (self.written[node.makes[0]] and not node.absorbed):
                yield number

    def _open(self, jaxpr: Jaxpr, env: dict[Var, int | None], calls: tuple[JaxprEqn, ...]) -> None:
        """Add the nodes of a body, in whose place calls are opened; None is a literal."""
        for eqn in jaxpr.eqns:
            # Tuples of numbers, which the garbage collector need not look at.
            reads = tuple([None if type(v) is Literal else env[v] for v in eqn.invars])
            held = regions(eqn)
            if held is not None and held.kind == "call" and self._is_opened(eqn):
                body, region = jaxcompat.open_jaxpr(held.bodies[0]), held.regions[0]
                inner = dict.fromkeys(body.constvars) | {
                    v: reads[i] for v, i in zip(body.invars, region.ins, strict=True)
                }
                self._open(body, inner, (*calls, eqn))
                for out, atom in zip(region.outs, body.outvars, strict=True):
                    assert out is not None
                    env[eqn.outvars[out]] = None if type(atom) is Literal else inner[atom]
            elif traits(eqn).gives and _is_operand(eqn):
                env.update(zip(eqn.outvars, reads, strict=False))
            else:
                number = len(self.nodes)
                makes = tuple([self._value(v.aval, number) for v in eqn.outvars])
                env.update(zip(eqn.outvars, makes, strict=True))
                own = tuple([v for v in reads if v is not None])
                self.nodes.append(Node(eqn, held, own, makes, fuses(eqn), reads, calls))

    def _is_opened(self, eqn: JaxprEqn) -> bool:
        if self._opens == "inlined":
            return jaxcompat.mark_of(eqn) == "plain"
        return self._opens == "all"

    def _value(self, aval: Aval, maker: int) -> int:
        known = self._measures.get(identity(aval))
        if known is None:
            known = self._measures[identity(aval)] = self._measured(aval)
        size, count = known
        self.sizes.append(size)
        self.maker.append(maker)
        self._counts.append(count)
        return len(self.sizes) - 1

    def _measured(self, aval: Aval) -> tuple[int, int]:
        """Return the bytes and the number of elements of a value."""
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        if shape is not None and self._symbols:
            shape = tuple(value_of(n, self._symbols) for n in shape)
        if not all(type(n) is int for n in shape or ()):
            raise UnknownSize
        count = math.prod(shape or ())
        return 0 if shape is None or dtype is None else count * itemsize(dtype), count

    # --- what is fused ----------------------------------------------------------------------------

    def _fuse(self) -> None:
        """Decide what is written and inlined, from the last node to the first."""
        # Who takes a value from memory, and which one kernel inlines it, or _SEVERAL.
        needed = [False] * len(self.sizes)
        inlining: list[int | None] = [None] * len(self.sizes)
        readers = self._readers()
        for result in self.results:
            needed[result] = True
            readers[result] += 1
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            if node.absorbed:
                self.written[node.makes[0]] = False
                continue
            if not node.fusible:
                if traits(node.eqn).reduces:
                    self._absorb(node, readers)
                for value in node.reads:
                    needed[value] = True
                for value, _ in node.broadcast:
                    inlining[value] = _joined(inlining[value], number)
                continue
            made = node.makes[0]
            if traits(node.eqn).costly:
                written = needed[made] or inlining[made] == _SEVERAL
                inlined = not written
            else:
                written = needed[made]
                inlined = not written or self._reads_one(node)
            self.written[made], self.inlined[made] = written, inlined
            for value in node.reads:
                if written:
                    inlining[value] = _joined(inlining[value], number)
                if inlined and inlining[made] is not None:
                    inlining[value] = _joined(inlining[value], inlining[made])

    def _readers(self) -> list[int]:
        """Return how many nodes read each value."""
        readers = [0] * len(self.sizes)
        for node in self.nodes:
            for value in node.reads:
                readers[value] += 1
        return readers

    def _absorb(self, reduction: Node, readers: list[int]) -> None:
        """Let a reduction take in what is computed for it alone."""
        reads: list[int] = []
        broadcast: list[tuple[int, int]] = []
        for value in reduction.reads:
            node = self.nodes[self.maker[value]] if self.maker[value] >= 0 else None
            if node is None or not node.fusible or readers[value] > 1:
                reads.append(value)
                continue
            node.absorbed = True
            for operand in node.reads:
                if self.sizes[operand] < self.sizes[value]:
                    broadcast.append((operand, self.sizes[value]))
                else:
                    reads.append(operand)
        reduction.reads, reduction.broadcast = reads, broadcast

    def _reads_one(self, node: Node) -> bool:
        """Return True if an equation reads no more than one array that is not broadcast."""
        count = self._counts[node.makes[0]]
        whole = [v for v in node.reads if self._counts[v] >= count and not self._fills(v)]
        return len(whole) <= 1

    def _fills(self, value: int) -> bool:
        maker = self.maker[value]
        return maker >= 0 and traits(self.nodes[maker].eqn).fills


class UnknownSize(Exception):
    """A value has a symbolic size."""


#: More than one kernel.
_SEVERAL = -1


def _joined(kernel: int | None, other: int | None) -> int | None:
    """Return the kernel if both are the same, or one is None."""
    if kernel is None or kernel == other:
        return other
    return kernel if other is None else _SEVERAL


def _is_operand(eqn: JaxprEqn) -> bool:
    """Return True if the results are the operands themselves, in memory."""
    like = traits(eqn)
    if like.gives == "same":
        return True
    if like.gives != "layout":
        return False
    (out,), params = eqn.outvars, eqn.params
    shape: tuple[int, ...] = getattr(eqn.invars[0].aval, "shape", ())
    if not shape or size_of(out.aval) != size_of(eqn.invars[0].aval):
        return False
    # Axes of size 1 may be turned round, taken away and put anywhere.
    turned = [axis for axis in params.get("dimensions") or () if shape[axis] != 1]
    order = [axis for axis in params.get("permutation") or () if shape[axis] != 1]
    # A product takes the transpose of a matrix, or gives it, at no cost.
    return not turned and (len(order) <= 2 or order == sorted(order))
