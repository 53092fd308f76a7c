"""Call functions in forked processes, with limits of time and memory.

A fork takes milliseconds, whereas a new Python process needs a second to import JAX. But a fork
lacks the threads of a JAX backend, and would wait for them forever. So a process that runs tries
should not compute anything with JAX. If it has started a backend anyway, for instance to name the
devices of a mesh, the fork executes a new Python:

    python -m jaxprtool.execute.sandbox DESCRIPTOR < FUNCTION

This calls a pickled function, and writes the pickled result to a file descriptor.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import selectors
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.errors import described
from jaxprtool.processes import stderr_tail

T = TypeVar("T")

#: The bytes of the output of a fork that are kept: the last ones.
_READ = 1 << 16


@dataclass(frozen=True)
class ForkOutcome:
    """The outcome of a call in a fork.

    Attributes:
        value: The value that the function returned; None if it did not return.
        signal: The name of the signal that killed the process, or "".
        error: The exception that the function raised, on one line, or "".
        output: The end of the output of the process on stdout and stderr.
        timed_out: Whether the process was killed at its time limit.
        seconds: The duration of its run.
    """

    value: Any
    signal: str
    error: str
    output: str
    timed_out: bool
    seconds: float

    def __str__(self) -> str:
        """Describe the failure on one line."""
        if self.timed_out:
            return f"timed out after {self.seconds:.2g} s"
        if self.signal:
            return f"{self.signal}: {text}" if (text := stderr_tail(self.output)) else self.signal
        return self.error or stderr_tail(self.output)


@dataclass(frozen=True)
class Limits:
    """The limits of a call in a fork.

    Attributes:
        seconds: The maximum duration, in seconds.
        memory: The maximum memory, in bytes; None for no limit.
    """

    seconds: float
    memory: int | None = None


class _Fork:
    """A forked process that calls a function."""

    def __init__(self, function: Callable[[], Any], limits: Limits):
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        reading, writing = os.pipe()
        self.started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks, whether it has threads or not
            self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _call(function, writing, self._output, limits.memory)
        os.close(writing)
        self.result = os.fdopen(reading, "rb")
        self.deadline = self.started + limits.seconds
        self._data = b""

    def read(self) -> bool:
        """Read the available part of the result, and return True at its end."""
        some = os.read(self.result.fileno(), 1 << 20)
        self._data += some
        return not some

    def ended(self, timed_out: bool = False) -> ForkOutcome:
        """Wait for the process and return its outcome. It is killed first if it has timed out."""
        if timed_out:
            self.kill()
        _, status = os.waitpid(self.pid, 0)
        self._kill_group()
        self.result.close()
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        value, error = pickle.loads(self._data) if self._data and not number else (None, "")
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _READ))
        output = self._output.read().decode(errors="replace")
        self._output.close()
        name = signal.Signals(number).name if number else ""
        return ForkOutcome(value, name, error, output, timed_out, time.monotonic() - self.started)

    def kill(self) -> None:
        """Kill the process and its group."""
        self._kill_group()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _kill_group(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)


def _call(function: Callable[[], Any], result: int, output: IO[bytes], memory: int | None) -> None:
    """Set the limits of this forked process, call a function, and end the process."""
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        if jaxcompat.has_backends():
            _send_result(lambda: _call_in_new_python(function, result), result)
        _send_result(function, result)
    finally:
        os._exit(1)


def _send_result(function: Callable[[], Any], result: int) -> None:
    """Call a function, write the value or exception to a descriptor, and end the process."""
    try:
        value = function(), ""
    except Exception as error:
        value = None, described(error)
    with os.fdopen(result, "wb") as file:
        pickle.dump(value, file)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _call_in_new_python(function: Callable[[], Any], result: int) -> None:
    """Replace this process by a new Python that calls the function."""
    with tempfile.TemporaryFile() as file:
        pickle.dump(function, file)
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.set_inheritable(result, True)
    os.execv(sys.executable, [sys.executable, "-m", __name__, str(result)])


def call_in_fork(function: Callable[[], Any], limits: Limits) -> ForkOutcome:
    """Call a function in a separate process, and return the outcome."""
    ((_, outcome),) = call_each_in_fork([function], 1, limits)
    return outcome


def call_each_in_fork(
    functions: Iterable[Callable[[], Any]], jobs: int, limits: Limits
) -> Iterator[tuple[int, ForkOutcome]]:
    """Call functions, each in a separate process, and yield the outcomes in their order.

    Closing the iterator kills the processes that still run.

    Args:
        functions: The functions. They are drawn when a process is free.
        jobs: The number of processes that run in parallel.
        limits: The limits of each.

    Yields:
        The number of a function, from 0, and its outcome.
    """
    left, running = enumerate(functions), dict[int, _Fork]()
    done: dict[int, ForkOutcome] = {}
    wanted = 0
    try:
        with selectors.DefaultSelector() as selector:
            while True:
                while len(running) + len(done) < jobs and (drawn := next(left, None)):
                    number, function = drawn
                    running[number] = _Fork(function, limits)
                    selector.register(running[number].result, selectors.EVENT_READ, number)
                if not running and not done:
                    return
                while wanted in done:
                    yield wanted, done.pop(wanted)
                    wanted += 1
                if running:
                    done.update(_next_ended(running, selector))
    finally:
        for fork in running.values():
            fork.kill()
            fork.ended()


def _next_ended(
    running: dict[int, _Fork], selector: selectors.BaseSelector
) -> Iterator[tuple[int, ForkOutcome]]:
    """Wait for output or a deadline, and yield the forks that have ended."""
    first = min(fork.deadline for fork in running.values())
    for key, _ in selector.select(max(0.0, first - time.monotonic())):
        if running[key.data].read():
            selector.unregister(key.fileobj)
            yield key.data, running.pop(key.data).ended()
    now = time.monotonic()
    for number in [n for n, fork in running.items() if fork.deadline <= now]:
        selector.unregister(running[number].result)
        yield number, running.pop(number).ended(timed_out=True)


if __name__ == "__main__":
    _send_result(lambda: pickle.load(sys.stdin.buffer)(), int(sys.argv[1]))
