"""Schedule the kernels of a body, and add up the memory that they need over time.

A result of the body is allocated from the start; until the result is computed, its memory (its
"room") may hold another value. An elementwise kernel may write to the memory of an operand that it
reads last. A call that XLA keeps, a loop and a branch also need the memory of their bodies.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.analysis.kernels import MOST_OPENED, KernelNode, Kernels, Opens, UnknownSize
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.backends import JaxprCache
from jaxprtool.ir.dataflow import BodySlice, live_part
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.equations import size_in_bytes
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.regions import Region, Regions
from jaxprtool.ir.repetition import TemporaryMemory
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn

# --- walk -----------------------------------------------------------------------------------------
# Add up the memory that a body needs over time, in one walk over its schedule.

#: No room is searched for a value of less than this fraction of all bytes.
_SMALL = 1 / 5000

_NO_ROOMS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class ValueInRoom:
    """A value in the room of a result that is computed later."""

    buffer: LiveBuffer
    result: LiveBuffer


@dataclass(frozen=True)
class Inner:
    """The body of an equation that needs the most memory, and its number."""

    number: int
    memory: BodyMemory


@dataclass(frozen=True)
class BodyMemory:
    """The memory that a body needs besides its arguments and results.

    Attributes:
        schedule: The schedule of its kernels.
        outside: The values that are not in the room of a result.
        in_rooms: The values that are in the room of a result.
        inner: The memory of the bodies of equations, by the time when the equation runs.
        workspaces: The bytes that kernels need besides their operands and results, by the time.
        needs: The bytes needed at each time.
        replaced: The bytes of the operand that a kernel overwrites, by the time when it runs.
        at: The time of the peak; None if nothing is computed.
    """

    schedule: KernelSchedule
    outside: tuple[LiveBuffer, ...]
    in_rooms: tuple[ValueInRoom, ...]
    inner: Mapping[int, Inner]
    workspaces: Mapping[int, int]
    needs: tuple[int, ...]
    replaced: Mapping[int, int]
    at: int | None

    @property
    def peak(self) -> int:
        """The most bytes needed at a time."""
        return 0 if self.at is None else self.needs[self.at]

    def node(self, time: int) -> KernelNode:
        """Return the node that runs at a time."""
        return self.schedule.kernels.nodes[self.schedule.order[time]]


class BodyMemories:
    """The memory of bodies. Each is walked once, since equations may share them.

    Args:
        opened: Whether to treat calls that XLA keeps as if it inlined them.
    """

    def __init__(self, opened: bool = False) -> None:
        self._opens: Opens = "all" if opened else "inlined"
        self._known: dict[tuple[BodySlice, LoopValues | None], BodyMemory] = {}
        #: The number of equations of each primitive whose own memory is unknown, or a part of it.
        self.unknown: Counter[str] = Counter()

    def memory(
        self,
        live: BodySlice,
        loop_values: LoopValues | None = None,
        donated: Mapping[int, int] = _NO_ROOMS,
    ) -> BodyMemory:
        """Return the memory that a body needs.

        Args:
            live: The live part of the body.
            loop_values: How values pass between iterations, if it is the body of a loop.
            donated: The position of the argument in whose memory a result is written, by the
                position of the result.
        """
        if (live, loop_values) not in self._known:
            schedule = KernelSchedule(Kernels(live.jaxpr, self._opens, live=live), loop_values)
            self._known[live, loop_values] = self._walked(schedule, donated)
        return self._known[live, loop_values]

    def whole_kernels(self) -> Iterator[tuple[Jaxpr, Kernels]]:
        """Yield the kernels of the bodies in which nothing is dead."""
        for body in self._known.values():
            kernels = body.schedule.kernels
            if kernels.is_whole:
                yield kernels.jaxpr, kernels

    def _walked(self, schedule: KernelSchedule, donated: Mapping[int, int]) -> BodyMemory:
        free_from, late = _donated(schedule, donated)
        outside, in_rooms = _placed(schedule, [*schedule.temporaries, *late], free_from)
        allocated, freed = defaultdict[int, int](int), defaultdict[int, int](int)
        last = defaultdict[int, set[int]](set)
        for buffer in outside:
            allocated[buffer.start] += buffer.size
            freed[buffer.end] += buffer.size
            if buffer.start < buffer.end:
                last[buffer.end].add(buffer.size)
        live, needs = 0, list[int]()
        inside, replaced = dict[int, Inner](), dict[int, int]()
        workspaces = dict[int, int]()
        for time, number in enumerate(schedule.order):
            node, new = schedule.kernels.nodes[number], allocated[time]
            needs.append(live + new)
            if new and new in last[time] and schedule.writes_in_place(node):
                replaced[time] = new
                needs[-1] = live
            if node.held is not None:
                inside[time] = self._inner(node)
                needs[-1] += inside[time].memory.peak
            elif extra := self._workspace(node, schedule.kernels):
                workspaces[time] = extra
                needs[-1] += extra
            live += new - freed[time]
        at = max(range(len(needs)), key=needs.__getitem__) if needs else None
        return BodyMemory(
            schedule,
            tuple(outside),
            tuple(in_rooms),
            inside,
            workspaces,
            tuple(needs),
            replaced,
            at,
        )

    def _workspace(self, node: KernelNode, kernels: Kernels) -> int:
        """Return the bytes that a kernel needs besides its operands and results."""
        if node.kind != "equation":
            return 0
        needed = workspace(node.eqn)
        name = node.eqn.primitive.name if needed is None else needed.not_counted
        if name:
            self.unknown[name] += 1
        if needed is None:
            return 0
        return needed.bytes + (_copies(node, kernels) if needed.by_columns else 0)

    def _inner(self, node: KernelNode) -> Inner:
        assert node.held is not None and node.live is not None
        bodies = zip(node.live, node.held.regions, strict=True)
        inner = (
            Inner(number, self.memory(live, loop_values_of(node.held, region)))
            for number, (live, region) in enumerate(bodies)
        )
        return max(inner, key=lambda body: body.memory.peak)


def _copies(node: KernelNode, kernels: Kernels) -> int:
    """Return the bytes of the copies by columns of a kernel's matrices."""
    arguments = [v for v in node.reads[:1] if kernels.defined_by[v] < 0]
    asked = [v for v in node.makes if v in kernels.results]
    return max(sum(kernels.sizes[v] for v in values) for values in (arguments, asked))


def _donated(
    schedule: KernelSchedule, donated: Mapping[int, int]
) -> tuple[dict[int, int], list[LiveBuffer]]:
    """Return when the memory of donated arguments is free, and copies of results computed before.

    A result that is computed while its donated argument is still needed lives in a copy until then.
    """
    constants, returned = len(schedule.kernels.jaxpr.constvars), schedule.kernels.given
    arguments = {returned[out]: constants + argument for out, argument in donated.items()}
    free_from, late = dict[int, int](), list[LiveBuffer]()
    for result in schedule.results:
        if result.value in arguments:
            argument = arguments[result.value]
            last = free_from[result.value] = schedule.last_read[argument]
            in_place = schedule.in_place(result) or schedule.carries(argument, result.value)
            if result.start < last or (result.start == last and not in_place):
                late.append(LiveBuffer(result.value, result.size, result.start, last))
    return free_from, late


def _placed(
    schedule: KernelSchedule, temporaries: list[LiveBuffer], free_from: Mapping[int, int]
) -> tuple[list[LiveBuffer], list[ValueInRoom]]:
    """Place values in the rooms of results, the largest first. Return the rest and those placed."""
    least = _SMALL * sum(buffer.size for buffer in temporaries)
    rooms = [
        _Room(result, free_from.get(result.value, -1), schedule.in_place(result), [])
        for result in schedule.results
        if result.size >= least
    ]
    rooms.sort(key=lambda room: -room.result.size)
    outside, in_rooms = [], []
    for buffer in sorted(temporaries, key=lambda buffer: -buffer.size):
        room = _room_for(buffer, rooms) if buffer.size >= least else None
        if room is None:
            outside.append(buffer)
        else:
            insort(room.held, (buffer.start, buffer.end))
            in_rooms.append(ValueInRoom(buffer, room.result))
    return outside, in_rooms


def _room_for(buffer: LiveBuffer, rooms: Iterable[_Room]) -> _Room | None:
    size, start, end = buffer.size, buffer.start, buffer.end
    for room in rooms:  # written for speed: there may be hundreds, and most are not free
        if room.result.size < size:
            return None
        if end <= room.result.start and start > room.free_from and room.takes(buffer):
            return room
    return None


@dataclass(slots=True)
class _Room:
    """The memory of a result, which may hold other values before the result is computed.

    Attributes:
        result: The result.
        free_from: The time of the last use of a donated argument there; -1 without one.
        in_place: Whether the result can be written to the memory of an operand.
        held: The lifetimes of the values placed there, which do not overlap, in order.
    """

    result: LiveBuffer
    free_from: int
    in_place: bool
    held: list[tuple[int, int]]

    def takes(self, buffer: LiveBuffer) -> bool:
        """Return True if the room is free during the lifetime of a value."""
        start, end = self.result.start, buffer.end
        if end > start or buffer.start <= self.free_from:
            return False
        if end == start and not (self.in_place and buffer.size == self.result.size):
            return False
        count = bisect_right(self.held, (end, math.inf))
        return not count or self.held[count - 1][1] < buffer.start


# --- schedule -------------------------------------------------------------------------------------
# Schedule the kernels of a body, and find the lifetimes of its values.
#
# `analysis.kernels` finds which values are written to memory. Kernels run as soon as their operands
# are ready, as on XLA's CPU backend, and a value lives until the last kernel that reads it. In the
# body of a loop, a slice of a scanned array is a value of its own if an equation such as a product
# reads it, and a carry is written in place if its old value is no longer needed.


@dataclass(slots=True, eq=False)
class LiveBuffer:
    """A value in memory, and its lifetime. Times are positions in `KernelSchedule.order`.

    Attributes:
        value: The number of the value; see `Kernels`.
        size: Its bytes.
        start: The time when it is computed.
        end: The time when it is read last.
        last: The number of the node that reads it last; None if unknown.
    """

    value: int
    size: int
    start: int
    end: int
    last: int | None = None


@dataclass(frozen=True)
class LoopValues:
    """How values pass between the iterations of a loop, by position in its body.

    Attributes:
        carried: The carries, as pairs of a result's position and an argument's.
        sliced: The arguments that are slices of scanned arrays.
        stacked: The results that are stacked.
    """

    carried: tuple[tuple[int, int], ...]
    sliced: tuple[int, ...]
    stacked: tuple[int, ...]


def loop_values_of(control: Regions, region: Region) -> LoopValues | None:
    """Return how values pass between the iterations of a loop's body; None for other bodies."""
    if not control.repeats or region.is_predicate:
        return None
    places = {operand: i for i, operand in enumerate(region.ins)}
    carried = {
        i: places[operand] for i, operand in enumerate(region.next_iteration) if operand is not None
    }
    going = {operand for operand, _ in control.carried}
    ins = enumerate(zip(region.ins, region.loop_invariant, strict=True))
    sliced = (i for i, (operand, is_invariant) in ins if not is_invariant and operand not in going)
    stacked = (i for i in range(len(region.outs)) if i not in carried)
    return LoopValues(tuple(carried.items()), tuple(sliced), tuple(stacked))


class KernelSchedule:
    """The schedule of a body's kernels, and the lifetimes of its values.

    Args:
        kernels: The kernels of the body.
        loop_values: How values pass between iterations, if it is the body of a loop.

    Attributes:
        kernels: The kernels of the body.
        order: The numbers of the nodes that are kernels, in the order in which they run.
        temporaries: The values written that are not results. In a loop they include results of an
            iteration that cannot be written in place yet.
        results: The results, which live to the end; empty for the body of a loop.
        last_read: The time when each value is read last; -1 if it is not read.
    """

    def __init__(self, kernels: Kernels, loop_values: LoopValues | None = None) -> None:
        self.kernels = kernels
        #: The level (longest path from the arguments, in kernels) at which a value can be read:
        #: once it is written, or when it is inlined.
        self._written = [0] * len(kernels.sizes)
        self._inlined = [0] * len(kernels.sizes)
        levels = self._levels()
        self.order = sorted(levels, key=levels.__getitem__)
        self._times = {number: time for time, number in enumerate(self.order)}
        self._starts = [levels[number] for number in self.order]
        self.temporaries: list[LiveBuffer] = []
        self.results: list[LiveBuffer] = []
        self.last_read = [-1] * len(kernels.sizes)
        self._last_node: list[int | None] = [None] * len(kernels.sizes)
        self._buffers()
        self._begin_loops()
        if loop_values is not None:
            self._reuse_loop_values(loop_values)

    def in_place(self, buffer: LiveBuffer) -> bool:
        """Return True if a value may be written to the memory of an operand that is read last."""
        return self.writes_in_place(self.kernels.nodes[self.kernels.defined_by[buffer.value]])

    def carries(self, start: int, value: int) -> bool:
        """Return True if a value is the last value of a loop's carry that begins as another one.

        The loop computes in the memory of the first value if that is not needed afterwards.
        """
        node = self.kernels.nodes[self.kernels.defined_by[value]]
        if node.held is None or node.held.kind != "loop":
            return False
        return any(
            node.places[operand] == start and node.makes[result] == value
            for operand, result in node.held.carried
        )

    def writes_in_place(self, node: KernelNode) -> bool:
        """Return True if a kernel may write to the memory of an operand that it reads last.

        It may if it is elementwise, or an update of an array, unless it inlines an array that
        repeats a number: XLA fills memory of its own with the number.
        """
        if node.kind != "equation":
            return False
        like = traits(node.eqn)
        if like.updates:
            array = node.places[0]
            if array is None:
                return False
            return self.kernels.written[array] or not self.kernels.fills(array)
        if node.fusible:
            return like.elementwise
        needed = None if node.held is not None else workspace(node.eqn)
        return needed is not None and needed.in_place

    def _levels(self) -> dict[int, int]:
        kernels, levels = self.kernels, dict[int, int]()
        for number, node in enumerate(kernels.nodes):
            if node.absorbed:
                continue
            level, fusible, is_barrier = 0, node.fusible, node.kind == "barrier"
            for v in node.reads:
                level = max(level, self._level(v, fusible))
            for out in node.makes:
                self._inlined[out] = level
                self._written[out] = level + 2 if is_barrier else level + 1
            if not is_barrier and (not fusible or kernels.writes(node)):
                levels[number] = level
        return levels

    def _level(self, value: int, fusible: bool) -> int:
        inlined = fusible and self.kernels.inlined[value]
        return self._inlined[value] if inlined else self._written[value]

    def _buffers(self) -> None:
        kernels, end = self.kernels, len(self.order)
        written, inlined = self.last_read, [-1] * len(kernels.sizes)

        def read(value: int, number: int, fusible: bool, time: int) -> None:
            uses = inlined if fusible and kernels.inlined[value] else written
            if time > uses[value]:
                uses[value] = time
                if uses is written:
                    self._last_node[value] = number

        for number in range(len(kernels.nodes) - 1, -1, -1):
            node = kernels.nodes[number]
            if node.absorbed:
                continue
            time = self._times.get(number, -1)
            if node.fusible:
                time = max(time, *[inlined[out] for out in node.makes])
            if node.kind == "barrier":  # a value lives until it is read after the barrier
                for value, after in zip(node.reads, node.makes, strict=True):
                    if written[after] > written[value]:
                        written[value] = written[after]
                        self._last_node[value] = self._last_node[after]
                continue
            for value in node.reads:
                read(value, number, node.fusible, time)
        results = set(kernels.results)
        for number, time in self._times.items():
            node = kernels.nodes[number]
            for value in node.makes:
                size, last = kernels.sizes[value], self._last_node[value]
                if value in results:
                    self.results.append(LiveBuffer(value, size, time, end))
                else:
                    until = max(time, written[value])
                    self.temporaries.append(LiveBuffer(value, size, time, until, last))

    def _begin_loops(self) -> None:
        """End the initial value of a carry when the loop starts, if only the loop reads it.

        The loop then writes the carry to its memory.
        """
        buffers = {buffer.value: buffer for buffer in self.temporaries}
        for number, time in self._times.items():
            node = self.kernels.nodes[number]
            for operand, _ in node.held.carried if node.held is not None else ():
                value = node.places[operand]
                buffer = None if value is None else buffers.get(value)
                if buffer is not None and buffer.end == time and node.places.count(value) == 1:
                    buffer.end = time - 1

    # --- loops ------------------------------------------------------------------------------------

    def _reuse_loop_values(self, loop_values: LoopValues) -> None:
        kernels, buffers = self.kernels, {result.value: result for result in self.results}
        self.results = []
        for position, argument in loop_values.carried:
            buffer = buffers.get(self._outcome(position))
            if buffer is not None and not self._takes_place(buffer, self._argument(argument)):
                self.temporaries.append(buffer)
                del buffers[buffer.value]
        for position in loop_values.stacked:
            buffer = buffers.pop(self._outcome(position), None)
            if buffer is None:
                continue
            buffer.end, buffer.last = self.last_read[buffer.value], self._last_node[buffer.value]
            if not kernels.nodes[kernels.defined_by[buffer.value]].fusible or buffer.end >= 0:
                buffer.end = max(buffer.start, buffer.end)
                self.temporaries.append(buffer)
        for value in self._read_from_memory(map(self._argument, loop_values.sliced)):
            last = self._last_node[value]
            size, end = kernels.sizes[value], self.last_read[value]
            self.temporaries.append(LiveBuffer(value, size, 0, end, last))

    def _argument(self, position: int) -> int:
        return len(self.kernels.jaxpr.constvars) + position

    def _outcome(self, position: int) -> int:
        """Return the value of a result; -1 for a literal."""
        value = self.kernels.given[position]
        return -1 if value is None else value

    def _takes_place(self, result: LiveBuffer, argument: int) -> bool:
        """Return True if the new value of a carry is written in place of the old one."""
        last = self.last_read[argument]
        return result.start > last or (result.start == last and self.in_place(result))

    def _read_from_memory(self, values: Iterable[int]) -> set[int]:
        """Return the given values that a kernel reads from memory without inlining them."""
        asked = set(values)
        nodes = (node for node in self.kernels.nodes if not node.fusible and not node.absorbed)
        return {value for node in nodes for value in node.reads if value in asked}


# --- workspaces -----------------------------------------------------------------------------------
# The memory that a kernel needs besides its operands and results: an open table of rules.
#
#     @rule("memory", "my_primitive")
#     def _(eqn):
#         return Workspace(2 * size_in_bytes(eqn.outvars[0].aval))
#
# A primitive needs a rule if XLA expands it, or calls a library that has buffers of its own, and
# JAX does not lower it to other primitives (`ir.expansions`). The sizes here are those of XLA on
# the CPU. A primitive about which neither the traits nor this table say anything is unknown: its
# operands and results count, and the estimate names it.


@dataclass(frozen=True)
class Workspace:
    """What a kernel needs besides its operands and results.

    Attributes:
        bytes: The bytes of its working memory.
        in_place: Whether it may write a result to the memory of an operand that it reads last.
        by_columns: Whether its matrices are stored by columns, as LAPACK has them. XLA copies those
            that are arguments or results of the program, which are stored by rows.
        not_counted: The primitive, and what of its memory is not counted; "" if all is.
    """

    bytes: int = 0
    in_place: bool = False
    by_columns: bool = False
    not_counted: str = ""


NOTHING = Workspace()

#: A function that returns the workspace of an equation, or None if it is unknown.
WorkspaceRule = Callable[[JaxprEqn], Workspace | None]

workspace_rules: RuleTable[WorkspaceRule] = RuleTable()


def workspace(eqn: JaxprEqn) -> Workspace | None:
    """Return the workspace of an equation without regions, or None if it is unknown."""
    rule = workspace_rules.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn)
    like = traits(eqn)
    if like.floats_of_complex and _is_complex(eqn):
        count = math.prod(_shape(eqn.outvars[0]))
        size = itemsize(eqn.invars[0].aval.dtype) // 2
        return Workspace(count * (like.floats_of_complex * size + 1))
    is_known = like.moves or like.updates or like.gives or like.elementwise or like.names_value
    return NOTHING if is_known or like.collective or like.callback else None


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_complex(eqn: JaxprEqn) -> bool:
    return bool(np.issubdtype(eqn.invars[0].aval.dtype, np.complexfloating))


def _matrices(eqn: JaxprEqn, rows: int, columns: int, more_bytes: int = 0) -> int:
    """Return the bytes of a matrix for each of the matrices that the first operand has."""
    batch, dtype = math.prod(_shape(eqn.invars[0])[:-2]), eqn.invars[0].aval.dtype
    return int(batch * (rows * columns * itemsize(dtype) + more_bytes))


# --- nothing --------------------------------------------------------------------------------------


@rule(workspace_rules, "after_all", "axis_index", "check", "create_linear", "create_token")
@rule(workspace_rules, "dce_sink", "device_put", "dim_as_value", "dimension_size")
@rule(workspace_rules, "empty", "empty2", "fft", "from_edtype", "inspect_sharding")
@rule(workspace_rules, "layout_constraint", "multiple_of", "pin", "rng_bit_generator")
@rule(workspace_rules, "platform_index", "reduce", "reduce_and", "reduce_max", "reduce_min")
@rule(workspace_rules, "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor", "relayout")
@rule(workspace_rules, "logical_array", "physical_array", "random_fold_in", "random_seed")
@rule(workspace_rules, "reciprocal", "reshard", "shape_assertion", "stage", "to_edtype", "unpin")
@rule(workspace_rules, "unreachable", "with_memory_space_constraint", "xla_metadata_value")
@rule(workspace_rules, "get", "swap", "addupdate", "new_ref", "empty_ref", "free_ref", "freeze")
@rule(workspace_rules, "argmax", "argmin")
def _nothing(eqn: JaxprEqn) -> Workspace:
    return NOTHING


@rule(workspace_rules, "lgamma")
def _lgamma(eqn: JaxprEqn) -> Workspace | None:
    """Return None where XLA writes none to 13 of the coefficients that `lgamma` looks up."""
    return None if jaxcompat.lgamma_reads_tables() else NOTHING


# --- random bits ----------------------------------------------------------------------------------


@rule(workspace_rules, "random_bits", "random_split", "threefry2x32", "rng_uniform")
def _random_words(eqn: JaxprEqn) -> Workspace:
    """Count three arrays of Threefry's words."""
    words = sum(math.prod(_shape(var)) for var in eqn.outvars) // len(eqn.outvars)
    return Workspace(3 * 4 * words)


# --- products and windows -------------------------------------------------------------------------


def _widened(eqn: JaxprEqn) -> str:
    """Return what is not counted if XLA for the CPU copies small floats to f32 for a product.

    XLA for accelerators multiplies them as they are, so these copies are named, not counted.
    """
    dtypes = (v.aval.dtype for v in (*eqn.invars, *eqn.outvars))
    small = [d.name for d in dtypes if jnp.issubdtype(d, jnp.floating) and itemsize(d) < 4]
    return f"{eqn.primitive.name} of {small[0]} on the CPU" if small else ""


@rule(workspace_rules, "dot_general")
def _product(eqn: JaxprEqn) -> Workspace:
    ((left, right), (batch, other)), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    sizes = [v.aval.ndim - len(batch) for v in eqn.invars]
    rows_by_columns = (*left, *right) == (eqn.invars[0].aval.ndim - 1, len(batch))
    plain = rows_by_columns and sizes == [2, 2] and batch == other == tuple(range(len(batch)))
    bf16 = all(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)
    as_they_are = plain and bf16 and (out.dtype == jnp.float32 or jaxcompat.keeps_bfloat16())
    return Workspace(not_counted="" if as_they_are else _widened(eqn))


@rule(workspace_rules, "conv_general_dilated")
def _convolution(eqn: JaxprEqn) -> Workspace:
    """Count the result with its features on the last axis, if it has them on another."""
    out, spec = eqn.outvars[0].aval, eqn.params["dimension_numbers"].out_spec
    batch, feature, *space = spec
    long = [axis for axis in (batch, *space, feature) if out.shape[axis] != 1]
    copied = 0 if long == sorted(long) else size_in_bytes(out)
    return Workspace(copied, not_counted=_widened(eqn))


#: XLA sums at most this many elements of a window in one step of a cumulative sum.
_BLOCK = 16


@rule(workspace_rules, "reduce_window_sum", "reduce_window_max", "reduce_window_min")
@rule(workspace_rules, "reduce_window")
def _reduce_window(eqn: JaxprEqn) -> Workspace:
    """Count the sums of blocks if the window is as long as an axis: a cumulative reduction."""
    shape, window = _shape(eqn.invars[0]), eqn.params["window_dimensions"]
    long = [n for n, size in zip(window, shape, strict=True) if n > 1 and n >= size]
    if len(long) != 1 or math.prod(window) != long[0] or long[0] <= _BLOCK:
        return NOTHING
    sizes = sum(size_in_bytes(var.aval) for var in eqn.outvars)
    return Workspace(int(sizes * (1 + 1 / _BLOCK)))


@rule(workspace_rules, "select_and_scatter")
def _select_and_scatter(eqn: JaxprEqn) -> Workspace:
    """Count the index of each element on each axis, and that of the one selected in each window."""
    operand, source = eqn.invars[:2]
    rank, count = len(_shape(operand)), math.prod(_shape(source))
    indices = 4 * rank * (math.prod(_shape(operand)) + count)
    return Workspace(indices + count * itemsize(operand.aval.dtype))


@rule(workspace_rules, "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul")
@rule(workspace_rules, "scatter-sub")
def _scatter(eqn: JaxprEqn) -> Workspace:
    """Count the indices that XLA completes by those of batch axes, and another layout of them."""
    indices, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
    batched = len(numbers.operand_batching_dims)
    width = batched + len(numbers.scatter_dims_to_operand_dims)
    count = math.prod(indices.shape[:-1])
    return Workspace(2 * bool(batched) * count * width * itemsize(indices.dtype))


# --- sorts ----------------------------------------------------------------------------------------


@rule(workspace_rules, "sort")
def _sort(eqn: JaxprEqn) -> Workspace:
    return Workspace(in_place=True)


@rule(workspace_rules, "top_k", "approx_top_k")
def _top_k(eqn: JaxprEqn) -> Workspace:
    """Count a sorted copy of the operand and its positions; XLA has a kernel for f32 alone."""
    operand = eqn.invars[0].aval
    dimension = eqn.params.get("reduction_dimension", -1) % operand.ndim
    if operand.dtype == np.float32 and dimension == operand.ndim - 1:
        return NOTHING
    return Workspace(size_in_bytes(operand) + 4 * math.prod(operand.shape))


# --- linear algebra -------------------------------------------------------------------------------


@rule(workspace_rules, "cholesky", "householder_product", "triangular_solve", "geqrf", "lu")
@rule(workspace_rules, "eigh", "geqp3", "ormqr", "hessenberg", "tridiagonal")
def _in_place(eqn: JaxprEqn) -> Workspace:
    return Workspace(in_place=True, by_columns=True)


@rule(workspace_rules, "svd")
def _svd(eqn: JaxprEqn) -> Workspace:
    """Count LAPACK's copy of the matrix, and the singular vectors if they are not results."""
    *_, m, n = _shape(eqn.invars[0])
    vectors = m * m + n * n if eqn.params["full_matrices"] else min(m, n) * (m + n)
    vectors *= not eqn.params["compute_uv"]
    return Workspace(_matrices(eqn, m, n) + _matrices(eqn, 1, vectors), by_columns=True)


@rule(workspace_rules, "eig")
def _eig(eqn: JaxprEqn) -> Workspace:
    """Count LAPACK's copy of the matrix, and the eigenvectors that are not results."""
    *_, n, _ = _shape(eqn.invars[0])
    results = 1 + eqn.params["compute_left_eigenvectors"] + eqn.params["compute_right_eigenvectors"]
    size = itemsize(eqn.outvars[0].aval.dtype)
    return Workspace(_matrices(eqn, n, n, (3 - results) * n * n * size), by_columns=True)


@rule(workspace_rules, "schur")
def _schur(eqn: JaxprEqn) -> Workspace:
    *_, n, _ = _shape(eqn.invars[0])
    hidden = 0 if eqn.params["compute_schur_vectors"] else 1
    return Workspace(_matrices(eqn, n, n) * hidden, in_place=True, by_columns=True)


@rule(workspace_rules, "tridiagonal_solve")
def _tridiagonal_solve(eqn: JaxprEqn) -> Workspace:
    """Count LAPACK's copies of the three diagonals and of the right-hand sides."""
    return Workspace(sum(size_in_bytes(v.aval) for v in eqn.invars))


# --- temporary ------------------------------------------------------------------------------------
# Estimate the temporary memory of a compiled program: all except its arguments and results.
#
# The memory of donated arguments is not reused.


def outlined_memory(program: Program) -> TemporaryMemory | None:
    """Estimate the temporary memory of a program outlined and as traced.

    Returns None if `temporary_memory` does.
    """
    as_traced, outlined = temporary_memory(program, opened=True), temporary_memory(program)
    if as_traced is None or outlined is None:
        return None
    return TemporaryMemory(as_traced, outlined)


def temporary_memory(
    program: Program, opened: bool = False, kernels: dict[Jaxpr, Kernels] | None = None
) -> int | None:
    """Estimate the bytes that a program needs besides its arguments and results.

    Args:
        program: The program.
        opened: Whether to treat calls that XLA keeps as if it inlined them.
        kernels: Gets the kernels of the bodies without dead equations, if these are computed here
            and calls are not opened.

    Returns:
        The bytes, or None if a size is symbolic or the program has too many equations.
    """
    jaxpr = top_jaxpr(program)
    known = _temporary.of(jaxpr)
    if opened not in known:  # `outline` asks several times for the programs that it compares
        bodies = BodyMemories(opened)
        known[opened] = _temporary_memory(jaxpr, bodies)
        if kernels is not None and not opened:
            kernels.update(bodies.whole_kernels())
    return known[opened]  # type: ignore[no-any-return]


#: The temporary memory of a program by its jaxpr, and by `opened`.
_temporary = JaxprCache()


def _temporary_memory(jaxpr: Jaxpr, bodies: BodyMemories) -> int | None:
    if count_equations(jaxpr) > MOST_OPENED:
        return None
    try:
        return bodies.memory(live_part(jaxpr)).peak
    except UnknownSize:
        return None
