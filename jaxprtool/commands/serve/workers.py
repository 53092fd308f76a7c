"""Run command lines in forks of a process that has imported JAX and all commands.

    with Workers() as workers:
        answer = workers.answer(["cost", "train.py:step", "--json"])

This process imports JAX, starts no devices and runs no code of the user, so a fork of it is as good
as a new process, and takes milliseconds. A fork that has imported the module of a TARGET stays for
the next commands on that module, with the programs that it has traced. It is replaced if

- a file that it has imported has changed;
- the user's code has raised, has ended the process, or has changed its folder;
- a command needs other devices than those that have started in it, or another value of an option
  that holds for the whole process, such as `--x64`.

Before each command, a fork drops JAX's caches, which have the source lines of what was traced
first. So the output is that of a new process, unless the user's code keeps a state of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, NamedTuple, NoReturn, TypeAlias

from jaxprtool import registry
from jaxprtool.cli import app, launch, output
from jaxprtool.cli.launch import TIMED_OUT
from jaxprtool.cli.session import KeptTargets, kept_targets
from jaxprtool.errors import UserFunctionError

#: The seconds after which the server looks whether a fork has ended.
_TICK = 0.5

#: The most forks that wait for another command on their module.
MOST_WAITING = 4

#: Options that hold for a whole process. The commands of a fork have the same values.
_OF_PROCESS = ("x64", "mesh", "host_devices", "backend", "device")

#: Options of commands that have a process to themselves.
_ALONE = ("launch", "coordinator", "plugin", "rewrite", "traceback")

#: The exit codes after which a fork stays: done, a check has failed, bad usage or input.
_STAYING = (0, 1, 2)

_OUT_OF_MEMORY = (
    "hint: Linux kills processes when its memory or that of a container is full: see `dmesg`"
)

#: The time of modification of a file in ns, its size and its inode; None if there is no file.
_Stamp: TypeAlias = tuple[int, int, int] | None

#: What the commands of a fork have in common: the module of TARGET, and options.
_Key: TypeAlias = tuple[str, ...]


class Answer(NamedTuple):
    """The output of a command line.

    Attributes:
        exit_code: Its exit code; 124 if its time was up, and 128 plus the number of the signal if
            one has killed its process.
        stdout: Its output on stdout.
        stderr: Its output on stderr.
        warm: Whether the module of TARGET was imported already.
    """

    exit_code: int
    stdout: str
    stderr: str
    warm: bool = False


class Workers:
    """Forks of this process that run command lines, one after another.

    Args:
        descriptors: Open files of this process that its forks close.
    """

    def __init__(self, descriptors: Sequence[int] = ()):
        self._descriptors = descriptors
        self._waiting: dict[_Key, _Worker] = {}  # the least recently used first
        self._apart: set[_Key] = set()  # those of commands that set the devices of their process
        _import_commands()

    def answer(
        self, words: Sequence[str], timeout: float | None = None, fresh: bool = False
    ) -> Answer:
        """Run a command line, and return its output.

        Args:
            words: The command and its arguments.
            timeout: The most seconds that it may run.
            fresh: Whether to import the module of TARGET again although no file has changed.
        """
        key = self._key(words)
        worker = None if key is None else self._waiting.pop(key, None)
        if worker is not None and (fresh or worker.is_outdated()):
            worker.end()
            worker = None
        warm = worker is not None
        if worker is None:
            pipes = [other.pipe.fileno() for other in self._waiting.values()]
            worker = _Worker([*self._descriptors, *pipes])
        report, answer = worker.run(words, timeout)
        if key is not None and (report.wants_other_devices or report.has_set_devices):
            self._apart.add((words[0], *key[1:]))
            key = self._key(words)
        if report.wants_other_devices:
            worker.end()
            return self.answer(words, timeout)
        if key is None or not report.stays:
            worker.end()
        else:
            self._waiting[key] = worker
        while len(self._waiting) > MOST_WAITING:
            self._waiting.pop(next(iter(self._waiting))).end()
        return answer._replace(warm=warm)

    def _key(self, words: Sequence[str]) -> _Key | None:
        """Return what a fork for a command line has to have in common with it; None if it is new.

        It is new for a command whose TARGET is no function, but a program in a file or a run.
        """
        options = _options(words)
        others = options.get("others") or options.get("other") or []
        targets = [options.get("target"), *([others] if isinstance(others, str) else others)]
        if not all(map(_is_function, targets)) or any(options.get(name) for name in _ALONE):
            return None
        places = (target.partition(":")[0] for target in targets)
        key = words[0], *(repr(options.get(name)) for name in _OF_PROCESS), *places
        return key if key in self._apart else ("", *key[1:])

    def end(self) -> None:
        """End all forks."""
        for worker in self._waiting.values():
            worker.end()
        self._waiting.clear()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _import_commands() -> None:
    """Import JAX and all commands, so that forks need not."""
    with launch.jax_settings_restored():
        launch.start_jax(output.silent)
    for info in registry.commands().values():
        paths = [info.run, *info.tables, *info.tables.values(), *info.documents]
        for path in paths:
            with contextlib.suppress(Exception):  # the command says what is missing
                importlib.import_module(path.partition(":")[0])
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages of this process


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command's options by name; none if they cannot be read."""
    try:
        info = registry.command_info(words[0]) if words else None
        if info is None:
            return {}
        command = app.load_command(words[0], info)
        return dict(command.make_context(words[0], [*words[1:]], resilient_parsing=True).params)
    except Exception:  # the command says what is wrong
        return {}


def _is_function(target: str | None) -> bool:
    """Return True if TARGET names a function in a file or a module."""
    place, colon, _ = (target or "").partition(":")
    return bool(colon) and (place.endswith(".py") or place.replace(".", "").isidentifier())


# --- forks, seen from the server ------------------------------------------------------------------


@dataclass(frozen=True)
class _ForkReport:
    """What a fork reports of a command that it has run.

    Attributes:
        exit_code: The exit code of the command; None if the process has reported nothing.
        stays: Whether the process can run another command.
        files: The files that are imported.
        has_set_devices: Whether the command has set the devices of the process.
        wants_other_devices: Whether the command has not run, because other devices have started.
    """

    exit_code: int | None = None
    stays: bool = False
    files: Sequence[str] = ()
    has_set_devices: bool = False
    wants_other_devices: bool = False


class _Worker:
    """A fork that runs command lines, with the files of its output."""

    def __init__(self, descriptors: Sequence[int]):
        self._output: list[IO[bytes]] = [
            tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            for _ in ("stdout", "stderr")
        ]
        self._stamps: dict[str, _Stamp] = {}
        self._status: int | None = None
        self.pipe, other_end = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks, whether it has threads or not
            self._pid = os.fork()
        if self._pid == 0:
            for descriptor in (*descriptors, self.pipe.fileno()):
                os.close(descriptor)
            _serve(other_end, [file.fileno() for file in self._output])
        other_end.close()

    def run(self, words: Sequence[str], timeout: float | None) -> tuple[_ForkReport, Answer]:
        """Run a command line. Its report is empty if the process has ended or its time is up."""
        for file in self._output:
            file.seek(0)  # for the fork too, which shares the position
            file.truncate()
        started = time.time_ns()
        report = _ForkReport()
        try:
            self.pipe.send_bytes(json.dumps([*words]).encode())
            if self._answers_within(timeout):
                report = _ForkReport(**json.loads(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            self._kill()  # it is ending, and keeps its status
        for path in report.files:
            self._stamps.setdefault(path, _stamp(path, started))
        stdout, stderr = map(_text, self._output)
        if report.exit_code is not None:
            return report, Answer(report.exit_code, stdout, stderr)
        code, said = _reported_end(self._status, timeout)
        return report, Answer(code, stdout, f"{stderr}{said}\n")

    def _answers_within(self, timeout: float | None) -> bool:
        """Wait for an answer; return False if the process has ended or its time is up."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.pipe.poll(min(_TICK, max(end - time.monotonic(), 0))):
            if self._has_ended() or time.monotonic() >= end:
                return False
        return True

    def _has_ended(self) -> bool:
        """Return True if the process has ended. A child of it may still hold its pipe."""
        if self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if ended else None
        return self._status is not None

    def is_outdated(self) -> bool:
        """Return True if an imported file has changed, or the process has ended."""
        return self._has_ended() or any(
            stamp != _stamp(path) for path, stamp in self._stamps.items()
        )

    def end(self) -> None:
        """Kill the process and its children, and close the files."""
        self._kill()
        self.pipe.close()
        for file in self._output:
            file.close()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)  # it may have no group yet
            _, self._status = os.waitpid(self._pid, 0)


def _stamp(path: str, started: int | None = None) -> _Stamp:
    """Return the state of a file; None if it has changed since a time, in ns."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if started is not None and status.st_mtime_ns >= started:
        return None  # perhaps after it was imported
    return status.st_mtime_ns, status.st_size, status.st_ino


def _text(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def _reported_end(status: int | None, timeout: float | None) -> tuple[int, str]:
    """Return the exit code and the message for a process that has not answered."""
    if status is None:
        return TIMED_OUT, f"error: the command did not end within {timeout:g} s (timeout_s)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        said = f"error: the process was killed by signal {number} ({signal.Signals(number).name})"
        return 128 + number, f"{said}\n{_OUT_OF_MEMORY}" if number == signal.SIGKILL else said
    code = os.WEXITSTATUS(status)
    return (
        UserFunctionError.exit_code,
        f"error: the process ended with status {code} before the command did, as by os._exit",
    )


# --- forks, seen from inside ----------------------------------------------------------------------


class _OtherDevices(BaseException):
    """Raised if a command wants other devices than those that have started."""


def _serve(pipe: Connection, files: Sequence[int]) -> NoReturn:
    """Run the command lines that the server sends, until it has ended."""
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Python would take a module for unchanged that was edited within a second.
        sys.dont_write_bytecode = True
        requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(pipe, requests), daemon=True).start()
        commands = _CommandRunner(files)
        while True:
            pipe.send_bytes(json.dumps(asdict(commands.run(json.loads(requests.get())))).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _receive(pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    """Receive requests. When the server has ended, kill this process and its children."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(pipe.recv_bytes())
    os.killpg(0, signal.SIGKILL)


class _CommandRunner:
    """The command lines that a fork runs, with output to two files."""

    def __init__(self, files: Sequence[int]):
        self._files = os.open(os.devnull, os.O_RDONLY), *files
        self._imported_before = frozenset(sys.modules)
        self._kept = KeptTargets()
        self._is_used = self._has_set_devices = False
        kept_targets.set(self._kept)
        launch.on_other_devices.set(self._see_other_devices)

    def run(self, words: Sequence[str]) -> _ForkReport:
        """Run a command line."""
        folder, self._has_set_devices = os.getcwd(), False
        with self._streams():
            try:
                code = app.run_command_line([*words])
            except _OtherDevices:
                return _ForkReport(0, wants_other_devices=True)
        self._prepare_next()
        stays = code in _STAYING and folder == os.getcwd()
        return _ForkReport(code, stays, self._imported_files(), self._has_set_devices)

    def _see_other_devices(self, is_late: bool) -> None:
        if is_late and self._is_used:
            raise _OtherDevices
        self._has_set_devices = not is_late

    @contextlib.contextmanager
    def _streams(self) -> Iterator[None]:
        """Let the standard streams be those of a command: an empty one, and two files."""
        for descriptor, file in enumerate(self._files):
            os.dup2(file, descriptor)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
        streams = [open(n, "w", 1, "utf-8", closefd=False) for n in (1, 2)]  # noqa: SIM115
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        try:
            yield
        finally:
            for stream in streams:
                stream.flush()

    def _prepare_next(self) -> None:
        """Drop caches, targets whose arrays are deleted, and what Python has read of folders."""
        import jax

        from jaxprtool.ir.backends import clear_caches

        jax.clear_caches()
        clear_caches()
        importlib.invalidate_caches()
        kept, self._is_used = self._kept, True
        for key, (entry, traced) in {**kept.earlier, **kept.now}.items():
            arrays = (value for value in traced.values.values() if isinstance(value, jax.Array))
            if any(array.is_deleted() for array in arrays):  # a run has donated them
                kept.earlier.pop(key, None)
            else:
                kept.earlier[key] = entry, traced
        kept.now.clear()

    def _imported_files(self) -> list[str]:
        modules = [sys.modules[name] for name in sys.modules.keys() - self._imported_before]
        files = (getattr(module, "__file__", None) for module in modules)
        return [os.path.abspath(file) for file in files if isinstance(file, str)]
