"""The measured time of a run by the user's own lines, from a trace of JAX's profiler.

Times are those of one call: `divided` (`timeline`) divides the time of a run among the operations
that ran, and `ir.hlo.origins` leads an operation back to the lines that it comes
from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median_low
from typing import Any, Literal, NamedTuple, get_args

from jaxprtool.commands.cost.estimate import Cost, Group
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.profile import Trace, TraceEvent
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.frames import Frames, Line
from jaxprtool.ir.hlo.module import HloModule
from jaxprtool.ir.hlo.origins import (
    CONTAINERS,
    InsertedCopy,
    OperationOrigin,
    OperationOrigins,
    inserted_copies,
)
from jaxprtool.ir.hlo.partitions import collectives, moved_values
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The criteria by which measured time is grouped.
By = Literal["line", "scope", "function", "op", "primitive"]

BY: tuple[By, ...] = get_args(By)

#: The share of the time below which a user should not trust the table.
TRUSTED = 0.9


class NoOperationsError(UnsupportedError):
    """No operation is in a trace."""


_OPTIONAL = "flops_per_second", "bytes_per_second", "moved_bytes", "moved"


@document(without=("line", "place", "path"), also=("moved_bytes",), optional=_OPTIONAL)
@dataclass(frozen=True)
class Timed:
    """The time of operations that belong together, for one call.

    Attributes:
        name: The scope, function or primitive; "" if it is unknown.
        seconds: Their time.
        share: Their share of the wall time.
        calls: How often an operation ran.
        forward_seconds: The part outside of the backward pass of a gradient.
        backward_seconds: The part in the backward pass.
        own_seconds: The part that is XLA's own work: copies, layout changes, overhead of loops.
        is_split: Whether a part is an estimated share of fusions that also compute other groups.
        flops_per_second: The FLOP/s that it achieves, by the estimate of `cost`.
        bytes_per_second: The bytes of memory traffic a second, by the estimate of `cost`.
        moved: The values that its collectives move to each device, by kind; None if the program has
            no collectives.
        line: The source line, of a group by line.
        place: The line, and that of a library behind it that takes most of its time; "" if it is
            unknown.
        path: The scopes, the outermost first, of a group by scope.
    """

    name: str
    seconds: float
    share: float
    calls: float
    forward_seconds: float
    backward_seconds: float
    own_seconds: float
    is_split: bool
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    moved: tuple[MovedValues, ...] | None = None
    line: Line | None = None
    place: Place = UNKNOWN
    path: tuple[str, ...] = ()

    @property
    def library(self) -> str:
        """The line of a library that takes most of it: `flax/linen/linear.py:199`, or ""."""
        return self.place.behind

    @property
    def moved_bytes(self) -> int | None:
        """The bytes of the results of its collectives on one device; None if there are none."""
        return None if self.moved is None else sum(moved.bytes for moved in self.moved)


@document(without=("line", "name", "path"), also=("moved_bytes",), optional=_OPTIONAL)
class TimedLine(Timed):
    """The time of a line of source."""


@document(names={"lines": "places"}, optional=("own",))
@dataclass(frozen=True)
class TimedOperation:
    """The time of a compiled operation, for one call.

    Attributes:
        name: Its name in the compiled module.
        module: The module.
        opcode: XLA's name of its kind; "" if the module is unknown.
        lines: The lines that it computes, the one with the largest part first.
        seconds: Its time.
        share: Its share of the wall time.
        calls: How often it ran.
        own: What it is if XLA added it: `copies`, `layout changes`, `loop overhead`; or "Python
            callbacks".
    """

    name: str
    module: str
    opcode: str
    lines: tuple[Place, ...]
    seconds: float
    share: float
    calls: float
    own: str = ""


@document(names={"lines": "places"})
@dataclass(frozen=True)
class OwnWork:
    """XLA's own work, or time in which no operation ran, for one call.

    Attributes:
        kind: Its kind: `copies`, `layout changes`, `loop overhead`, `Python callbacks`; if no
            operation ran, `between operations`, `dispatch`, `compiling` or `idle`.
        seconds: Its time.
        share: Its share of the wall time.
        lines: The lines that most of it belongs to.
    """

    kind: str
    seconds: float
    share: float
    lines: tuple[Place, ...]


@document(optional=("seconds", "share"))
@dataclass(frozen=True)
class TimedCopy:
    """Copies that XLA inserted, and their time in one call.

    Attributes:
        copy: The copies.
        seconds: Their time; None if they are in a loop or a call that was compiled to one piece of
            code.
        share: Its share of the wall time.
    """

    copy: InsertedCopy
    seconds: float | None
    share: float | None


@dataclass(frozen=True)
class Peaks:
    """The highest rates of a device.

    Attributes:
        device: Its name.
        flops_per_second: Its FLOP/s.
        bytes_per_second: Its memory bandwidth.
        source: Where the figures are from.
    """

    device: str
    flops_per_second: float
    bytes_per_second: float
    source: str


@document(
    without=("frames", "stacks", "trace"),
    also=("moved_bytes",),
    optional=("plain_seconds", "peaks", "flops_per_second", "devices", "moved_bytes"),
)
@dataclass(frozen=True)
class Profile(Printed):
    """The measured time of a run.

    Attributes:
        name: The name of the program, the block or the trace.
        wall_seconds: The time of one call.
        explained: The share of this time in which an operation ran.
        calls: The number of measured calls, over which times are averaged.
        plain_seconds: The time of one call without the profiler; None if it was not measured.
        lines: The time by source line, in descending order.
        scopes: The time of each scope of `cost`, including the scopes in it.
        functions: The time by function.
        primitives: The time by JAX primitive.
        operations: The time of each compiled operation.
        own: The time of XLA's own work, which is also part of the time of lines, and the time in
            which no operation ran; by kind.
        copies: The copies that XLA inserted, those of most bytes first.
        without_module: The time of operations whose module is not in the trace.
        is_cut: Whether operations were left out because there were too many.
        flops_per_second: The FLOP/s that the program achieves, by the estimate of `cost`.
        is_above_peak: Whether FLOP/s of the program or of lines are left out because they are above
            the peak, which no program achieves.
        peaks: The highest rates of its device; None if they are unknown.
        devices: The number of devices that exchange values; None if there are no collectives.
        frames: The whole time by scope and line, the outermost scope first, for flame graphs of the
            user's code. The line is "" if it is unknown.
        stacks: The time by call stack, for flame graphs.
        trace: The recorded trace.
    """

    name: str
    wall_seconds: float
    explained: float
    calls: int
    plain_seconds: float | None
    lines: tuple[TimedLine, ...]
    scopes: tuple[Timed, ...]
    functions: tuple[Timed, ...]
    primitives: tuple[Timed, ...]
    operations: tuple[TimedOperation, ...]
    own: tuple[OwnWork, ...]
    copies: tuple[TimedCopy, ...] = ()
    without_module: float = 0.0
    is_cut: bool = False
    flops_per_second: float | None = None
    is_above_peak: bool = False
    peaks: Peaks | None = None
    devices: int | None = None
    frames: Mapping[tuple[str, ...], float] = field(default_factory=dict, repr=False)
    stacks: Mapping[tuple[tuple[UserFrame, ...], str], float] = field(
        default_factory=dict, repr=False
    )
    trace: Trace | None = field(default=None, repr=False)

    @property
    def moved_bytes(self) -> int | None:
        """The bytes of the results of all collectives on one device; None if there are none."""
        return None if self.devices is None else sum(line.moved_bytes or 0 for line in self.lines)

    @property
    def has_rates(self) -> bool:
        """True if the work of the program is estimated, so that lines have rates."""
        return self.flops_per_second is not None or self.is_above_peak

    def by(self, by: By) -> tuple[Any, ...]:
        """Return the groups by a criterion."""
        return {
            "line": self.lines,
            "scope": self.scopes,
            "function": self.functions,
            "op": self.operations,
            "primitive": self.primitives,
        }[by]


@without_collector()
def profile_of(trace: Trace, name: str, frames: Frames) -> Profile:
    """Return the times of a trace by line, scope, function, primitive and operation.

    Args:
        trace: The trace. Without marked steps, the time from its first to its last operation counts
            as one call.
        name: The name of what was run.
        frames: Reads frames, and decides which files are the user's.

    Raises:
        NoOperationsError: If no operation is in the trace.
    """
    if not trace.events:
        raise NoOperationsError(
            f"the profile of {name} is empty: JAX's profiler recorded no operations"
        )
    steps = trace.steps or (
        (min(event.start for event in trace.events), max(event.end for event in trace.events)),
    )
    runs = _OperationRuns(trace, steps, frames)
    return runs.profile(name)


class _TimePart(NamedTuple):
    """A part of the time of an operation that belongs to one origin."""

    origin: OperationOrigin
    seconds: float
    calls: float
    own: bool
    split: bool


class _OperationRuns:
    """The operations of a trace with their times; all times are per call, in seconds."""

    def __init__(self, trace: Trace, steps: Sequence[tuple[float, float]], frames: Frames) -> None:
        self._trace, self._frames = trace, frames
        self._calls = len(steps)
        self._wall = sum(end - start for start, end in steps) * 1e-9 / self._calls
        ran: defaultdict[str, set[str]] = defaultdict(set)
        for event in trace.events:
            ran[event.program].add(event.name)
        self._origins = {
            key: OperationOrigins(module, frames, frozenset(ran[key]))
            for key, module in trace.modules.items()
        }
        host = [
            TimeSpan(event.start, event.end, event.kind, _RANKS[event.kind]) for event in trace.host
        ]
        spans = clipped([span for event in trace.events for span in self._spans(event)], steps)
        self._counts = Counter(span.key for span in spans if span.rank != HANDED_ON)
        times = divided(spans + clipped(host, steps))
        per_call = 1e-9 / self._calls
        self._times: dict[tuple[str, str], float] = {
            key: time * per_call for key, time in times.items() if key in self._counts
        }
        self._host = {str(key): time * per_call for key, time in times.items() if type(key) is str}
        self._parts = list(self._all_parts())
        self._moved = moved_by_line(trace, steps, self._origins)

    def _spans(self, event: TraceEvent) -> Iterator[TimeSpan]:
        key, origins = (event.program, event.name), self._origins.get(event.program)
        if origins is None:
            is_container = event.name.partition(".")[0] in CONTAINERS
        else:
            is_container = origins.is_container(event.name)
        if is_container:
            yield TimeSpan(event.start, event.done, key, _RANKS["container"])
            return
        yield TimeSpan(event.start, event.end, key)
        if event.done > event.end:
            yield TimeSpan(event.end, event.done, key, HANDED_ON)

    def _all_parts(self) -> Iterator[_TimePart]:
        for key, seconds in self._times.items():
            program, name = key
            origins = self._origins.get(program)
            if origins is None:
                continue
            of = origins.of(name)
            is_own, calls = bool(origins.own(name)), self._counts[key] / self._calls
            for origin, share in of:
                yield _TimePart(origin, seconds * share, calls, is_own, len(of) > 1)

    def profile(self, name: str) -> Profile:
        explained = sum(self._times.values())
        without = sum(t for (program, _), t in self._times.items() if program not in self._origins)
        return Profile(
            name,
            self._wall,
            explained / self._wall,
            self._calls,
            None,
            tuple(self._lines()),
            tuple(self._scopes()),
            self._grouped(lambda origin: origin.function),
            self._grouped(lambda origin: origin.primitive),
            tuple(sorted(self._operations(), key=_by_time)),
            tuple(sorted(self._own(explained), key=_by_time)),
            tuple(sorted(self._copies(), key=lambda timed: -timed.copy.bytes)),
            without,
            self._trace.is_cut,
            devices=None if self._moved is None else self._moved.devices,
            frames=self._by_frame(without),
            stacks=self._stacks(),
            trace=self._trace,
        )

    def _lines(self) -> Iterator[TimedLine]:
        grouped: defaultdict[Line | None, list[_TimePart]] = defaultdict(list)
        for part in self._parts:
            grouped[part.origin.line].append(part)
        moved = None if self._moved is None else self._moved.lines
        for line in moved or ():
            grouped[line]  # its collectives may have no time
        for line, parts in sorted(grouped.items(), key=lambda item: -_seconds(item[1])):
            places: defaultdict[Place, float] = defaultdict(float)
            for part in parts:
                places[part.origin.place] += part.seconds
            place = max(places, key=places.__getitem__, default=UNKNOWN)
            if not place and line is not None:  # only its collectives are known
                place = self._frames.at(line.file, line.line)
            here = None if moved is None else moved.get(line, ())
            yield self._timed(parts, place.user, TimedLine, place=place, moved=here, line=line)

    def _scopes(self) -> Iterator[Timed]:
        grouped: defaultdict[tuple[str, ...], list[_TimePart]] = defaultdict(list)
        for part in self._parts:
            scope = part.origin.scope
            for end in range(1, len(scope) + 1) if scope else [0]:
                grouped[scope[:end]].append(part)
        for path, parts in sorted(grouped.items(), key=lambda item: -_seconds(item[1])):
            yield self._timed(parts, "/".join(path), path=path)

    def _grouped(self, name: Callable[[OperationOrigin], str]) -> tuple[Timed, ...]:
        grouped: defaultdict[str, list[_TimePart]] = defaultdict(list)
        for part in self._parts:
            grouped[name(part.origin)].append(part)
        groups = [self._timed(parts, name) for name, parts in grouped.items()]
        return tuple(sorted(groups, key=_by_time))

    def _timed(
        self, parts: Sequence[_TimePart], name: str, kind: type[Any] = Timed, **more: Any
    ) -> Any:
        seconds = _seconds(parts)
        backward = _seconds(part for part in parts if part.origin.backward)
        return kind(
            name,
            seconds,
            seconds / self._wall,
            sum(part.calls for part in parts),
            seconds - backward,
            backward,
            _seconds(part for part in parts if part.own),
            any(part.split for part in parts),
            **more,
        )

    def _operations(self) -> Iterator[TimedOperation]:
        for key, seconds in self._times.items():
            program, name = key
            module, origins = self._trace.modules.get(program), self._origins.get(program)
            op = None if module is None else module.by_name.get(name)
            yield TimedOperation(
                name,
                self._trace.names.get(program, ""),
                "" if op is None else op.opcode,
                () if origins is None else self._lines_of(origins, name),
                seconds,
                seconds / self._wall,
                self._counts[key] / self._calls,
                "" if origins is None else origins.own(name),
            )

    def _lines_of(self, origins: OperationOrigins, name: str) -> tuple[Place, ...]:
        weights: defaultdict[Place, float] = defaultdict(float)
        for origin, weight in origins.of(name):
            if origin.line is not None:
                weights[origin.place.user] += weight
        return _largest(weights)

    def _own(self, explained: float) -> Iterator[OwnWork]:
        times: defaultdict[str, float] = defaultdict(float)
        lines: defaultdict[str, defaultdict[Place, float]] = defaultdict(lambda: defaultdict(float))
        for (program, name), seconds in self._times.items():
            origins = self._origins.get(program)
            if origins is not None and (kind := origins.own(name)):
                times[kind] += seconds
                for line in self._lines_of(origins, name)[:1]:
                    lines[kind][line] += seconds
        for kind, seconds in times.items():
            yield OwnWork(kind, seconds, seconds / self._wall, _largest(lines[kind])[:3])
        for kind, seconds in self._without_operation(explained).items():
            yield OwnWork(kind, seconds, seconds / self._wall, ())

    def _copies(self) -> Iterator[TimedCopy]:
        ran = {program for program, _ in self._times}
        for program, module in self._trace.modules.items():
            for copy in inserted_copies(module, None, self._frames) if program in ran else ():
                keys = [(program, name) for name in copy.operations]
                if any(key in self._times for key in keys):
                    seconds = sum(self._times.get(key, 0.0) for key in keys)
                    yield TimedCopy(copy, seconds, seconds / self._wall)
                else:
                    yield TimedCopy(copy, None, None)

    def _without_operation(self, explained: float) -> dict[str, float]:
        """Return the time in which no operation ran, by kind."""
        rest = self._wall - explained - sum(self._host.values())
        times = {**self._host, "idle": max(rest, 0.0)}
        return {kind: seconds for kind, seconds in times.items() if seconds}

    def _by_frame(self, without_module: float) -> dict[tuple[str, ...], float]:
        frames: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for part in self._parts:
            frames[*part.origin.scope, self._line_name(part.origin.line)] += part.seconds
        if without_module:
            frames["operations of unknown modules",] = without_module
        for kind, seconds in self._without_operation(sum(self._times.values())).items():
            frames["no operation", kind] = seconds
        return dict(frames)

    def _line_name(self, line: Line | None) -> str:
        return "" if line is None else f"{self._frames.path(line.file)}:{line.line}"

    def _stacks(self) -> dict[tuple[tuple[UserFrame, ...], str], float]:
        stacks: defaultdict[tuple[tuple[UserFrame, ...], str], float] = defaultdict(float)
        for part in self._parts:
            stacks[part.origin.frames, part.origin.primitive] += part.seconds
        return dict(stacks)


#: The ranks of spans that get the instants at which no operation runs, the lowest first.
_RANKS = {"container": 2, "between operations": 3, "compiling": 4, "dispatch": 5}


def _largest(weights: Mapping[Place, float]) -> tuple[Place, ...]:
    """Return the keys, the one with the largest number first."""
    return tuple(sorted(weights, key=lambda key: -weights[key]))


def _seconds(parts: Iterable[_TimePart]) -> float:
    return sum(part.seconds for part in parts)


def _by_time(timed: Any) -> float:
    return -timed.seconds


def with_plain_time(profile: Profile, seconds: float | None) -> Profile:
    """Add the time that a call takes without the profiler."""
    return replace(profile, plain_seconds=seconds)


def with_cost(profile: Profile, cost: Cost, peaks: Peaks | None) -> Profile:
    """Add the rates that the program and its lines achieve, by an estimate of their work.

    Args:
        profile: The profile of a program.
        cost: The cost of the program, by line.
        peaks: The highest rates of its device.
    """
    groups = {group.name: group for group in cost.groups}
    rated = [_with_rates(line, groups.get(line.name)) for line in profile.lines]
    flops = _number(cost.total.work.flops + cost.total.work.transcendentals)
    rate = flops / profile.wall_seconds if flops is not None else None
    most = inf if peaks is None else peaks.flops_per_second
    lines = [line if (line.flops_per_second or 0) <= most else _unrated(line) for line in rated]
    return replace(
        profile,
        lines=tuple(lines),
        flops_per_second=None if rate is None or rate > most else rate,
        is_above_peak=lines != rated or (rate or 0) > most,
        peaks=peaks,
    )


def _unrated(line: TimedLine) -> TimedLine:
    return replace(line, flops_per_second=None)


def _with_rates(line: TimedLine, group: Group | None) -> TimedLine:
    if group is None or not line.name or not line.seconds or group.per_round:
        return line
    flops, size = _number(group.work.flops + group.work.transcendentals), _number(group.work.bytes)
    return replace(
        line,
        flops_per_second=None if flops is None else flops / line.seconds,
        bytes_per_second=None if size is None else size / line.seconds,
    )


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


# --- timeline -------------------------------------------------------------------------------------
# Divide the time of a run among the operations, so that the parts add up to the time.
#
# Operations run at the same time on several threads. Each instant is divided equally among the
# operations that a thread is known to run. An operation that was handed to other threads gets the
# share of a thread that is free, since it may still be waiting for one. Loops, branches and calls
# contain the operations of their bodies, on the same thread or on others: they get only the
# instants at which no operation runs, which is their overhead. The work of the host gets the
# instants at which nothing else runs.

#: The ranks of operations: a thread runs it, or it was handed to other threads.
RUNNING, HANDED_ON = 0, 1


class TimeSpan(NamedTuple):
    """Something that ran.

    Attributes:
        start: When it began.
        end: When it ended.
        key: Identifies what ran.
        rank: RUNNING or HANDED_ON for operations, which share an instant. If none runs, the other
            span with the lowest rank gets the instant; of several, the one that began last.
    """

    start: float
    end: float
    key: Any
    rank: int = RUNNING


def clipped(spans: Iterable[TimeSpan], windows: Sequence[tuple[float, float]]) -> list[TimeSpan]:
    """Return the spans that begin in windows, each up to the end of its window.

    XLA reports the end of some loops only during the next call. Windows are in order.
    """
    starts, inside = [start for start, _ in windows], []
    for span in spans:
        place = bisect_right(starts, span.start) - 1
        if place >= 0 and span.start < (end := windows[place][1]):
            inside.append(span._replace(end=min(end, span.end)))
    return inside


def divided(spans: Sequence[TimeSpan]) -> dict[Any, float]:
    """Return the time of each key. The sum is the time at which any span runs."""
    times: defaultdict[Any, float] = defaultdict(float)
    edges = [(span.start, 1, i) for i, span in enumerate(spans)]
    edges += [(span.end, 0, i) for i, span in enumerate(spans)]
    edges.sort()
    threads = _most_at_once(spans, edges)
    now = 0.0
    had = [0.0, 0.0]  # the share so far of an operation of each rank that runs all the time
    began: tuple[dict[int, float], dict[int, float]] = ({}, {})  # `had` when operations began
    others: dict[int, None] = {}  # other running spans, in the order in which they began
    for at, begins, i in edges:
        if at > now:
            running, handed_on = map(len, began)
            free = max(threads - running, 0 if running else 1)
            part = min(1.0, free / handed_on) if handed_on else 0.0
            if running or handed_on:
                share = (at - now) / (running + part * handed_on)
                had[RUNNING] += share
                had[HANDED_ON] += share * part
            elif others:
                least = min(spans[other].rank for other in others)
                key = next(spans[o].key for o in reversed(others) if spans[o].rank == least)
                times[key] += at - now
        now, span = at, spans[i]
        if span.rank > HANDED_ON:
            if begins:
                others[i] = None
            else:
                del others[i]
        elif begins:
            began[span.rank][i] = had[span.rank]
        else:
            times[span.key] += had[span.rank] - began[span.rank].pop(i)
    return dict(times)


def _most_at_once(spans: Sequence[TimeSpan], edges: Iterable[tuple[float, int, int]]) -> int:
    """Return how many operations run at the same time at most."""
    most = running = 0
    for _, begins, i in edges:
        if spans[i].rank == RUNNING:
            running += 1 if begins else -1
            most = max(most, running)
    return most


# --- collectives ----------------------------------------------------------------------------------
# The bytes that collectives move, by source line, from the compiled modules of a trace.


@dataclass(frozen=True)
class MovedValues:
    """The values that collectives of one kind move for a line, in a call.

    Attributes:
        kind: The kind: `all-reduce`.
        bytes: The bytes of their results on one device.
        count: The number of values.
    """

    kind: str
    bytes: int
    count: float


@dataclass(frozen=True)
class MovedByLine:
    """The values that the collectives of a trace move.

    Attributes:
        devices: The number of devices, the largest if programs differ.
        lines: The moved values by line, the kind with the most bytes first.
    """

    devices: int
    lines: Mapping[Line | None, tuple[MovedValues, ...]]


def moved_by_line(
    trace: Trace, steps: Sequence[tuple[float, float]], origins: Mapping[str, OperationOrigins]
) -> MovedByLine | None:
    """Return the values that collectives move to each device in a call; None if there are none.

    The trip count of a loop is the one that the module states, or else is measured.

    Args:
        trace: The trace.
        steps: The start and end of each call.
        origins: The origins of the operations of each module.
    """
    by_program = {
        program: list(collectives(op_origins.module)) for program, op_origins in origins.items()
    }
    if not any(by_program.values()):
        return None
    ran = _runs(trace, steps)
    sizes = defaultdict[Line | None, Counter[str]](Counter)
    counts = defaultdict[tuple[Line | None, str], float](float)
    for program, listed in by_program.items():
        op_origins, module = origins[program], origins[program].module
        whole = _module_runs(module, ran[program])
        for collective in listed:
            here = ran[program][collective.instruction.name]
            runs = (here if collective.count is None else whole * collective.count) / module.devices
            for value, shape in moved_values(module, collective.instruction):
                line = op_origins.origin(value).line
                sizes[line][collective.kind] += round(shape.bytes * runs / len(steps))
                counts[line, collective.kind] += runs / len(steps)
    lines = {
        line: tuple(
            MovedValues(kind, size, counts[line, kind]) for kind, size in kinds.most_common()
        )
        for line, kinds in sizes.items()
    }
    devices = max(
        origins[program].module.devices for program, listed in by_program.items() if listed
    )
    return MovedByLine(devices, lines)


def _runs(trace: Trace, steps: Sequence[tuple[float, float]]) -> dict[str, Counter[str]]:
    """Return how often each operation began in the steps, on all devices, by module."""
    counts = defaultdict[str, Counter[str]](Counter)
    for event in trace.events:
        if any(start <= event.start <= end for start, end in steps):
            counts[event.program][event.name] += 1
    return counts


def _module_runs(module: HloModule, ran: Counter[str]) -> int:
    """Return how often a module ran on all devices.

    It is the most frequent count among the operations of its entry computation, since some devices
    run an operation as several kernels.
    """
    counts = [ran[op.name] for op in module.entry.instructions if ran[op.name]]
    return median_low(counts) if counts else 0
