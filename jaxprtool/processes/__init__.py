"""Run commands with limits, as child processes that never outlive this one.

Each command runs under a supervisor (see `supervisor`). It kills all processes that the command has
started when the command ends or times out, and when this process ends, even by SIGKILL or a crash.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, NoReturn

_SUPERVISOR = os.path.join(os.path.dirname(__file__), "supervisor.py")

#: The bytes of each stream that are kept: the last ones.
_KEPT = 1 << 24


class Terminated(BaseException):
    """Raised in the main thread when the process gets a signal that should end it.

    Attributes:
        number: The number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Unwind a `with` block on SIGTERM and SIGHUP, and then end the process by that signal.

    A terminal sends SIGHUP when it is closed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    ending = [each for each in signals if signal.getsignal(each) is signal.SIG_DFL]

    def terminate(number: int, _: object) -> NoReturn:
        for each in ending:
            signal.signal(each, signal.SIG_IGN)  # one signal is enough
        raise Terminated(number)

    for each in ending:
        signal.signal(each, terminate)
    try:
        yield
    except Terminated as error:
        signal.signal(error.number, signal.SIG_DFL)
        os.kill(os.getpid(), error.number)
        raise
    finally:
        for each in ending:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def temporary_folder(prefix: str = "jaxprtool-") -> Iterator[str]:
    """Make a temporary folder for the files of commands.

    It is removed at the end of the `with` block, and also on a signal (see `ended_by_signals`).
    """
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield folder


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command.

    Attributes:
        status: The exit status, or None if it was killed.
        signal: The name of the signal that killed it, such as `SIGSEGV`, or None.
        stdout: Its output on stdout, at most the last 16 MiB.
        stderr: Its output on stderr, at most the last 16 MiB.
        seconds: The time that it ran.
        timed_out: Whether it was killed at its time limit.
    """

    status: int | None
    signal: str | None
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    @property
    def crashed(self) -> bool:
        """True if it was killed by a signal that did not come from a timeout, as in a crash."""
        return self.signal is not None and not self.timed_out

    def __str__(self) -> str:
        """Describe the outcome on one line: `SIGABRT: F0000 ... Check failed: ...`."""
        if self.timed_out:
            return f"timed out after {self.seconds:.0f} s"
        how = f"exit status {self.status}" if self.signal is None else self.signal
        said = stderr_tail(self.stderr)
        return f"{how}: {said}" if said else how


def stderr_tail(stderr: str) -> str:
    """Return the line of a command's output that states why it died.

    XLA writes the line of a fatal check before the stack. If there is no such line, return the last
    one, which names a Python exception.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if "Check fail" in line or "Fatal Python error" in line]
    said = (fatal or lines[-1:] or [""])[0]
    return said if len(said) <= 300 else said[:297] + "..."


class Child:
    """A running command. The end of a `with` block kills it, if it has not ended.

    Args:
        command: The program and its arguments.
        memory: The limit of each process's private memory (RLIMIT_DATA), in bytes.
        cwd: The folder to run in.
        env: The environment to run in.
        options: Other arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        memory: int | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ):
        reading, self._lifeline = os.pipe()
        given: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _SUPERVISOR, str(reading), str(memory or 0), *command],
                pass_fds=(reading,),
                start_new_session=True,
                cwd=cwd,
                env=env,
                **given,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading)
        self._started, self._killed = time.monotonic(), False
        self._lock = threading.Lock()

    def kill(self) -> None:
        """Kill the command and all processes that it has started. Does not wait for them."""
        with self._lock:
            if not self._killed:
                self._killed = True
                os.close(self._lifeline)

    def wait(self, seconds: float | None = None) -> Outcome:
        """Wait until the command ends, and return its outcome.

        Args:
            seconds: The time that it may run, from its start. Then it is killed.
        """
        deadline = None if seconds is None else self._started + seconds
        read, in_time = self._read(deadline)
        if in_time:
            try:
                left = None if deadline is None else max(0, deadline - time.monotonic())
                self.popen.wait(left)
            except subprocess.TimeoutExpired:
                in_time = False
        if not in_time:
            self.kill()
            more, _ = self._read(None)
            read = [old + new for old, new in zip(read, more, strict=True)]
        code = self.popen.wait()
        stdout, stderr = (each.decode(errors="replace") for each in read)
        return Outcome(
            status=code if code >= 0 and not self._killed else None,
            signal="SIGKILL" if self._killed else _signal_name(code),
            stdout=stdout,
            stderr=stderr,
            seconds=time.monotonic() - self._started,
            timed_out=not in_time,
        )

    def _read(self, deadline: float | None) -> tuple[list[bytes], bool]:
        """Read both streams until they close, and return the bytes and whether they did in time."""
        streams: list[IO[bytes] | None] = [self.popen.stdout, self.popen.stderr]
        read = [bytearray(), bytearray()]
        with selectors.DefaultSelector() as selector:
            for number, stream in enumerate(streams):
                if stream is not None:
                    selector.register(stream, selectors.EVENT_READ, number)
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                for key, _ in selector.select(left):
                    some = os.read(key.fd, 1 << 16)
                    if not some:
                        selector.unregister(key.fileobj)
                    read[key.data] += some
                    if len(read[key.data]) > 2 * _KEPT:
                        del read[key.data][:-_KEPT]
            in_time = not selector.get_map()
        return [bytes(each[-_KEPT:]) for each in read], in_time

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _signal_name(code: int) -> str | None:
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def run(
    command: Sequence[str],
    *,
    seconds: float | None = None,
    memory: int | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command until it ends, or for at most `seconds`, and return its outcome.

    The other arguments are those of `Child`.
    """
    with Child(command, memory=memory, cwd=cwd, env=env) as child:
        return child.wait(seconds)
