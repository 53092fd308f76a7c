"""A model of XLA's fusion: which values a compiled program writes to memory.

An elementwise equation, or one that only moves elements, is *inlined* into the kernels that read
it, and computed again in each of them. Its value is *written* to memory by a kernel of its own

- if a reader takes its operands from memory: a product, a loop, a call that XLA keeps, the caller;
- if it is costly, such as an exponential, and several kernels read it; or such as a quotient of two
  arrays, and several equations do;
- if several equations read it, and one of them also reads a written value that is computed from it;
- if the kernels would repeat its code too often: a kernel has the code of a value once for each
  index at which it reads the value, and never twice if the code has branches, as that of `pad`.

A written value is read from memory by all readers, unless computing it again reads at most one
array. A reduction of floats *absorbs* the equations that lead to it alone, as far as XLA's library
of kernels has them, and reads the operands of these from memory. Other reductions inline their
operands if their axes are short or they give positions too, and are written. Calls are inlined,
except those that XLA keeps. A reshape is the same array as its operand, and a part of joined arrays
is the array that was joined. Dead equations are left out if the live ones are given.

A *barrier* separates the recomputation of `jax.checkpoint` from the forward pass, if XLA keeps it:
the arguments of the call are read from memory, and none of them before all are written.
"""

from __future__ import annotations

import math
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.dataflow import BodySlice
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.equations import fuses, is_flat, size_of
from jaxprtool.ir.regions import Regions, regions
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.symbols import Sizes, value_of
from jaxprtool.ir.traits import Traits, traits
from jaxprtool.jaxcompat import Atom, Aval, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.jaxprs import identity

#: The calls that are opened, so that their equations are nodes: those that XLA inlines, all, or
#: none.
Opens: typing.TypeAlias = typing.Literal["inlined", "all", "none"]

#: The maximum number of equations of a body whose calls are opened: nested calls may have
#: exponentially many.
MOST_OPENED = 300_000

#: The value of each operand; None for a literal.
Places: typing.TypeAlias = tuple[int | None, ...]

Shape: typing.TypeAlias = tuple[int, ...]

#: An order of axes.
Order: typing.TypeAlias = tuple[int, ...]

#: The minimum number of elements of an equation for XLA's library of CPU kernels.
_LEAST_ABSORBED = 4096

#: The dtypes of XLA's library of CPU kernels.
_ABSORBED_DTYPES = frozenset(map(np.dtype, (jnp.bfloat16, "float32", "float64")))

#: XLA splits a reduction along a longer axis into several, whose operands are in memory.
_LONGEST_INLINED = 32

#: The maximum number of different indices at which XLA inlines a value into a kernel.
_MOST_EMITTED = 15

#: The maximum number of indices of a value that are followed.
_MOST_INDICES = 256

#: The maximum number of nodes of a body in which paths are followed.
_MOST_FOLLOWED = 4096

#: XLA copies the parts of an array along its last axis in a kernel of its own, if the axis and the
#: array have at least so many bytes; and more than so many parts in any case.
_LEAST_JOINED, _LEAST_ARRAY, _MOST_PARTS = 64, 2048, 8

#: The traits of a copy and of a broadcast.
_MOVES = traits("broadcast_in_dim")

_NO_SIZES: Sizes = MappingProxyType({})


@dataclass(slots=True)
class KernelNode:
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
        absorbed: Whether the only reduction that reads it has absorbed it, or nothing reads it.
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
    live: Sequence[BodySlice] | None = None


class Kernels:
    """The nodes of a body, and which of its values are written and which are inlined.

    Args:
        jaxpr: The body.
        opens: Which calls are opened, unless the body is too large: "all", "none", or those
            "inlined" by XLA.
        symbols: The sizes of symbolic dimensions at which fusion is decided.
        live: The live part of the body; all of it if None.
        fuses: Whether to decide which values are written; otherwise none are, nor inlined.

    Raises:
        UnknownSize: If a size is symbolic.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        opens: Opens = "inlined",
        symbols: Sizes = _NO_SIZES,
        live: BodySlice | None = None,
        fuses: bool = True,
    ) -> None:
        self.jaxpr = jaxpr
        self._opens: Opens = opens if count_equations(jaxpr) <= MOST_OPENED else "none"
        #: Whether nothing was left out as dead, so that these are also the kernels of all of it.
        self.is_whole = live is None or all(live.results)
        self._symbols = symbols
        self.nodes: list[KernelNode] = []
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
        #: The broadcasts of values by value, its shape, the shape of the broadcast, and the call
        #: that recomputes it.
        self._broadcasts: dict[tuple[int, Shape, Shape, int | None], int] = {}
        #: The parts of joined values, by value, shape, first and last indices.
        self._parts: dict[tuple[int, Shape, Shape, Shape], int] = {}
        #: The joined values of which a part is read.
        self._divided: set[int] = set()
        #: The values that are one number, in an array of any shape.
        self._numbers: dict[int, Any] = {}
        #: The numbers that arguments of opened calls are, if they are literals.
        self._literals: dict[Var, Any] = {}
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
        self.written = [fuses] * len(self.sizes)
        self.inlined = [False] * len(self.sizes)
        readers = self._readers()
        self._leave_out_unread(readers)
        if fuses:
            self._fuse(readers)

    def kernels(self) -> Iterable[int]:
        """Yield the numbers of the nodes that are kernels of their own."""
        for number, node in enumerate(self.nodes):
            if node.absorbed or node.kind == "barrier":
                continue
            if not node.fusible or self.writes(node):
                yield number

    def writes(self, node: KernelNode) -> bool:
        """Return True if any value that a node makes is written."""
        return any(self.written[out] for out in node.makes)

    def _open(
        self,
        jaxpr: Jaxpr,
        env: dict[Var, int | None],
        calls: tuple[JaxprEqn, ...],
        live: BodySlice | None,
    ) -> None:
        """Add the live nodes of a body, opening calls.

        `env` has None for a literal, and nothing for a dead value.
        """
        inside, flat = None if live is None else live.inside, is_flat(jaxpr)
        for i, eqn in enumerate(jaxpr.eqns):
            if inside is not None and i not in inside:
                self.is_whole = False
                continue
            # The garbage collector does not track tuples of numbers, as it does lists.
            reads: Places = tuple([None if type(v) is Literal else env.get(v) for v in eqn.invars])
            control = None if flat else regions(eqn)
            runs = None if inside is None or control is None else inside[i]
            if control is not None and control.kind == "call" and self._is_opened(eqn):
                body, region = control.jaxprs[0], control.regions[0]
                if any(behind := jaxcompat.behind_barrier(eqn)):
                    reads = self._barrier(eqn, reads, behind, calls)
                inner = dict.fromkeys(body.constvars) | {
                    v: reads[i] for v, i in zip(body.invars, region.ins, strict=True)
                }
                for v, i in zip(body.invars, region.ins, strict=True):
                    if reads[i] is None:
                        self._literals[v] = self._number(eqn.invars[i], None)
                self._open(body, inner, (*calls, eqn), runs[0] if runs else None)
                for out, atom in zip(region.outs, body.outvars, strict=True):
                    assert out is not None
                    env[eqn.outvars[out]] = None if type(atom) is Literal else inner.get(atom)
            elif (like := traits(eqn)).gives and _is_operand(eqn):
                if any(behind := jaxcompat.behind_barrier(eqn)):
                    reads = self._barrier(eqn, reads, behind, calls)
                env.update(zip(eqn.outvars, reads, strict=False))
            elif like.neutral is not None and (kept := self._simplified(eqn, reads)) is not None:
                env[eqn.outvars[0]] = reads[kept]
            elif (like.joins or self._parts) and (whole := self._whole(eqn, reads)) is not None:
                env[eqn.outvars[0]] = whole
            else:
                if (orders := operand_orders.get(eqn.primitive.name)) is not None:
                    reads = self._copied(eqn, reads, orders(eqn), calls)
                elif like.broadcasts and None not in reads:
                    reads = self._broadcast(eqn, reads, calls)
                makes = tuple([self._value(v.aval, len(self.nodes)) for v in eqn.outvars])
                env.update(zip(eqn.outvars, makes, strict=True))
                if like.joins:
                    self._join(eqn, reads, makes[0])
                values = tuple([v for v in reads if v is not None])
                places = tuple(map(self._origin, reads)) if self._before else reads
                fusible = self._is_fusible(eqn, like)
                self.nodes.append(KernelNode(eqn, control, values, makes, fusible, places, calls))
                if like.gives in ("cast", "layout"):
                    number = self._number(eqn.invars[0], reads[0])
                    self._numbers.update((value, number) for value in makes if number is not None)
                if control is not None and runs is not None:
                    self._leave_out_dead(self.nodes[-1], control, reads, runs)

    def _leave_out_dead(
        self, node: KernelNode, control: Regions, reads: Places, runs: Sequence[BodySlice]
    ) -> None:
        """Leave out the dead operands and results of a loop or branch, as XLA removes them."""
        read, returned = set(control.predicates), set[int | None]()
        for region, run in zip(control.regions, runs, strict=True):
            read.update([i for i, flag in zip(region.ins, run.arguments, strict=True) if flag])
            returned.update([i for i, flag in zip(region.outs, run.results, strict=True) if flag])
        node.live, every = runs, node.reads
        node.reads = tuple([v for i, v in enumerate(reads) if v is not None and i in read])
        dead = [value for i, value in enumerate(node.makes) if i not in returned]
        for value in dead:
            self.sizes[value] = 0
        self.is_whole &= node.reads == every and not dead

    def _barrier(
        self,
        eqn: JaxprEqn,
        reads: Places,
        behind: Sequence[bool],
        calls: tuple[JaxprEqn, ...],
    ) -> Places:
        """Add a barrier before some operands of an equation, and return the values after it."""
        operands = [v for v, flag in zip(reads, behind, strict=True) if flag and v is not None]
        start, number = len(self.sizes), len(self.nodes)
        after = dict[int | None, int]()
        for value in dict.fromkeys(operands):
            after[value] = len(self.sizes)
            self._before[len(self.sizes)] = self.origin(value)
            self.sizes.append(self.sizes[value])
            self._counts.append(self._counts[value])
            self.defined_by.append(number)
        makes = range(start, len(self.sizes))
        self.nodes.append(
            KernelNode(
                eqn, None, tuple(dict.fromkeys(operands)), makes, False, reads, calls, "barrier"
            )
        )
        pairs = zip(reads, behind, strict=True)
        return tuple([after.get(v, v) if flag else v for v, flag in pairs])

    def _copied(
        self,
        eqn: JaxprEqn,
        reads: Places,
        orders: Iterable[Order | None],
        calls: tuple[JaxprEqn, ...],
    ) -> Places:
        """Add copies of a product's operands whose axes it cannot read in their order."""
        operands = list(reads)
        for i, (value, order) in enumerate(zip(reads, orders, strict=True)):
            if value is None or order is None:
                continue
            if (value, order) not in self._copies:
                copy = self._value(eqn.invars[i].aval, len(self.nodes))
                self.nodes.append(
                    KernelNode(eqn, None, (value,), (copy,), True, (value,), calls, "copy")
                )
                self._copies[value, order] = copy
            operands[i] = self._copies[value, order]
        return tuple(operands)

    def _broadcast(self, eqn: JaxprEqn, reads: Places, calls: tuple[JaxprEqn, ...]) -> Places:
        """Add the broadcasts of smaller operands, each array to a shape once.

        What `jax.checkpoint` recomputes is not merged with the forward pass.
        """
        shape = eqn.outvars[0].aval.shape
        _, count = self._measure(eqn.outvars[0].aval)
        counts = [0 if v is None else self._counts[v] for v in reads]
        if counts == [count, count] or 1 in counts:
            return reads
        recomputes = (id(call) for call in reversed(calls) if jaxcompat.has_barrier(call))
        recomputing = next(recomputes, None)
        operands = list(reads)
        for i, (value, atom) in enumerate(zip(reads, eqn.invars, strict=True)):
            if value is None or counts[i] == count:
                continue
            key = value, atom.aval.shape, shape, recomputing
            if key not in self._broadcasts:
                self._broadcasts[key] = len(self.sizes)
                self.sizes.append(self.sizes[value] // counts[i] * count)
                self._counts.append(count)
                self.defined_by.append(len(self.nodes))
                makes = (len(self.sizes) - 1,)
                node = KernelNode(eqn, None, (value,), makes, True, (value,), calls, "broadcast")
                self.nodes.append(node)
            operands[i] = self._broadcasts[key]
        return tuple(operands)

    def _join(self, eqn: JaxprEqn, reads: Places, joined: int) -> None:
        """Note the parts of the joined operands of an equation."""
        shape, axis = eqn.outvars[0].aval.shape, eqn.params.get("dimension")
        if axis is None:  # a stack, whose parts have another rank
            return
        start = 0
        for atom, value in zip(eqn.invars, reads, strict=True):
            first, last = [0] * len(shape), list(shape)
            first[axis] = start
            start = last[axis] = start + atom.aval.shape[axis]
            if value is not None:
                self._parts[joined, shape, tuple(first), tuple(last)] = value

    def _whole(self, eqn: JaxprEqn, reads: Places) -> int | None:
        """Return the value that an equation takes back from joined values, or joins to nothing."""
        like = traits(eqn)
        if like.joins and "dimension" in eqn.params:
            counts = [self._measure(atom.aval)[1] for atom in eqn.invars]
            full = [v for v, count in zip(reads, counts, strict=True) if count]
            return full[0] if len(full) == 1 else None
        if like.gives != "part" or not self._parts or "limit_indices" not in eqn.params:
            return None
        params, value = eqn.params, reads[0]
        if value is None or set(params["strides"] or ()) - {1}:
            return None
        key = value, eqn.invars[0].aval.shape, params["start_indices"], params["limit_indices"]
        part = self._parts.get(key)
        if part is not None:
            self._divided.add(value)
        return part

    def _number(self, atom: Atom, value: int | None) -> Any:
        """Return the number that all elements of an operand are; None if unknown."""
        if type(atom) is not Literal:
            return self._literals.get(atom) if value is None else self._numbers.get(value)
        return atom.val if getattr(atom.val, "ndim", 0) == 0 else None

    def _simplified(self, eqn: JaxprEqn, reads: Places) -> int | None:
        """Return the position of the operand that an equation returns, such as x in x + 0."""
        like, out = traits(eqn), eqn.outvars[0].aval
        for i in (1, 0) if like.commutative else (1,):
            number = self._number(eqn.invars[i], reads[i])
            if reads[1 - i] is None or number is None or not bool(number == like.neutral):
                continue
            other = eqn.invars[1 - i].aval
            if getattr(other, "shape", None) == getattr(out, "shape", None):
                return 1 - i
        return None

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
        size, count = self._measure(aval)
        self.sizes.append(size)
        self.defined_by.append(defined_by)
        self._counts.append(count)
        return len(self.sizes) - 1

    def _measure(self, aval: Aval) -> tuple[int, int]:
        """Return what `_measured` does, computed once for each aval."""
        measured = self._measures.get(identity(aval))
        if measured is None:
            measured = self._measures[identity(aval)] = self._measured(aval)
        return measured

    def _measured(self, aval: Aval) -> tuple[int, int]:
        """Return the bytes and the number of elements of a value."""
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        count = math.prod(self._shape(aval))
        is_counted = shape is not None and dtype is not None and not _is_on_host(aval)
        return count * itemsize(dtype) if is_counted else 0, count

    def _shape(self, aval: Aval) -> Shape:
        """Return the shape of a value, in numbers."""
        shape: Shape = getattr(aval, "shape", ())
        if self._symbols:
            shape = tuple(value_of(n, self._symbols) for n in shape)
        if not all(type(n) is int for n in shape):
            raise UnknownSize
        return shape

    # --- fusion -----------------------------------------------------------------------------------

    def _is_fusible(self, eqn: JaxprEqn, like: Traits) -> bool:
        """Return True if a kernel may inline the results of an equation with these traits."""
        if like.floats_of_complex and np.issubdtype(eqn.invars[0].aval.dtype, np.complexfloating):
            return False
        axes = eqn.params.get("axes", eqn.params.get("dimensions")) if like.reduces else None
        if axes is not None:
            gives_positions = len(eqn.outvars) > 1 or "index_dtype" in eqn.params
            shape = self._shape(eqn.invars[0].aval)
            return gives_positions or all(shape[axis] <= _LONGEST_INLINED for axis in axes)
        if like.joins and _is_joined_apart(eqn, self._shape(eqn.outvars[0].aval)):
            return False
        if like.bilinear and _sums_nothing(eqn):
            return True
        if like.gives == "part" and like.costly:
            return True
        is_code = like.elementwise or like.moves or like.updates or like.gives or like.collective
        return bool(is_code or not (like.may_merge or like.callback)) and fuses(eqn)

    def _fuse(self, readers: list[int]) -> None:
        """Decide which values are written and which inlined, from the last node to the first."""
        # Whether a reader takes the value from memory; and the kernel that inlines it, or _SEVERAL.
        needed = [False] * len(self.sizes)
        inlining: list[int | None] = [None] * len(self.sizes)
        indices, paths = _Indices(self), _Paths(self)
        for result in self.results:
            needed[result] = True
        copied = {value for value, _ in self._copies}
        grown = self._grown(readers)
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            if node.absorbed:
                for out in node.makes:
                    self.written[out] = False
                continue
            if number in grown:
                self._absorb(node, readers)
                node.fusible = False
            if not node.fusible:
                for value in node.reads:
                    needed[value] = True
                paths.read(number)
                continue
            like = traits(node.eqn) if node.kind == "equation" else _MOVES
            for out in node.makes:  # several of `split` and `unstack`
                most = 1 if like.branches else _MOST_EMITTED
                several = readers[out] > 1 or inlining[out] == _SEVERAL
                repeated = indices.emitted(out) > most or (like.branches and several)
                if (repeated and not like.fills) or like.reduces:
                    needed[out] = True
                if readers[out] > 1 and paths.rejoin(out) and not self.reads_one(node):
                    needed[out] = True
                if like.costly or like.reduces:
                    again = readers[out] > 1 and not self.reads_one(node)
                    written = needed[out] or inlining[out] == _SEVERAL or again
                    inlined = not written
                else:
                    written = needed[out]
                    inlined = not written or out in copied or self.reads_one(node)
                    inlined = inlined and (like.fills or not repeated)
                self.written[out], self.inlined[out] = written, inlined
                indices.read(number, out)
                for value in node.reads:
                    if written:
                        inlining[value] = _joined(inlining[value], number)
                    if inlined and inlining[out] is not None:
                        inlining[value] = _joined(inlining[value], inlining[out])
            paths.read(number)

    def _readers(self) -> list[int]:
        """Return the number of nodes that read each value; the caller counts as one."""
        readers = [0] * len(self.sizes)
        for result in self.results:
            readers[result] += 1
        for node in self.nodes:
            for value in node.reads:
                readers[value] += 1
        return readers

    def _leave_out_unread(self, readers: list[int]) -> None:
        """Leave out joins of which only parts are read, and the nodes that lead to them alone."""
        todo = [self.defined_by[value] for value in self._divided]
        while todo:
            node = self.nodes[todo.pop()]
            if node.absorbed or node.eqn.effects or any(readers[out] for out in node.makes):
                continue
            for value in node.reads:
                readers[value] -= 1
                if self.defined_by[value] >= 0:
                    todo.append(self.defined_by[value])
            node.absorbed, node.reads = True, ()

    def _grown(self, readers: list[int]) -> set[int]:
        """Return the reductions that absorb equations, and the equations that follow them alone."""
        grown = set[int]()
        for number, node in enumerate(self.nodes):
            if node.kind != "equation":
                continue
            like = traits(node.eqn)
            if like.absorbs:
                large = node.reads and self._counts[node.reads[0]] >= _LEAST_ABSORBED
                if large and node.eqn.outvars[0].aval.dtype.name in like.absorbs:
                    grown.add(number)
            elif (
                grown
                and node.fusible
                and not like.moves
                and self._may_absorb(node)
                and any(self._follows(value, grown, readers) for value in node.reads)
            ):
                grown.add(number)
        return grown

    def _follows(self, value: int, grown: set[int], readers: list[int]) -> bool:
        while readers[value] == 1 and (number := self.defined_by[value]) >= 0:
            if number in grown:
                return True
            node = self.nodes[number]
            moves = traits(node.eqn).moves if node.kind == "equation" else node.kind == "broadcast"
            if not moves or not node.reads:
                return False
            value = node.reads[0]
        return False

    def _absorb(self, reduction: KernelNode, readers: list[int]) -> None:
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

    def _may_absorb(self, node: KernelNode) -> bool:
        like = traits(node.eqn)
        if node.kind != "equation":
            return node.kind == "broadcast"
        if not like.absorbed:
            return False
        atoms = (*node.eqn.invars, *node.eqn.outvars)
        large = like.moves or self._counts[node.makes[0]] >= _LEAST_ABSORBED
        return large and all(v.aval.dtype in _ABSORBED_DTYPES for v in atoms)

    def reads_one(self, node: KernelNode) -> bool:
        """Return True if an equation reads at most one array of its own size from memory."""
        count = self._counts[node.makes[0]]
        whole = {v for v in node.reads if self._counts[v] >= count and not self.fills(v)}
        return len(whole) <= 1

    def fills(self, value: int) -> bool:
        """Return True if a value repeats a smaller one."""
        if self.defined_by[value] < 0:
            return False
        node = self.nodes[self.defined_by[value]]
        return traits(node.eqn).fills if node.kind == "equation" else node.kind == "broadcast"


class _Indices:
    """The different indices at which each kernel that inlines a value reads it.

    An equation whose operand has the shape of its result reads it at its own index. Another one
    computes an index of its own, as often as its own code is emitted.

    Args:
        kernels: The nodes, which are visited from the last to the first.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        #: For each value, the number of indices by kernel and by the value that is computed there;
        #: empty once the node that makes the value has been visited.
        self._of = [dict[tuple[int, int], int]() for _ in kernels.sizes]
        #: For each value, the number of its indices by kernel, in sum.
        self._totals = [dict[int, int]() for _ in kernels.sizes]

    def emitted(self, value: int) -> int:
        """Return how often the code of a value would be in a kernel that inlines it, at most."""
        return max(self._totals[value].values(), default=0)

    def read(self, number: int, result: int) -> None:
        """Add the indices at which a node reads its operands to compute one of its results."""
        kernels = self._kernels
        node = kernels.nodes[number]
        indices, totals = self._of[result], self._totals[result]
        self._of[result], self._totals[result] = {}, {}
        if not kernels.inlined[result]:
            indices, totals = {}, {}
        if kernels.written[result]:
            indices[number, result] = totals[number] = 1
        computed: dict[tuple[int, int], int] | None = None
        for value, keeps in zip(node.reads, _keep_index(node), strict=True):
            if len(self._of[value]) >= _MOST_INDICES:
                continue
            if not keeps and computed is None:
                computed = {(kernel, result): count for kernel, count in totals.items()}
            self._add(value, indices if keeps or computed is None else computed, totals)

    def _add(
        self, value: int, indices: Mapping[tuple[int, int], int], totals: Mapping[int, int]
    ) -> None:
        """Add indices, of which each kernel has so many in sum, to those of a value."""
        present, sums = self._of[value], self._totals[value]
        if not present:  # most values are read once: copies take less time than sums
            present.update(indices)
            sums.update(totals)
            return
        for (kernel, at), count in indices.items():
            sums[kernel] = sums.get(kernel, 0) + count - present.get((kernel, at), 0)
        present.update(indices)


class _Paths:
    """The nodes that each value leads to, and those that it leads to through a written value.

    Sets of nodes are bits of integers. Paths are not followed in bodies of too many nodes.

    Args:
        kernels: The nodes, which are visited from the last to the first.
    """

    def __init__(self, kernels: Kernels) -> None:
        count = len(kernels.sizes)
        self._kernels = kernels
        self._is_followed = len(kernels.nodes) <= _MOST_FOLLOWED
        self._readers, self._after, self._after_written = [0] * count, [0] * count, [0] * count

    def rejoin(self, value: int) -> bool:
        """Return True if a node reads a value, and also one that a written value leads to."""
        return bool(self._readers[value] & self._after_written[value])

    def read(self, number: int) -> None:
        """Add the paths from the operands of a node."""
        if not self._is_followed:
            return
        node, after, after_written = self._kernels.nodes[number], 1 << number, 0
        for out in node.makes:
            after |= self._after[out]
            inlined = node.fusible and self._kernels.inlined[out]
            after_written |= self._after_written[out] if inlined else self._after[out]
        for value in node.reads:
            self._readers[value] |= 1 << number
            self._after[value] |= after
            self._after_written[value] |= after_written


def _keep_index(node: KernelNode) -> Iterator[bool]:
    """Yield for each value that a node reads whether it reads it at the index of its result."""
    if node.kind != "equation":
        yield from (node.kind == "copy" for _ in node.reads)
        return
    eqn = node.eqn
    shape, transposes = eqn.outvars[0].aval.shape, "permutation" in eqn.params
    for atom, value in zip(eqn.invars, node.places, strict=True):
        if value is not None:
            yield transposes or getattr(atom.aval, "shape", None) == shape


class UnknownSize(Exception):
    """Raised if a value has a symbolic size."""


#: The mark of a value that several kernels inline.
_SEVERAL = -1


def _joined(kernel: int | None, other: int | None) -> int | None:
    """Return the union of two sets of kernels: None, one kernel, or _SEVERAL."""
    if kernel is None or kernel == other:
        return other
    return kernel if other is None else _SEVERAL


#: The order of axes that XLA copies each operand of a product to, or None, by primitive.
operand_orders: RuleTable[Callable[[JaxprEqn], Iterable[Order | None]]] = RuleTable()


@rule(operand_orders, "dot_general")
def _product_orders(eqn: JaxprEqn) -> Iterator[Order | None]:
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
    orders = (*batched[0], *free[0], *contracted[0]), (*batched[1], *contracted[1], *free[1])
    for axes, free_axes, order in zip(batched, free, orders, strict=True):
        is_matrix = len(free_axes) <= 1 and len(contracted[0]) <= 1
        fits = is_matrix and tuple(axes) == tuple(range(len(axes)))
        yield None if fits or order == tuple(range(len(order))) or len(order) <= 2 else order


@rule(operand_orders, "conv_general_dilated")
def _convolution_orders(eqn: JaxprEqn) -> Iterator[Order | None]:
    """Yield the orders of a convolution: batch, space, features; and space, features in and out."""
    numbers = eqn.params["dimension_numbers"]
    (batch, feature, *space), (into, of, *window) = numbers.lhs_spec, numbers.rhs_spec
    orders = (batch, *space, feature), (*window, of, into)
    for order, atom in zip(orders, eqn.invars, strict=True):
        long = [axis for axis in order if atom.aval.shape[axis] != 1]
        yield order if long != sorted(long) else None


def _is_on_host(aval: Aval) -> bool:
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def _sums_nothing(eqn: JaxprEqn) -> bool:
    """Return True if a product sums over no axis longer than 1, and is elementwise in XLA."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[axis] == 1 for axis in contracted)


def _is_joined_apart(eqn: JaxprEqn, shape: Shape) -> bool:
    """Return True if XLA joins operands to an array of a shape in a kernel of its own."""
    if len(shape) < 2:
        return len(eqn.invars) > _MOST_PARTS
    axis = eqn.params["dimension"] if "dimension" in eqn.params else eqn.params["axis"]
    size = itemsize(eqn.outvars[0].aval.dtype)
    is_last = axis % len(shape) == len(shape) - 1
    long = shape[-1] * size >= _LEAST_JOINED and math.prod(shape) * size >= _LEAST_ARRAY
    return (is_last and long) or len(eqn.invars) > _MOST_PARTS


def _is_operand(eqn: JaxprEqn) -> bool:
    """Return True if an equation's result is its operand in memory, so that nothing is computed."""
    like = traits(eqn)
    if like.gives == "same":
        return True
    if like.gives == "part" and like.moves and len(eqn.outvars) == 1:
        return bool(eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape)
    if "new_dtype" in eqn.params:  # JAX converts weak types to the same dtype
        return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)
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
