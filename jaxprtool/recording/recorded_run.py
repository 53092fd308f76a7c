"""The facts of a recorded run: functions, their compilations, and why each was compiled again.

These dataclasses are the public result of `jaxprtool.record` and the JSON of `jaxprtool show run/`.
`jaxprtool.recording.read` reads them from a run's folder. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from jaxprtool.ir.documents import Printed, as_json, document
from jaxprtool.ir.source_text import UNKNOWN, Place

#: The kinds of differences between a compilation and an earlier one of the same function.
ReasonKind = Literal[
    "shape",
    "dtype",
    "weak_type",
    "sharding",
    "static",
    "structure",
    "function",
    "context",
    "closure",
    "cache",
]


@dataclass(frozen=True)
class Argument:
    """A flat argument of a compilation, or a result.

    Attributes:
        path: Its name: `params['w']`.
        dtype: Its dtype in the notation of listings: `f32`.
        shape: Its sizes; a symbolic size is a text.
        weak: Whether its type is weak: JAX's type of Python scalars.
        sharding: Its sharding over several devices, or its device if it is committed to one; "" for
            an uncommitted array on the default device.
        donated: Whether its buffer is donated.
        host: The kind of a host value that each call copies to the device: "numpy" or "python"; ""
            for other values.
    """

    path: str
    dtype: str
    shape: tuple[int | str, ...] = ()
    weak: bool = False
    sharding: str = ""
    donated: bool = False
    host: str = ""

    @property
    def type(self) -> str:
        """Its type as listings show it: `~f32[4,17]`."""
        return f"{'~' if self.weak else ''}{self.dtype}[{','.join(map(str, self.shape))}]"


@document(names={"line": "place"}, optional=("advice",))
@dataclass(frozen=True)
class Reason:
    """A difference between a compilation and the nearest earlier one of the same function.

    Attributes:
        kind: What differs.
        path: The argument, static argument, variable or setting that differs; "" for the function.
        before: Its value in the earlier compilation.
        after: Its value in this compilation.
        line: The line that made the difference, if it is known, or that of the call: `train.py:24`.
        advice: What to do, if that is clear; else "".
    """

    kind: ReasonKind
    path: str
    before: str
    after: str
    line: Place
    advice: str = ""


@document(without=("line", "library"), also=("place",), optional=("error", "file"))
@dataclass(frozen=True)
class Compilation:
    """One lowering of a function by JAX, and its compilation by XLA.

    Attributes:
        name: The name of the recorded program: `step`, `step@2`.
        start: When its tracing began, after the start of the run.
        trace_seconds: The time of tracing; 0 if JAX had the jaxpr already.
        lower_seconds: The time of lowering.
        compile_seconds: The time of XLA's compilation; None if it did not finish or was not
            requested.
        cpu_seconds: The CPU time of all three, in all threads of the process.
        cached: Whether the executable came from the persistent compilation cache.
        equations: The number of equations, at all depths.
        arguments: The flat arguments.
        results: The flat results.
        statics: The values of static arguments by name, as text.
        line: The user's line of the call that caused it: `train.py:24`.
        library: The innermost library line between that line and JAX; "" if there is none.
        reasons: Why the function was compiled again; empty for its first compilation.
        nearest: The name of the earlier compilation that `reasons` compares with, or "".
        process: The process that compiled it.
        file: The file of the program below the run's folder; "" if it was not written.
        error: Why JAX could not lower or compile it, or why its program was not written.
        unfinished_seconds: How long XLA had been compiling it when its process ended, or until now;
            None if it was not.
    """

    name: str
    start: float
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float | None
    cpu_seconds: float
    cached: bool
    equations: int
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    statics: dict[str, str]
    line: Place
    library: Place
    reasons: tuple[Reason, ...] = ()
    nearest: str = ""
    process: int = 0
    file: str = ""
    error: str = ""
    unfinished_seconds: float | None = None

    @property
    def place(self) -> Place:
        """The user's line of the call that caused it, and the innermost library line behind it."""
        return self.line.calling(self.library)

    @property
    def seconds(self) -> float:
        """The time of tracing, lowering and compiling."""
        compiling = self.compile_seconds or self.unfinished_seconds or 0.0
        return self.trace_seconds + self.lower_seconds + compiling


@document(names={"line": "place"})
@dataclass(frozen=True)
class Unfinished:
    """What a process was doing when it ended, or does now if it still runs.

    Attributes:
        phase: What: "tracing", "lowering" or "compiling".
        name: The function; for a program that was lowered, its name.
        line: The user's line of the call that caused it.
        seconds: For how long; None if it is unknown when the process ended.
        process: The process.
    """

    phase: str
    name: str
    line: Place
    seconds: float | None
    process: int = 0


@dataclass(frozen=True)
class Calls:
    """The calls of a function, counted with `--calls`.

    Attributes:
        count: The number of calls.
        timed: The number of calls with a known time. It is unknown if a later call donated all
            results before they were ready.
        seconds: The sum of these times, each from the call until its results were ready.
        longest: The longest of these times.
    """

    count: int
    timed: int
    seconds: float
    longest: float


@document(names={"line": "place", "jit_line": "jit_place"}, also=("seconds",), optional=("calls",))
@dataclass(frozen=True)
class Function:
    """A function under `jax.jit`.

    Attributes:
        name: Its name in the run, which names its programs: `step`.
        line: Where it is defined: `train.py:24`.
        jit_line: The user's line that called `jax.jit`, or the decorator's; "" if it is unknown.
        compilations: Its compilations in order.
        calls: Its calls; None if calls were not counted.
        kept: The number of calls whose arguments were kept.
    """

    name: str
    line: Place
    jit_line: Place
    compilations: tuple[Compilation, ...]
    calls: Calls | None = None
    kept: int = 0

    @property
    def seconds(self) -> float:
        """The time of all its compilations."""
        return sum(compilation.seconds for compilation in self.compilations)


@document(names={"line": "place"})
@dataclass(frozen=True)
class OutsideJit:
    """Small computations that one line of the user's made JAX compile outside of `jit`.

    Attributes:
        line: The line.
        count: The number of compilations.
        seconds: Their time.
        names: The number of compilations of each operation.
        start: When the first began, after the start of the run.
    """

    line: Place
    count: int
    seconds: float
    names: dict[str, int]
    start: float = 0.0


@document(names={"line": "place"})
@dataclass(frozen=True)
class Transfer:
    """Values that a line moved between the host and the device, or waited for.

    Attributes:
        kind: "to_host" for a value that Python waited for and read, "to_device" for a NumPy array
            or a number that is copied at each call of a function.
        line: The user's line.
        count: The number of transfers. Copies to the device are counted only with `--calls`;
            without it, this is the number of compilations that saw them.
        bytes: The total number of bytes.
        seconds: The total time that Python waited.
        path: The argument that is copied to the device: `step: batch`.
    """

    kind: Literal["to_host", "to_device"]
    line: Place
    count: int
    bytes: int
    seconds: float = 0.0
    path: str = ""


@document(names={"line": "place"})
@dataclass(frozen=True)
class NotFinite:
    """Values that a line of the user's read from arrays, of which some are not finite.

    Attributes:
        line: The line: `train.py:31`.
        type: The type of the first that is not finite: `f32[]`.
        is_nan: Whether that one is NaN, or else infinite.
        first: Its number among the values that this call of the line has read, from 1.
        count: The number of values read; 0 if the process was killed before it wrote it.
        bad: The number of those that are not finite; 0 likewise.
    """

    line: Place
    type: str
    is_nan: bool
    first: int
    count: int = 0
    bad: int = 0


@document(names={"line": "place"}, optional=("line", "advice", "command", "program"))
@dataclass(frozen=True)
class NextStep:
    """What to do about a finding in a run.

    Attributes:
        kind: What was found: values that are not finite, findings of `lint`, a gradient that is
            zero, a state that could be donated, a function that was compiled again, or that `lint`
            was not run.
        text: The finding, in a phrase.
        line: Its first line: `train.py:31`.
        advice: What to do, if that is known.
        command: The command line to run next.
        program: The name of the program that it is about: `step`.
    """

    kind: Literal["not_finite", "lint", "gradient", "donate", "again", "skipped"]
    text: str
    line: Place = UNKNOWN
    advice: str = ""
    command: str = ""
    program: str = ""


@document(optional=("ending",))
@dataclass(frozen=True)
class Process:
    """A process of the run.

    Attributes:
        number: Its number, in the order of starts.
        pid: Its process ID.
        command: Its command line.
        start: When it started, after the start of the run.
        seconds: How long it ran, as far as it is known.
        jax: The release of JAX; "" if it did not import JAX.
        backend: The default backend, if it was used.
        ending: How it ended, if not normally: `killed by SIGKILL`, `ValueError: ...`.
    """

    number: int
    pid: int
    command: tuple[str, ...]
    start: float
    seconds: float
    jax: str
    backend: str = ""
    ending: str = ""


@document(also=("compile_seconds",), without=("folder", "files"))
@dataclass(frozen=True)
class Run(Printed):
    """A recorded run.

    Attributes:
        folder: The folder it was written to.
        command: The command; empty for a block in an interactive session.
        seconds: The time from the start to the end of the run.
        exit_code: The exit code of the command; for a `with` block 0, or 1 if it raised. None if
            the run has not ended, or its exit code is unknown.
        functions: The functions under `jax.jit`, in descending order of their time.
        outside_jit: The computations compiled outside of `jit`, in the same order.
        transfers: The values moved between host and device, in the same order.
        processes: The processes.
        differing: The names of programs that differ between processes.
        calls_counted: Whether calls were counted.
        files: The file of each path that lines show, by its name in `ir.source_text`.
        unfinished: What was not finished at the end.
        not_finite: The lines that read values that are not finite.
        next_steps: What to do about the run, the most urgent first.
    """

    folder: str
    command: tuple[str, ...]
    seconds: float
    exit_code: int | None
    functions: tuple[Function, ...]
    outside_jit: tuple[OutsideJit, ...]
    transfers: tuple[Transfer, ...] = ()
    processes: tuple[Process, ...] = ()
    differing: tuple[str, ...] = ()
    calls_counted: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    unfinished: tuple[Unfinished, ...] = ()
    not_finite: tuple[NotFinite, ...] = ()
    next_steps: tuple[NextStep, ...] = ()

    @cached_property
    def compilations(self) -> tuple[Compilation, ...]:
        """All compilations of functions under `jax.jit`, in the order of their starts."""
        compilations = [
            compilation for function in self.functions for compilation in function.compilations
        ]
        return tuple(sorted(compilations, key=lambda compilation: compilation.start))

    @property
    def compile_seconds(self) -> float:
        """The time of tracing, lowering and compiling, of all programs."""
        inside = sum(function.seconds for function in self.functions)
        return inside + sum(computation.seconds for computation in self.outside_jit)


# --- trace ----------------------------------------------------------------------------------------
# A recorded run as a trace for Perfetto and chrome://tracing: Chrome's trace-event JSON.
#
# Each process of the run is a process of the trace. Its first track has all compilations, each with
# its phases inside; each compiled function has its own track below. A compilation that begins
# before another has ended, in another thread, goes to a further track, since the slices of one
# track must nest. Times are in microseconds.

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
