"""Call functions in another Python process, which may crash and has its own environment.

    with python_process("dce crashed", {"NPROC": "1"}) as process:
        results = process.call(results_of, path, arguments)

The process imports a function by its name. It sends back what the function returns, yields and
reports, or its JaxprToolError. Any other exception is a fault of the function, and ends the
process. So does a crash, which is an error with the signal and the last words of the process.

Functions, arguments and results are pickled to files in a folder that only the two processes use.
These are the only pickles that jaxprtool reads besides those of its forks (`execute.sandbox`): a
pickle of a user is never loaded.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from typing import IO, Any, NoReturn, ParamSpec, TypeAlias, TypeVar

from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.files import file_written_whole
from jaxprtool.processes import Child, temporary_folder

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
    command = [sys.executable, "-m", "jaxprtool.processes"]
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
