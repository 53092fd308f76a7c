"""A profile as a trace for Perfetto and chrome://tracing: the operations, with their lines.

The format is Chrome's trace-event JSON. Times are in microseconds from the first measured call on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxprtool.commands.profile.lines import Profile, TimedOperation
    from jaxprtool.ir.hlo.trace import Trace, TraceEvent


#: The tracks of the process: the measured calls, and the work of the host; threads follow.
_CALLS, _HOST = 1, 2


def perfetto_of_profile(profile: Profile) -> str:
    """Return the operations of a profile, in time, as the text of a trace."""
    assert profile.trace is not None
    document = {
        "traceEvents": list(_profile_events(profile, profile.trace)),
        "displayTimeUnit": "ms",
        "otherData": {"name": profile.name, "explained": f"{profile.explained:.3f}"},
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def _profile_events(profile: Profile, trace: Trace) -> Iterator[dict[str, Any]]:
    first = min((event.start for event in trace.events), default=0.0)
    first = min(first, *(start for start, _ in trace.steps)) if trace.steps else first
    by_name = {(operation.module, operation.name): operation for operation in profile.operations}
    threads = {name: i for i, name in enumerate(dict.fromkeys(e.thread for e in trace.events))}
    names = {_CALLS: "calls", _HOST: "host"} | {i + 3: name for name, i in threads.items()}
    yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": profile.name}}
    for thread, name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": name}}
    for number, (start, end) in enumerate(trace.steps):
        yield _profile_slice(_CALLS, "call", f"call {number + 1}", start - first, end - first, {})
    for host in trace.host:
        if host.kind != "between operations":
            yield _profile_slice(_HOST, "host", host.kind, host.start - first, host.end - first, {})
    for event in trace.events:
        module = trace.names.get(event.program, "")
        yield _operation(event, by_name.get((module, event.name)), threads[event.thread] + 3, first)


def _operation(
    event: TraceEvent, timed: TimedOperation | None, thread: int, first: float
) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if timed is not None:
        args = {"lines": ", ".join(timed.lines), "opcode": timed.opcode, "module": timed.module}
    name = timed.lines[0] if timed is not None and timed.lines else event.name
    kind = (timed.own if timed is not None else "") or "operation"
    args |= {"operation": event.name}
    if event.done > event.end:
        args["done after (µs)"] = round((event.done - event.start) / 1000, 3)
    return _profile_slice(thread, kind, name, event.start - first, event.end - first, args)


def _profile_slice(
    thread: int, kind: str, name: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    # Round both ends instead of the duration, so that slices stay inside their parents.
    begin = round(start / 1000, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": round(round(end / 1000, 3) - begin, 3),
        "args": args,
    }
