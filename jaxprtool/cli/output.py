"""Output: results to stdout, all else to stderr, a status line, and files written atomically."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TextIO, TypeAlias

from jaxprtool.errors import OutputError
from jaxprtool.files import STDOUT, file_written_whole, is_stream, suffix_of
from jaxprtool.render.terminal.tables import CYAN, RED, YELLOW

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    from jaxprtool.errors import Details
    from jaxprtool.formats.emission import Emission, Format
    from jaxprtool.ir.program import Program
    from jaxprtool.render.terminal.lines import Listing
    from jaxprtool.render.terminal.tables import Rendering

# --- output ---------------------------------------------------------------------------------------
# Output: results to stdout, everything else to stderr; files are written atomically.

STDOUT_DESCRIPTOR, STDERR_DESCRIPTOR = 1, 2

#: The suffix of pages.
PAGE = ".html"

#: Whether the running command has written its JSON document.
has_written_json = ContextVar("has_written_json", default=False)

#: The most bytes of this document; None if it may have any number.
max_bytes = ContextVar[int | None]("max_bytes", default=None)

#: The width of a listing in a file or a pipe, as in `str(jaxpr)`.
PIPED_WIDTH = 80


# --- messages ---------------------------------------------------------------------------------


def colors(stream: TextIO) -> bool:
    """Return True to write colors: on terminals, unless NO_COLOR or FORCE_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """Print a line on stderr. If that fails, only the exit code reports the error."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        discard(STDERR_DESCRIPTOR)


def discard(descriptor: int) -> None:
    """Redirect a file descriptor to the null device, so that flushing it does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextmanager
def only_python_on_stdout() -> Iterator[None]:
    """Redirect to stderr what native libraries print on stdout, since it is not a result."""
    stdout = sys.stdout
    stdout.flush()
    copy = os.dup(STDOUT_DESCRIPTOR)
    os.dup2(STDERR_DESCRIPTOR, STDOUT_DESCRIPTOR)
    try:
        is_own = sys.stdout is sys.__stdout__
        if not is_own:  # a caller in this process reads what Python prints
            yield
            return
        with open(copy, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False) as out:
            sys.stdout = out
            yield
    finally:
        sys.stdout = stdout
        os.dup2(copy, STDOUT_DESCRIPTOR)
        os.close(copy)


def error(message: str, hint: str | None = None, details: Details = ()) -> None:
    """Print `error: message`, a line for each detail, and `hint: hint`."""
    _labelled("error", RED, message)
    labels = max((len(label) for label, _ in details), default=0)
    for label, text in details:
        say(_filled(f"  {label:<{labels}}  {text}", labels + 4))
    if hint:
        _labelled("hint", CYAN, hint)


def warning(message: str) -> None:
    """Print `warning: message`."""
    _labelled("warning", YELLOW, message)


def note(message: str) -> None:
    """Print `note: message`: information about a result."""
    _labelled("note", CYAN, message)


def names_text(names: Sequence[str]) -> str:
    """Return names as text, or their number if there are many."""
    return f"{len(names)} arguments" if len(names) > 4 else ", ".join(names)


def _labelled(label: str, color: int, message: str) -> None:
    text = "\n".join(map(_filled, f"{label}: {message}".splitlines()))
    if colors(sys.stderr):
        text = f"\x1b[1;38;5;{color}m{label}\x1b[0m{text[len(label) :]}"
    say(text)


def _filled(line: str, indent: int = 0, stream: TextIO | None = None) -> str:
    """Return a line for stderr (or another stream), wrapped if that is a terminal."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return line
    import textwrap

    return textwrap.fill(
        line,
        width(stream),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# --- results ----------------------------------------------------------------------------------


def console(stream: TextIO | None = None, colored: bool | None = None) -> Console:
    """Return a Rich console on stdout (or another stream); by default it follows `colors`."""
    from rich.console import Console

    stream = stream or sys.stdout
    colored = colors(stream) if colored is None else colored
    return Console(
        file=stream,
        force_terminal=colored,
        force_jupyter=False,
        color_system="auto" if colored else None,
        no_color=not colored,
        highlight=False,
        width=None if stream.isatty() or os.environ.get("COLUMNS") else PIPED_WIDTH,
        soft_wrap=False,
    )


def width(stream: TextIO | None = None) -> int:
    """Return the width of the terminal, or PIPED_WIDTH without one."""
    stream = stream or sys.stdout
    return size(stream)[0] if stream.isatty() else PIPED_WIDTH


def size(terminal: TextIO) -> tuple[int, int]:
    """Return the columns and lines of a terminal, some of which report zero."""
    try:
        columns, lines = os.get_terminal_size(terminal.fileno())
    except OSError:  # it only claims to be a terminal
        columns = lines = 0
    return columns or PIPED_WIDTH, lines or 24


def write_text(text: str) -> None:
    """Write a text result to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def write_exactly(text: str) -> None:
    """Write a program to stdout unchanged, so that it can be read again.

    Raises OutputError if the encoding of stdout lacks a character of it.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as fault:
        raise OutputError(
            f"stdout uses the encoding {encoding}, which lacks '{text[fault.start]}'",
            "write a file (-o FILE), or set PYTHONUTF8=1",
        ) from None
    write_text(text)


def say_if_partitioned(programs: Iterable[Program], json: bool) -> None:
    """Print a line if costs are of all devices together, because XLA partitions the program.

    With JSON output, this is a note on stderr.
    """
    from jaxprtool.ir.meshes import left_to_partitioner, partitioner_note

    for program in programs:
        if text := partitioner_note(program.name, left_to_partitioner(program)):
            note(text) if json else write_text(_filled(text, stream=sys.stdout))


def say_unused_donations(programs: Iterable[Program]) -> None:
    """Print notes on donated arguments whose memory no result can use, and why, on stderr."""
    donors = [program for program in programs if program.jit is not None]
    if not donors:
        return
    from jaxprtool.ir.donation import donation_notes, donations

    for program in donors:
        for text in donation_notes(program.name, donations(program).unused):
            note(text)


def write_programs(
    programs: Sequence[tuple[str, Program]],
    render: Callable[[Program], Rendering | Listing],
    stream: TextIO | None = None,
) -> None:
    """Write programs to stdout (or another stream), rendered by `render`.

    Several programs are each preceded by their name as a comment.
    """
    stream = stream or sys.stdout
    for i, (name, program) in enumerate(programs):
        if len(programs) > 1:
            stream.write(f"{chr(10) if i else ''}# {name}\n")
        write_rendered(render(program), stream)


def write_listings(
    programs: Sequence[tuple[str, Program]], stream: TextIO | None = None, **shown: Any
) -> None:
    """Write whole programs in JAX's notation at the stream's width; `shown` are `ShowOptions`."""
    from jaxprtool.render.terminal.listing import ShowOptions, listing

    stream = stream or sys.stdout
    options = ShowOptions(width=width(stream), fit=stream.isatty(), **shown)
    write_programs(programs, lambda program: listing(program, options), stream)


def is_page(out: str | None) -> bool:
    """Return True if a file name is that of a page."""
    return suffix_of(out) == PAGE


def check_out(
    command: str,
    out: str | None,
    json: bool,
    formats: Sequence[Format],
    instead: str,
    page: bool = False,
) -> None:
    """Raise OutputError for a file name of -o whose format the command does not write.

    `instead` is the command that writes it; with `page`, pages are allowed. Also raises OutputError
    for two documents on stdout.
    """
    from jaxprtool.formats.emission import SUFFIXES

    if json and out == STDOUT:
        raise OutputError(
            "--json and -o - cannot both write to stdout", "write the program to a file"
        )
    ends = [end for end, (kind, _) in SUFFIXES.items() if kind in formats]
    ends += [PAGE] if page else []
    suffix = suffix_of(out)
    if ends == [PAGE] and suffix not in (*ends, *SUFFIXES, ""):
        raise OutputError(f"{command} writes {PAGE} files, but -o names '{out}'")
    if suffix not in ends and (suffix in SUFFIXES or is_page(out)):
        instead = "jaxprtool show TARGET" if is_page(out) else instead
        raise OutputError(
            f"{command} writes {' and '.join(ends)} files, but -o names '{out}'",
            f"`{instead} -o {out}` writes that format",
        )


def refuse_stdout(option: str, path: str | None, command: str) -> None:
    """Raise OutputError for `-` after an option that takes a file."""
    if path == STDOUT:
        raise OutputError(f"{option} takes a file, because {command} prints to stdout")


def figure_format(path: str) -> str:
    """Return the format of a figure by the name of its file: "svg" or "png".

    Raises:
        OutputError: If it is another one, or matplotlib, which draws figures, is not installed.
    """
    suffix = suffix_of(path)
    if suffix not in (".svg", ".png"):
        raise OutputError(f"cannot draw '{path}': its name must end in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise OutputError(
            f"cannot draw '{path}': matplotlib is not installed", "pip install matplotlib"
        )
    return suffix[1:]


@contextmanager
def written_file(path: str) -> Iterator[BinaryIO]:
    """Open a file as `file_written_whole` does, and say that it was written."""
    with file_written_whole(path) as file:
        yield file
    say_written([path])


def say_written(paths: Iterable[str]) -> None:
    """Print the path and size of each file that was written, on stderr."""
    from jaxprtool.ir.documents import in_bytes

    for path in paths:
        if not is_stream(path):
            say(f"wrote {path}, {in_bytes(os.path.getsize(path))}")


def write_page(page: str, out: str | None) -> None:
    """Write a page atomically to the file of -o, or to stdout without it."""
    if out in (None, STDOUT):
        write_text(page)
        return
    with written_file(out) as file:
        file.write(page.encode())


def write_files(programs: Sequence[tuple[str, Program]], emission: Emission, out: str) -> None:
    """Write programs to the destination of -o, all or none; one may go to stdout."""
    if out == STDOUT and len(programs) == 1:
        content = emission.content(programs[0][1])
        assert isinstance(content, str)
        write_exactly(content)
    else:
        say_written(emission.write(programs, out))


def write_rendered(
    rendered: Rendering | Listing, stream: TextIO | None = None, colored: bool | None = None
) -> None:
    """Write an object with a plain text that is also a Rich renderable, for colors."""
    stream = stream or sys.stdout
    if colors(stream) if colored is None else colored:
        console(stream, True).print(rendered, soft_wrap=True)
    else:
        stream.write(rendered.plain() + "\n")


def write_each(rendered: Iterable[Rendering | Listing]) -> None:
    """Write several objects with `write_rendered`, separated by an empty line."""
    for i, block in enumerate(rendered):
        if i:
            write_text("")
        write_rendered(block)


def write_json(document: object) -> None:
    """Write a result as JSON to stdout, within `max_bytes`."""
    from jaxprtool.render.documents import document_text

    write_json_text(document_text(document, max_bytes.get()))


def write_json_text(text: str) -> None:
    """Write the text of a JSON document to stdout."""
    write_text(text)
    has_written_json.set(True)


@contextmanager
def max_bytes_set(most: int | None) -> Iterator[None]:
    """Limit the JSON document that is written in a `with` block."""
    token = max_bytes.set(most)
    try:
        yield
    finally:
        max_bytes.reset(token)


def write_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Write a table of texts to stdout (or another stream); columns in `right` are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    printer = console(stream)
    with printer.capture() as captured:
        printer.print(table)
    lines = (line.rstrip() for line in captured.get().splitlines())
    print(*lines, sep="\n", file=stream or sys.stdout)


@contextmanager
def paged(wanted: bool) -> Iterator[None]:
    """Send stdout through $PAGER (less), if `wanted` and on a terminal.

    Raises OutputError if the pager cannot be started.
    """
    if not (wanted and sys.stdout.isatty()):
        yield
        return
    import shlex
    import signal
    import subprocess

    command = shlex.split(os.environ.get("PAGER") or "less")
    environment = {"LESS": "FRX", **os.environ}
    try:
        pager = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)
    except OSError as fault:
        raise OutputError(
            f"cannot start the pager '{command[0]}': {fault.strerror}",
            hint="set PAGER to an installed program, or omit --pager",
        ) from fault
    assert pager.stdin is not None
    terminal, terminal_interrupt = sys.stdout, signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = _PagerInput(pager.stdin, terminal)
    try:
        yield
    except BrokenPipeError:  # the user has quit the pager
        pass
    finally:
        sys.stdout = terminal
        with suppress(BrokenPipeError):
            pager.stdin.close()
        pager.wait()
        signal.signal(signal.SIGINT, terminal_interrupt)


class _PagerInput:
    """The pager's stdin, with the colors and the width of the pager's terminal."""

    def __init__(self, pipe: IO[str], terminal: TextIO):
        self._pipe = pipe
        self._terminal = terminal

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


# --- progress -------------------------------------------------------------------------------------
# A status line on the terminal that shows what a slow command is doing, or lines elsewhere.
#
# The line is shown on stderr if that is a terminal. It is cleared before anything else is written
# to the terminal, and shown again after a second without output, so that it never mixes with the
# user's output or a prompt. Any other stderr, such as a log, gets a line every few seconds.

#: Called with a short description of the current work; an empty text hides the line.
OnProgress: TypeAlias = Callable[[str], object]

#: Seconds without output before the line is shown.
PATIENCE = 1.0

#: Seconds between two updates of the line.
_TICK = 0.1

#: Seconds between two lines if stderr is no terminal, and between two equal ones.
LINE_SECONDS, SAME_LINE_SECONDS = 10.0, 60.0


def silent(doing: str) -> None:
    """Ignore progress messages."""


@contextlib.contextmanager
def progress_shown() -> Iterator[OnProgress]:
    """Yield a function that shows progress messages."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        yield from _progress_lines()
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


def _progress_lines() -> Iterator[OnProgress]:
    """Yield a function whose last message is printed on stderr every few seconds."""
    latest = "", time.monotonic()
    closed = threading.Event()

    def describe(doing: str) -> None:
        nonlocal latest
        latest = doing, time.monotonic()

    def print_lines() -> None:
        printed, printed_at = latest, 0.0
        while not closed.wait(LINE_SECONDS):
            doing, since = latest
            is_due = printed != latest or time.monotonic() - printed_at > SAME_LINE_SECONDS
            if doing and is_due:
                say(_with_seconds(doing, since))
                printed, printed_at = (doing, since), time.monotonic()

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield describe
    finally:
        closed.set()
        thread.join()


def _with_seconds(doing: str, since: float) -> str:
    """Return a progress message with the seconds since it was received."""
    seconds = int(time.monotonic() - since)
    return doing + (f" · {seconds} s" if seconds else "")


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
        text = Text(_with_seconds(self._doing, self._since))
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

        console = Console(file=self._terminal, force_jupyter=False)
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
    watched = (_Input if name == "stdin" else _TerminalOutput)(stream, line)
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


class _TerminalOutput:
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
