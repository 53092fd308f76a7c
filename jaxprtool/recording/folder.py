"""The folder of a recorded run, and the settings of a recording.

    run/run.json                    the command: written at the start, and again at the end
    run/process-0/process.json      a Python process that imported JAX
    run/process-0/events.jsonl      what JAX compiled in it, one event per line, in order
    run/process-0/counters.bin      counts and times that change often; see `counters`
    run/process-0/step.jaxpr        a program; step@2.jaxpr is the second compilation of `step`
    run/process-0/constants.*.npz   large constants of programs, by content
    run/process-0/kept/             the arguments of calls that --keep names
    run/process-0/profile/          the trace of JAX's profiler for the steps of --profile
    run/sources/*.txt               the user's source files that ran, by digest; see `sources`
    run/index.html, run/trace.json  the page, and the trace for Perfetto
    run/.gitignore                  which leaves the folder out of the user's repository

A line of `events.jsonl` is written by one system call, and the file of a program gets its name when
it is complete. So a process that is killed loses nothing that was recorded before.

`run/` is the newest run; `new_run` renames older ones.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool.errors import ArgumentsError, OutputError, TargetError

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
IGNORE = ".gitignore"

#: The folder of the newest run, unless another is given.
NEWEST = "run"


def is_run(path: str) -> bool:
    """Return True if a folder holds a recorded run."""
    return os.path.isfile(os.path.join(path, RUN))


def run_and_program(target: str) -> tuple[str, str] | None:
    """Return the folder of a run and the name of a program in it, for `run/step`; None for others.

    The name is "" for the folder itself. `run/step:loss` is a function inside a program.
    """
    path = target.rstrip("/")
    if is_run(path):
        return path, ""
    head, _, name = path.rpartition("/")
    while head:
        if is_run(head):
            return None if os.path.isfile(target) or ":" in name else (head, name)
        head, _, part = head.rpartition("/")
        name = f"{part}/{name}"
    return None


def run_of_file(path: str) -> str:
    """Return the run that a file or folder lies in, as `run/process-0/step.jaxpr`; "" for none."""
    while path and not is_run(path):
        folder = os.path.dirname(path)
        path = folder if folder != path else ""
    return path


def recorded_run(target: str) -> str | None:
    """Return the folder of the run if TARGET is a recorded run, else None."""
    parts = run_and_program(target)
    return parts[0] if parts is not None and not parts[1] else None


def runs_beside(path: str) -> list[str]:
    """Return the runs in the folder that a path lies in, the newest first."""
    parent = os.path.dirname(path)
    try:
        names = os.listdir(parent or ".")
    except OSError:
        return []
    starts = {name: run_start(run) for name in names if is_run(run := os.path.join(parent, name))}
    return [os.path.join(parent, name) for name in sorted(starts, key=lambda n: -starts[n])]


def missing_run(target: str) -> TargetError | None:
    """Return the error for a TARGET that names a run that does not exist; None for others.

    A run is meant if the missing folder has the name of one, `run-9`, or lies beside runs.
    """
    path = target.rstrip("/")
    parts = path.split("/")
    heads = ("/".join(parts[: n + 1]) for n in range(len(parts)))
    missing = next((head for head in heads if head and not os.path.exists(head)), None)
    if missing is None or ":" in target or os.path.exists(f"{missing}.py"):
        return None
    runs = runs_beside(missing)
    is_named = re.fullmatch(rf"{NEWEST}(-\d+)?", os.path.basename(missing))
    if not is_named and not (runs and "/" in target):
        return None
    hint = "write one with `jaxprtool record script.py`"
    if runs:
        hint = f"the runs here: {', '.join(runs[:_LISTED])}{', …' if len(runs) > _LISTED else ''}"
    return TargetError(f"no run '{missing}'", hint)


#: The number of runs that an error lists.
_LISTED = 8


def run_start(path: str) -> float:
    """Return when a run began, by `time.time`; 0 if its file is damaged."""
    return float(run_json(path).get("start", 0))


def run_json(path: str) -> dict[str, Any]:
    """Return the contents of `run.json` of a run; empty if there are none, or they are damaged."""
    try:
        with open(os.path.join(path, RUN), encoding="utf-8") as file:
            contents = json.load(file)
    except (OSError, ValueError):
        return {}
    return contents if isinstance(contents, dict) else {}


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


def write_json_file(path: str, document: Mapping[str, Any]) -> None:
    """Write a small JSON file, whole or not at all."""
    temporary = f"{path}.{os.getpid()}.part"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"cannot write '{path}': {error.strerror or error}") from None


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
