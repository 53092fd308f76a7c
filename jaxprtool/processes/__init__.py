"""Run commands with limits, as child processes that never outlive this one.

Each command runs under a supervisor (see `supervisor`). It kills all processes that the command has
started when the command ends or times out, and when this process ends, even by SIGKILL or a crash.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, NoReturn, TypeAlias

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
    ending = [signum for signum in signals if signal.getsignal(signum) is signal.SIG_DFL]

    def terminate(number: int, _: object) -> NoReturn:
        for signum in ending:
            signal.signal(signum, signal.SIG_IGN)  # one signal is enough
        raise Terminated(number)

    for signum in ending:
        signal.signal(signum, terminate)
    try:
        yield
    except Terminated as error:
        signal.signal(error.number, signal.SIG_DFL)
        os.kill(os.getpid(), error.number)
        raise
    finally:
        for signum in ending:
            signal.signal(signum, signal.SIG_DFL)


@contextmanager
def temporary_folder(prefix: str = "jaxprtool-") -> Iterator[str]:
    """Make a temporary folder for the files of commands.

    It is removed at the end of the `with` block, and also on a signal (see `ended_by_signals`).
    """
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield folder


@dataclass(frozen=True)
class CommandOutcome:
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
        keywords: dict[str, Any] = {
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
                **keywords,
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

    def wait(self, seconds: float | None = None) -> CommandOutcome:
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
        stdout, stderr = (output.decode(errors="replace") for output in read)
        return CommandOutcome(
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
        return [bytes(output[-_KEPT:]) for output in read], in_time

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


def run_process(
    command: Sequence[str],
    *,
    seconds: float | None = None,
    memory: int | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandOutcome:
    """Run a command until it ends, or for at most `seconds`, and return its outcome.

    The other arguments are those of `Child`.
    """
    with Child(command, memory=memory, cwd=cwd, env=env) as child:
        return child.wait(seconds)


# --- group ----------------------------------------------------------------------------------------
# Run the processes of one program together: show their output, and end all if one fails.
#
# The process to blame is one that was killed by a signal, or else one that does not report the loss
# of another process, as the others do when they notice.

#: The seconds to wait for other failures after the first, so that the right process is blamed.
_GRACE = 1.0

#: The first line of a failure's report on stderr: by jaxprtool, XLA's log, or the C or C++ library.
_FAILURE = re.compile(r"(error: |interrupted$|[EF]\d{4} \d\d:|terminate called|cannot allocate )")

#: In the report of a process that fails because another one has ended.
_LOST = re.compile(r"another process of the cluster has ended|closed by peer|[Gg]loo|heartbeat")

Stream: TypeAlias = Literal["stdout", "stderr"]

#: Receives the number of a process, a stream, and a line of it.
OnLine: TypeAlias = Callable[[int, Stream, bytes], object]


@dataclass(frozen=True)
class ClusterPlace:
    """The place of this process in a cluster.

    Attributes:
        coordinator: `HOST:PORT` of process 0.
        count: The number of processes.
        number: The number of this process.
    """

    coordinator: str
    count: int
    number: int


@dataclass(frozen=True)
class Failure:
    """The process that made a group fail.

    Attributes:
        process: Its number; None if the group reached its time limit.
        status: Its exit status; None if a signal killed it.
        signal: The number of the signal that killed it, or None.
        said: The lines on its stderr, from the first that reports a failure.
    """

    process: int | None
    status: int | None = None
    signal: int | None = None
    said: tuple[str, ...] = ()


def run_together(
    commands: Sequence[Sequence[str]],
    env: Mapping[str, str],
    on_line: OnLine,
    seconds: float | None = None,
) -> Failure | None:
    """Run commands at the same time until all have ended, or one has failed.

    Args:
        commands: The program and the arguments of each process.
        env: The environment to run in.
        on_line: Called with each line, except those that report a failure.
        seconds: The time limit. At its end the processes are killed.

    Returns:
        The failure, or None if all processes have succeeded. All processes have ended.
    """
    end = None if seconds is None else time.monotonic() + seconds
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        members = []
        for number, command in enumerate(commands):
            child = stack.enter_context(Child(command, env=env))
            members.append(_Member(number, child, on_line))
            for stream in (child.popen.stdout, child.popen.stderr):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, members[-1])
        return _wait(members, selector, end)


class _Member:
    """A process of a group, and its output."""

    def __init__(self, number: int, child: Child, on_line: OnLine):
        self.number, self.child, self._on_line = number, child, on_line
        self._parts: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}
        self._said: list[str] = []

    def received(self, stream: Stream, some: bytes) -> None:
        """Pass on complete lines. An empty `some` is the end of the stream and of the last line."""
        lines = (self._parts[stream] + some).splitlines(keepends=True)
        rest = lines and some and not lines[-1].endswith(b"\n")
        self._parts[stream] = lines.pop() if rest else b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if stream == "stderr" and (self._said or _FAILURE.match(text)):
                self._said.append(text)
            else:
                self._on_line(self.number, stream, line)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.child.popen.poll()

    def failure(self) -> Failure:
        """Return the failure of this process, which has ended."""
        code = self.child.popen.wait()
        killed = -code if code < 0 else None
        return Failure(self.number, None if killed else code, killed, tuple(self._said))


def _wait(
    members: Sequence[_Member], selector: selectors.BaseSelector, end: float | None
) -> Failure | None:
    first: _Member | None = None
    grace = float("inf")
    while selector.get_map() or any(member.code is None for member in members):
        now = time.monotonic()
        if end is not None and now >= end and first is None:
            return Failure(None)
        if now >= grace:
            break
        for key, _ in selector.select(0.1):
            some = os.read(key.fd, 1 << 16)
            if not some:
                selector.unregister(key.fileobj)
            member = key.data
            stream: Stream = "stdout" if key.fileobj is member.child.popen.stdout else "stderr"
            member.received(stream, some)
        if not selector.get_map():
            time.sleep(0.01)
        if first is None:
            first = next((member for member in members if member.code), None)
            grace = now + _GRACE if first else grace
    if first is None:
        first = next((member for member in members if member.code), None)
    if first is None:
        return None
    # An abort is how XLA itself ends a process whose peers are lost.
    killed = [m for m in members if m.code and m.code < 0 and m.code != -signal.SIGABRT]
    causes = [m for m in members if m.code and not any(map(_LOST.search, m.failure().said))]
    return (killed or causes or [first])[0].failure()
