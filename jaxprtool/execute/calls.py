"""Call functions in other processes: in new Python processes, and in forks of this one.

    with python_process("dce crashed", {"NPROC": "1"}) as process:
        results = process.call(results_of, path, arguments)

    outcome = call_in_fork(function, Limits(seconds=10))

Functions, arguments and results are pickled, in files or through descriptors that only the two
processes use. These are the only pickles that jaxprtool reads: a pickle of a user is never loaded.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from typing import IO, Any, NoReturn, ParamSpec, TypeAlias, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError, described
from jaxprtool.files import file_written_whole
from jaxprtool.processes import Child, stderr_tail, temporary_folder

# --- Python processes -----------------------------------------------------------------------------
# Call functions in another Python process, which may crash and has its own environment.
#
# The process imports a function by its name. It sends back what the function returns, yields and
# reports, or its JaxprToolError. Any other exception is a fault of the function, and ends the
# process. So does a crash, which is an error with the signal and the last words of the process.
#
# Functions, arguments and results are pickled to files in a folder that only the two processes use.

P = ParamSpec("P")
T = TypeVar("T")

_OnReport: TypeAlias = Callable[[Any], object]


class _Channel:
    """Sends values to the other process, and receives its values.

    A value goes through a file, and the path of the file through a pipe. A pipe would hold up the
    sender of a large array until the other process has imported JAX and reads it.
    """

    def __init__(self, folder: str, reading: IO[bytes], writing: IO[bytes]):
        self._folder, self._reading, self._writing = folder, reading, writing
        self._numbers = count()

    def send(self, value: object) -> None:
        path = os.path.join(self._folder, f"{os.getpid()}-{next(self._numbers)}.pickle")
        with file_written_whole(path) as file:
            pickle.dump(value, file)
        with suppress(BrokenPipeError):  # the other process has ended: `receive` says so
            self._writing.write(os.fsencode(path) + b"\n")
            self._writing.flush()

    def receive(self) -> Any:
        """Wait for the next value. Raises EOFError if the other process has ended."""
        path = self._reading.readline().rstrip(b"\n")
        if not path:
            raise EOFError
        with open(path, "rb") as file:
            value = pickle.load(file)
        os.unlink(path)
        return value


# --- parent ---------------------------------------------------------------------------------------


@contextmanager
def python_process(
    failure: str,
    environment: Mapping[str, str] | None = None,
    on_report: _OnReport = lambda value: None,
) -> Iterator[PythonProcess]:
    """Start a process for calls. It ends with the `with` block.

    Args:
        failure: What it means if the process ends on its own, for the error: `dce crashed`.
        environment: Environment variables of the process, in addition to those of this one.
        on_report: Called with each value that a function reports before its result.
    """
    command = [sys.executable, "-m", __name__, "serve"]
    env = {**os.environ, **(environment or {})}
    with (
        temporary_folder() as folder,
        tempfile.TemporaryFile() as stderr,
        Child([*command, folder], env=env, stdin=subprocess.PIPE, stderr=stderr) as child,
    ):
        yield PythonProcess(failure, folder, child, stderr, on_report)


class PythonProcess:
    """A Python process that calls functions.

    Attributes:
        folder: The folder of the two processes, for files with names of their own.
    """

    def __init__(
        self, failure: str, folder: str, child: Child, stderr: IO[bytes], on_report: _OnReport
    ):
        stdin, stdout = child.popen.stdin, child.popen.stdout
        assert stdin is not None and stdout is not None
        self.folder, self._channel = folder, _Channel(folder, stdout, stdin)
        self._failure, self._child, self._stderr = failure, child, stderr
        self._on_report = on_report

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of a module in the process, and return its result; see `result`."""
        self.begin(function, *args, **kwargs)
        result: T = self.result()
        return result

    def begin(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function of a module in the process, without waiting for its result."""
        self._channel.send((function, args, kwargs))

    def next(self) -> Any:
        """Wait for the next value of the generator that was called last; see `result`."""
        self._channel.send(None)
        return self.result()

    def result(self) -> Any:
        """Wait for the result of the last call, or for the first value if it is a generator.

        Raises:
            JaxprToolError: The error that the function has raised.
            UnsupportedError: If the process has ended.
        """
        while True:
            try:
                kind, value = self._channel.receive()
            except EOFError:
                self._fail()
            if kind == "result":
                return value
            if kind == "error":
                raise value
            self._on_report(value)

    def _fail(self) -> NoReturn:
        outcome = self._child.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace")
        raise UnsupportedError(f"{self._failure}: {replace(outcome, stderr=said)}")


# --- child ----------------------------------------------------------------------------------------

_PARENT: ContextVar[_Channel] = ContextVar("parent")


def report(value: object) -> None:
    """Send a value to the process that has called the running function, before its result."""
    _PARENT.get().send(("report", value))


def serve(folder: str) -> None:
    """Call the functions that the parent process sends, until it closes stdin."""
    reading, writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as null:  # for what functions read and print
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    channel = _Channel(folder, reading, writing)
    _PARENT.set(channel)
    values: Iterator[Any] = iter(())
    while True:
        try:
            call = channel.receive()
        except EOFError:
            return
        try:
            if call is not None:
                function, args, kwargs = call
                result = function(*args, **kwargs)
                values = result if isinstance(result, Generator) else iter((result,))
            message: tuple[str, Any] = "result", next(values)
        except JaxprToolError as error:
            message = "error", error
        channel.send(message)


# --- forks ----------------------------------------------------------------------------------------
# Call functions in forked processes, with limits of time and memory.
#
# A fork takes milliseconds, whereas a new Python process needs a second to import JAX. But a fork
# lacks the threads of a JAX backend, and would wait for them forever. So a process that runs tries
# should not compute anything with JAX. If it has started a backend anyway, for instance to name the
# devices of a mesh, the fork executes a new Python:
#
#     python -m jaxprtool.execute.calls call DESCRIPTOR < FUNCTION
#
# This calls a pickled function, and writes the pickled result to a file descriptor.


#: The bytes of the output of a fork that are kept: the last ones.
_READ = 1 << 16

#: What XLA says when it ends the process.
_CHECK = re.compile(r"Check failed: .*")

#: The longest time, in seconds, that a function may run that may crash.
_PATIENCE = 3600.0


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
    os.execv(sys.executable, [sys.executable, "-m", __name__, "call", str(result)])


def call_in_fork(function: Callable[[], Any], limits: Limits) -> ForkOutcome:
    """Call a function in a separate process, and return the outcome."""
    ((_, outcome),) = call_each_in_fork([function], 1, limits)
    return outcome


def call_that_may_crash(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that may end the process, in a fork if JAX has no backend.

    Raises:
        UnsupportedError: If it ends the fork.
    """
    if jaxcompat.has_backends():
        return function(*args, **kwargs)
    outcome = call_in_fork(lambda: _result(function, args, kwargs), Limits(_PATIENCE))
    if outcome.value is None:
        said = _CHECK.search(outcome.output)
        raise UnsupportedError(said[0].strip() if said else str(outcome))
    result, error = outcome.value
    if error is not None:
        raise error
    return result


def _result(
    function: Callable[..., T], args: Any, kwargs: Any
) -> tuple[T | None, Exception | None]:
    """Call a function, and return what it returns or raises."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return None, error


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


def main(task: str, place: str) -> None:
    """Do a task in a new Python: `serve FOLDER`, or `call DESCRIPTOR < FUNCTION`."""
    if task == "serve":
        serve(place)
    else:
        _send_result(lambda: pickle.load(sys.stdin.buffer)(), int(place))


if __name__ == "__main__":
    # Functions that are called import this module by its own name, which is another one.
    import_module("jaxprtool.execute.calls").main(*sys.argv[1:])
