"""Schedule the kernels of a body, and find the lifetimes of its values.

`analysis.kernels` finds which values are written to memory. Kernels run as soon as their operands
are ready, as on XLA's CPU backend, and a value lives until the last kernel that reads it. In the
body of a loop, a slice of a scanned array is a value of its own if an equation such as a product
reads it, and a carry is written in place if its old value is no longer needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxprtool.analysis.kernels import Kernels, Node
from jaxprtool.analysis.memory.workspaces import workspace
from jaxprtool.ir.core.regions import Region, Regions
from jaxprtool.ir.core.traits import traits


@dataclass(slots=True, eq=False)
class Buffer:
    """A value in memory, and its lifetime. Times are positions in `Schedule.order`.

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


def loop_values_of(held: Regions, region: Region) -> LoopValues | None:
    """Return how values pass between the iterations of a loop's body; None for other bodies."""
    if not held.repeats or region.is_predicate:
        return None
    places = {operand: i for i, operand in enumerate(region.ins)}
    carried = {
        i: places[operand] for i, operand in enumerate(region.next_iteration) if operand is not None
    }
    going = {operand for operand, _ in held.carried}
    ins = enumerate(zip(region.ins, region.loop_invariant, strict=True))
    sliced = (i for i, (operand, is_invariant) in ins if not is_invariant and operand not in going)
    stacked = (i for i in range(len(region.outs)) if i not in carried)
    return LoopValues(tuple(carried.items()), tuple(sliced), tuple(stacked))


class Schedule:
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
        self.temporaries: list[Buffer] = []
        self.results: list[Buffer] = []
        self.last_read = [-1] * len(kernels.sizes)
        self._last_node: list[int | None] = [None] * len(kernels.sizes)
        self._buffers()
        self._begin_loops()
        if loop_values is not None:
            self._reuse_loop_values(loop_values)

    def in_place(self, buffer: Buffer) -> bool:
        """Return True if a value may be written to the memory of an operand that is read last."""
        return self.writes_in_place(self.kernels.nodes[self.kernels.defined_by[buffer.value]])

    def writes_in_place(self, node: Node) -> bool:
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
            for made in node.makes:
                self._inlined[made] = level
                self._written[made] = level + 2 if is_barrier else level + 1
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
                time = max(time, *[inlined[made] for made in node.makes])
            if node.kind == "barrier":  # a value lives until it is read after the barrier
                for value, made in zip(node.reads, node.makes, strict=True):
                    if written[made] > written[value]:
                        written[value] = written[made]
                        self._last_node[value] = self._last_node[made]
                continue
            for value in node.reads:
                read(value, number, node.fusible, time)
        results = set(kernels.results)
        for number, time in self._times.items():
            node = kernels.nodes[number]
            for value in node.makes:
                size, last = kernels.sizes[value], self._last_node[value]
                if value in results:
                    self.results.append(Buffer(value, size, time, end))
                else:
                    until = max(time, written[value])
                    self.temporaries.append(Buffer(value, size, time, until, last))

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
        kernels, made = self.kernels, {each.value: each for each in self.results}
        self.results = []
        for position, argument in loop_values.carried:
            buffer = made.get(self._outcome(position))
            if buffer is not None and not self._takes_place(buffer, self._argument(argument)):
                self.temporaries.append(buffer)
                del made[buffer.value]
        for position in loop_values.stacked:
            buffer = made.pop(self._outcome(position), None)
            if buffer is None:
                continue
            buffer.end, buffer.last = self.last_read[buffer.value], self._last_node[buffer.value]
            if not kernels.nodes[kernels.defined_by[buffer.value]].fusible or buffer.end >= 0:
                buffer.end = max(buffer.start, buffer.end)
                self.temporaries.append(buffer)
        for value in self._read_from_memory(map(self._argument, loop_values.sliced)):
            last = self._last_node[value]
            size, end = kernels.sizes[value], self.last_read[value]
            self.temporaries.append(Buffer(value, size, 0, end, last))

    def _argument(self, position: int) -> int:
        return len(self.kernels.jaxpr.constvars) + position

    def _outcome(self, position: int) -> int:
        """Return the value of a result; -1 for a literal."""
        value = self.kernels.given[position]
        return -1 if value is None else value

    def _takes_place(self, result: Buffer, argument: int) -> bool:
        """Return True if the new value of a carry is written in place of the old one."""
        last = self.last_read[argument]
        return result.start > last or (result.start == last and self.in_place(result))

    def _read_from_memory(self, values: Iterable[int]) -> set[int]:
        """Return the given values that a kernel reads from memory without inlining them."""
        asked = set(values)
        nodes = (node for node in self.kernels.nodes if not node.fusible and not node.absorbed)
        return {value for node in nodes for value in node.reads if value in asked}
