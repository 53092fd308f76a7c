"""The memory of a compiled program at its peak: XLA's own buffers, by the user's line.

    found = compiled_memory(program, compiled, memory(program))
    found.peak_bytes, found.lines[0].line, found.buffers[0].what

Arguments, results and constants have memory from start to end. All other values share blocks of
memory, whose live values at the peak are those that `ir.hlo.live_ranges` finds. The rest of such a
block is unused then: XLA could not place the values more densely, or aligned them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from jaxprtool.analysis.memory import Memory
from jaxprtool.analysis.memory.origins import Origin, Origins
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.paths import common_path, without_numbers
from jaxprtool.ir.hlo.buffers import Allocation, Assignment, Buffer, Placed, buffer_assignment
from jaxprtool.ir.hlo.live_ranges import LiveRanges
from jaxprtool.ir.hlo.module import Module, compiled_module
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import BEHIND, frames_now
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The kinds of buffers. "pointers" are the tables of tuples; "unused" is memory between buffers.
Kind: TypeAlias = Literal["argument", "result", "constant", "value", "pointers", "unused"]

#: How `lines` names what has no line of its own, by its kind.
_LINES = {
    "argument": "arguments",
    "result": "results",
    "room": "results",
    "constant": "constants",
    "pointers": "pointers",
    "unused": "unused",
}

#: The line of values that XLA makes of none of the user's lines.
NO_LINE = "no line"


@document(without=("frames",))
@dataclass(frozen=True)
class PeakBuffer:
    """Buffers at the peak with the same kind, type and lines.

    Attributes:
        bytes: Their total bytes.
        line: The user's line that computes them, followed by the library's; "" for arguments.
        what: The path of an argument or a result, with `*` for numbers that differ; or the
            primitive that computes a value, or XLA's own operation: `copy of params['w']`.
        kind: The kind: "argument", "result", "constant", "value", "pointers" (the tables of tuples)
            or "unused" (memory between buffers).
        count: Their number.
        type: Their type, as XLA writes it.
        operation: The name of XLA's operation that computes the first of them; "" for none.
        until: The last operation that reads them, and its line; "" if they live to the end.
        shares: What else uses this memory: the result that a donated argument is reused for, or the
            operand that is written over.
        frames: The frames of the first of them, the innermost first.
    """

    bytes: int
    line: str
    what: str
    kind: Kind
    count: int
    type: str
    operation: str = ""
    until: str = ""
    shares: str = ""
    frames: tuple[UserFrame, ...] = ()


@dataclass(frozen=True)
class LineBytes:
    """The memory of a line at the peak.

    Attributes:
        line: The user's line; or "arguments", "results", "constants", "pointers", "unused", or "no
            line" for what XLA makes of none.
        bytes: The bytes of XLA's buffers.
        estimate_bytes: The bytes in the estimate without compiling.
    """

    line: str
    bytes: int
    estimate_bytes: int


@document(names={"name": "program"})
@dataclass(frozen=True)
class CompiledPeak:
    """The memory that XLA assigned to a compiled program, on each device.

    Attributes:
        name: The name of the program.
        devices: The number of devices that it is compiled for.
        peak_bytes: All bytes: the sum of the next four, less `donated_bytes`.
        argument_bytes: The bytes of its arguments.
        result_bytes: The bytes of its results.
        constant_bytes: The bytes of the constants in the executable.
        temporary_bytes: The bytes of the memory that all other values share.
        donated_bytes: The bytes of results that are written to the memory of donated arguments.
        unused_bytes: Those of `temporary_bytes` that hold no value at the peak.
        unshared_bytes: The bytes that the temporaries would need if none shared memory.
        at: The operation that runs at the peak, and its line.
        estimate_bytes: The peak that was estimated without compiling.
        buffers: The buffers at the peak, the largest first; they add up to `peak_bytes`.
        lines: The bytes by line, and the estimated ones, the largest first.
    """

    name: str
    devices: int
    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    constant_bytes: int
    temporary_bytes: int
    donated_bytes: int
    unused_bytes: int
    unshared_bytes: int
    at: str
    estimate_bytes: int
    buffers: tuple[PeakBuffer, ...]
    lines: tuple[LineBytes, ...]


def compiled_memory(program: Program, compiled: Any, estimate: Memory) -> CompiledPeak:
    """Return the memory that XLA assigned to a program.

    Args:
        program: A program.
        compiled: The program as a `jax.stages.Compiled`, lowered with the names of its arguments.
        estimate: The estimate of its memory.

    Raises:
        UnsupportedError: If the backend does not describe its buffers.
    """
    module = compiled_module(compiled)
    assignment = buffer_assignment(compiled, module)
    reader = _Reader(program, module, assignment)
    counted = [each for each in assignment.allocations if not each.is_local]
    temporaries = [each for each in counted if each.is_temporary]
    time, alive = reader.ranges.peak(temporaries)
    values = [reader.value(placed, size) for placed, size in alive]
    unused = _size(temporaries) - sum(each.bytes for each in values)
    fixed = [found for each in counted if (found := reader.fixed(each))]
    rest = [PeakBuffer(unused, "", "between buffers", "unused", 1, "")] if unused else []
    buffers = _grouped([*fixed, *values, *rest])
    return CompiledPeak(
        program.name,
        len(compiled.runtime_executable().local_devices()),
        _size(counted),
        _size(each for each in counted if each.parameter is not None),
        _size(each for each in counted if each.is_result),
        _size(each for each in counted if each.is_constant),
        _size(temporaries),
        _size(each for each in counted if each.is_result and each.parameter is not None),
        unused,
        sum(reader.unshared(each) for each in temporaries),
        reader.at(time),
        estimate.peak_bytes,
        buffers,
        _lines(buffers, estimate),
    )


def _size(allocations: Iterable[Allocation]) -> int:
    return sum(each.size for each in allocations)


class _Reader:
    """Describes the buffers of a module."""

    def __init__(self, program: Program, module: Module, assignment: Assignment):
        self._module, self._assignment = module, assignment
        self.ranges = LiveRanges(module, assignment)
        frames = frames_now(program.roots)
        self._origins = Origins(module, assignment, self.ranges, frames)
        self._places = {
            placed.buffer.id: (each.index, placed)
            for each in assignment.allocations
            for placed in each.placed
        }
        self._results = self._named_results(program)

    def _named_results(self, program: Program) -> dict[int, list[str]]:
        """Return the names of the results in each allocation."""
        root = self._module.entry.root
        indices = [(i,) for i in range(len(root.shape.parts))] or [()]
        found = defaultdict[int, list[str]](list)
        # Tokens of effects and errors of checks come first.
        for name, index in zip(reversed(program.out_names), reversed(indices), strict=False):
            if (buffer := self.ranges.buffer_at((root.id, index))) is not None:
                found[self._places[buffer.id][0]].insert(0, name)
        return found

    def fixed(self, allocation: Allocation) -> PeakBuffer | None:
        """Return the argument, result or constant in an allocation; None for temporaries."""
        first = next((p.buffer for p in allocation.placed), None)
        names = ", ".join(self._results.get(allocation.index, ()))
        kind: Kind
        if allocation.parameter is not None:
            kind, what, origin = "argument", self._parameter(allocation), Origin()
            shares = f"reused for {names}" if names else ""
            first = self._module_parameter(allocation)
        elif allocation.is_result and first is not None and first.shape.parts:
            kind, what, origin, shares = "pointers", "table of the results", Origin(), ""
        elif allocation.is_result:
            first = self._result_in(allocation) or first
            kind, what, shares = "result", names, self._others(allocation, first)
            origin = Origin() if first is None else self._origins.of(first)
        elif allocation.is_constant:
            kind, what, origin, shares = "constant", "constant", Origin(), ""
        else:
            return None
        shape = "" if first is None else str(first.shape)
        size, line = allocation.size, origin.line
        return PeakBuffer(size, line, what, kind, 1, shape, "", "", shares, origin.frames)

    def _parameter(self, allocation: Allocation) -> str:
        found = self._module_parameter(allocation)
        return "" if found is None else found.instruction.op_name or found.instruction.name

    def _module_parameter(self, allocation: Allocation) -> Buffer | None:
        entry = {each.id for each in self._module.entry.instructions}
        held = (placed.buffer for placed in allocation.placed)
        of = (b for b in held if b.instruction.opcode == "parameter" and b.instruction.id in entry)
        return next(of, None)

    def _result_in(self, allocation: Allocation) -> Buffer | None:
        root = self._module.entry.root
        for i in range(max(1, len(root.shape.parts))):
            found = self.ranges.buffer_at((root.id, (i,) if root.shape.parts else ()))
            if found is not None and self._places[found.id][0] == allocation.index:
                return found
        return None

    def _others(self, allocation: Allocation, result: Buffer | None) -> str:
        """Return what the memory of a result holds before."""
        groups, own = self._assignment.groups, None
        if result is not None:
            own = groups[result.id]
        others = {groups[p.buffer.id]: p.buffer for p in allocation.placed}
        named = [self._origins.of(b).what for number, b in others.items() if number != own]
        if not named:
            return ""
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        return f"before, it holds {named[-1]}{more}"

    def value(self, placed: Placed, size: int) -> PeakBuffer:
        """Return a live value in the memory that values share."""
        buffer = placed.buffer
        shape, name = str(buffer.shape), buffer.instruction.name
        if buffer.shape.parts:
            return PeakBuffer(size, "", "table of a tuple", "pointers", 1, "")
        origin = self._origins.of(buffer)
        until = self._origins.until(buffer)
        shares = self._written_over(placed)
        return PeakBuffer(
            size, origin.line, origin.what, "value", 1, shape, name, until, shares, origin.frames
        )

    def _written_over(self, placed: Placed) -> str:
        """Return which operand the operation that makes a value writes over."""
        made = placed.buffer
        allocation, _ = self._places[made.id]
        groups = self._assignment.groups
        for operand in made.instruction.operands:
            read = self.ranges.buffer_at((operand, ()))
            if read is None or groups[read.id] == groups[made.id]:
                continue
            where, other = self._places[read.id]
            if where == allocation and placed.common(other):
                return f"written over {self._origins.of(read).text}"
        return ""

    def unshared(self, allocation: Allocation) -> int:
        """Return the bytes of the groups of buffers in an allocation."""
        groups = {self._assignment.groups[p.buffer.id]: p.size for p in allocation.placed}
        return sum(groups.values())

    def at(self, time: int) -> str:
        """Return the operation that runs at a time, and its line; "" if nothing runs."""
        running = [n for n, when in self.ranges.time.items() if when == time]
        return self._origins.made(self._module.instructions[running[0]]).text if running else ""


def _grouped(buffers: Iterable[PeakBuffer]) -> tuple[PeakBuffer, ...]:
    """Merge equal buffers, and sort them by their bytes, the largest first."""
    groups = defaultdict[tuple[object, ...], list[PeakBuffer]](list)
    for each in buffers:
        same = each.kind, each.type, each.line, without_numbers(each.what)
        groups[*same, each.until, without_numbers(each.shares)].append(each)
    merged = (
        replace(
            group[0],
            count=len(group),
            bytes=sum(each.bytes for each in group),
            what=common_path([each.what for each in group]),
            shares=common_path([each.shares for each in group]),
        )
        for group in groups.values()
    )
    return tuple(sorted(merged, key=lambda each: -each.bytes))


def _lines(buffers: Iterable[PeakBuffer], estimate: Memory) -> tuple[LineBytes, ...]:
    """Return the bytes of each line in XLA's buffers and in the estimate."""
    sizes = defaultdict[str, list[int]](lambda: [0, 0])
    for i, (kind, line, size) in enumerate_sizes(buffers, estimate):
        sizes[line_of(kind, line)][i] += size
    found = (LineBytes(line, *both) for line, both in sizes.items())
    return tuple(sorted(found, key=lambda each: (-each.bytes, -each.estimate_bytes)))


def enumerate_sizes(
    buffers: Iterable[PeakBuffer], estimate: Memory
) -> Iterator[tuple[int, tuple[str, str, int]]]:
    """Yield kind, line and bytes of each buffer, with 0, and of each estimated value, with 1."""
    yield from ((0, (each.kind, each.line, each.bytes)) for each in buffers)
    yield from ((1, (live.kind, live.source, live.bytes)) for live in estimate.live)


def line_of(kind: str, line: str) -> str:
    """Return the line of a buffer or of an estimated value in `lines`."""
    return _LINES.get(kind) or line.partition(BEHIND)[0] or NO_LINE
