"""Run the processes of one program together: show their output, and end all if one fails.

The process to blame is one that was killed by a signal, or else one that does not report the loss
of another process, as the others do when they notice.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxprtool.processes import Child

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
class Place:
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
    own = [m for m in members if m.code and not any(map(_LOST.search, m.failure().said))]
    return (killed or own or [first])[0].failure()
