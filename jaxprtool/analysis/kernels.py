"""A model of XLA's fusion: which values a compiled program writes to memory.

An elementwise equation, or one that only moves elements, is *inlined* into the kernels that read
it, and computed again in each of them. Its value is *written* to memory by a kernel of its own

- if a reader takes its operands from memory: a product, a loop, a call that XLA keeps, the caller;
- if it is costly, such as a division, and several kernels read it.

A written value is read from memory by all readers, unless computing it again reads at most one
array. A reduction *absorbs* the equations that lead to it alone, as far as XLA's library of kernels
has them, and reads the operands of these from memory. Calls are inlined, except those that XLA
keeps, and a reshape is the same array as its operand. Dead equations are left out if the live ones
are given.

A *barrier* separates the recomputation of `jax.checkpoint` from the forward pass, if XLA keeps it:
the arguments of the call are read from memory, and none of them before all are written.
"""

from __future__ import annotations

import math
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import MappingProxyType

import jax

from jaxprtool import jaxcompat
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.basics.dtypes import itemsize
from jaxprtool.ir.core.equations import fuses, is_inexact, size_of
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.dataflow.slicing import Run
from jaxprtool.ir.shapes.symbols import Sizes, value_of
from jaxprtool.jaxcompat import Aval, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.identity import identity

#: The calls that are opened, so that their equations are nodes: those that XLA inlines, all, or
#: none.
Opens: typing.TypeAlias = typing.Literal["inlined", "all", "none"]

#: The maximum number of equations of a body whose calls are opened: nested calls may have
#: exponentially many.
MOST_OPENED = 300_000

#: The value of each operand; None for a literal.
Places: typing.TypeAlias = tuple[int | None, ...]

#: The minimum number of elements of an equation for XLA's library of CPU kernels.
_LEAST_ABSORBED = 4096

#: The maximum number of different indices at which XLA inlines a value into a kernel.
_MOST_EMITTED = 15

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
        kind: What it is: the equation, a "barrier" before it, whose results are its operands, or a
            "copy" of an operand with its axes in the order that a product needs, or the "broadcast"
            of a smaller operand.
        absorbed: Whether the only reduction that reads it has absorbed it.
        live: The live parts of its bodies; None if all of them are.
    """

    eqn: JaxprEqn
    held: Regions | None
    reads: Sequence[int]
    makes: Sequence[int]
    fusible: bool
    places: Sequence[int | None]
    calls: tuple[JaxprEqn, ...] = ()
    kind: typing.Literal["equation", "barrier", "copy", "broadcast"] = "equation"
    absorbed: bool = False
    live: Sequence[Run] | None = None


class Kernels:
    """The nodes of a body, and which of its values are written and which are inlined.

    Args:
        jaxpr: The body.
        opens: Which calls are opened, unless the body is too large: "all", "none", or those
            "inlined" by XLA.
        symbols: The sizes of symbolic dimensions at which fusion is decided.
        live: The live part of the body; all of it if None.

    Raises:
        UnknownSize: If a size is symbolic.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        opens: Opens = "inlined",
        symbols: Sizes = _NO_SIZES,
        live: Run | None = None,
    ) -> None:
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
        #: The value before a barrier of each value after it.
        self._before: dict[int, int] = {}
        #: The copies of values with their axes in another order, by value and order.
        self._copies: dict[tuple[int, tuple[int, ...]], int] = {}
        #: The broadcasts of values by value and shape.
        self._broadcasts: dict[tuple[int, tuple[int, ...]], int] = {}
        env: dict[Var, int | None] = {
            v: self._value(v.aval, -1) for v in (*jaxpr.constvars, *jaxpr.invars)
        }
        #: The values of the constants and then the arguments.
        self.arguments = range(len(env))
        self._open(jaxpr, env, (), live)
        #: The value of each result; None for a literal, or if it is dead.
        self.given = [
            None if type(v) is Literal else self._origin(env.get(v)) for v in jaxpr.outvars
        ]
        if live is not None:
            pairs = zip(self.given, live.results, strict=True)
            self.given = [value if flag else None for value, flag in pairs]
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
            if node.absorbed or node.kind == "barrier":
                continue
            if not node.fusible or self.writes(node):
                yield number

    def writes(self, node: Node) -> bool:
        """Return True if any value that a node makes is written."""
        return any(self.written[made] for made in node.makes)

    def _open(
        self,
        jaxpr: Jaxpr,
        env: dict[Var, int | None],
        calls: tuple[JaxprEqn, ...],
        live: Run | None,
    ) -> None:
        """Add the live nodes of a body, opening calls.

        `env` has None for a literal, and nothing for a dead value.
        """
        inside = None if live is None else live.inside
        for i, eqn in enumerate(jaxpr.eqns):
            if inside is not None and i not in inside:
                continue
            # The garbage collector does not track tuples of numbers, as it does lists.
            reads: Places = tuple([None if type(v) is Literal else env.get(v) for v in eqn.invars])
            held = regions(eqn)
            runs = None if inside is None or held is None else inside[i]
            if held is not None and held.kind == "call" and self._is_opened(eqn):
                body, region = held.jaxprs[0], held.regions[0]
                if any(behind := jaxcompat.behind_barrier(eqn)):
                    reads = self._barrier(eqn, reads, behind, calls)
                inner = dict.fromkeys(body.constvars) | {
                    v: reads[i] for v, i in zip(body.invars, region.ins, strict=True)
                }
                self._open(body, inner, (*calls, eqn), runs[0] if runs else None)
                for out, atom in zip(region.outs, body.outvars, strict=True):
                    assert out is not None
                    env[eqn.outvars[out]] = None if type(atom) is Literal else inner.get(atom)
            elif (like := traits(eqn)).gives and _is_operand(eqn):
                if any(behind := jaxcompat.behind_barrier(eqn)):
                    reads = self._barrier(eqn, reads, behind, calls)
                env.update(zip(eqn.outvars, reads, strict=False))
            elif like.broadcasts and _is_max_of_nothing(eqn):
                env[eqn.outvars[0]] = reads[1]  # `jnp.max` of floats; XLA simplifies it
            else:
                if like.bilinear:
                    reads = self._copied(eqn, reads, calls)
                elif like.broadcasts and None not in reads:
                    reads = self._broadcast(eqn, reads, calls)
                makes = tuple([self._value(v.aval, len(self.nodes)) for v in eqn.outvars])
                env.update(zip(eqn.outvars, makes, strict=True))
                own = tuple([v for v in reads if v is not None])
                places = tuple(map(self._origin, reads)) if self._before else reads
                self.nodes.append(Node(eqn, held, own, makes, fuses(eqn), places, calls))
                if held is not None and runs is not None:
                    self._leave_out_dead(self.nodes[-1], held, reads, runs)

    def _leave_out_dead(
        self, node: Node, held: Regions, reads: Places, runs: Sequence[Run]
    ) -> None:
        """Leave out the dead operands and results of a loop or branch, as XLA removes them."""
        read, made = set(held.predicates), set[int | None]()
        for region, run in zip(held.regions, runs, strict=True):
            read.update([i for i, flag in zip(region.ins, run.arguments, strict=True) if flag])
            made.update([i for i, flag in zip(region.outs, run.results, strict=True) if flag])
        node.live = runs
        node.reads = tuple([v for i, v in enumerate(reads) if v is not None and i in read])
        for i, value in enumerate(node.makes):
            if i not in made:
                self.sizes[value] = 0

    def _barrier(
        self,
        eqn: JaxprEqn,
        reads: Places,
        behind: Sequence[bool],
        calls: tuple[JaxprEqn, ...],
    ) -> Places:
        """Add a barrier before some operands of an equation, and return the values after it."""
        own = [v for v, flag in zip(reads, behind, strict=True) if flag and v is not None]
        start, number = len(self.sizes), len(self.nodes)
        after = dict[int | None, int]()
        for value in dict.fromkeys(own):
            after[value] = len(self.sizes)
            self._before[len(self.sizes)] = self.origin(value)
            self.sizes.append(self.sizes[value])
            self._counts.append(self._counts[value])
            self.defined_by.append(number)
        makes = range(start, len(self.sizes))
        self.nodes.append(
            Node(eqn, None, tuple(dict.fromkeys(own)), makes, False, reads, calls, "barrier")
        )
        pairs = zip(reads, behind, strict=True)
        return tuple([after.get(v, v) if flag else v for v, flag in pairs])

    def _copied(self, eqn: JaxprEqn, reads: Places, calls: tuple[JaxprEqn, ...]) -> Places:
        """Add copies of a product's operands whose axes it cannot read in their order."""
        given = list(reads)
        for i, (value, order) in enumerate(zip(reads, _product_orders(eqn), strict=True)):
            if value is None or order is None:
                continue
            if (value, order) not in self._copies:
                copy = self._value(eqn.invars[i].aval, len(self.nodes))
                self.nodes.append(Node(eqn, None, (value,), (copy,), True, (value,), calls, "copy"))
                self._copies[value, order] = copy
            given[i] = self._copies[value, order]
        return tuple(given)

    def _broadcast(self, eqn: JaxprEqn, reads: Places, calls: tuple[JaxprEqn, ...]) -> Places:
        """Add the broadcasts of smaller operands, each array to a shape once."""
        own = [v for v in reads if v is not None]
        counts = [self._counts[v] for v in own]
        if counts[0] == counts[1] or 1 in counts:
            return reads
        shape = eqn.outvars[0].aval.shape
        _, count = self._measured(eqn.outvars[0].aval)
        given = list(reads)
        for i, value in enumerate(own):
            if counts[i] == count:
                continue
            if (value, shape) not in self._broadcasts:
                self._broadcasts[value, shape] = len(self.sizes)
                self.sizes.append(self.sizes[value] // counts[i] * count)
                self._counts.append(count)
                self.defined_by.append(len(self.nodes))
                made = (len(self.sizes) - 1,)
                node = Node(eqn, None, (value,), made, True, (value,), calls, "broadcast")
                self.nodes.append(node)
            given[i] = self._broadcasts[value, shape]
        return tuple(given)

    def origin(self, value: int) -> int:
        """Return the value before all barriers that is the same array."""
        return self._before.get(value, value)

    def _origin(self, value: int | None) -> int | None:
        return None if value is None else self.origin(value)

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
        is_counted = shape is not None and dtype is not None and not _is_on_host(aval)
        return count * itemsize(dtype) if is_counted else 0, count

    # --- fusion -----------------------------------------------------------------------------------

    def _fuse(self) -> None:
        """Decide which values are written and which inlined, from the last node to the first."""
        # Whether a reader takes the value from memory; and the kernel that inlines it, or _SEVERAL.
        needed = [False] * len(self.sizes)
        inlining: list[int | None] = [None] * len(self.sizes)
        # How often the code of the value would be emitted, once for each index that it is read at.
        emitted = [0] * len(self.sizes)
        readers = self._readers()
        for result in self.results:
            needed[result] = True
            readers[result] += 1
        copied = {value for value, _ in self._copies}
        grown = self._grown(readers)
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            if node.absorbed:
                for made in node.makes:
                    self.written[made] = False
                continue
            if number in grown:
                self._absorb(node, readers)
                node.fusible = False
            if not node.fusible:
                for value in node.reads:
                    needed[value] = True
                continue
            moves = node.kind == "equation" and traits(node.eqn).moves
            for made in node.makes:  # several of `split` and `unstack`
                if emitted[made] > _MOST_EMITTED:
                    needed[made] = True
                if traits(node.eqn).costly and node.kind == "equation":
                    written = needed[made] or inlining[made] == _SEVERAL
                    inlined = not written
                else:
                    written = needed[made]
                    inlined = not written or made in copied or self.reads_one(node)
                self.written[made], self.inlined[made] = written, inlined
                times = 1 if written else emitted[made]
                for value in node.reads:
                    emitted[value] = emitted[value] + times if moves else max(emitted[value], times)
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

    def _grown(self, readers: list[int]) -> set[int]:
        """Return the reductions that absorb equations, and the equations that follow them alone."""
        found = set[int]()
        for number, node in enumerate(self.nodes):
            if node.kind != "equation":
                continue
            like = traits(node.eqn)
            if like.absorbs:
                large = node.reads and self._counts[node.reads[0]] >= _LEAST_ABSORBED
                if large and is_inexact(node.eqn.outvars[0]):
                    found.add(number)
            elif (
                found
                and node.fusible
                and not like.moves
                and self._may_absorb(node)
                and any(self._follows(value, found, readers) for value in node.reads)
            ):
                found.add(number)
        return found

    def _follows(self, value: int, found: set[int], readers: list[int]) -> bool:
        while readers[value] == 1 and (number := self.defined_by[value]) >= 0:
            if number in found:
                return True
            node = self.nodes[number]
            moves = traits(node.eqn).moves if node.kind == "equation" else node.kind == "broadcast"
            if not moves or not node.reads:
                return False
            value = node.reads[0]
        return False

    def _absorb(self, reduction: Node, readers: list[int]) -> None:
        """Absorb into a reduction the equations that lead to it alone."""
        counts = Counter(reduction.reads)  # how often the group reads each value
        reads, todo = list[int](), [(-self.defined_by[value], value) for value in counts]
        heapify(todo)
        while todo:  # the last equation first: then all readers of its value are known
            number, value = heappop(todo)
            node = self.nodes[-number] if number <= 0 else None
            if node is None or counts[value] < readers[value] or not self._may_absorb(node):
                reads.append(value)
                continue
            node.absorbed = True
            for operand in node.reads:
                if operand not in counts:
                    heappush(todo, (-self.defined_by[operand], operand))
                counts[operand] += 1
        reduction.reads = reads

    def _may_absorb(self, node: Node) -> bool:
        like = traits(node.eqn)
        if node.kind != "equation":
            return node.kind == "broadcast"
        return like.absorbed and (like.moves or self._counts[node.makes[0]] >= _LEAST_ABSORBED)

    def reads_one(self, node: Node) -> bool:
        """Return True if an equation reads at most one array of its own size from memory."""
        count = self._counts[node.makes[0]]
        whole = [v for v in node.reads if self._counts[v] >= count and not self._fills(v)]
        return len(whole) <= 1

    def _fills(self, value: int) -> bool:
        if self.defined_by[value] < 0:
            return False
        node = self.nodes[self.defined_by[value]]
        return traits(node.eqn).fills if node.kind == "equation" else node.kind == "broadcast"


class UnknownSize(Exception):
    """Raised if a value has a symbolic size."""


#: The mark of a value that several kernels inline.
_SEVERAL = -1


def _joined(kernel: int | None, other: int | None) -> int | None:
    """Return the union of two sets of kernels: None, one kernel, or _SEVERAL."""
    if kernel is None or kernel == other:
        return other
    return kernel if other is None else _SEVERAL


def _product_orders(eqn: JaxprEqn) -> Iterator[tuple[int, ...] | None]:
    """Yield for each operand of a product the order of axes that XLA copies it to, or None.

    An operand of XLA's products has batch axes, then one contracted and one free axis, in either
    order. XLA copies other operands into this form; a matrix needs no copy.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in eqn.invars]
    free = [
        [axis for axis in range(rank) if axis not in (*contracted[i], *batched[i])]
        for i, rank in enumerate(ranks)
    ]
    small = len(contracted[0]) <= 1 and all(len(axes) <= 1 for axes in free)
    if small and all(tuple(axes) == tuple(range(len(axes))) for axes in batched):
        yield from (None, None)
        return
    first = (*batched[0], *free[0], *contracted[0])
    second = (*batched[1], *contracted[1], *free[1])
    for order, rank in zip((first, second), ranks, strict=True):
        yield order if rank > 2 and order != tuple(range(rank)) else None


def _is_on_host(aval: Aval) -> bool:
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def _is_max_of_nothing(eqn: JaxprEqn) -> bool:
    """Return True for the maximum of minus infinity and a value."""
    atom = eqn.invars[0]
    return type(atom) is Literal and eqn.primitive.name == "max" and atom.val == -math.inf


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
