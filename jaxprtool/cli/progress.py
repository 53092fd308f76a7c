"""What a command is doing, on one line of the terminal, once it has kept its user waiting.

The line is on stderr, where that is a terminal, and nowhere else. It gives way to whatever is
written to the terminal, and is back only after a second of silence: so that it stands in no line of
the user's program, and beside no prompt.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

#: Is told what a command does from now on, in a few words; nothing is shown of an empty text.
Told: TypeAlias = Callable[[str], object]

#: Seconds without a sign of life that a user is left to wait.
PATIENCE = 1.0

#: Seconds between two pictures of the line.
_TICK = 0.1


def silent(doing: str) -> None:
    """Tell nobody."""


@contextlib.contextmanager
def shown() -> Iterator[Told]:
    """Show what is being done, as what is given is told."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        yield silent
        return
    line = _StatusLine(sys.stderr)
    with contextlib.ExitStack() as streams:
        for name in ("stdin", "stdout", "stderr"):
            streams.enter_context(_watched(name, line))
        line.start()
        try:
            yield line.tell
        finally:
            line.close()


class _StatusLine:
    """A line that a thread of its own draws on a terminal: what is done, and for how long."""

    def __init__(self, terminal: TextIO):
        self.lock = threading.RLock()
        self._terminal = terminal
        self._doing, self._since = "", time.monotonic()
        self._silent_since = self._since
        self._at_margin = True
        self._live: Live | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, doing: str) -> None:
        """Say what is done from now on."""
        with self.lock:
            self._doing, self._since = doing, time.monotonic()
            if not doing:
                self._clear()

    def give_way(self, at_margin: bool | None = None) -> None:
        """Leave the terminal to another; `at_margin` is whether its cursor begins a line then."""
        with self.lock:
            self._clear()
            self._silent_since = time.monotonic()
            if at_margin is not None:
                self._at_margin = at_margin

    def close(self) -> None:
        """Leave the terminal for good."""
        self._closed.set()
        self._thread.join()
        with self.lock:
            self._clear()

    def _run(self) -> None:
        if self._closed.wait(PATIENCE):
            return
        import rich.live
        import rich.spinner  # noqa: F401  (not under the lock, which a module that prints may want)

        with contextlib.suppress(OSError):  # a terminal that has gone away
            while not self._closed.wait(_TICK):
                with self.lock:
                    self._draw()

    def _draw(self) -> None:
        from rich.text import Text

        now = time.monotonic()
        if self._live is None:
            waiting = now - self._silent_since >= PATIENCE
            if not (waiting and self._doing and self._at_margin and self._is_ours()):
                return
            self._spinner, self._live = self._drawing()
        seconds = int(now - self._since)
        text = Text(self._doing + (f" · {seconds} s" if seconds else ""))
        text.truncate(self._live.console.width - 3, overflow="ellipsis")
        self._spinner.update(text=text)
        self._live.refresh()

    def _is_ours(self) -> bool:
        """Return whether this is not a job in the background of the terminal's shell."""
        try:
            return os.tcgetpgrp(self._terminal.fileno()) == os.getpgrp()
        except OSError:  # a terminal without a shell
            return True

    def _drawing(self) -> tuple[Spinner, Live]:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        console = Console(file=self._terminal)
        ascii_only = not console.encoding.startswith("utf")
        spinner = Spinner("line" if ascii_only else "dots")
        live = Live(
            spinner,
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        live.start()
        console.show_cursor(True)  # a process that is stopped or killed leaves one behind
        return spinner, live

    def _clear(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):
                live.stop()


@contextlib.contextmanager
def _watched(name: str, line: _StatusLine) -> Iterator[None]:
    """Have a stream of `sys` that leads to the terminal move the line out of its way."""
    stream = getattr(sys, name)
    if stream is None or not (stream.isatty() or (name == "stdout" and _is_pipe(stream))):
        yield
        return
    watched = (_Input if name == "stdin" else _Output)(stream, line)
    setattr(sys, name, watched)
    try:
        yield
    finally:
        if getattr(sys, name) is watched:  # the user's code may have put another in its place
            setattr(sys, name, stream)


def _is_pipe(stream: TextIO) -> bool:
    """Return True for a pipe: what reads it, `head` or `less`, may write to the terminal."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


class _Output:
    """A stream that writes to the terminal where the line is."""

    def __init__(self, stream: TextIO, line: _StatusLine):
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        with self._line.lock:
            self._line.give_way(text.endswith("\n") if text else None)
            return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Input:
    """A stream that reads from the terminal: whoever asks for it has written a prompt."""

    def __init__(self, stream: TextIO, line: _StatusLine):
        self._stream, self._line = stream, line

    def __iter__(self) -> Iterator[str]:
        self._line.give_way(at_margin=False)
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        self._line.give_way(at_margin=False)
        return getattr(self._stream, name)
