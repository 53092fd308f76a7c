"""The measured time of a run by the user's own lines, from a trace of JAX's profiler.

Times are those of one call: `divided` (`timeline`) divides the time of a run among the operations
that ran, and `Origins` (`origins`) leads an operation back to the lines that it comes from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from jaxprtool.analysis.cost import Cost, Group
from jaxprtool.analysis.cost.groupings import Line
from jaxprtool.analysis.profile.collectives import MovedValues, moved_by_line
from jaxprtool.analysis.profile.origins import CONTAINERS, Origin, Origins
from jaxprtool.analysis.profile.timeline import HANDED_ON, Span, clipped, divided
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.hlo.trace import Event, Trace
from jaxprtool.ir.source.frames import Frames
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The criteria by which measured time is grouped.
By = Literal["line", "scope", "function", "op", "primitive"]

BY: tuple[By, ...] = get_args(By)

#: The share of the time below which a user should not trust the table.
TRUSTED = 0.9


class NoOperationsError(UnsupportedError):
    """No operation is in a trace."""


_OPTIONAL = "library", "flops_per_second", "bytes_per_second", "moved_bytes", "moved"


@document(without=("line", "path"), also=("moved_bytes",), optional=_OPTIONAL)
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
        library: The line of a library that takes most of it: `flax/linen/linear.py:199`.
        flops_per_second: The FLOP/s that it achieves, by the estimate of `cost`.
        bytes_per_second: The bytes of memory traffic a second, by the estimate of `cost`.
        moved: The values that its collectives move to each device, by kind; None if the program has
            no collectives.
        line: The source line, of a group by line.
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
    library: str | None = None
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    moved: tuple[MovedValues, ...] | None = None
    line: Line | None = None
    path: tuple[str, ...] = ()

    @property
    def moved_bytes(self) -> int | None:
        """The bytes of the results of its collectives on one device; None if there are none."""
        return None if self.moved is None else sum(each.bytes for each in self.moved)


@document(
    without=("line", "path"), names={"name": "line"}, also=("moved_bytes",), optional=_OPTIONAL
)
class TimedLine(Timed):
    """The time of a line of source: `line` is `model.py:9`, "" if it is unknown."""


@document(optional=("own",))
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
    lines: tuple[str, ...]
    seconds: float
    share: float
    calls: float
    own: str = ""


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
    lines: tuple[str, ...]


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
    without=("stacks", "trace"),
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
        without_module: The time of operations whose module is not in the trace.
        is_cut: Whether operations were left out because there were too many.
        flops_per_second: The FLOP/s that the program achieves, by the estimate of `cost`.
        peaks: The highest rates of its device; None if they are unknown.
        devices: The number of devices that exchange values; None if there are no collectives.
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
    without_module: float = 0.0
    is_cut: bool = False
    flops_per_second: float | None = None
    peaks: Peaks | None = None
    devices: int | None = None
    stacks: Mapping[tuple[tuple[UserFrame, ...], str], float] = field(
        default_factory=dict, repr=False
    )
    trace: Trace | None = field(default=None, repr=False)

    @property
    def moved_bytes(self) -> int | None:
        """The bytes of the results of all collectives on one device; None if there are none."""
        return None if self.devices is None else sum(each.moved_bytes or 0 for each in self.lines)

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
        (min(each.start for each in trace.events), max(each.end for each in trace.events)),
    )
    found = _Runs(trace, steps, frames)
    return found.profile(name)


class _Part(NamedTuple):
    """A part of the time of an operation that belongs to one origin."""

    origin: Origin
    seconds: float
    calls: float
    own: bool
    split: bool


class _Runs:
    """The operations of a trace with their times; all times are per call, in seconds."""

    def __init__(self, trace: Trace, steps: Sequence[tuple[float, float]], frames: Frames) -> None:
        self._trace, self._frames = trace, frames
        self._calls = len(steps)
        self._wall = sum(end - start for start, end in steps) * 1e-9 / self._calls
        ran: defaultdict[str, set[str]] = defaultdict(set)
        for each in trace.events:
            ran[each.program].add(each.name)
        self._origins = {
            key: Origins(module, frames, frozenset(ran[key]))
            for key, module in trace.modules.items()
        }
        host = [Span(each.start, each.end, each.kind, _RANKS[each.kind]) for each in trace.host]
        spans = clipped([span for each in trace.events for span in self._spans(each)], steps)
        self._counts = Counter(each.key for each in spans if each.rank != HANDED_ON)
        times = divided(spans + clipped(host, steps))
        per_call = 1e-9 / self._calls
        self._times: dict[tuple[str, str], float] = {
            key: time * per_call for key, time in times.items() if key in self._counts
        }
        self._host = {str(key): time * per_call for key, time in times.items() if type(key) is str}
        self._parts = list(self._all_parts())
        self._moved = moved_by_line(trace, steps, self._origins)

    def _spans(self, event: Event) -> Iterator[Span]:
        key, origins = (event.program, event.name), self._origins.get(event.program)
        if origins is None:
            is_container = event.name.partition(".")[0] in CONTAINERS
        else:
            is_container = origins.is_container(event.name)
        if is_container:
            yield Span(event.start, event.done, key, _RANKS["container"])
            return
        yield Span(event.start, event.end, key)
        if event.done > event.end:
            yield Span(event.end, event.done, key, HANDED_ON)

    def _all_parts(self) -> Iterator[_Part]:
        for key, seconds in self._times.items():
            program, name = key
            origins = self._origins.get(program)
            if origins is None:
                continue
            of = origins.of(name)
            own, calls = bool(origins.own(name)), self._counts[key] / self._calls
            for origin, share in of:
                yield _Part(origin, seconds * share, calls, own, len(of) > 1)

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
            without,
            self._trace.is_cut,
            devices=None if self._moved is None else self._moved.devices,
            stacks=self._stacks(),
            trace=self._trace,
        )

    def _lines(self) -> Iterator[TimedLine]:
        grouped: defaultdict[Line | None, list[_Part]] = defaultdict(list)
        for part in self._parts:
            grouped[part.origin.line].append(part)
        moved = None if self._moved is None else self._moved.lines
        for line in moved or ():
            grouped[line]  # its collectives may have no time
        for line, parts in sorted(grouped.items(), key=lambda each: -_seconds(each[1])):
            behind: defaultdict[str, float] = defaultdict(float)
            for part in parts:
                behind[part.origin.library] += part.seconds
            library = max(behind, key=behind.__getitem__, default="")
            name = "" if line is None else f"{self._frames.path(line.file)}:{line.line}"
            here = None if moved is None else moved.get(line, ())
            yield self._timed(
                parts, name, TimedLine, library=library or None, moved=here, line=line
            )

    def _scopes(self) -> Iterator[Timed]:
        grouped: defaultdict[tuple[str, ...], list[_Part]] = defaultdict(list)
        for part in self._parts:
            scope = part.origin.scope
            for end in range(1, len(scope) + 1) if scope else [0]:
                grouped[scope[:end]].append(part)
        for path, parts in sorted(grouped.items(), key=lambda each: -_seconds(each[1])):
            yield self._timed(parts, "/".join(path), path=path)

    def _grouped(self, name: Callable[[Origin], str]) -> tuple[Timed, ...]:
        grouped: defaultdict[str, list[_Part]] = defaultdict(list)
        for part in self._parts:
            grouped[name(part.origin)].append(part)
        found = [self._timed(parts, name) for name, parts in grouped.items()]
        return tuple(sorted(found, key=_by_time))

    def _timed(
        self, parts: Sequence[_Part], name: str, kind: type[Any] = Timed, **more: Any
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

    def _lines_of(self, origins: Origins, name: str) -> tuple[str, ...]:
        weights: defaultdict[str, float] = defaultdict(float)
        for origin, weight in origins.of(name):
            if origin.line is not None:
                line = f"{self._frames.path(origin.line.file)}:{origin.line.line}"
                weights[line] += weight
        return _largest(weights)

    def _own(self, explained: float) -> Iterator[OwnWork]:
        times: defaultdict[str, float] = defaultdict(float)
        lines: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (program, name), seconds in self._times.items():
            origins = self._origins.get(program)
            if origins is not None and (kind := origins.own(name)):
                times[kind] += seconds
                for line in self._lines_of(origins, name)[:1]:
                    lines[kind][line] += seconds
        for kind, seconds in times.items():
            yield OwnWork(kind, seconds, seconds / self._wall, _largest(lines[kind])[:3])
        rest = self._wall - explained - sum(self._host.values())
        for kind, seconds in {**self._host, "idle": max(rest, 0.0)}.items():
            if seconds:
                yield OwnWork(kind, seconds, seconds / self._wall, ())

    def _stacks(self) -> dict[tuple[tuple[UserFrame, ...], str], float]:
        found: defaultdict[tuple[tuple[UserFrame, ...], str], float] = defaultdict(float)
        for part in self._parts:
            found[part.origin.frames, part.origin.primitive] += part.seconds
        return dict(found)


#: The ranks of spans that get the instants at which no operation runs, the lowest first.
_RANKS = {"container": 2, "between operations": 3, "compiling": 4, "dispatch": 5}


def _largest(weights: Mapping[str, float]) -> tuple[str, ...]:
    """Return the keys, the one with the largest number first."""
    return tuple(sorted(weights, key=lambda each: -weights[each]))


def _seconds(parts: Iterable[_Part]) -> float:
    return sum(part.seconds for part in parts)


def _by_time(each: Any) -> float:
    return -each.seconds


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
    known = {each.name: each for each in cost.groups}
    lines = [_with_rates(each, known.get(each.name)) for each in profile.lines]
    flops = _number(cost.total.work.flops + cost.total.work.transcendentals)
    rate = flops / profile.wall_seconds if flops is not None else None
    return replace(profile, lines=tuple(lines), flops_per_second=rate, peaks=peaks)


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
