"""A recorded run as a trace for Perfetto and chrome://tracing: Chrome's trace-event JSON.

Each process of the run is a process of the trace. Its first track has all compilations, each with
its phases inside; each compiled function has its own track below. A compilation that
begins before another has ended, in another thread, goes to a further track, since the slices of
one track must nest. Times are in microseconds.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxprtool.ir.documents import as_json

if TYPE_CHECKING:
    from jaxprtool.recording.recorded_run import Compilation, Function, OutsideJit, Reason, Run

#: A trace event: an object of JSON.
_Event = dict[str, Any]

#: The maximum number of functions with their own track; the slowest to compile have one.
_MOST_TRACKS = 200


def perfetto(run: Run) -> str:
    """Return a run as the text of a trace."""
    document = {
        "traceEvents": list(_events(run)),
        "displayTimeUnit": "ms",
        "otherData": {
            "command": shlex.join(run.command),
            "seconds": as_json(run.seconds),
            "exit_code": "" if run.exit_code is None else str(run.exit_code),
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def _events(run: Run) -> Iterator[_Event]:
    # Perfetto treats process 0 as the idle process of the kernel, so numbers begin at 1.
    for process in run.processes:
        number = process.number + 1
        command = " ".join(process.command) or "process"
        yield _metadata(number, "process_name", name=f"{process.number}: {command}")
        yield _metadata(number, "process_sort_index", sort_index=process.number)
        labels = " ".join(filter(None, (process.jax and f"JAX {process.jax}", process.backend)))
        if labels:
            yield _metadata(number, "process_labels", labels=labels)
        if process.seconds:
            args = {"pid": process.pid, "ending": process.ending}
            yield _metadata(number, "thread_name", thread=1, name="process")
            end = process.start + process.seconds
            yield _slice(number, 1, "process", command, process.start, end, args)
    by_process: defaultdict[int, list[tuple[Function, Compilation]]] = defaultdict(list)
    for function in run.functions:
        for compilation in function.compilations:
            by_process[compilation.process].append((function, compilation))
    for process_number, pairs in sorted(by_process.items()):
        yield from _process_events(process_number + 1, pairs, run.functions)
    first = min((process.number for process in run.processes), default=0) + 1
    for outside in run.outside_jit:
        yield _outside(first, outside)


def _process_events(
    number: int, pairs: Sequence[tuple[Function, Compilation]], functions: Sequence[Function]
) -> Iterator[_Event]:
    """Yield the events of the compilations of a process, all together and by function."""
    ordered = sorted(pairs, key=lambda pair: pair[1].start)
    tracks = _Tracks(number, 2)
    yield from tracks.events("compilations", ordered)
    by_function: defaultdict[int, list[tuple[Function, Compilation]]] = defaultdict(list)
    for function, compilation in ordered:
        by_function[id(function)].append((function, compilation))
    for function in functions[:_MOST_TRACKS]:
        if id(function) in by_function:
            yield from tracks.events(function.name, by_function[id(function)])


class _Tracks:
    """The tracks of a process; `thread` is the number of the next one."""

    def __init__(self, process: int, thread: int):
        self._process, self._thread = process, thread

    def events(self, name: str, pairs: Sequence[tuple[Function, Compilation]]) -> Iterator[_Event]:
        """Yield compilations in as many tracks as run at the same time."""
        ends: list[float] = []
        for function, compilation in pairs:
            place = next((i for i, end in enumerate(ends) if end <= compilation.start), len(ends))
            if place == len(ends):
                ends.append(0.0)
                thread = self._thread + place
                yield _metadata(self._process, "thread_name", thread=thread, name=name)
                yield _metadata(
                    self._process, "thread_sort_index", thread=thread, sort_index=thread
                )
            ends[place] = compilation.start + compilation.seconds
            yield from _compilation(self._process, self._thread + place, function, compilation)
        self._thread += len(ends)


def _compilation(
    process: int, thread: int, function: Function, compilation: Compilation
) -> Iterator[_Event]:
    """Yield the slice of a compilation, and those of its phases within it."""
    args: _Event = {
        "function": function.name,
        "defined at": function.line,
        "called at": compilation.line,
        "library": compilation.library,
        "equations": compilation.equations,
        "cached": compilation.cached,
        "CPU seconds": as_json(compilation.cpu_seconds),
        "compared with": compilation.nearest,
        "error": compilation.error,
        "static": as_json(compilation.statics),
        "reasons": list(map(_reason, compilation.reasons)),
    }
    args = {key: value for key, value in args.items() if value not in ("", [], {})}
    kind = "compiled again" if compilation.reasons else "compiled"
    last = compilation.start + compilation.seconds
    yield _slice(process, thread, kind, compilation.name, compilation.start, last, args)
    start = compilation.start
    for phase in ("trace", "lower", "compile"):
        if seconds := getattr(compilation, f"{phase}_seconds"):
            end = min(start + seconds, last)
            yield _slice(process, thread, phase, phase, start, end, {})
            start = end


def _reason(reason: Reason) -> str:
    change = " → ".join(filter(None, (reason.before, reason.after)))
    parts = ": ".join(filter(None, (reason.kind, reason.path, change)))
    line = f" at {reason.line}" if reason.line else ""
    advice = f" ({reason.advice})" if reason.advice else ""
    return f"{parts}{line}{advice}"


def _outside(process: int, outside: OutsideJit) -> _Event:
    """Return an instant event where the first small computation of a line was compiled."""
    return {
        "ph": "i",
        "s": "p",
        "name": f"{outside.count} outside of jit at {outside.line}",
        "cat": "outside of jit",
        "pid": process,
        "tid": 1,
        "ts": _microseconds(outside.start),
        "args": {"seconds": as_json(outside.seconds), "operations": dict(outside.names)},
    }


def _slice(
    process: int, thread: int, kind: str, name: str, start: float, end: float, args: _Event
) -> _Event:
    # Round both ends instead of the duration, so that phases stay inside their compilation.
    begin = _microseconds(start)
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": round(_microseconds(end) - begin, 3),
        "args": args,
    }


def _metadata(process: int, kind: str, thread: int = 0, **args: Any) -> _Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
