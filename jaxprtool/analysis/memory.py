"""How much memory a compiled program needs besides its arguments and results: an estimate.

What is written to memory is what `kernels` says. Kernels run as early as their operands are there,
as XLA for the CPU runs them, and a value lives until the last kernel that reads it. A value may lie
in the buffer of a result of the program that is made later, or, where a kernel is computed element
by element, in that of an operand which it is the last to read. A call that XLA keeps, a loop and a
branch need what their bodies do as well. Donated arguments are not made use of, and what a single
operation needs while it runs (a convolution, a sort) is not known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from jaxprtool import jaxcompat
from jaxprtool.analysis.kernels import Kernels, Opens, UnknownSize
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.border import top_jaxpr
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr

#: Calls within calls may be equations without end.
_MOST = 300_000

#: A value of less than this part of all is not asked which buffer it can lie in.
_SMALL = 1 / 5000


@dataclass(frozen=True)
class TemporaryMemory:
    """The bytes that an outlined program needs besides its arguments and results, estimated.

    Attributes:
        as_traced: What it would need if XLA inlined the calls.
        outlined: What it needs.
    """

    as_traced: int
    outlined: int

    @property
    def is_much(self) -> bool:
        """Whether outlining costs half as much again, and a number of bytes worth a warning."""
        more = self.outlined - self.as_traced
        return more > MUCH_MORE * self.as_traced and more > MUCH


#: What is worth a warning: such a part of the memory as traced, and so many bytes.
MUCH_MORE, MUCH = 0.5, 2**20


def outlined_memory(program: Program) -> TemporaryMemory | None:
    """Return what an outlined program needs, beside what it would need as traced.

    None if `temporary_memory` is.
    """
    as_traced, outlined = temporary_memory(program, opened=True), temporary_memory(program)
    if as_traced is None or outlined is None:
        return None
    return TemporaryMemory(as_traced, outlined)


def temporary_memory(program: Program, opened: bool = False) -> int | None:
    """Return how many bytes a program needs besides its arguments and results, estimated.

    Args:
        program: The program.
        opened: Whether calls that XLA keeps are taken for calls that it inlines.

    Returns:
        The bytes; None if a size is symbolic, or there are more equations than can be gone through.
    """
    if count_equations(program) > _MOST:
        return None
    try:
        return _Bodies(opened).temporary(top_jaxpr(program))
    except UnknownSize:
        return None


@dataclass(slots=True)
class _Buffer:
    """A value in memory, from the kernel that makes it to the last that reads it."""

    size: int
    start: int
    end: int


class _Bodies:
    """What bodies need, each computed once: equations may share them."""

    def __init__(self, opened: bool) -> None:
        self._opens: Opens = "all" if opened else "inlined"
        self._known: dict[Jaxpr, int] = {}

    def temporary(self, jaxpr: AnyJaxpr) -> int:
        """Return the bytes that a body needs besides its arguments and results."""
        body = jaxcompat.open_jaxpr(jaxpr)
        if body not in self._known:
            self._known[body] = self._peak(_Schedule(Kernels(body, self._opens)))
        return self._known[body]

    def _peak(self, schedule: _Schedule) -> int:
        kernels = schedule.kernels
        temporaries = _without_results(schedule.temporaries, schedule.results)
        made, freed = defaultdict[int, int](int), defaultdict[int, int](int)
        last: defaultdict[int, set[int]] = defaultdict(set)
        for buffer in temporaries:
            made[buffer.start] += buffer.size
            freed[buffer.end] += buffer.size
            last[buffer.end].add(buffer.size)
        live = peak = 0
        for time, number in enumerate(schedule.order):
            node, new = kernels.nodes[number], made[time]
            if node.held is not None:
                inner = max(map(self.temporary, node.held.bodies))
                if node.held.repeats:
                    inner += sum(kernels.sizes[v] for v in node.makes)
                peak = max(peak, live + new + inner)
            elif not (node.fusible and new in last[time]):
                peak = max(peak, live + new)
            live += new - freed[time]
        return peak


class _Schedule:
    """When the kernels of a body run, and how long values live.

    Attributes:
        kernels: What is written.
        order: The numbers of the nodes that are kernels, as they run.
        temporaries: The values that are written and no results.
        results: The results; they live to the end.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        #: The level after which a value can be read, written and inlined: that of its kernel is one
        #: more than those of what it reads.
        self._written = [0] * len(kernels.sizes)
        self._inlined = [0] * len(kernels.sizes)
        levels = self._levels()
        self.order = sorted(levels, key=lambda number: levels[number])
        self._times = {number: time for time, number in enumerate(self.order)}
        self._starts = [levels[number] for number in self.order]
        self.temporaries: list[_Buffer] = []
        self.results: list[_Buffer] = []
        self._buffers()

    def _levels(self) -> dict[int, int]:
        kernels, levels = self.kernels, dict[int, int]()
        for number, node in enumerate(kernels.nodes):
            if node.absorbed:
                continue
            level = max(
                [self._level(v, node.fusible) for v in node.reads]
                + [self._level(v, True) + 1 for v, _ in node.broadcast],
                default=0,
            )
            for made in node.makes:
                self._inlined[made], self._written[made] = level, level + 1
            if not node.fusible or kernels.written[node.makes[0]]:
                levels[number] = level
        return levels

    def _level(self, value: int, fusible: bool) -> int:
        inlined = fusible and self.kernels.inlined[value]
        return self._inlined[value] if inlined else self._written[value]

    def _buffers(self) -> None:
        kernels, end = self.kernels, len(self.order)
        written, inlined = [-1] * len(kernels.sizes), [-1] * len(kernels.sizes)

        def read(value: int, fusible: bool, time: int) -> None:
            uses = inlined if fusible and kernels.inlined[value] else written
            uses[value] = max(uses[value], time)

        for number in range(len(kernels.nodes) - 1, -1, -1):
            node = kernels.nodes[number]
            if node.absorbed:
                continue
            time = self._times.get(number, -1)
            if node.fusible:
                time = max(time, inlined[node.makes[0]])
            for value in node.reads:
                read(value, node.fusible, time)
            for value, size in node.broadcast:
                start = min(time, bisect_left(self._starts, self._level(value, True)))
                read(value, True, start)
                self.temporaries.append(_Buffer(size, start, time))
        results = set(kernels.results)
        for number, time in self._times.items():
            for value in kernels.nodes[number].makes:
                if value in results:
                    self.results.append(_Buffer(kernels.sizes[value], time, end))
                else:
                    last = max(time, written[value])
                    self.temporaries.append(_Buffer(kernels.sizes[value], time, last))


def _without_results(temporaries: list[_Buffer], results: list[_Buffer]) -> list[_Buffer]:
    """Return the values that do not fit in the buffer of a result that is made later."""
    least = _SMALL * sum(buffer.size for buffer in temporaries)
    places = [(result, list[_Buffer]()) for result in results if result.size >= least]
    places.sort(key=lambda place: -place[0].size)
    left = []
    for buffer in sorted(temporaries, key=lambda buffer: -buffer.size):
        if buffer.size < least or not _placed(buffer, places):
            left.append(buffer)
    return left


def _placed(buffer: _Buffer, places: list[tuple[_Buffer, list[_Buffer]]]) -> bool:
    for result, held in places:
        if result.size < buffer.size:
            return False
        if result.start > buffer.end and all(
            other.end < buffer.start or other.start > buffer.end for other in held
        ):
            held.append(buffer)
            return True
    return False
