"""The compile time of a program by stage, pass of XLA, and body of the user's code.

XLA reports its work to JAX's profiler: passes by name, and each kernel by the name of its
operation, whose call stack is in the compiled module. XLA for the CPU does so in JAX 0.10 and 0.12.
For other backends, only the stages of JAX are known. The machine code of all kernels is generated
together, so that time is divided among them in proportion to the rest of their compile time.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax

from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.running import run
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.documents import document
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.hlo.module import HloModule, compiled_module
from jaxprtool.ir.program import Program
from jaxprtool.ir.repetition import SourceRange
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The maximum number of passes, and of bodies.
MOST = 10


@dataclass(frozen=True)
class Stage:
    """A stage of XLA, or one of its passes.

    Attributes:
        name: Its name.
        seconds: The wall time that it took.
    """

    name: str
    seconds: float


@document(names={"source": "lines"})
@dataclass(frozen=True)
class CompiledBody:
    """The kernels of one function of the user or of a library.

    Attributes:
        name: The name of the function; empty for kernels without a source, which XLA adds.
        kernels: The number of its kernels that XLA compiled; equal ones are compiled once.
        seconds: The time to compile them, summed over threads.
        share: The fraction of the time of all kernels.
        source: The lines of the operations.
    """

    name: str
    kernels: int
    seconds: float
    share: float
    source: SourceRange | None


@dataclass(frozen=True)
class CompileProfile:
    """The compile time of a program. Times are in seconds.

    Attributes:
        trace: The time of tracing, and of passes of jaxprtool.
        lower: The time of lowering to StableHLO.
        compile: The time of XLA.
        compile_cpu: The CPU time of all threads of XLA.
        stages: The stages of XLA, the longest first; empty if the backend reports none.
        passes: The longest passes of XLA on the whole program, each without nested passes.
        bodies: The most expensive bodies, the most expensive first.
    """

    trace: float
    lower: float
    compile: float
    compile_cpu: float
    stages: tuple[Stage, ...]
    passes: tuple[Stage, ...]
    bodies: tuple[CompiledBody, ...]


def compile_profile(
    program: Program, arguments: Sequence[object], device: jax.Device | None, trace_time: float
) -> CompileProfile:
    """Compile a program under JAX's profiler, without JAX's persistent cache.

    Args:
        program: The program.
        arguments: Its flat arguments.
        device: The device to compile for.
        trace_time: The seconds of tracing, which the result includes.

    Raises:
        UnsupportedError: If the program cannot be compiled, or not as a whole.
    """
    program = with_contents(program)
    ready = run.arguments_placed(program, arguments, device)
    with compiled_afresh(), ready as (there, _), _events() as threads:
        compilation = run.compiled_program(program, there, lambda doing: None)
    if compilation.lower is None or compilation.compile is None or compilation.compile_cpu is None:
        raise UnsupportedError("nothing is compiled as a whole under jax_disable_jit")
    main = next((thread for thread in threads if any(e.name == _WHOLE for e in thread)), [])
    kernels: list[tuple[str, float]] = []
    for thread in threads:
        kernels += _kernels(thread)
    module = compiled_module(compilation.executable)
    return CompileProfile(
        trace_time,
        compilation.lower,
        compilation.compile,
        compilation.compile_cpu,
        _stages(main, compilation.compile),
        _passes(main),
        _bodies(kernels, module, frames_now(program.roots)),
    )


def compile_seconds(
    program: Program, arguments: Sequence[object], device: jax.Device | None
) -> float:
    """Return the CPU time of XLA to compile a program, in seconds."""
    program = with_contents(program)
    with compiled_afresh(), run.arguments_placed(program, arguments, device) as (there, _):
        compilation = run.compiled_program(program, there, lambda doing: None)
    assert compilation.compile_cpu is not None
    return compilation.compile_cpu


# --- events -----------------------------------------------------------------------------------


class _ThreadEvent(NamedTuple):
    """An event of a thread: nanoseconds, and the kernel's name if it is the compilation of one."""

    start: float
    end: float
    name: str
    kernel: str = ""

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


#: The events of XLA for the CPU: the whole compilation, a task of a thread, a kernel in a task.
_WHOLE, _TASK, _KERNEL = (
    "CpuCompiler::RunBackend",
    "TaskDispatcher::dispatch",
    "FusionCompiler::Compile",
)

#: The stages by the names of their events, or the beginnings of these.
_STAGES = {
    "HLO passes": "passes on the whole program",
    "ThunkEmitter::EmitEntryComputation": "kernels written",
    "Codegen": "kernels compiled",
}


@contextmanager
def _events() -> Iterator[list[list[_ThreadEvent]]]:
    """Yield a list that holds the events of each thread after the `with` block."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    threads: list[list[_ThreadEvent]] = []
    with tempfile.TemporaryDirectory(prefix="jaxprtool-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield threads
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's types have no __module__
        for plane in data.planes:
            threads += [list(map(_event, line.events)) for line in plane.lines]


def _event(event: jax.profiler.ProfileEvent) -> _ThreadEvent:
    name, start = event.name, event.start_ns
    kernel = str(dict(event.stats).get("module", "")) if name == _KERNEL else ""
    return _ThreadEvent(start, start + event.duration_ns, name, kernel)


def _self_times(events: Sequence[_ThreadEvent]) -> Iterator[tuple[_ThreadEvent, float]]:
    """Yield events of one thread with their seconds, without those of nested events."""
    stack: list[tuple[_ThreadEvent, list[float]]] = []
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        while stack and event.start >= stack[-1][0].end:
            done, inner = stack.pop()
            yield done, done.seconds - sum(inner)
        if stack:
            stack[-1][1].append(event.seconds)
        stack.append((event, []))
    for done, inner in stack:
        yield done, done.seconds - sum(inner)


# --- stages and passes ------------------------------------------------------------------------


def _stages(main: Sequence[_ThreadEvent], whole: float) -> tuple[Stage, ...]:
    seconds: dict[str, float] = defaultdict(float)
    for event in main:
        for name, stage in _STAGES.items():
            if event.name.startswith(name):
                seconds[stage] += event.seconds
    if not seconds:
        return ()
    seconds["the rest"] = max(whole - sum(seconds.values()), 0.0)
    return _longest(seconds)


def _passes(main: Sequence[_ThreadEvent]) -> tuple[Stage, ...]:
    """Return the passes on the whole program that took longest, by their own time."""
    pipelines = [event for event in main if event.name.startswith("HLO passes")]
    inside = [
        event
        for event in main
        if any(
            pipeline.start <= event.start and event.end <= pipeline.end for pipeline in pipelines
        )
    ]
    seconds: dict[str, float] = defaultdict(float)
    for event, self_seconds in _self_times(inside):
        seconds[event.name.partition(" (")[0]] += self_seconds
    return _longest(seconds)[:MOST]


def _longest(seconds: Mapping[str, float]) -> tuple[Stage, ...]:
    """Return stages, the longest first."""
    stages = (Stage(name, total) for name, total in seconds.items())
    return tuple(sorted(stages, key=lambda stage: -stage.seconds))


# --- kernels and bodies -----------------------------------------------------------------------


def _kernels(thread: Sequence[_ThreadEvent]) -> list[tuple[str, float]]:
    """Return the kernels that a thread compiled, each with its share of the thread's time."""
    kernels = [event for event in thread if event.kernel]
    kernel_seconds = sum(event.seconds for event in kernels)
    tasks = sum(event.seconds for event in thread if event.name == _TASK)
    scale = max(tasks / kernel_seconds, 1.0) if kernel_seconds else 0.0
    return [(event.kernel, scale * event.seconds) for event in kernels]


#: The end of the name of a generator or a lambda inside a function.
_INNER = re.compile(r"(\.<locals>)?\.<\w+>$")


@dataclass
class _FunctionKernels:
    """The kernels of one function."""

    seconds: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def _bodies(
    kernels: Sequence[tuple[str, float]], module: HloModule, frames: Frames
) -> tuple[CompiledBody, ...]:
    by_place: dict[tuple[str, str], _FunctionKernels] = defaultdict(_FunctionKernels)
    for kernel, seconds in kernels:
        frame = _frame(kernel, module, frames)
        place = (frame.file, _INNER.sub("", frame.function)) if frame else ("", "")
        body = by_place[place]
        body.seconds.append(seconds)
        body.lines += [frame.line] if frame else []
    whole = sum(seconds for _, seconds in kernels)
    bodies = [
        CompiledBody(
            function,
            len(body.seconds),
            sum(body.seconds),
            sum(body.seconds) / whole,
            SourceRange(file, min(body.lines), max(body.lines)) if body.lines else None,
        )
        for (file, function), body in by_place.items()
    ]
    return tuple(sorted(bodies, key=lambda body: -body.seconds)[:MOST])


def _frame(kernel: str, module: HloModule, frames: Frames) -> UserFrame | None:
    """Return the user's frame of a kernel; None if the kernel is XLA's own."""
    name = kernel.removeprefix("__compute_module_").removesuffix("_kernel_module")
    instruction = module.by_name.get(name)
    if instruction is None:
        return None
    for candidate in (instruction, *module.inside(instruction)):
        if location := frames.location_in(module.frames(candidate)):
            return location.frame
    return None
