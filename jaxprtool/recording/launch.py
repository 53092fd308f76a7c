"""Run a command unchanged, and record the Python processes that it starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxprtool.errors import TargetError, did_you_mean
from jaxprtool.recording import folder
from jaxprtool.recording.folder import VARIABLE, Settings

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
    """

    exit_code: int
    seconds: float


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
