"""A model of XLA's fusion: which values a compiled program writes to memory.

An elementwise equation, or one that only moves elements, is *inlined* into the kernels that read
it, and computed again in each of them. Its value is *written* to memory by a kernel of its own

- if a reader takes its operands from memory: a product, a loop, a call that XLA keeps, the caller;
- if it is costly, such as a division, and several kernels read it.

A written value is read from memory by all readers, unless computing it again reads at most one
array. A reduction absorbs an equation that it alone reads, and reads the operands of that from
memory; smaller operands are broadcast in memory first. Calls are inlined, except those that XLA
keeps, and a reshape is the same array as its operand.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxprtool import jaxcompat
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.basics.dtypes import itemsize
from jaxprtool.ir.core.equations import fuses, size_of
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.shapes.symbols import Sizes, value_of
from jaxprtool.jaxcompat import Aval, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.identity import identity

#: The calls that are opened, so that their equations are nodes: those that XLA inlines, all, or
#: none.
Opens: typing.TypeAlias = typing.Literal["inlined", "all", "none"]

#: The maximum number of equations of a body whose calls are opened: nested calls may have
#: exponentially many.
MOST_OPENED = 300_000

_NO_SIZES: Sizes = MappingProxyType({})


@dataclass(slots=True)
class Node:
    """An equation of a body or of an opened call. Values are numbers.

    Attributes:
        eqn: The equation.
        held: Its regions, if it has bodies.
        reads: The values that it reads from memory or inlines.
        makes: The values of its results.
        fusible: Whether it may be inlined.
        places: The value of each operand; None for a literal.
        calls: The opened calls around it, the outermost first.
        absorbed: Whether the only reduction that reads it has absorbed it.
        broadcast: The values that are broadcast in memory for a reduction, each with the bytes of
            the broadcast array.
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
    """The nodes of a body, and which of its values are written and which are inlined.

    Args:
        jaxpr: The body.
        opens: Which calls are opened, unless the body is too large: "all", "none", or those
            "inlined" by XLA.
        symbols: The sizes of symbolic dimensions at which fusion is decided.

    Raises:
        UnknownSize: If a size is symbolic.
    """

    def __init__(self, jaxpr: Jaxpr, opens: Opens = "inlined", symbols: Sizes = _NO_SIZES) -> None:
        self.jaxpr = jaxpr
        self._opens: Opens = opens if count_equations(jaxpr) <= MOST_OPENED else "none"
        self._symbols = symbols
        self.nodes: list[Node] = []
        #: The bytes of each value.
        self.sizes: list[int] = []
        #: The node that computes each value; -1 for arguments and constants.
        self.defined_by: list[int] = []
        self._counts: list[int] = []
        #: The bytes and the number of elements of each aval, by its identity.
        self._measures: dict[int, tuple[int, int]] = {}
        env: dict[Var, int | None] = {
            v: self._value(v.aval, -1) for v in (*jaxpr.constvars, *jaxpr.invars)
        }
        #: The values of the constants and then the arguments.
        self.arguments = range(len(env))
        self._open(jaxpr, env, ())
        #: The value of each result; None for a literal.
        self.given = [None if type(v) is Literal else env.get(v) for v in jaxpr.outvars]
        #: The values of results that nodes compute, without duplicates.
        self.results = [
            v for v in dict.fromkeys(self.given) if v is not None and self.defined_by[v] >= 0
        ]
        #: Whether each value is written, and whether it is inlined. It may be both, or neither.
        self.written = [True] * len(self.sizes)
        self.inlined = [False] * len(self.sizes)
        self._fuse()

    def kernels(self) -> Iterable[int]:
        """Yield the numbers of the nodes that are kernels of their own."""
        for number, node in enumerate(self.nodes):
            if not node.fusible or (self.writes(node) and not node.absorbed):
                yield number

    def writes(self, node: Node) -> bool:
        """Return True if any value that a node makes is written."""
        return any(self.written[made] for made in node.makes)

    def _open(self, jaxpr: Jaxpr, env: dict[Var, int | None], calls: tuple[JaxprEqn, ...]) -> None:
        """Add the nodes of a body, opening calls. `env` has None for a literal."""
        for eqn in jaxpr.eqns:
            # The garbage collector does not track tuples of numbers, as it does lists.
            reads = tuple([None if type(v) is Literal else env[v] for v in eqn.invars])
            held = regions(eqn)
            if held is not None and held.kind == "call" and self._is_opened(eqn):
                body, region = held.jaxprs[0], held.regions[0]
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

    def _value(self, aval: Aval, defined_by: int) -> int:
        known = self._measures.get(identity(aval))
        if known is None:
            known = self._measures[identity(aval)] = self._measured(aval)
        size, count = known
        self.sizes.append(size)
        self.defined_by.append(defined_by)
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

    # --- fusion -----------------------------------------------------------------------------------

    def _fuse(self) -> None:
        """Decide which values are written and which inlined, from the last node to the first."""
        # Whether a reader takes the value from memory; and the kernel that inlines it, or _SEVERAL.
        needed = [False] * len(self.sizes)
        inlining: list[int | None] = [None] * len(self.sizes)
        readers = self._readers()
        for result in self.results:
            needed[result] = True
            readers[result] += 1
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            if node.absorbed:
                for made in node.makes:
                    self.written[made] = False
                continue
            if not node.fusible:
                if traits(node.eqn).reduces:
                    self._absorb(node, readers)
                for value in node.reads:
                    needed[value] = True
                for value, _ in node.broadcast:
                    inlining[value] = _joined(inlining[value], number)
                continue
            for made in node.makes:  # several of `split` and `unstack`
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
        """Return the number of nodes that read each value."""
        readers = [0] * len(self.sizes)
        for node in self.nodes:
            for value in node.reads:
                readers[value] += 1
        return readers

    def _absorb(self, reduction: Node, readers: list[int]) -> None:
        """Absorb into a reduction the equations that only it reads."""
        reads: list[int] = []
        broadcast: list[tuple[int, int]] = []
        for value in reduction.reads:
            node = self.nodes[self.defined_by[value]] if self.defined_by[value] >= 0 else None
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
        """Return True if an equation reads at most one array of its own size from memory."""
        count = self._counts[node.makes[0]]
        whole = [v for v in node.reads if self._counts[v] >= count and not self._fills(v)]
        return len(whole) <= 1

    def _fills(self, value: int) -> bool:
        defined_by = self.defined_by[value]
        return defined_by >= 0 and traits(self.nodes[defined_by].eqn).fills


class UnknownSize(Exception):
    """Raised if a value has a symbolic size."""


#: The mark of a value that several kernels inline.
_SEVERAL = -1


def _joined(kernel: int | None, other: int | None) -> int | None:
    """Return the union of two sets of kernels: None, one kernel, or _SEVERAL."""
    if kernel is None or kernel == other:
        return other
    return kernel if other is None else _SEVERAL


def _is_operand(eqn: JaxprEqn) -> bool:
    """Return True if an equation's result is its operand in memory, so that nothing is computed."""
    like = traits(eqn)
    if like.gives == "same":
        return True
    if like.gives != "layout":
        return False
    (out,), params = eqn.outvars, eqn.params
    shape: tuple[int, ...] = getattr(eqn.invars[0].aval, "shape", ())
    if not shape or size_of(out.aval) != size_of(eqn.invars[0].aval):
        return False
    # Axes of size 1 may be reversed, removed and moved.
    turned = [axis for axis in params.get("dimensions") or () if shape[axis] != 1]
    order = [axis for axis in params.get("permutation") or () if shape[axis] != 1]
    # A product reads or writes the transpose of a matrix at no cost.
    return not turned and (len(order) <= 2 or order == sorted(order))
