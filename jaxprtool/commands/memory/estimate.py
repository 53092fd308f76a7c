"""Estimate the memory of a program: its peak, the values live at the peak, and the curve over time.

    found = memory(program)
    found.peak_bytes, found.at.source, found.live[0].type, found.curve

Nothing is compiled. A model of fusion determines which values are written (`analysis.kernels`), a
schedule determines how long they live (`schedule`), and `walk` adds them up. Arguments, constants
and results have memory from start to end, as in XLA.
"""

from __future__ import annotations

import typing
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.analysis.kernels import KernelNode, Kernels, UnknownSize
from jaxprtool.commands.memory.walk import (
    BodyMemories,
    BodyMemory,
    LiveBuffer,
    outlined_memory,
    temporary_memory,
)
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.dataflow import DefiningEquations, DefUse, live_part
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.donation import UnusedDonation, donations
from jaxprtool.ir.equations import equations, size_of, type_of
from jaxprtool.ir.expansions import expanded
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.keys import constant_key
from jaxprtool.ir.meshes import left_to_partitioner
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import NamedValue, Program, ProgramSignature, program_signature
from jaxprtool.ir.regions import Regions, regions, sub_jaxprs
from jaxprtool.ir.rewrite import as_constants
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.symbols import symbols_of
from jaxprtool.ir.trees import common_path, without_numbers
from jaxprtool.jaxcompat import AnyJaxpr, Aval, Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.source_locations import UserFrame

__all__ = [
    "Live",
    "Memory",
    "Point",
    "memory",
    "outlined_memory",
    "peak_memory",
    "temporary_memory",
]


@document(without=("peak_values",))
@dataclass(frozen=True)
class Memory(Printed):
    """The memory that a program needs.

    Attributes:
        name: The name of the program.
        peak_bytes: The maximum number of bytes needed at once: the sum of the next four, less
            `donated_bytes`.
        argument_bytes: The bytes of its arguments.
        result_bytes: The bytes of its results, which are allocated from the start.
        constant_bytes: The bytes of its constants.
        temporary_bytes: The bytes of all other values, at the peak.
        donated_bytes: The bytes of results that are written to the memory of donated arguments.
        at: The peak.
        live: The values live at the peak, the largest first; they add up to `peak_bytes`.
        curve: The memory needed from the first equation to the last.
        left_to_partitioner: Arguments, results and equations with a sharding over several devices,
            whose arrays are counted at their global size.
        unused_donations: The donated arguments whose memory no result can use.
        unknown: The number of equations of each primitive whose memory is not counted, besides that
            of their operands and results.
        peak_values: The values of `live`, one by one.
        vmem_bytes: The vector memory of a TPU's core that the largest Pallas kernel takes, besides
            `peak_bytes`; see `kernels`. 0 without kernels.
    """

    name: str
    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    constant_bytes: int
    temporary_bytes: int
    donated_bytes: int
    at: Point
    live: tuple[Live, ...]
    curve: tuple[Point, ...]
    left_to_partitioner: tuple[str, ...] = ()
    unused_donations: tuple[UnusedDonation, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)
    peak_values: tuple[Live, ...] = field(default=(), repr=False)
    vmem_bytes: int = 0


@without_collector()
def memory(program: Program | AnyJaxpr) -> Memory:
    """Estimate the memory that a program needs once it is compiled.

    Args:
        program: A `Program`, or a jaxpr.

    Raises:
        UnsupportedError: If a size is symbolic.
    """
    walked = _WalkedProgram(program)
    about, lent, body = walked.about, walked.lent, walked.body
    frames = frames_now(about.roots)
    points = curve(body, walked.base, frames)
    peak_values = tuple(_alive(about, walked.constant_values, body, frames, lent.by_result))
    return Memory(
        about.name,
        walked.base + body.peak,
        walked.arguments,
        walked.results,
        walked.constants,
        body.peak,
        walked.donated,
        max(points, key=lambda point: point.bytes),
        grouped_live_values(peak_values),
        points,
        left_to_partitioner(program),
        lent.unused,
        walked.unknown,
        peak_values,
        _vmem_bytes(about.jaxpr) if "pallas_call" in walked.unknown else 0,
    )


def _vmem_bytes(jaxpr: Jaxpr) -> int:
    """Return the vector memory of the Pallas kernel that takes most."""
    from jaxprtool.analysis.grids import GridSteps  # few programs have kernels
    from jaxprtool.ir.kernel_calls import kernel_call

    grids = [GridSteps(kernel) for kernel in map(kernel_call, equations(jaxpr)) if kernel]
    return max((grid.vmem_bytes for grid in grids if grid.in_order), default=0)


@without_collector()
def peak_memory(program: Program | AnyJaxpr) -> PeakMemory:
    """Estimate the peak memory of a program as `memory` does, without the values live there."""
    walked = _WalkedProgram(program)
    return PeakMemory(walked.base + walked.body.peak, walked.unknown)


class PeakMemory(NamedTuple):
    """The `peak_bytes` and the `unknown` of a `Memory`."""

    peak_bytes: int
    unknown: Mapping[str, int]


class _WalkedProgram:
    """A program with the memory of its temporaries, and the bytes of its other values.

    Raises UnsupportedError if a size is symbolic.
    """

    def __init__(self, program: Program | AnyJaxpr) -> None:
        about = self.about = program_signature(program)
        self.lent = donations(program)
        donated = self.lent.by_result
        bodies = BodyMemories()
        try:
            self.body = bodies.memory(live_part(expanded(about.jaxpr)), donated=donated)
        except UnknownSize:
            names = "=…, ".join(symbols_of(about.jaxpr))
            raise UnsupportedError(
                f"the memory of {about.name} needs sizes that are numbers",
                f'write them in --args, or -p "specialize({names}=…)"',
            ) from None
        self.unknown = dict(bodies.unknown)
        self.constant_values = _constants(program, about)
        self.arguments, self.results = _size(about.arguments), _size(about.outputs)
        self.constants = _size(self.constant_values)
        self.donated = _size([about.outputs[position] for position in donated])
        self.base = self.arguments + self.results + self.constants - self.donated


def _size(values: Sequence[NamedValue]) -> int:
    return sum(value.bytes or 0 for value in values)


def _constants(program: Program | AnyJaxpr, about: ProgramSignature) -> list[NamedValue]:
    """Return the different constants of a program and of its bodies: XLA keeps equal ones once."""
    whole = program.jaxpr if isinstance(program, Program) else as_constants(program)
    inner = (body for eqn in equations(about.jaxpr) for _, body in sub_jaxprs(eqn))
    constants = dict[object, NamedValue]()
    for jaxpr in chain((whole,), inner):
        values = getattr(jaxpr, "consts", ())
        for i, var in enumerate(jaxcompat.open_jaxpr(jaxpr).constvars):
            key = constant_key(values[i]) if i < len(values) else var
            name = f"constant[{len(constants)}]"
            constants.setdefault(key, NamedValue(name, type_of(var.aval), size_of(var.aval)))
    return list(constants.values())


def _alive(
    about: ProgramSignature,
    constants: Sequence[NamedValue],
    body: BodyMemory,
    frames: Frames,
    donated: Mapping[int, int],
) -> Iterator[Live]:
    """Yield the values that are live at the peak."""
    for named in about.arguments:
        yield Live("argument", 1, named.type, named.bytes or 0, named.name)
    for named in constants:
        yield Live("constant", 1, named.type, named.bytes or 0, named.name)
    names = [named.name for named in (*about.constants, *about.arguments)]
    values, now = LiveValues(frames, names), levels(body)
    yield from values.of(now)
    room_bytes = values.held_in_rooms(now)
    kernels = body.schedule.kernels
    starts = {buffer.value: buffer.start for buffer in body.schedule.results}
    for position, result in enumerate(about.outputs):
        if position in donated:
            continue
        value = kernels.given[position]
        size = (result.bytes or 0) - room_bytes.pop(value, 0)
        if value is None or kernels.defined_by[value] < 0:
            yield Live("result", 1, result.type, size, result.name)
        elif size:
            is_made = not now or starts[value] <= now[0].time
            kind: Kind = "result" if is_made else "room"
            primitive, line, calls = values.made(kernels, value)
            yield Live(kind, 1, result.type, size, result.name, primitive, line, frames=calls)


# --- live -----------------------------------------------------------------------------------------
# Describe the values live at the peak, and the user's lines that compute and read them.

#: The kinds of live values. A "room" is the memory of a result that is computed later, a "value" is
#: computed by an equation, a "row" is a slice of an array that a loop scans over, and a "workspace"
#: is memory that a kernel needs besides its operands and results.
Kind: TypeAlias = typing.Literal[
    "argument", "constant", "result", "room", "value", "row", "workspace"
]


@document(names={"source": "place", "reader_source": "reader_place"}, without=("frames",))
@dataclass(frozen=True)
class Live:
    """Live values with the same kind, type, and source lines.

    Attributes:
        kind: The kind: "argument", "constant", "result", "room" (memory of a result that is
            computed later), "value" (computed by an equation), "row" (a slice of an array that a
            loop scans over) or "workspace" (of an equation, besides its operands and results).
        count: The number of values.
        type: Their type.
        bytes: Their total bytes.
        name: The path of an argument or result, with `*` for numbers that differ. For a row of
            an argument, the path of the argument.
        primitive: The primitive that computes them; "" for arguments and constants.
        source: The user's line that computes them, followed by the library's; "" if unknown.
        reader: The primitive that reads them last; "" if they live to the end of the body.
        reader_source: The line of the reader.
        frames: The frames of the first of them, the innermost first.
    """

    kind: Kind
    count: int
    type: str
    bytes: int
    name: str
    primitive: str = ""
    source: Place = UNKNOWN
    reader: str = ""
    reader_source: Place = UNKNOWN
    frames: tuple[UserFrame, ...] = ()


class Made(NamedTuple):
    """The primitive that computes a value, the user's line, and the frames, the innermost first."""

    primitive: str = ""
    line: Place = UNKNOWN
    frames: tuple[UserFrame, ...] = ()


class RunningBody(NamedTuple):
    """A body that is running, and the time in it.

    Attributes:
        memory: The body.
        time: The time in the body's schedule.
        number: The number of the body in the equation around it.
    """

    memory: BodyMemory
    time: int
    number: int = 0

    @property
    def kernels(self) -> Kernels:
        """The kernels of the body."""
        return self.memory.schedule.kernels

    @property
    def node(self) -> KernelNode:
        """The node that runs."""
        return self.memory.node(self.time)


def levels(memory: BodyMemory) -> tuple[RunningBody, ...]:
    """Return the bodies that run at the peak, the outermost first."""
    running = list[RunningBody]()
    body, number = memory, 0
    while body.at is not None:
        running.append(RunningBody(body, body.at, number))
        inner = body.inner.get(body.at)
        if inner is None:
            break
        body, number = inner.memory, inner.number
    return tuple(running)


def grouped_live_values(values: Iterable[Live]) -> tuple[Live, ...]:
    """Merge equal values, and sort the groups by their total bytes, the largest first."""
    groups = defaultdict[Live, list[Live]](list)
    for value in values:
        groups[replace(value, bytes=0, name=without_numbers(value.name), frames=())].append(value)
    merged = (
        replace(
            group[0],
            count=len(group),
            bytes=sum(value.bytes for value in group),
            name=common_path([value.name for value in group]),
        )
        for group in groups.values()
    )
    return tuple(sorted(merged, key=lambda live: -live.bytes))


class LiveValues:
    """Finds the live values of running bodies.

    Args:
        frames: Reads source lines.
        names: The names of the program's constants and then of its arguments.
    """

    def __init__(self, frames: Frames, names: Sequence[str]) -> None:
        self._frames = frames
        self._names = names
        self._defining_equations: dict[Jaxpr, DefiningEquations] = {}
        self._variables: dict[Jaxpr, DefUse] = {}

    def of(self, levels: Sequence[RunningBody]) -> Iterator[Live]:
        """Yield the live values at a moment, except those of the program's arguments and results.

        Args:
            levels: The bodies that run, the outermost first.
        """
        for depth, level in enumerate(levels):
            around = _around(levels[:depth])
            for buffer in _live_buffers(level):
                yield self._value(buffer, level, levels[:depth], around)
            if size := level.memory.workspaces.get(level.time):
                eqns = (*around, *level.node.calls, level.node.eqn)
                maker = eqns[-1].primitive.name, self._frames.line_of(eqns)
                stack = self._frames.stack(eqns)
                yield Live("workspace", 1, "", size, "", *maker, frames=stack)
        if levels:
            for room in levels[0].memory.in_rooms:
                if _is_alive(room.buffer, levels[0].time):
                    yield self._value(room.buffer, levels[0], (), ())

    def held_in_rooms(self, levels: Sequence[RunningBody]) -> dict[int | None, int]:
        """Return the bytes of other values in the memory of each result, by the result's value."""
        in_rooms = levels[0].memory.in_rooms if levels else ()
        return {
            room.result.value: room.buffer.size
            for room in in_rooms
            if _is_alive(room.buffer, levels[0].time)
        }

    def made(self, kernels: Kernels, value: int, around: Sequence[JaxprEqn] = ()) -> Made:
        """Return the equation that computes a value of a body.

        Args:
            kernels: The kernels of the body.
            value: The number of the value.
            around: The equations around the body, the outermost first.
        """
        node = kernels.nodes[kernels.defined_by[value]]
        var = node.eqn.outvars[node.makes.index(value)]
        jaxpr = _home(kernels, node)
        if jaxpr not in self._defining_equations:
            self._defining_equations[jaxpr] = DefiningEquations(jaxpr)
        definition = self._defining_equations[jaxpr].of(var)
        eqns = (*around, *node.calls, *definition.around, definition.eqn)
        line = self._frames.line_of(eqns)
        return Made(definition.eqn.primitive.name, line, self._frames.stack(eqns))

    def _value(
        self,
        buffer: LiveBuffer,
        level: RunningBody,
        outer: Sequence[RunningBody],
        around: Sequence[JaxprEqn],
    ) -> Live:
        kernels = level.kernels
        reader, place = self._reader(buffer, kernels, around)
        type_name = type_of(_aval(kernels, buffer.value))
        is_made = kernels.defined_by[buffer.value] >= 0
        if is_made:
            name, maker = "", self.made(kernels, buffer.value, around)
        else:
            name, maker = self._origin(buffer.value, level, outer)
        kind: Kind = "value" if is_made else "row"
        return Live(kind, 1, type_name, buffer.size, name, *maker[:2], reader, place, maker.frames)

    def _reader(
        self, buffer: LiveBuffer, kernels: Kernels, around: Sequence[JaxprEqn]
    ) -> tuple[str, Place]:
        """Return the primitive that reads a value last, at any depth, and its line."""
        if buffer.last is None:
            return "", UNKNOWN
        node = kernels.nodes[buffer.last]
        eqns, control = [*around, *node.calls, node.eqn], node.held
        position = (
            node.places.index(buffer.value) if control and buffer.value in node.places else None
        )
        while control is not None and position is not None:
            eqn, position = self._last_inside(control, position)
            if eqn is None:
                break
            eqns.append(eqn)
            control = regions(eqn)
        return eqns[-1].primitive.name, self._frames.line_of(eqns)

    def _last_inside(self, control: Regions, operand: int) -> tuple[JaxprEqn | None, int | None]:
        """Return the last reader of an operand in the bodies, and the position of its operand."""
        for number, value in control.arguments_by_operand[operand]:
            body = control.jaxprs[number]
            variables = self._variables.setdefault(body, DefUse(body.eqns))
            if readers := variables.readers(value):
                eqn = body.eqns[readers[-1]]
                return eqn, list(eqn.invars).index(value)
        return None, None

    def _origin(
        self, value: int, level: RunningBody, outer: Sequence[RunningBody]
    ) -> tuple[str, Made]:
        """Return the name, or else the equation, of the outer value that an argument comes from."""
        while outer and level.kernels.defined_by[value] < 0:
            *outer, around = outer
            control = around.node.held
            assert control is not None
            position = value - len(level.kernels.jaxpr.constvars)
            operand = around.node.places[control.regions[level.number].ins[position]]
            if operand is None:
                return "", Made()
            value, level = operand, around
        if level.kernels.defined_by[value] < 0:
            return self._names[value], Made()
        return "", self.made(level.kernels, value, _around(outer))


def _home(kernels: Kernels, node: KernelNode) -> Jaxpr:
    """Return the jaxpr that an equation is in: that of the opened call around it, or the body."""
    control = regions(node.calls[-1]) if node.calls else None
    return kernels.jaxpr if control is None else control.jaxprs[0]


def _around(levels: Sequence[RunningBody]) -> tuple[JaxprEqn, ...]:
    """Return the equations that are running, the outermost first."""
    return tuple(eqn for level in levels for eqn in (*level.node.calls, level.node.eqn))


def _aval(kernels: Kernels, value: int) -> Aval:
    if kernels.defined_by[value] < 0:
        return (*kernels.jaxpr.constvars, *kernels.jaxpr.invars)[value].aval
    node = kernels.nodes[kernels.defined_by[value]]
    return node.eqn.outvars[node.makes.index(value)].aval


def _is_alive(buffer: LiveBuffer, time: int) -> bool:
    return buffer.start <= time <= buffer.end


def _live_buffers(level: RunningBody) -> list[LiveBuffer]:
    """Return the live values of a body that have memory of their own.

    If a kernel writes in place, its result is returned and the operand that it replaces is not.
    """
    memory, time = level.memory, level.time
    alive = [buffer for buffer in memory.outside if buffer.size and _is_alive(buffer, time)]
    replaced = memory.replaced.get(time)
    if replaced is not None:
        last = (
            i for i, buffer in enumerate(alive) if buffer.end == time and buffer.size == replaced
        )
        del alive[next(i for i in last if alive[i].start < time)]
    return alive


# --- curve ----------------------------------------------------------------------------------------
# The curve of a program's memory, from its first equation to its last.

#: The maximum number of points of a curve. If there are more, each point is the highest of a
#: stretch.
MOST_POINTS = 1000

#: The maximum number of points of a body whose inner bodies are shown on the curve.
_MOST_GONE_INTO = 200_000


@document(names={"source": "place"})
@dataclass(frozen=True)
class Point:
    """The memory needed while an equation runs.

    Attributes:
        position: The number of the equation in the schedule, from 1. The body of a loop counts
            once.
        bytes: The bytes needed.
        primitive: The primitive of the equation; "" before the first.
        source: The user's line of the equation; "" if unknown.
    """

    position: int
    bytes: int
    primitive: str
    source: Place


def curve(memory: BodyMemory, base: int, frames: Frames) -> tuple[Point, ...]:
    """Return the curve of a program.

    Args:
        memory: The memory of its temporaries.
        base: The bytes of its arguments, constants and results.
        frames: Reads source lines.
    """
    runs, needs = list[_KernelRun](), list[int]()
    _go(memory, base, (), runs, needs, _PointCounts())
    stretch = -(-len(needs) // MOST_POINTS) or 1
    points = [Point(0, base, "", UNKNOWN)]
    for start in range(0, len(needs), stretch):
        place = max(range(start, min(start + stretch, len(needs))), key=needs.__getitem__)
        run = runs[bisect_right(runs, place, key=lambda run: run.start) - 1]
        node = run.memory.node(run.time + place - run.start)
        line = frames.line_of((*run.around, *node.calls, node.eqn))
        points.append(Point(place + 1, needs[place], node.eqn.primitive.name, line))
    return tuple(points)


class _KernelRun(NamedTuple):
    """A run of consecutive kernels of a body.

    Attributes:
        start: The index of the first kernel on the curve.
        memory: The body.
        time: The time of the first kernel in the body.
        around: The equations around the body, the outermost first.
    """

    start: int
    memory: BodyMemory
    time: int
    around: tuple[JaxprEqn, ...]


def _go(
    memory: BodyMemory,
    base: int,
    around: tuple[JaxprEqn, ...],
    runs: list[_KernelRun],
    needs: list[int],
    sizes: _PointCounts,
) -> None:
    """Append the curve of a body, with inner bodies in place of the equations that hold them."""
    goes_into = sizes.of(memory) <= _MOST_GONE_INTO
    start = 0
    for time, inner in memory.inner.items() if goes_into else ():
        if not inner.memory.needs:
            continue
        runs.append(_KernelRun(len(needs), memory, start, around))
        needs += [base + need for need in memory.needs[start:time]]
        node, outside = memory.node(time), base + memory.needs[time] - inner.memory.peak
        _go(inner.memory, outside, (*around, *node.calls, node.eqn), runs, needs, sizes)
        start = time + 1
    runs.append(_KernelRun(len(needs), memory, start, around))
    needs += [base + need for need in memory.needs[start:]]


class _PointCounts:
    """The number of points of each body, including those of its inner bodies."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, memory: BodyMemory) -> int:
        """Return the number of points of a body."""
        if id(memory) not in self._known:
            inside = (self.of(inner.memory) for inner in memory.inner.values())
            self._known[id(memory)] = len(memory.needs) + sum(inside)
        return self._known[id(memory)]
