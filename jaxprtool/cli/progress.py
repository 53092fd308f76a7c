"""A status line on the terminal that shows what a slow command is doing.

The line is shown on stderr if that is a terminal. It is cleared before anything else is written to
the terminal, and shown again after a second without output, so that it never mixes with the user's
output or a prompt.
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

#: Called with a short description of the current work; an empty text hides the line.
OnProgress: TypeAlias = Callable[[str], object]

#: Seconds without output before the line is shown.
PATIENCE = 1.0

#: Seconds between two updates of the line.
_TICK = 0.1


def silent(doing: str) -> None:
    """Ignore progress messages."""


@contextlib.contextmanager
def shown() -> Iterator[OnProgress]:
    """Yield a function that shows progress messages."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        yield silent
        return
    line = _StatusLine(sys.stderr)
    with contextlib.ExitStack() as streams:
        for name in ("stdin", "stdout", "stderr"):
            streams.enter_context(_watched(name, line))
        line.start()
        try:
            yield line.describe
        finally:
            line.close()


class _StatusLine:
    """A line drawn on a terminal by a separate thread: the current work and its duration."""

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

    def describe(self, doing: str) -> None:
        """Set the description of the current work."""
        with self.lock:
            self._doing, self._since = doing, time.monotonic()
            if not doing:
                self._clear()

    def give_way(self, at_margin: bool | None = None) -> None:
        """Clear the line for other output; `at_margin` is True if that ends a line."""
        with self.lock:
            self._clear()
            self._silent_since = time.monotonic()
            if at_margin is not None:
                self._at_margin = at_margin

    def close(self) -> None:
        """Clear the line and stop."""
        self._closed.set()
        self._thread.join()
        with self.lock:
            self._clear()

    def _run(self) -> None:
        if self._closed.wait(PATIENCE):
            return
        import rich.live
        import rich.spinner  # noqa: F401  (outside the lock, since the module may print)

        with contextlib.suppress(OSError):  # the terminal is gone
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
        """Return True unless this is a background job of the terminal's shell."""
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
        console.show_cursor(True)  # a stopped or killed process leaves it hidden
        return spinner, live

    def _clear(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):
                live.stop()


@contextlib.contextmanager
def _watched(name: str, line: _StatusLine) -> Iterator[None]:
    """Replace a stream of `sys` to the terminal by one that clears the line first."""
    stream = getattr(sys, name)
    if stream is None or not (stream.isatty() or (name == "stdout" and _is_pipe(stream))):
        yield
        return
    watched = (_Input if name == "stdin" else _Output)(stream, line)
    setattr(sys, name, watched)
    try:
        yield
    finally:
        if getattr(sys, name) is watched:  # the user's code may have replaced it
            setattr(sys, name, stream)


def _is_pipe(stream: TextIO) -> bool:
    """Return True if a stream is a pipe, whose reader (`less`) may write to the terminal."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


class _Output:
    """An output stream to the terminal of the line."""

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
    """An input stream from the terminal; a reader has written a prompt."""

    def __init__(self, stream: TextIO, line: _StatusLine):
        self._stream, self._line = stream, line

    def __iter__(self) -> Iterator[str]:
        self._line.give_way(at_margin=False)
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        self._line.give_way(at_margin=False)
        return getattr(self._stream, name)
