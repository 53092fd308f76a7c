"""Read the folder of a recorded run, and find the program in it that a TARGET names."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from jaxprtool.errors import JaxprToolError, TargetError, did_you_mean
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import plural
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.frames import Frames, Root
from jaxprtool.ir.program import Program
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import Aval, open_jaxpr, replace_jaxpr
from jaxprtool.jaxcompat.source_locations import FrameReader
from jaxprtool.recording import folder
from jaxprtool.recording.calls import (
    StoredLeaf,
    kept_arguments,
    kept_calls,
    kept_types,
    read_counters,
)
from jaxprtool.recording.describe import CacheKey
from jaxprtool.recording.reasons import reasons
from jaxprtool.recording.recorded_run import (
    Argument,
    Calls,
    Compilation,
    Function,
    NextStep,
    NotFinite,
    OutsideJit,
    Process,
    Run,
    Transfer,
    Unfinished,
)

# --- read -----------------------------------------------------------------------------------------
# Read the folder of a recorded run.

Event = dict[str, Any]

#: The prefix of the names of arguments that `jaxprtool.jit` adds.
_HIDDEN = "\U0010ffff"


def read_run(path: str) -> Run:
    """Return the run in a folder; it may still be in progress.

    Raises:
        TargetError: If the folder holds no run.
    """
    about = read_about(path)
    source_text.use_kept(path)
    processes = [_ProcessEvents.read(process_path) for process_path in folder.processes(path)]
    digests = {
        **about.get("digests", {}),
        **_merged_digests(process.events for process in processes),
    }
    shown = _RelativeLines(about.get("folder", ""), digests)
    for process in processes:
        process.end = _end(process, about)
    functions = tuple(_functions(processes, about["start"], shown))
    seconds = about.get("seconds")
    return Run(
        folder=path,
        command=tuple(about["command"]),
        seconds=seconds if seconds is not None else _until(processes, about),
        exit_code=about.get("exit_code"),
        functions=tuple(sorted(_summed(functions), key=lambda function: -function.seconds)),
        outside_jit=tuple(_outside_jit(processes, about["start"], shown)),
        transfers=tuple(_transfers(processes, functions, shown)),
        processes=tuple(_described(process, about) for process in processes),
        differing=tuple(_differing(path, functions)),
        calls_counted=bool(about.get("calls")),
        files=shown.files,
        unfinished=tuple(u for process in processes for u in _unfinished(process, shown)),
        not_finite=tuple(reads for process in processes for reads in _not_finite(process, shown)),
        next_steps=tuple(_next_step(**step) for step in about.get("next_steps", ())),
    )


def _next_step(place: Mapping[str, Any] | None = None, **step: Any) -> NextStep:
    return NextStep(**step, line=Place.from_json(place))


def source_digests(run: str) -> dict[str, str]:
    """Return the digest of each source file that a run keeps; "" for one of several texts."""
    return _merged_digests(folder.read_events(process) for process in folder.processes(run))


def _merged_digests(processes: Iterable[Iterable[Event]]) -> dict[str, str]:
    """Return the digests of the source files of processes, from their events."""
    digests: dict[str, str] = {}
    for events in processes:
        for event in events:
            if event.get("event") == "source":
                file, digest = event["file"], event["digest"]
                digests[file] = digest if digests.get(file, digest) == digest else ""
    return digests


def read_program(run: str, file: str, facts: Mapping[str, WrittenProgram] | None = None) -> Program:
    """Return the program in a file of a run, with the source texts that the run keeps.

    Args:
        run: The folder of the run.
        file: The file of the program.
        facts: The `written_programs` of its process, if known.

    Raises:
        ProgramFileError: If the file is damaged.
    """
    base = read_about(run).get("folder")
    source_text.use_kept(run)
    program = read(file, Root(base, base) if base else None)
    facts = written_programs(os.path.dirname(file)) if facts is None else facts
    about = facts.get(os.path.basename(file), WrittenProgram())
    program = program.replace(after_call=about.after_call)
    source, _, number = about.line.rpartition(":")
    name = _name_in(program, source, base or "") or (source if _is_older(source, file) else "")
    if not name:
        return program
    debug = program.jaxpr.debug_info._replace(func_src_info=f"{program.name} at {name}:{number}")
    return program.replace(jaxpr=replace_jaxpr(program.jaxpr, debug_info=debug))


def programs(run: Run) -> dict[str, Program]:
    """Return the recorded programs of a run by name, those of its first process first."""
    by_name: dict[str, Program] = {}
    for compilation in sorted(run.compilations, key=lambda compilation: compilation.process):
        if compilation.file and compilation.name not in by_name:
            by_name[compilation.name] = read_program(
                run.folder, os.path.join(run.folder, compilation.file)
            )
    return by_name


def every_program(
    path: str, on_error: Callable[[str, JaxprToolError], None]
) -> Iterator[tuple[str, Program]]:
    """Yield the recorded programs of all processes of a run: `step`, `process-1/step`.

    Args:
        path: The folder of the run.
        on_error: Receives the names of programs that cannot be read, and why not.
    """
    facts = dict[str, Mapping[str, WrittenProgram]]()
    for compilation in read_run(path).compilations:
        if not compilation.file:
            continue
        process = os.path.join(path, os.path.dirname(compilation.file))
        if process not in facts:
            facts[process] = written_programs(process)
        name = compilation.file.removesuffix(".jaxpr").removeprefix(f"{folder.PREFIX}0/")
        try:
            program = read_program(path, os.path.join(path, compilation.file), facts[process])
        except JaxprToolError as error:
            on_error(name, error)
            continue
        yield name, program


def _name_in(program: Program, source: str, base: str) -> str:
    """Return the name of a source file in the frames of a program, which says if it has changed.

    The result is "" if no equation at the top level comes from it.
    """
    reader = FrameReader()
    for eqn in open_jaxpr(program.jaxpr).eqns:
        for frame in reader.frames(eqn):
            if os.path.join(base, source_text.path(frame.file)) == source:
                return frame.file
    return ""


class WrittenProgram(NamedTuple):
    """What the events of a process say of a program that it wrote.

    Attributes:
        line: The line at which its function is defined: `/home/me/train.py:24`; "" if unknown.
        after_call: What the caller did with its arguments, as in `Program`.
    """

    line: str = ""
    after_call: tuple[tuple[str, Literal["dropped", "kept"]], ...] = ()


def written_programs(process: str) -> dict[str, WrittenProgram]:
    """Return what the events of a process say of its programs, by file.

    Args:
        process: The folder of the process.
    """
    written = dict[str, WrittenProgram]()
    for event in folder.read_events(process):
        if event.get("file"):
            source, line, *_ = event.get("defined") or ("", 0)
            written[event["file"]] = WrittenProgram(f"{source}:{line}" if source else "")
        elif event.get("event") == "after_call":
            file = f"{event['program']}.jaxpr"
            about = written.get(file, WrittenProgram())
            fates = (*about.after_call, *event["fates"].items())
            written[file] = about._replace(after_call=fates)
    return written


def _is_older(source: str, file: str) -> bool:
    """Return True if a source file has not changed since a file was written."""
    try:
        return os.stat(source).st_mtime <= os.stat(file).st_mtime
    except OSError:
        return False


def program_file(path: str, name: str) -> str:
    """Return the file of a program of a run: `step`, `step@2`, `process-1/step`.

    Raises:
        TargetError: If the run has no program of this name; the hint has similar names.
    """
    names = folder.program_names(path)
    has = "it has no programs" if not names else None
    listed = [f"{path}/{program}" for program in names]
    if names:
        has = f"write {', '.join(listed[:6])}{', …' if len(listed) > 6 else ''}"
    if not name:
        raise TargetError(f"'{path}' is a recorded run of {plural(len(names), 'program')}", has)
    process, _, program = name.rpartition("/")
    folders = folder.processes(path)
    if process:
        folders = [
            process_path for process_path in folders if os.path.basename(process_path) == process
        ]
    for process_path in folders:
        file = os.path.join(process_path, f"{program.removesuffix('@1')}.jaxpr")
        if os.path.isfile(file):
            return file
    hint = did_you_mean(f"{path}/{name}", listed) or has
    raise TargetError(f"the run '{path}' has no program '{name}'", hint)


def read_about(path: str) -> dict[str, Any]:
    """Return the contents of `run.json` of a run. Raises TargetError."""
    try:
        with open(os.path.join(path, folder.RUN), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        raise TargetError(
            f"'{path}' holds no recorded run", "write one with `jaxprtool record -o DIR script.py`"
        ) from None


@dataclass
class _ProcessEvents:
    """The events of a process."""

    path: str
    about: dict[str, Any]
    events: list[Event]
    counters: list[tuple[float, ...]]
    compiled: dict[int, Event] = field(default_factory=dict)
    #: When it ended, or now if it still runs; None if that is not known.
    end: float | None = None

    @classmethod
    def read(cls, path: str) -> _ProcessEvents:
        try:
            with open(os.path.join(path, folder.PROCESS), encoding="utf-8") as file:
                about = json.load(file)
        except (OSError, ValueError):  # killed while it was written
            about = {"number": int(os.path.basename(path).removeprefix(folder.PREFIX))}
        counters = read_counters(os.path.join(path, folder.COUNTERS))
        process = cls(path, about, folder.read_events(path), counters)
        process.compiled = {event["id"]: event for event in process.of("compiled")}
        return process

    @property
    def number(self) -> int:
        return int(self.about["number"])

    def since(self, event: Event) -> float | None:
        """Return the seconds from an event to the end of the process."""
        return None if self.end is None else max(self.end - event["time"], 0.0)

    def of(self, kind: str) -> Iterable[Event]:
        """Return the events of a kind, in order."""
        return (event for event in self.events if event.get("event") == kind)


class _RelativeLines:
    """Shows lines as `train.py:24`, relative to the folder of the run.

    Args:
        base: The folder of the run.
        digests: The digests of source files when they ran, or at the end of the run.
    """

    def __init__(self, base: str, digests: Mapping[str, str]) -> None:
        self._frames = Frames((Root(base, base),) if base else ())
        self._names = {
            file: source_text.name_read(
                file, file, recorded, recorded != "" and recorded == source_text.source_digest(file)
            )
            for file, recorded in digests.items()
        }
        self.files: dict[str, str] = {}

    def line(self, stored: Any) -> Place:
        """Return a line that is stored as a file, a number and, if it is known, a function."""
        file, line, *function = stored or ("", 0)
        if not file:
            return UNKNOWN
        name = self._names.get(file, file)
        place = self._frames.at(name, line, *function)
        self.files[place.display] = name
        return place

    def text(self, stored: str) -> Place:
        """Return a line that is stored as text."""
        file, _, line = stored.rpartition(":")
        return self.line((file, int(line))) if file else UNKNOWN

    def key(self, key: CacheKey) -> CacheKey:
        """Return a key with its lines shortened."""
        function = replace(key.function, made=self.text(key.function.made))
        return replace(
            key,
            function=function,
            line=self.text(key.line),
            cleared_line=self.text(key.cleared_line),
        )


def _functions(
    processes: list[_ProcessEvents], start: float, shown: _RelativeLines
) -> Iterable[Function]:
    for process in processes:
        by_name: defaultdict[str, list[Event]] = defaultdict(list)
        for event in process.of("lowered"):
            if "function" in event:
                by_name[event["function"]].append(event)
        calls = _calls(process)
        kept = Counter(call.function for call in kept_calls(process.path))
        for name, events in by_name.items():
            earlier: list[CacheKey] = []
            compilations: list[Compilation] = []
            for event in events:
                key = shown.key(CacheKey.from_json(event["key"]))
                compilations.append(
                    _compilation(process, event, start, shown, key, earlier, compilations)
                )
                earlier.append(key)
            yield Function(
                name=name,
                line=shown.line(events[0]["defined"]),
                jit_line=earlier[0].function.made,
                compilations=tuple(compilations),
                calls=calls.get(name),
                kept=kept[name],
            )


def _summed(functions: Iterable[Function]) -> list[Function]:
    """Return the functions of all processes; those with the same name and line are merged."""
    merged: dict[tuple[str, str], Function] = {}
    for function in functions:
        old = merged.get((function.name, function.line))
        if old is not None:
            function = replace(
                old,
                compilations=(*old.compilations, *function.compilations),
                calls=_added(old.calls, function.calls),
                kept=old.kept + function.kept,
            )
        merged[function.name, function.line] = function
    return list(merged.values())


def _added(calls: Calls | None, more: Calls | None) -> Calls | None:
    if calls is None or more is None:
        return calls or more
    return Calls(
        calls.count + more.count,
        calls.timed + more.timed,
        calls.seconds + more.seconds,
        max(calls.longest, more.longest),
    )


def _compilation(
    process: _ProcessEvents,
    event: Event,
    start: float,
    shown: _RelativeLines,
    key: CacheKey,
    earlier: list[CacheKey],
    compilations: list[Compilation],
) -> Compilation:
    done = process.compiled.get(event["id"], {})
    nearest, why = (
        reasons(key, earlier, foreign=event.get("foreign", False)) if earlier else (0, ())
    )
    begun = [other for other in process.of("compiling") if other["id"] == event["id"]]
    error = event.get("error") or done.get("error") or ""
    unwritten = event.get("unwritten", "")
    return Compilation(
        name=event["program"],
        start=event["start"] - start,
        trace_seconds=event["trace"],
        lower_seconds=event["lower"],
        compile_seconds=done.get("seconds"),
        cpu_seconds=event["cpu"] + done.get("cpu", 0.0),
        cached=bool(done.get("cached")),
        equations=event["equations"],
        arguments=key.arguments,
        results=tuple(map(_argument, event["results"])),
        statics=key.statics,
        line=shown.line(event["user"]),
        library=shown.line(event["library"]),
        reasons=why,
        nearest=compilations[nearest].name if why else "",
        process=process.number,
        file=f"{os.path.basename(process.path)}/{event['file']}" if "file" in event else "",
        error=error or unwritten,
        unfinished_seconds=process.since(begun[0]) if begun and not done else None,
    )


def _argument(document: Mapping[str, Any]) -> Argument:
    return Argument(**{**document, "shape": tuple(document["shape"])})


def _calls(process: _ProcessEvents) -> dict[str, Calls]:
    """Return the counted calls of functions."""
    counted: dict[str, Calls] = {}
    for event in process.of("counter"):
        if event["of"] == "calls" and event["counter"] < len(process.counters):
            count, seconds, longest, timed = process.counters[event["counter"]]
            calls = Calls(int(count), int(timed), seconds, longest)
            counted[event["function"]] = _added(counted.get(event["function"]), calls) or calls
    return counted


def _outside_jit(
    processes: list[_ProcessEvents], start: float, shown: _RelativeLines
) -> list[OutsideJit]:
    lines: defaultdict[Place, list[tuple[Event, float]]] = defaultdict(list)
    for process in processes:
        for event in process.of("lowered"):
            if "operation" in event:
                done = process.compiled.get(event["id"], {})
                seconds = event["trace"] + event["lower"] + done.get("seconds", 0.0)
                lines[shown.line(event["user"])].append((event, seconds))
    computations = [
        OutsideJit(
            line=line,
            count=len(events),
            seconds=sum(seconds for _, seconds in events),
            names=dict(Counter(event["operation"] for event, _ in events).most_common()),
            start=min(event["start"] for event, _ in events) - start,
        )
        for line, events in lines.items()
    ]
    return sorted(computations, key=lambda computation: -computation.seconds)


def _transfers(
    processes: list[_ProcessEvents], functions: Iterable[Function], shown: _RelativeLines
) -> list[Transfer]:
    """Return the transfers between host and device, the longest first."""
    waits: dict[str, Transfer] = {}
    for process in processes:
        for event in process.of("counter"):
            if event["of"] == "to_host" and event["counter"] < len(process.counters):
                count, seconds, _, size = process.counters[event["counter"]]
                line = shown.line(event["user"])
                old = waits.get(line, Transfer("to_host", line, 0, 0))
                waits[line] = replace(
                    old,
                    count=old.count + int(count),
                    bytes=old.bytes + int(size),
                    seconds=old.seconds + seconds,
                )
    copies = [
        Transfer(
            "to_device",
            compilation.line,
            _count(function),
            _size(argument) * _count(function),
            path=f"{function.name}: {argument.path}",
        )
        for function in functions
        for compilation in function.compilations[-1:]
        for argument in compilation.arguments
        if argument.host == "numpy" and _HIDDEN not in argument.path
    ]
    return sorted(
        (*waits.values(), *copies), key=lambda transfer: (-transfer.seconds, -transfer.bytes)
    )


def _count(function: Function) -> int:
    return function.calls.count if function.calls is not None else len(function.compilations)


def _size(argument: Argument) -> int:
    """Return the bytes of an argument, by the width in the name of its dtype."""
    size = 1
    for n in argument.shape:
        size *= n if isinstance(n, int) else 1
    digits = "".join(filter(str.isdigit, argument.dtype))
    return size * (int(digits) // 8 if digits.isdigit() and int(digits) >= 8 else 1)


def _described(process: _ProcessEvents, run: Mapping[str, Any]) -> Process:
    about, start = process.about, run["start"]
    ended = next(iter(process.of("ended")), None)
    times = [event["start"] for event in process.of("lowered")]
    # The command starts with the run; the processes that it starts begin when they import JAX.
    first = start if about.get("pid") == run.get("pid") else about.get("start", start)
    last = ended["time"] if ended else max(times, default=first)
    endings = [ended["error"] if ended else _sudden(about, run)]
    endings += [f"recording failed: {event['error']}" for event in process.of("failed")][:1]
    return Process(
        number=process.number,
        pid=about.get("pid", 0),
        command=tuple(about.get("command", ())),
        start=first - start,
        seconds=last - first,
        jax=about.get("jax", ""),
        ending="; ".join(filter(None, endings)),
    )


def _unfinished(process: _ProcessEvents, shown: _RelativeLines) -> Iterable[Unfinished]:
    """Return the phases that a process was in at its end, the innermost first."""
    ends = folder.PHASE_ENDS
    ended = {kind: {event["id"] for event in process.of(kind)} for kind in ends.values()}
    begun = [event for event in process.events if event.get("event") in ends]
    for event in reversed(begun):
        phase = event["event"]
        if event["id"] not in ended[ends[phase]]:
            line, seconds = shown.line(event["user"]), process.since(event)
            yield Unfinished(phase, event["name"], line, seconds, process.number)


def _not_finite(process: _ProcessEvents, shown: _RelativeLines) -> Iterable[NotFinite]:
    """Return the lines of a process that read values that are not finite, the first one first."""
    totals = {
        (*event["user"], event["instruction"]): (event["count"], event["bad"])
        for event in process.of("reads")
    }
    for event in process.of("not_finite"):
        total = totals.get((*event["user"], event["instruction"]), ())
        line = shown.line(event["user"])
        yield NotFinite(line, event["type"], event["is_nan"], event["read"], *total)


def _end(process: _ProcessEvents, run: Mapping[str, Any]) -> float | None:
    """Return when a process ended: as it wrote, with the run, or now if it still runs."""
    if ended := next(iter(process.of("ended")), None):
        return float(ended["time"])
    if "seconds" in run:
        return float(run["start"] + run["seconds"])
    pid = process.about.get("pid")
    return time.time() if pid and _is_alive(pid) else None


def _sudden(about: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return how a process ended that Python did not shut down."""
    code, pid = run.get("exit_code"), about.get("pid")
    if "seconds" not in run and pid and _is_alive(pid):
        return ""
    if code is None or pid != run.get("pid"):
        return "it ended suddenly: it was killed, or called os._exit"
    if code <= 128:
        return f"it called os._exit({code})"
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"killed by signal {code - 128}"


def _is_alive(pid: int) -> bool:
    """Return True if a process of this machine has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def _until(processes: list[_ProcessEvents], run: Mapping[str, Any]) -> float:
    """Return the duration of a run whose end was not written, in seconds."""
    ends = [_described(process, run) for process in processes]
    return max((process.start + process.seconds for process in ends), default=0.0)


def _differing(path: str, functions: Iterable[Function]) -> list[str]:
    """Return the programs whose texts differ between processes."""
    texts: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for function in functions:
        for compilation in function.compilations:
            if compilation.file:
                texts[compilation.name][compilation.process] = compilation.file
    names = []
    for name, files in texts.items():
        if len(files) > 1 and len({_text(os.path.join(path, file)) for file in files.values()}) > 1:
            names.append(name)
    return names


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


# --- replay ---------------------------------------------------------------------------------------
# Find the program of a recorded run that a TARGET names, and the arguments kept for it.


def replayed(run: str, name: str) -> tuple[Program, list[Any] | None]:
    """Return a program of a run, and the arguments of its last kept call.

    Args:
        run: The folder of the run.
        name: The name of the program: `step@2`. For `step`, the compilation that the last kept call
            used; without kept calls, the first one.

    Returns:
        The program, and its flat arguments; None if no call of it was kept.

    Raises:
        TargetError: If the run has no such program.
        ProgramFileError: If a file is damaged.
    """
    file = program_file(run, name)
    process, base = os.path.split(file)
    function, at, _ = base.removesuffix(".jaxpr").partition("@")
    calls = [call for call in kept_calls(process) if call.function == function]
    named = bool(at) or name.endswith("@1")
    for call in reversed(calls):
        types = kept_types(call)
        for program_path in [file] if named else _compilations(process, function):
            program = read_program(run, program_path)
            if _fits(types, program.in_avals):
                return program, kept_arguments(call)
    return read_program(run, file), None


def _compilations(process: str, function: str) -> list[str]:
    """Return the files of all compilations of a function, the last one first."""
    files, count = [], 1
    file = os.path.join(process, f"{function}.jaxpr")
    while os.path.isfile(file):
        files.append(file)
        count += 1
        file = os.path.join(process, f"{function}@{count}.jaxpr")
    return files[::-1]


def _fits(types: Sequence[StoredLeaf], avals: Sequence[Aval]) -> bool:
    """Return True if a program takes arguments of these types."""
    return len(types) == len(avals) and all(map(_is, types, avals))


def _is(leaf: StoredLeaf, aval: Aval) -> bool:
    if leaf.shape != aval.shape or bool(leaf.key) != is_extended(aval.dtype):
        return False
    if leaf.key:
        return True
    if leaf.weak != bool(getattr(aval, "weak_type", False)):
        return False
    return leaf.dtype == str(aval.dtype) or leaf.dtype == _WIDE.get(str(aval.dtype))


#: The NumPy dtype that JAX converts to each narrow dtype without `jax_enable_x64`.
_WIDE = {"float32": "float64", "int32": "int64", "uint32": "uint64", "complex64": "complex128"}
