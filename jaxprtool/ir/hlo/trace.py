"""The operations that ran, with their times, from a trace that JAX's profiler recorded.

    trace = read_trace("trace/plugins/profile/…/host.xplane.pb")
    trace.modules[trace.events[0].program]

On a CPU each operation is an event of the thread that started it. An operation that other threads
work on, such as a large matrix product, ends where an event "end: NAME" begins. On GPUs and TPUs it
is an event of a stream, or of the line "XLA Ops"; that has not been tested. The compiled modules
are in the trace, unless the profiler was told to leave them out. Field numbers are those of
`xplane.proto` of TSL and `xla/service/hlo.proto`.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxprtool.ir.hlo.module import (
    HloModule,
    Message,
    message,
    read_module,
    submessage,
    submessages,
    text_field,
)
from jaxprtool.ir.process import without_collector

#: The name of the annotation around each measured call or step.
STEP = "jaxprtool.step"

#: The maximum number of operations to read from a trace: more would take too long.
MOST_EVENTS = 500_000

#: The prefix of the names of events that begin when an operation has ended.
_END = "end: "

#: The names of the host's events while no operation runs, or their prefixes, by kind.
_COMPILING = ("lower_sharding_computation", "backend_compile_and_load")
_RUNNING = "ThunkExecutor::Execute"
_DISPATCHING = ("PjitFunction(", "ExecuteReplicated")


class TraceEvent(NamedTuple):
    """A run of an operation.

    Attributes:
        name: The name of the operation in its module.
        program: Its module in the trace: the name with a number, `jit_step(4)`. The number alone
            is not unique: programs from JAX's compilation cache keep theirs.
        start: When it began, in nanoseconds.
        end: When its thread had ended its part, in nanoseconds.
        done: When other threads had ended theirs, such as parts of a large matrix product.
        thread: The thread or stream that it ran on.
    """

    name: str
    program: str
    start: float
    end: float
    done: float
    thread: str


class HostEvent(NamedTuple):
    """An event of the host; `kind` is "compiling", "between operations" or "dispatch"."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What a profiler recorded.

    Attributes:
        events: The operations that ran, as far as they were read.
        host: What the host did.
        steps: The start and end of each measured call; empty if none is marked.
        modules: The compiled modules, by `TraceEvent.program`.
        names: The names of all modules, by the same keys.
        is_cut: Whether there were more operations than are read.
        since: The time of the file that it was read from; see `read_module`.
    """

    events: tuple[TraceEvent, ...]
    host: tuple[HostEvent, ...]
    steps: tuple[tuple[float, float], ...]
    modules: Mapping[str, HloModule]
    names: Mapping[str, str]
    is_cut: bool = False
    since: float | None = None


@without_collector()
def read_trace(path: str, modules: bool = True) -> Trace:
    """Return the trace in a file `*.xplane.pb`, with at most `MOST_EVENTS` operations.

    Args:
        path: The file.
        modules: Whether to read the compiled modules.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a trace.
    """
    with open(path, "rb") as file:
        data, since = file.read(), os.fstat(file.fileno()).st_mtime
    space = message(data)
    try:
        profile = ProfileData.from_serialized_xspace(data)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    trace = _read_events(profile)
    used = set(trace.names) if modules else set()
    return replace(trace, modules=_modules(space, used, since), since=since)


def _read_events(data: Any) -> Trace:
    events: list[TraceEvent] = []
    names: dict[str, str] = {}
    host: list[HostEvent] = []
    steps: list[tuple[float, float]] = []
    ends: defaultdict[str, list[float]] = defaultdict(list)
    is_cut = False
    for plane in data.planes:
        if not plane.name.startswith(("/host:CPU", "/device:")):
            continue
        for number, line in enumerate(plane.lines):
            thread = f"{plane.name} {line.name} {number}"
            for event in line.events:
                name = event.name
                if name.startswith(_END):
                    ends[name.removeprefix(_END)].append(event.start_ns)
                elif name.startswith("ThreadpoolListener::"):
                    continue
                elif kind := _host_kind(name):
                    start = event.start_ns
                    host.append(HostEvent(kind, start, start + event.duration_ns))
                elif name == STEP:
                    steps.append((event.start_ns, event.start_ns + event.duration_ns))
                elif len(events) == MOST_EVENTS:
                    is_cut = True
                elif operation := _operation(event, thread, names):
                    events.append(operation)
    return Trace(_with_ends(events, ends), tuple(host), tuple(sorted(steps)), {}, names, is_cut)


def _with_ends(events: list[TraceEvent], ends: dict[str, list[float]]) -> tuple[TraceEvent, ...]:
    """Return events in order, with the times at which other threads have ended their parts.

    The runs of an operation end in the order in which they begin.
    """
    left = {name: deque(sorted(times)) for name, times in ends.items()}
    ordered = []
    for event in sorted(events, key=lambda event: event.start):
        later = left.get(event.name, deque())
        while later and later[0] < event.start:
            later.popleft()
        ordered.append(event._replace(done=max(event.end, later.popleft())) if later else event)
    return tuple(ordered)


def _host_kind(name: str) -> str | None:
    if name.startswith(_RUNNING):
        return "between operations"
    if name.startswith(_DISPATCHING):
        return "dispatch"
    return "compiling" if name in _COMPILING else None


def _operation(event: Any, thread: str, names: dict[str, str]) -> TraceEvent | None:
    """Return the operation that an event is a run of; None if it is not one.

    The name of its module is added to `names`.
    """
    name = module = number = None
    for key, value in event.stats:
        if key == "hlo_op":
            name = value
        elif key == "hlo_module":
            module = value
        elif key == "program_id":
            number = value
        if name is not None and module is not None and number is not None:
            program, start = f"{module}({number})", event.start_ns
            names[program], end = module, start + event.duration_ns
            return TraceEvent(name, program, start, end, end, thread)
    return None


def _modules(space: Message, used: set[str], since: float) -> dict[str, HloModule]:
    """Return the compiled modules in a trace that its events refer to; see `read_module`."""
    modules = {}
    for plane in submessages(space, 1):
        if text_field(plane, 2) != "/host:metadata":
            continue
        for entry in submessages(plane, 4):
            metadata = submessage(entry, 2)
            data = [stat[6][-1] for stat in submessages(metadata, 5) if 6 in stat]
            if data and (name := text_field(metadata, 2)) in used:
                modules[name] = read_module(message(data[0])[1][-1], since)
    return modules
