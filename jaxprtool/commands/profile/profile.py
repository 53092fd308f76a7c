"""`profile`: the measured time of each source line.

found = jaxprtool.profile(program, (params, batch))
found.lines[0].name, found.lines[0].seconds

with jaxprtool.profiling() as found:
    train()
found.profile.lines
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxprtool.analysis.devices import device_of_kind
from jaxprtool.commands.cost.estimate import cost
from jaxprtool.commands.profile.lines import (
    Peaks,
    Profile,
    profile_of,
    with_cost,
    with_plain_time,
)
from jaxprtool.errors import TargetError
from jaxprtool.execute.profile import (
    MODULE,
    Trace,
    finish,
    measured_peaks,
    newest_trace,
    profiled_run,
    read_trace,
    recorded,
    step,
    with_modules,
)
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.execute.running.run import flat_arguments, require_count
from jaxprtool.ir import source_text
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program, require_program
from jaxprtool.recording.folder import run_of_file
from jaxprtool.recording.read import source_digests

if TYPE_CHECKING:
    from jaxprtool.commands.profile.lines import Profile, TimedOperation
    from jaxprtool.execute.profile import Trace, TraceEvent


def profile(
    program: Program, args: object = None, *, calls: int | None = None, seed: int = 0
) -> Profile:
    """Run a compiled program under JAX's profiler, and return its time by source line.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves; None for random
            values.
        calls: The number of measured calls. By default at most 20, and fewer if these take long;
            one if the program has effects.
        seed: The seed of random values.

    Raises:
        ArgumentsError: If the arguments do not fit.
        UnsupportedError: If the program cannot be compiled, or the profiler is running already, or
            records nothing on this device.
        UserFunctionError: If a user's callback or check fails.
    """
    require_program(program)
    values: Sequence[object] = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals
    ]
    if args is not None:
        values = flat_arguments(program, args)
        program = program.at(list(map(np.shape, values))) if program.symbols else program
    require_count(program, values)
    filled = fill_arguments(program, dict(zip(program.arg_names, values, strict=True)), seed)
    return profile_on(program, filled.arguments, None, calls)


def profile_on(
    program: Program,
    arguments: Sequence[object],
    device: jax.Device | None,
    calls: int | None,
    on_progress: Callable[[str], object] = lambda doing: None,
) -> Profile:
    """Return the profile of a program on flat arguments and a device; see `profile`."""
    measured = profiled_run(program, arguments, device, calls, on_progress)
    result = profile_of(measured.trace, program.name, frames_now(program.roots))
    result = with_plain_time(result, measured.plain_seconds)
    estimate = cost(program)
    rated = with_cost(result, estimate, None)
    rates = (rated.flops_per_second, *(line.flops_per_second for line in rated.lines))
    achieved = max(rate or 0.0 for rate in rates)
    return with_cost(
        result, estimate, peaks_of(measured.device, achieved, tuple(estimate.total.products))
    )


#: How often the peaks of a CPU are measured again at most, about 0.2 seconds each.
_MORE_TIMES = 2


def peaks_of(
    device: jax.Device, achieved: float = 0.0, products: Sequence[str] = ()
) -> Peaks | None:
    """Return the highest rates of a device: measured on a CPU, from a table for others.

    Args:
        device: The device.
        achieved: FLOP/s that a program seems to achieve. A measured peak below that is measured
            again, since the machine may have been busy.
        products: The precisions of the program's matrix products, for a device from a table.
    """
    if device.platform == "cpu":
        flops, size = measured_peaks(device)
        for _ in range(_MORE_TIMES):
            if flops < achieved:
                flops, size = map(max, (flops, size), measured_peaks(device))
        source = "a matrix product and a negation of f32, measured here"
        return Peaks(str(device), flops, size, source)
    hardware = device_of_kind(device.device_kind)
    if hardware is None:
        return None
    rate = max(hardware.rate(name) for name in ("f32", *products))
    return Peaks(hardware.name, rate, hardware.bandwidth, hardware.source)


@dataclass
class Profiling:
    """A `with` block that is profiled; `profile` is set at its end."""

    _found: list[Profile] = field(default_factory=list)

    @property
    def profile(self) -> Profile:
        """The profile of the block. Raises AttributeError inside the block."""
        if not self._found:
            raise AttributeError("the profile is known after the block")
        return self._found[0]


@contextlib.contextmanager
def profiling() -> Iterator[Profiling]:
    """Profile a `with` block: all operations that JAX runs in it, under `jax.jit` or outside.

    The block is one call: its wall time includes the user's Python and compilations. It ends when
    all operations that it started have ended.

    Raises:
        UnsupportedError: If the profiler is running already, or records nothing.
    """
    block = Profiling()
    with recorded() as recording, step():
        yield block
        finish()
    assert recording.trace is not None
    block._found.append(profile_of(recording.trace, "the block", frames_now()))


def profile_in(path: str) -> Profile:
    """Return the profile in a trace of `jax.profiler`: a file, or the newest one in a folder.

    Raises:
        TargetError: If there is none, or it cannot be read.
        UnsupportedError: If it has no operations.
    """
    file = newest_trace(path)
    try:
        trace = with_modules(read_trace(file), _modules_in(path))
    except OSError as error:
        raise TargetError(f"cannot read '{file}': {error.strerror}") from None
    except ValueError as error:
        raise TargetError(f"'{file}' is not a trace of JAX's profiler: {error}") from None
    return profile_of(_with_kept_sources(trace, path), path, frames_now())


def _with_kept_sources(trace: Trace, path: str) -> Trace:
    """Return a trace whose lines have the source texts that its run keeps, if it is of a run."""
    run = run_of_file(path.rstrip("/"))
    if not run:
        return trace
    source_text.use_kept(run)
    digests = source_digests(run)
    modules = {key: replace(m, digests=digests) for key, m in trace.modules.items()}
    return replace(trace, modules=modules)


def _modules_in(path: str) -> Iterator[bytes]:
    """Yield the compiled modules that `record` has written in a folder."""
    return (file.read_bytes() for file in Path(path).rglob(f"*{MODULE}"))


# --- trace ----------------------------------------------------------------------------------------
# A profile as a trace for Perfetto and chrome://tracing: the operations, with their lines.
#
# The format is Chrome's trace-event JSON. Times are in microseconds from the first measured call
# on.

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
