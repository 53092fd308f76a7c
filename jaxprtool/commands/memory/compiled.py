"""The memory of a compiled program at its peak: XLA's own buffers, by the user's line.

    found = compiled_memory(program)
    found.peak_bytes, found.lines[0].line, found.buffers[0].what

Arguments, results and constants have memory from start to end. All other values share blocks of
memory, whose live values at the peak are those that `ir.hlo.buffers` finds. The rest of such a
block is unused then: XLA could not place the values more densely, or aligned them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from jaxprtool.commands.memory.estimate import Memory, memory
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.execute.running.backends import compiled_afresh, devices_to_compile_for
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.formats.lowering import compiled_with_memory, on_devices
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.documents import Printed, document, in_bytes, some
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.hlo.buffers import (
    Allocation,
    Buffer,
    BufferAssignment,
    LiveRanges,
    PlacedBuffer,
    Position,
    scheduled_assignment,
)
from jaxprtool.ir.hlo.module import HloModule
from jaxprtool.ir.hlo.origins import BufferOrigins, InsertedCopy, inserted_copies
from jaxprtool.ir.program import Program, require_program
from jaxprtool.ir.source_text import UNKNOWN, Place, place_in
from jaxprtool.ir.trees import common_path, without_numbers
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The kinds of buffers. "pointers" are the tables of tuples; "unused" is memory between buffers.
Kind: TypeAlias = Literal["argument", "result", "constant", "value", "pointers", "unused"]

#: The names in `lines` of buffers without a source line, by kind.
_LINES = {
    "argument": "arguments",
    "result": "results",
    "room": "results",
    "constant": "constants",
    "pointers": "pointers",
    "unused": "unused",
}

#: The name in `lines` of values that XLA computes for none of the user's lines.
NO_LINE = "no line"


@document(names={"line": "place"}, without=("frames",))
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
        shares: The value that shares this memory: the result that reuses a donated argument, the
            operand that is overwritten, or a result that is written later.
        frames: The frames of the first of them, the innermost first.
    """

    bytes: int
    line: Place
    what: str
    kind: Kind
    count: int
    type: str
    operation: str = ""
    until: str = ""
    shares: str = ""
    frames: tuple[UserFrame, ...] = ()


@document(without=("line", "buffers"), also=("name", "place"), optional=("place",))
@dataclass(frozen=True)
class LineBytes:
    """The memory of a line at the peak.

    Attributes:
        line: The user's line; or "arguments", "results", "constants", "pointers", "unused", or "no
            line" for values that XLA computes for none of the user's lines.
        bytes: The bytes of XLA's buffers.
        estimate_bytes: The bytes in the estimate without compiling.
        buffers: XLA's buffers of the line, the largest first.
    """

    line: str
    bytes: int
    estimate_bytes: int
    buffers: tuple[PeakBuffer, ...]

    @property
    def name(self) -> str:
        """The line, or else what the values are."""
        return str(self.line)

    @property
    def place(self) -> Place | None:
        """The user's line; None for values without one."""
        return place_in(self.line)


@dataclass(frozen=True)
class CompiledPeak(Printed):
    """The memory that XLA assigned to a compiled program, on each device.

    Attributes:
        name: The name of the program.
        devices: The number of devices that it is compiled for.
        peak_bytes: The bytes at the peak: the sum of the next four, less `donated_bytes`.
        argument_bytes: The bytes of its arguments.
        result_bytes: The bytes of its results.
        constant_bytes: The bytes of the constants in the executable.
        temporary_bytes: The bytes of the memory that all other values share.
        donated_bytes: The bytes of results that are written to the memory of donated arguments.
        unused_bytes: The part of `temporary_bytes` that holds no value at the peak.
        unshared_bytes: The bytes that the temporaries would need if none shared memory.
        at: The line of the operation that runs at the peak, and its primitive.
        estimate_bytes: The peak that was estimated without compiling; None for an HLO module.
        estimate_is_whole: Whether the estimate counts the global size of arrays that are sharded
            over several devices.
        buffers: The buffers at the peak, the largest first; they add up to `peak_bytes`.
        lines: The bytes by line, and the estimated ones, the largest first.
        unknown: The number of equations of each primitive whose memory the estimate does not count,
            besides that of their operands and results.
        by_schedule: Whether this is the memory of the values that are live by the schedule, because
            XLA's own assignment is not known. That may have gaps between values, or place them in
            the memory of results that are not written yet.
        copies: The copies that XLA inserted, those of most bytes first.
        reported_bytes: The peak that XLA reports for a TPU (`peak_memory_in_bytes`): the bytes of
            what is not temporary, and of the other values at the peak of the fullest memory. None
            for other devices, and if XLA's own assignment is not known.
        reported_memory: The number of that memory: 0 is the main memory, to which all other figures
            refer; others are on the chip or in the host.
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
    estimate_bytes: int | None
    estimate_is_whole: bool
    buffers: tuple[PeakBuffer, ...]
    lines: tuple[LineBytes, ...]
    unknown: Mapping[str, int] = field(default_factory=dict)
    by_schedule: bool = False
    copies: tuple[InsertedCopy, ...] = ()
    reported_bytes: int | None = None
    reported_memory: int = 0


def module_peak(stored: StoredModule) -> CompiledPeak:
    """Return the memory of an HLO module that was read from a file.

    It is XLA's assignment if the file has it, and otherwise that of `scheduled_assignment`.

    Raises:
        UnsupportedError: If the module is not scheduled, because XLA has not optimized it yet.
    """
    module = stored.module
    if not module.schedule:
        raise UnsupportedError(
            f"{module.name} has no schedule, so its memory is not known",
            "read the module after XLA's optimizations",
        )
    return _stored_peak(stored, _result_names(module), frames_now())


def _result_names(module: HloModule) -> list[str]:
    parts = module.entry.root.shape.parts
    return [f"result[{i}]" for i in range(len(parts))] or ["result"]


def compiled_peak(program: Program, stored: StoredModule, estimate: Memory) -> CompiledPeak:
    """Return the memory that XLA assigned to a program.

    Args:
        program: A program.
        stored: Its module, compiled with the names of its arguments.
        estimate: The estimate of its memory.

    The buffers are those of the schedule if XLA's own assignment is not known.
    """
    peak = _stored_peak(stored, program.out_names, frames_now(program.roots))
    return replace(
        peak,
        name=program.name,
        estimate_bytes=estimate.peak_bytes,
        estimate_is_whole=bool(estimate.left_to_partitioner),
        lines=_lines(peak.buffers, estimate),
        unknown=estimate.unknown,
    )


def _stored_peak(stored: StoredModule, results: Sequence[str], frames: Frames) -> CompiledPeak:
    """Return the memory of a module by XLA's assignment, or else by its schedule."""
    module, assignment = stored.module, stored.assignment
    if assignment is None:
        peak = _peak_of(module, scheduled_assignment(module), results, frames)
        return replace(peak, by_schedule=True)
    reported = assignment.reported_peak
    return replace(
        _peak_of(module, assignment, results, frames),
        reported_bytes=None if reported is None else reported[0],
        reported_memory=0 if reported is None else reported[1],
    )


def _peak_of(
    module: HloModule, assignment: BufferAssignment, results: Sequence[str], frames: Frames
) -> CompiledPeak:
    """Return the memory of a module, whose results have these names."""
    reader = _BufferDescriber(module, assignment, results, frames)
    counted = assignment.main
    temporaries = [allocation for allocation in counted if allocation.is_temporary]
    time, live = reader.ranges.at_peak(temporaries)
    values = [reader.value(*each) for each in live]
    unused = _size(temporaries) - sum(value.bytes for value in values)
    fixed = [buffer for allocation in counted for buffer in reader.fixed(allocation, time)]
    rest = [PeakBuffer(unused, UNKNOWN, "between buffers", "unused", 1, "")] if unused else []
    buffers = _grouped([*fixed, *values, *rest])
    return CompiledPeak(
        module.name,
        module.devices,
        _size(counted),
        _size(allocation for allocation in counted if allocation.parameter is not None),
        _size(allocation for allocation in counted if allocation.is_result),
        _size(allocation for allocation in counted if allocation.is_constant),
        _size(temporaries),
        _size(
            allocation
            for allocation in counted
            if allocation.is_result and allocation.parameter is not None
        ),
        unused,
        sum(reader.unshared(allocation) for allocation in temporaries),
        reader.at(time),
        None,
        False,
        buffers,
        _lines(buffers, None),
        copies=inserted_copies(module, assignment, frames),
    )


def _size(allocations: Iterable[Allocation]) -> int:
    return sum(allocation.size for allocation in allocations)


class _BufferDescriber:
    """Describes the buffers of a module."""

    def __init__(
        self,
        module: HloModule,
        assignment: BufferAssignment,
        results: Sequence[str],
        frames: Frames,
    ) -> None:
        self._module, self._assignment = module, assignment
        self.ranges = LiveRanges(module, assignment)
        self._origins = BufferOrigins(module, assignment, self.ranges, frames)
        self._places = {
            placed.buffer.id: (allocation.index, placed)
            for allocation in assignment.allocations
            for placed in allocation.placed
        }
        self._results = self._named_results(results)
        parameters = (op for op in module.entry.instructions if op.opcode == "parameter")
        self._parameters = {parameter.parameter_number: parameter for parameter in parameters}

    def _named_results(self, names: Sequence[str]) -> dict[int, tuple[Buffer, list[str]]]:
        """Return the buffer and the names of the results in each allocation."""
        root = self._module.entry.root
        parts = range(len(root.shape.parts))
        positions: list[Position] = [(root.id, (i,)) for i in parts] or [(root.id, ())]
        results: dict[int, tuple[Buffer, list[str]]] = {}
        # The tokens of effects come before the results of the program.
        first = len(positions) - len(names)
        for name, position in zip(names, positions[first:], strict=True):
            if (buffer := self.ranges.buffer_at(position)) is not None:
                results.setdefault(self._places[buffer.id][0], (buffer, []))[1].append(name)
        return results

    def fixed(self, allocation: Allocation, time: int) -> Iterator[PeakBuffer]:
        """Yield the argument, constant or result in an allocation.

        Before a result is written, its memory may hold another value.
        """
        size = allocation.size
        result, all_names = self._results.get(allocation.index, (None, []))
        names = ", ".join(all_names)
        if allocation.parameter is not None:
            parameter = self._parameters[allocation.parameter]
            name, shape = parameter.op_name or parameter.name, str(parameter.shape)
            shares = f"reused for {names}" if names else ""
            yield PeakBuffer(size, UNKNOWN, name, "argument", 1, shape, shares=shares)
        elif allocation.is_constant:
            shape = ", ".join(str(placed.buffer.shape) for placed in allocation.placed)
            yield PeakBuffer(size, UNKNOWN, "constant", "constant", 1, shape)
        elif result is not None:
            for placed, part in self.ranges.live([allocation], time):
                if self._group(placed.buffer) != self._group(result):
                    size -= part
                    yield replace(self.value(placed, part), shares=f"in the memory of {names}")
            origin, shape = self._origins.of(result), str(result.shape)
            yield PeakBuffer(size, origin.line, names, "result", 1, shape, frames=origin.frames)
        elif allocation.is_result:
            yield PeakBuffer(size, UNKNOWN, "table of the results", "pointers", 1, "")

    def _group(self, buffer: Buffer) -> int:
        return self._assignment.groups[buffer.id]

    def value(self, placed: PlacedBuffer, size: int) -> PeakBuffer:
        """Return a live value in the memory that values share."""
        buffer = placed.buffer
        shape, name = str(buffer.shape), buffer.instruction.name
        if buffer.shape.parts:
            return PeakBuffer(size, UNKNOWN, "table of a tuple", "pointers", 1, "")
        origin = self._origins.of(buffer)
        until = self._origins.until(buffer)
        shares = self._written_over(placed)
        return PeakBuffer(
            size, origin.line, origin.what, "value", 1, shape, name, until, shares, origin.frames
        )

    def _written_over(self, placed: PlacedBuffer) -> str:
        """Return the operand that the operation of a value overwrites, in words."""
        written = placed.buffer
        allocation, _ = self._places[written.id]
        for operand in written.instruction.operands:
            read = self.ranges.buffer_at((operand, ()))
            if read is None or self._group(read) == self._group(written):
                continue
            where, other = self._places[read.id]
            if where == allocation and placed.common(other):
                return f"written over {self._origins.of(read).text}"
        return ""

    def unshared(self, allocation: Allocation) -> int:
        """Return the bytes of the groups of buffers in an allocation."""
        groups = {self._group(p.buffer): p.size for p in allocation.placed}
        return sum(groups.values())

    def at(self, time: int) -> str:
        """Return the line of the operation that runs at a time, and its primitive."""
        running = next((n for n, when in self.ranges.time.items() if when == time), None)
        if running is None:
            return ""
        instruction = self._module.instructions[running]
        buffer = self.ranges.buffer_at((running, (0,) if instruction.shape.parts else ()))
        origin = self._origins.made(instruction) if buffer is None else self._origins.of(buffer)
        return " ".join(filter(None, (origin.line, origin.what)))


def _grouped(buffers: Iterable[PeakBuffer]) -> tuple[PeakBuffer, ...]:
    """Merge equal buffers, and sort them by their bytes, the largest first.

    Tokens, which order effects, have no bytes and are left out.
    """
    groups = defaultdict[tuple[object, ...], list[PeakBuffer]](list)
    for value in filter(lambda buffer: buffer.bytes, buffers):
        same = value.kind, value.type, value.line, without_numbers(value.what)
        groups[*same, value.until, without_numbers(value.shares)].append(value)
    merged = (
        replace(
            group[0],
            count=len(group),
            bytes=sum(value.bytes for value in group),
            what=common_path([value.what for value in group]),
            shares=common_path([value.shares for value in group]),
        )
        for group in groups.values()
    )
    return tuple(sorted(merged, key=lambda value: -value.bytes))


def _lines(buffers: Iterable[PeakBuffer], estimate: Memory | None) -> tuple[LineBytes, ...]:
    """Return the buffers of each line, and their bytes beside those of the estimate."""
    by_line = defaultdict[str, list[PeakBuffer]](list)
    for buffer in buffers:
        by_line[_line(buffer.kind, buffer.line)].append(buffer)
    estimated = {} if estimate is None else estimated_lines(estimate)
    lines = (
        LineBytes(
            line,
            sum(buffer.bytes for buffer in by_line[line]),
            estimated.get(line, 0),
            tuple(by_line[line]),
        )
        for line in dict.fromkeys([*by_line, *estimated])
    )
    return tuple(sorted(lines, key=lambda line: (-line.bytes, -line.estimate_bytes)))


def estimated_lines(estimate: Memory) -> dict[str, int]:
    """Return the estimated bytes at the peak by line, under the names of `LineBytes`."""
    sizes = defaultdict[str, int](int)
    for live in estimate.live:
        sizes[_line(live.kind, live.source)] += live.bytes
    return dict(sizes)


def _line(kind: str, line: Place) -> str:
    """Return the line of a buffer or of an estimated value in `LineBytes`."""
    return _LINES.get(kind) or line.user or NO_LINE


# --- compiled memory ------------------------------------------------------------------------------
# `compiled_memory`: the buffers of a compiled program at its peak, by the user's line.
#
# found = jaxprtool.compiled_memory(program)
# found.peak_bytes, found.estimate_bytes, found.buffers[0].line


def compiled_memory(
    program: Program, arguments: Sequence[object] = (), backend: str | None = None
) -> CompiledPeak:
    """Compile a program, and return XLA's buffers at its peak beside the estimate of `memory`.

    JAX's compilation cache is not used: its executables may have the lines of an earlier source.
    Refs are arguments and results, as in `run`.

    Args:
        program: A `Program`.
        arguments: Its flat arguments or their types, if they lie on several devices.
        backend: The backend to compile for; or, with the package libtpu, a TPU that this machine
            lacks: `tpu:v5e:2x2`. By default that of the program.

    Raises:
        ArgumentsError: If it was traced with arguments on several devices, and none are given.
        UnsupportedError: For symbolic sizes or free named axes, or if XLA cannot compile the
            program, for instance because it does not fit. For a TPU, the hint has the lines that
            need most memory then.
        BackendError: If there is no such backend, or too few devices for its mesh.
    """
    require_program(program)
    if program.sharded and not arguments and backend is None:
        raise ArgumentsError(
            f"{program.name} was traced with {some(program.sharded, 3)} on several devices",
            "also pass its flat arguments, which have the devices",
        )
    program = with_contents(program)
    estimate = memory(program)
    return compiled_peak(program, compiled_for(program, arguments, backend), estimate)


def compiled_for(
    program: Program, arguments: Sequence[object], backend: str | None
) -> StoredModule:
    """Return the module of a program, compiled afresh; see `compiled_memory`."""
    with compiled_afresh():
        if backend is None:
            return compiled_with_memory(program, arguments, (), _largest)
        there, devices = on_devices(program, devices_to_compile_for(backend), backend)
        return compiled_with_memory(there, (), devices, _largest)


def _largest(stored: StoredModule) -> str:
    """Return the lines of a module that need most memory, in words."""
    peak = module_peak(stored)
    largest = ", ".join(f"{in_bytes(line.bytes)} {line.line}" for line in peak.lines[:3])
    return f"it needs {in_bytes(peak.peak_bytes)} at its peak: {largest}"
