"""Run programs under JAX's profiler, and read the operations and their times that it recorded.

trace = read_trace("trace/plugins/profile/…/host.xplane.pb")
trace.modules[trace.events[0].program]
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from jaxprtool import jaxcompat
from jaxprtool.errors import TargetError, UnsupportedError
from jaxprtool.execute.running.run import arguments_placed, compiled_program, failures_reported
from jaxprtool.ir.hlo.module import (
    HloModule,
    Message,
    message,
    module_name,
    read_module,
    submessage,
    submessages,
    text_field,
)
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program

T = TypeVar("T")

#: The maximum number of measured calls, and the limits of their seconds and operations.
CALLS, _SECONDS, _EVENTS = 20, 1.0, 15_000

#: The ending of a trace of the profiler.
SUFFIX = ".xplane.pb"

#: The ending of a compiled module that `record` writes beside a trace.
MODULE = ".hlo.pb"


@dataclass
class Recorded:
    """The recording of a `with` block by the profiler; `trace` is set at its end."""

    trace: Trace | None = None


@contextlib.contextmanager
def recorded(executables: Iterable[Any] | None = None) -> Iterator[Recorded]:
    """Record the operations that run in a `with` block, and their compiled modules.

    Args:
        executables: The executables to search for modules that the profiler lacks; by default all
            that this process has compiled.

    Raises:
        UnsupportedError: If the profiler is running already.
    """
    recording = Recorded()
    with tempfile.TemporaryDirectory(prefix="jaxprtool-") as folder:
        start(folder)
        try:
            yield recording
        finally:
            jax.profiler.stop_trace()
        modules = live_modules() if executables is None else modules_of(executables)
        recording.trace = with_modules(read_trace(newest_trace(folder)), modules)


def start(folder: str) -> None:
    """Start the profiler, which writes to a folder when `jax.profiler.stop_trace` stops it.

    Raises:
        UnsupportedError: If the profiler is running already.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise UnsupportedError(
            "JAX's profiler is running already", "only one profile can be taken at a time"
        ) from error


def finish() -> None:
    """Wait until the operations of all devices have ended."""
    jax.effects_barrier()
    for array in jax.live_arrays():
        with contextlib.suppress(JaxRuntimeError):  # whoever reads the array sees the error
            array.block_until_ready()


def modules_of(executables: Iterable[Any]) -> Iterator[bytes]:
    """Yield the modules of executables, as `HloModuleProto`s."""
    for executable in executables:
        for module in executable.hlo_modules():
            yield module.as_serialized_hlo_module_proto()


def live_modules() -> Iterator[bytes]:
    """Yield the modules of all executables of this process."""
    return modules_of(jax.devices()[0].client.live_executables())


def with_modules(trace: Trace, protos: Iterable[bytes]) -> Trace:
    """Add the modules that are not in a trace: those that came from JAX's compilation cache.

    Of several modules with the name and the operations that ran, the smallest is taken.

    Args:
        trace: The trace.
        protos: Modules, as `HloModuleProto`s.
    """
    missing = {program: set[str]() for program in trace.names if program not in trace.modules}
    for event in trace.events:
        if event.program in missing:
            missing[event.program].add(event.name)
    if not missing:
        return trace
    wanted = {trace.names[program] for program in missing}
    modules = [read_module(data, trace.since) for data in protos if module_name(data) in wanted]
    modules.sort(key=lambda module: len(module.by_name))
    by_program = dict(trace.modules)
    for program, ran in missing.items():
        for module in modules:
            if module.name == trace.names[program] and ran <= module.by_name.keys():
                by_program[program] = module
                break
    return replace(trace, modules=by_program)


@contextlib.contextmanager
def _own_lines() -> Iterator[None]:
    """Compile with the call stacks of this source: an executable in JAX's cache may have others."""
    setting = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", setting)


def step() -> contextlib.AbstractContextManager[object]:
    """Mark a `with` block as a measured call."""
    return TraceAnnotation(STEP)


def newest_trace(path: str) -> str:
    """Return the newest trace in a folder that `jax.profiler.trace` wrote, or the file itself.

    Raises:
        TargetError: If there is none.
    """
    if not os.path.isdir(path):
        return path
    traces = sorted(Path(path).rglob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
    if not traces:
        raise TargetError(f"'{path}' has no profile: no file in it ends with {SUFFIX}")
    return str(traces[-1])


@dataclass(frozen=True)
class MeasuredRun:
    """A program that was run under the profiler.

    Attributes:
        trace: The trace; its steps are the fastest quarter of the measured calls.
        plain_seconds: The mean time of the fastest quarter of as many calls without the profiler;
            None if the program has effects.
        device: The device that it ran on; the first of several.
    """

    trace: Trace
    plain_seconds: float | None
    device: jax.Device


def profiled_run(
    program: Program,
    arguments: Sequence[object],
    device: jax.Device | None = None,
    calls: int | None = None,
    on_progress: Callable[[str], object] = lambda doing: None,
) -> MeasuredRun:
    """Compile a program and run it under the profiler, after calls to warm up.

    Args:
        program: The program.
        arguments: Its flat arguments.
        device: The device to run on; by default placed by JAX and the arguments.
        calls: The number of measured calls. By default at most `CALLS`, and fewer if these take
            long or run many operations; one if the program has effects.
        on_progress: Called with progress messages.

    Raises:
        UnsupportedError: If it cannot be compiled, or the profiler is running already.
        BackendError: If the device cannot run it.
        UserFunctionError: If a user's callback or check fails.
    """
    harmless = all(map(jaxcompat.is_removable_effect, program.jaxpr.effects))
    with arguments_placed(program, arguments, device) as (placed, chosen):
        with _own_lines():
            compilation = compiled_program(program, placed, on_progress)
        on_progress(f"profiling {program.name}")

        def call() -> float:
            (args,) = compilation.form.calls(placed, 1)
            start = time.perf_counter()
            with step():
                jax.block_until_ready(compilation.jitted(*args))
                jax.effects_barrier()
            return time.perf_counter() - start

        with failures_reported(program):
            call()
            count, plain = calls or 1, [0.0]
            if harmless:
                count = calls or _affordable(call)
                plain = [call() for _ in range(count)]
            executable = compilation.executable
            executables = None if executable is None else [executable.runtime_executable()]
            with recorded(executables) as recording:
                for _ in range(count):
                    call()
    assert recording.trace is not None
    devices = [chosen] if chosen is not None else jax.devices()
    steps = _fastest(recording.trace.steps, lambda step: step[1] - step[0])
    trace = replace(recording.trace, steps=tuple(sorted(steps)))
    plain_seconds = statistics.mean(_fastest(plain, float)) if harmless else None
    return MeasuredRun(trace, plain_seconds, devices[0])


def _fastest(calls: Sequence[T], seconds: Callable[[T], float]) -> list[T]:
    """Return the fastest quarter of calls: the others waited for other work of the machine."""
    return sorted(calls, key=seconds)[: (len(calls) + 3) // 4]


def _affordable(call: Callable[[], float]) -> int:
    """Return the number of calls to measure, by the time and the operations of one call."""
    with tempfile.TemporaryDirectory(prefix="jaxprtool-") as folder:
        start(folder)
        try:
            seconds = call()
        finally:
            jax.profiler.stop_trace()
        count = len(read_trace(newest_trace(folder), modules=False).events)
    bounds = CALLS, _SECONDS / max(seconds, 1e-9), _EVENTS / max(count, 1)
    return max(math.floor(min(bounds)), 1)


def measured_peaks(device: jax.Device) -> tuple[float, float]:
    """Return the FLOP/s of a matrix product of f32, and the bytes a second of negating f32."""
    size, count = 1024, 1 << 24
    with jax.default_device(device):
        product = jax.jit(jnp.matmul)
        square = jnp.ones((size, size), jnp.float32)
        # In place, since allocating new pages would take most of the time.
        negated, vector = jax.jit(jnp.negative, donate_argnums=0), jnp.ones(count, jnp.float32)
        return (
            2 * size**3 / _shortest(lambda _: product(square, square), None),
            8 * count / _shortest(negated, vector),
        )


def _shortest(call: Callable[[Any], Any], value: Any) -> float:
    """Return the shortest time of calls, each with the result of the last."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        value = jax.block_until_ready(call(value))
        times.append(time.perf_counter() - start)
    return min(times)


# --- the trace ------------------------------------------------------------------------------------
# The operations that ran, with their times, from a trace that JAX's profiler recorded.
#
#     trace = read_trace("trace/plugins/profile/…/host.xplane.pb")
#     trace.modules[trace.events[0].program]
#
# On a CPU each operation is an event of the thread that started it. An operation that other threads
# work on, such as a large matrix product, ends where an event "end: NAME" begins. On GPUs and TPUs
# it is an event of a stream, or of the line "XLA Ops"; that has not been tested. The compiled
# modules are in the trace, unless the profiler was told to leave them out. Field numbers are those
# of `xplane.proto` of TSL and `xla/service/hlo.proto`.

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
