"""The folder of a recorded run, and the settings of a recording.

    run/run.json                    the command: written at the start, and again at the end
    run/process-0/process.json      a Python process that imported JAX
    run/process-0/events.jsonl      what JAX compiled in it, one event per line, in order
    run/process-0/counters.bin      counts and times that change often; see `counters`
    run/process-0/step.jaxpr        a program; step@2.jaxpr is the second compilation of `step`
    run/process-0/constants.*.npz   large constants of programs, by content
    run/process-0/kept/             the arguments of calls that --keep names
    run/process-0/profile/          the trace of JAX's profiler for the steps of --profile
    run/index.html, run/trace.json  the page, and the trace for Perfetto

A line of `events.jsonl` is written by one system call, and the file of a program gets its name when
it is complete. So a process that is killed loses nothing that was recorded before.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool.errors import ArgumentsError, OutputError

# --- folder ---------------------------------------------------------------------------------------
# The folder of a recorded run.

RUN, PROCESS, EVENTS, COUNTERS, KEPT = (
    "run.json",
    "process.json",
    "events.jsonl",
    "counters.bin",
    "kept",
)
PAGE, TRACE = "index.html", "trace.json"
PREFIX = "process-"


def is_run(path: str) -> bool:
    """Return True if a folder holds a recorded run."""
    return os.path.isfile(os.path.join(path, RUN))


def run_and_program(target: str) -> tuple[str, str] | None:
    """Return the folder of a run and the name of a program in it, for `run/step`; None for others.

    The name is "" for the folder itself.
    """
    path = target.rstrip("/")
    if is_run(path):
        return path, ""
    head, _, name = path.rpartition("/")
    while head:
        if is_run(head):
            return (head, name) if not os.path.isfile(target) else None
        head, _, part = head.rpartition("/")
        name = f"{part}/{name}"
    return None


def recorded_run(target: str) -> str | None:
    """Return the folder of the run if TARGET is a recorded run, else None."""
    parts = run_and_program(target)
    return parts[0] if parts is not None and not parts[1] else None


def new_run(path: str, overwrite: bool) -> None:
    """Create the folder of a run.

    Args:
        path: The folder.
        overwrite: Whether to remove a run that is there.

    Raises:
        OutputError: If it holds a run, or anything else, or cannot be written.
    """
    try:
        if is_run(path):
            if not overwrite:
                message = f"'{path}' holds a recorded run"
                raise OutputError(message, "add --overwrite, or another folder with -o")
            _remove_run(path)
        elif os.path.isdir(path) and os.listdir(path):
            raise OutputError(f"'{path}' is a folder with other files in it", "give another to -o")
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write '{path}': {error.strerror or error}") from None


def _remove_run(path: str) -> None:
    """Remove the files of a run, and no others."""
    for name in (PAGE, TRACE, RUN):
        if os.path.exists(os.path.join(path, name)):
            os.unlink(os.path.join(path, name))
    for process in processes(path):
        for folder, _, files in os.walk(process, topdown=False):
            for file in files:
                os.unlink(os.path.join(folder, file))
            os.rmdir(folder)


def processes(path: str) -> list[str]:
    """Return the folders of a run's processes, in order."""
    names = [
        name
        for name in os.listdir(path)
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).isdigit()
    ]
    names.sort(key=lambda name: int(name.removeprefix(PREFIX)))
    return [os.path.join(path, name) for name in names]


def program_names(path: str) -> list[str]:
    """Return the names of the programs of a run."""
    names = [
        file.removesuffix(".jaxpr")
        for process in processes(path)
        for file in os.listdir(process)
        if file.endswith(".jaxpr")
    ]
    return sorted(set(names))


def free_folder() -> str:
    """Return the first of `run`, `run-2`, `run-3`, … that does not exist."""
    path, number = "run", 1
    while os.path.lexists(path):
        number += 1
        path = f"run-{number}"
    return path


def write_json_file(path: str, document: Mapping[str, Any]) -> None:
    """Write a small JSON file, whole or not at all."""
    temporary = f"{path}.{os.getpid()}.part"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"cannot write '{path}': {error.strerror or error}") from None


class ProcessFolder:
    """The folder that a process writes, created when it is first needed."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.path = ""
        self._events = -1
        self._lock = threading.Lock()

    def start(self, about: Mapping[str, Any]) -> None:
        """Create the folder, and write the facts about the process. Raises OSError."""
        number = 0
        while True:
            path = os.path.join(self.run, f"{PREFIX}{number}")
            try:
                os.mkdir(path)
                break
            except FileExistsError:
                number += 1
        write_json_file(os.path.join(path, PROCESS), {"number": number, **about})
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._events = os.open(os.path.join(path, EVENTS), flags, 0o666)
        self.path = path

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.path, name)

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event. Raises OSError."""
        data = json.dumps(event).encode() + b"\n"
        with self._lock:
            written = os.write(self._events, data)
            while written < len(data):  # a full disk raises at the next attempt
                written += os.write(self._events, data[written:])

    def close(self) -> None:
        """Close the file of events. Nothing is appended after this."""
        with self._lock:
            if self._events != -1:
                os.close(self._events)
                self._events = -1


def read_events(path: str) -> list[dict[str, Any]]:
    """Return the events of a process, without one that was cut short."""
    events = []
    try:
        with open(os.path.join(path, EVENTS), encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):
                    try:
                        events.append(json.loads(line))
                    except ValueError:
                        continue  # cut short by a full disk, and continued by the next
    except FileNotFoundError:
        pass
    return events


# --- settings -------------------------------------------------------------------------------------
# The settings of a recording, passed to the processes of a run.

#: The environment variable with the settings, as JSON.
VARIABLE = "JAXPRTOOL_RECORD"


@dataclass(frozen=True)
class Settings:
    """The settings of a recording.

    Attributes:
        run: The folder of the run, as an absolute path.
        start: The start of the run, by `time.time`.
        constants: The maximum size of the large constants that a process writes, in bytes; 0 for
            none.
        calls: Whether to count calls, and the time until their results are ready.
        keep: Pairs of a function's name and the number of last calls whose arguments are kept.
        keep_bytes: The maximum size of the arguments kept for one function, in bytes.
        until: The results that end the script: "nan", or "".
        profile: The number of steps of each process to profile; 0 for none.
        programs: Whether to write programs, not only the facts of each compilation.
    """

    run: str
    start: float
    constants: int = 1 << 30
    calls: bool = False
    keep: tuple[tuple[str, int], ...] = ()
    keep_bytes: int = 1 << 32
    until: str = ""
    profile: int = 0
    programs: bool = True


def require_until(until: str, keep: Mapping[str, int]) -> None:
    """Raise ArgumentsError if `until` is unknown, or there are no functions to check."""
    if until not in ("", "nan"):
        raise ArgumentsError(f"--until {until}: only nan is known")
    if until and not keep:
        raise ArgumentsError("--until nan needs the functions to check", "add --keep NAME")


def kept_calls_of(texts: Sequence[str]) -> dict[str, int]:
    """Return the number of calls to keep for each function, from texts such as `step,loss:3`.

    Raises:
        ArgumentsError: If a text is not of this form.
    """
    counts: dict[str, int] = {}
    for name in (part.strip() for text in texts for part in text.split(",")):
        function, _, count = name.partition(":")
        if not function or (count and not (count.isdigit() and int(count))):
            raise ArgumentsError(f"--keep {name}: write NAME, or NAME:N for the last N calls")
        counts[function] = int(count or 1)
    return counts
