"""The folder of a recorded run.

    run/run.json                    the command: written at the start, and again at the end
    run/process-0/process.json      a Python process that imported JAX
    run/process-0/events.jsonl      what JAX compiled in it, one event per line, in order
    run/process-0/counters.bin      counts and times that change often; see `counters`
    run/process-0/step.jaxpr        a program; step@2.jaxpr is the second compilation of `step`
    run/process-0/constants.*.npz   large constants of programs, by content
    run/process-0/summary.json      what `record` prints, until it has printed it; see `recorder`
    run/process-0/kept/             the arguments of calls that --keep names
    run/process-0/profile/          the trace of JAX's profiler for the steps of --profile
    run/sources/*.txt               the user's source files that ran, by digest; see `KeptSources`
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
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from jaxprtool.errors import OutputError, TargetError
from jaxprtool.files import file_written_whole
from jaxprtool.ir import source_text

# --- folder ---------------------------------------------------------------------------------------
# The folder of a recorded run.

RUN, PROCESS, EVENTS, COUNTERS, KEPT, SUMMARY = (
    "run.json",
    "process.json",
    "events.jsonl",
    "counters.bin",
    "kept",
    "summary.json",
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


def was_compiled_with_x64(target: str) -> bool:
    """Return True if the script of the run that TARGET is in compiled with 64-bit types enabled."""
    run = run_of_file(target.partition(":")[0])
    for process in processes(run) if run else ():
        with suppress(OSError), open(os.path.join(process, EVENTS), "rb") as file:
            if any(b'"enable_x64": "True"' in line for line in file):
                return True
    return False


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


#: The event that ends each phase of a compilation.
PHASE_ENDS = {"tracing": "traced", "lowering": "lowered", "compiling": "compiled"}


class RunningPhases:
    """The phases of compilations that a run is in, read while it goes on.

    Args:
        path: The folder of the run.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._read: dict[str, int] = {}
        self._open: dict[tuple[str, str, int], dict[str, Any]] = {}

    def now(self) -> list[dict[str, Any]]:
        """Return the events that began the phases which have not ended, in order."""
        for process in processes(self._path):
            for event in self._new_events(process):
                kind, number = event.get("event", ""), event.get("id", 0)
                if kind in PHASE_ENDS:
                    self._open[process, PHASE_ENDS[kind], number] = event
                else:
                    self._open.pop((process, kind, number), None)
        return list(self._open.values())

    def _new_events(self, process: str) -> Iterator[dict[str, Any]]:
        with suppress(OSError), open(os.path.join(process, EVENTS), "rb") as file:
            file.seek(self._read.get(process, 0))
            whole, _, _ = file.read().rpartition(b"\n")
            self._read[process] = self._read.get(process, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                with suppress(ValueError):
                    yield json.loads(line)


# --- sources --------------------------------------------------------------------------------------
# The texts of the user's source files in the folder of a run.
#
# A run keeps each text once, whichever of its processes and programs use it: `sources/DIGEST.txt`.
# `jaxprtool.ir.source_text` shows them when the files have changed.


class _LoadedText(NamedTuple):
    """The text of a file when it was first kept, and the import that had run it."""

    digest: str
    spec: Any


class KeptSources:
    """Writes the source texts that a process runs to the folder of a run, each once.

    Args:
        run: The folder of the run.
        since: When the process began. A file that is edited later has the text that was kept
            earlier; without one its text is not known.
        kept: Called with a file and its digest when a text of it is first kept.
    """

    def __init__(
        self,
        run: str,
        since: float,
        kept: Callable[[str, str], None] = lambda file, digest: None,
    ) -> None:
        self._folder, self._since = os.path.join(run, source_text.SOURCES), since
        self._report = kept
        self._loaded: dict[str, _LoadedText] = {}

    def keep(self, file: str) -> str:
        """Keep the text of a file, and return its digest; "" if it is not known.

        Raises:
            OutputError: If it cannot be written.
        """
        if source_text.path(file) != file:  # of a program that was read
            return source_text.source_digest(file)
        loaded = self._loaded.get(file)
        data = source_text.text_since(file, self._since)
        if data is None:
            return loaded.digest if loaded is not None and _runs_still(file, loaded) else ""
        digest = source_text.text_digest(data)
        if loaded is None or loaded.digest != digest:
            self._loaded[file] = _LoadedText(digest, _spec(file))
            self._write(digest, data)
            self._report(file, digest)
        return digest

    def _write(self, digest: str, data: bytes) -> None:
        path = os.path.join(self._folder, f"{digest}{source_text.KEPT}")
        if not os.path.exists(path):
            with suppress(OSError):  # reported by the next line
                os.makedirs(self._folder, exist_ok=True)
            with file_written_whole(path) as file:
                file.write(data)


def _runs_still(file: str, loaded: _LoadedText) -> bool:
    """Return True if the process runs a text of a file although the file has been edited.

    It may run the new one if the module was reloaded. IPython's `%autoreload` also replaces
    functions without reloading their module.
    """
    return "IPython" not in sys.modules and _spec(file) is loaded.spec


def _spec(file: str) -> Any:
    """Return the specification of the module of a file, which a reload replaces; None for none."""
    for module in list(sys.modules.values()):
        variables = getattr(module, "__dict__", {})
        if variables.get("__file__") == file:
            return variables.get("__spec__")
    return None
