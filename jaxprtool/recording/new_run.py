"""Create the folder of a run, and run the command that is recorded in it.

`run/` is the newest run. When another is recorded, it is renamed to `run-1/`, the next one to
`run-2/`, and so on. Every process that writes a run holds a shared lock on its folder, which ends
with the process. A folder that is locked is neither renamed nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxprtool.errors import OutputError, TargetError, did_you_mean
from jaxprtool.files import locked
from jaxprtool.ir.source_text import SOURCES
from jaxprtool.recording import folder
from jaxprtool.recording.folder import (
    EVENTS,
    IGNORE,
    NEWEST,
    PAGE,
    PREFIX,
    PROCESS,
    RUN,
    TRACE,
    is_run,
    processes,
    run_json,
    run_start,
    write_json_file,
)
from jaxprtool.recording.settings import VARIABLE, Settings, taken_summary


class NewRun:
    """The folder of a run that is about to be recorded, locked until it is closed.

    Attributes:
        path: The folder.
        older: The folder to which an older run was renamed; "" if there was none.
        is_other: Whether the folder is another one than was asked for, which is being written.
    """

    def __init__(self, path: str, older: str = "", is_other: bool = False) -> None:
        self.path, self.older, self.is_other = path, older, is_other
        self._lock = RunLock(path)

    def close(self) -> None:
        """Release the lock of this process."""
        self._lock.close()

    def undo(self) -> None:
        """Remove the folder, in which nothing was recorded, and give an older run its name back."""
        parent = os.path.dirname(os.path.abspath(self.path))
        with _one_begins(parent), contextlib.suppress(OSError):
            self.close()
            _remove_run(self.path)
            os.rmdir(self.path)
            if self.older:
                os.rename(self.older, self.path)

    def __enter__(self) -> NewRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def new_run(path: str | None, overwrite: bool) -> NewRun:
    """Create the folder of a run, and rename a run that has its name.

    Args:
        path: The folder; None for `run`, or for a numbered one while `run` is being written.
        overwrite: Whether to remove a run that is there instead of renaming it.

    Raises:
        OutputError: If the folder holds anything else than a run, or a run that is being written,
            or cannot be written.
    """
    where = NEWEST if path is None else path.rstrip("/") or path[:1]
    _require_possible(where)
    parent = os.path.dirname(os.path.abspath(where))
    try:
        os.makedirs(parent, exist_ok=True)
        with _one_begins(parent):
            older, is_other = "", False
            with _unwritten(where) as is_free:
                if is_free:
                    older = _cleared(where, overwrite)
                elif path is None:
                    where, is_other = _numbered(where), True
                else:
                    message = f"'{where}' is being recorded by another process"
                    raise OutputError(message, "give another folder to -o")
            os.makedirs(where, exist_ok=True)
            run = NewRun(where, older, is_other)
            ignore = os.path.join(where, IGNORE)
            if not os.path.exists(ignore):
                with open(ignore, "w", encoding="utf-8") as file:
                    file.write("*\n")
            return run
    except OSError as error:
        raise OutputError(f"cannot write '{where}': {error.strerror or error}") from None


def _require_possible(where: str) -> None:
    """Raise OutputError for a name that no new folder can have."""
    if not where:
        raise OutputError("-o names no folder", "write the folder of the run: -o run")
    path = os.path.abspath(where)
    if path == os.path.dirname(path):
        raise OutputError(f"-o names '{where}', in which nothing but a run may be", "add a name")
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        file = os.path.relpath(path) if not os.path.isabs(where) else path
        raise OutputError(f"cannot write '{where}': '{file}' is not a folder")


def _one_begins(parent: str) -> contextlib.AbstractContextManager[None]:
    """Let no other process create or rename a run in a folder in a `with` block."""
    # A run inside of a run waits for no lock: its writers have locked the folder.
    return contextlib.nullcontext() if is_run(parent) else locked(parent)


def _cleared(path: str, overwrite: bool) -> str:
    """Remove or rename a run that nobody writes, and return its new folder; "" if it has none."""
    if not os.path.isdir(path):
        return ""
    if not is_run(path):
        if set(os.listdir(path)) <= {IGNORE}:  # empty, or of a record that was killed at its start
            return ""
        raise OutputError(f"'{path}' is a folder with other files in it", "give another to -o")
    if overwrite:
        _remove_run(path)
        return ""
    older = _numbered(path)
    try:
        os.rename(path, older)
    except OSError as error:  # the working folder as `.`, or a mount
        message = f"cannot rename the run in '{path}': {error.strerror or error}"
        raise OutputError(message, "add --overwrite, or give another folder to -o") from None
    return older


def _numbered(path: str) -> str:
    """Return `run-4` if `run-3` is the last of the numbered folders beside `run`."""
    parent, name = os.path.split(path)
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    matches = map(pattern.fullmatch, os.listdir(parent or "."))
    last = max((int(match[1]) for match in matches if match), default=0)
    return os.path.join(parent, f"{name}-{last + 1}")


def _remove_run(path: str) -> None:
    """Remove the files of a run, and no others."""
    for name in (PAGE, TRACE, RUN, IGNORE):
        if os.path.exists(os.path.join(path, name)):
            os.unlink(os.path.join(path, name))
    for place in (*processes(path), os.path.join(path, SOURCES)):
        if os.path.isdir(place):
            shutil.rmtree(place)


# --- locks ---------------------------------------------------------------------------------------
# Who writes a run.


class RunLock:
    """A shared lock on the folder of a run, which each process that writes it holds.

    The lock belongs to the folder whatever its name, and ends with the process at the latest. A
    fork shares it. Without support for locks there is none, and `_unwritten` is more careful.

    Args:
        path: The folder.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            self._descriptor = os.open(path, os.O_RDONLY)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock of this process."""
        if self._descriptor != -1:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def _unwritten(path: str) -> Iterator[bool]:
    """Yield True if no process writes a run in a folder; then none begins to in a `with` block."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    except OSError:  # Windows has no descriptors of folders
        yield not _is_unfinished(path)
        return
    try:
        yield _locked_alone(descriptor, path)
    finally:
        os.close(descriptor)


def _locked_alone(descriptor: int, path: str) -> bool:
    """Lock a folder against the processes that write it; return False if there are any."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return not _is_unfinished(path)
    return True


def _is_unfinished(path: str) -> bool:
    """Return True if a folder holds a run whose end is not written."""
    return is_run(path) and "exit_code" not in run_json(path)


# --- processes -----------------------------------------------------------------------------------
# The folders of the processes of a run.


class ProcessFolder:
    """The folder that a process writes, created when it is first needed.

    Args:
        run: The folder of the run.
        run_began: When the run began. A process that outlives its run does not write to the next.
    """

    def __init__(self, run: str, run_began: float) -> None:
        self.run, self._run_began = run, run_began
        self.path = ""
        self._run_lock: RunLock | None = None
        self._events = -1
        self._lock = threading.Lock()

    def start(self, about: Mapping[str, Any]) -> None:
        """Create the folder, and write the facts about the process. Raises OSError."""
        self._run_lock = RunLock(self.run)
        if run_start(self.run) != self._run_began:
            self._run_lock.close()
            raise FileNotFoundError(errno.ENOENT, "its run has ended")
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
            if self._run_lock is not None:
                self._run_lock.close()


# --- the command ----------------------------------------------------------------------------------
# Run a command unchanged, and record the Python processes that it starts.

#: The folder whose `sitecustomize` starts the recording.
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

#: Signals that are passed on to the command.
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")

#: Signals that a terminal sends to all processes in the foreground.
_OF_TERMINAL = (signal.SIGINT, getattr(signal, "SIGQUIT", signal.SIGINT))


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        exit_code: Its exit code: 128 plus the signal's number if a signal ended it, as in a shell.
        seconds: The duration of its run.
        summary: The summary that its process has made, with the page; None if there is none.
    """

    exit_code: int
    seconds: float
    summary: str | None = None


def script_command(script: str, args: Sequence[str]) -> list[str]:
    """Return the command `python SCRIPT ARGS…`. Raises TargetError if there is no such script."""
    if not os.path.exists(script):
        where, name = os.path.split(script)
        near = None
        with contextlib.suppress(OSError):
            files = [file for file in os.listdir(where or ".") if file.endswith(".py")]
            near = did_you_mean(name, files)
        hint = near
        if near is None and shutil.which(script):
            hint = f"a command stands behind --: jaxprtool record -- {script}"
        raise TargetError(f"no script '{script}'", hint)
    return [sys.executable, script, *args]


def module_command(module: str, args: Sequence[str]) -> list[str]:
    """Return the command `python -m MODULE ARGS…`."""
    return [sys.executable, "-m", module, *args]


def run_recorded(command: Sequence[str], settings: Settings) -> Ended:
    """Run a command, record what its Python processes compile, and return how it ended.

    The command inherits the standard streams, the working folder and the environment of this
    process. Two more environment variables start the recording.

    Raises:
        TargetError: If the command cannot be started.
    """
    about: dict[str, Any] = {
        "version": 1,
        "command": ["python" if command[0] == sys.executable else command[0], *command[1:]],
        "folder": os.getcwd(),
        "start": settings.start,
        "calls": settings.calls,
    }
    path = os.path.join(settings.run, folder.RUN)
    folder.write_json_file(path, about)
    try:
        with _signals_passed_on() as receivers:
            process = subprocess.Popen(command, env=_environment(settings))
            receivers.append(process)
            code = process.wait()
    except OSError as error:
        raise TargetError(f"cannot run '{command[0]}': {error.strerror or error}") from None
    seconds = time.time() - settings.start
    code = code if code >= 0 else 128 - code
    summary = taken_summary(settings.run)
    if summary is not None and summary.exit_code == code:
        return Ended(code, seconds, summary.text)
    ending = {"pid": process.pid, "seconds": seconds, "exit_code": code}
    folder.write_json_file(path, about | ending)
    return Ended(code, seconds)


def _environment(settings: Settings) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        VARIABLE: json.dumps(asdict(settings)),
        "PYTHONPATH": os.pathsep.join([_SITE, path] if path else [_SITE]),
    }


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[list[subprocess.Popen]]:
    """Yield a list, and pass signals on to the processes in it."""
    receivers: list[subprocess.Popen] = []

    def pass_on(number: int, frame: object) -> None:
        if number in _OF_TERMINAL and _in_foreground():
            return  # the terminal has sent it to them, too
        for process in receivers:
            process.send_signal(number)

    handlers: dict[int, Any] = {}
    for name in _PASSED_ON:
        if (number := getattr(signal, name, None)) is not None:
            handlers[number] = signal.signal(number, pass_on)
    try:
        yield receivers
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return True if this process is in the foreground of a terminal."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
