"""The end of a command: errors and problems, exit codes, and streams of ASCII.

0    done
1    a check failed
2    bad usage or bad input
3    the user's own function raised; its frames are shown, JAX's and ours are not
70   a fault of jaxprtool's own
130  interrupted with Ctrl-C
141  the reader of the output closed it (`| head`); nothing is printed
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import typer

from jaxprtool.cli import output
from jaxprtool.cli.options import FormatChoice
from jaxprtool.errors import (
    Details,
    JaxprToolError,
    OutOfMemoryError,
    OutputError,
    UserFunctionError,
    user_traceback,
)

if TYPE_CHECKING:
    from jaxprtool.render.documents import Problem

# --- errors ---------------------------------------------------------------------------------------
# The end of a command: errors as one line on stderr, and exit codes for scripts.

INTERNAL, INTERRUPTED, BROKEN_PIPE = 70, 130, 141

#: The number of frames shown at either end of a deep call stack.
FRAMES = 8

#: The hint of an out-of-memory error that does not state how much memory was needed.
_LIMITS = "give the process more memory or threads: `ulimit -a` lists its limits"

#: The hint of a program that is nested too deeply.
_WHERE = "--traceback shows where"

#: Messages of Python, JAX and the dynamic loader when the system has no more memory.
_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|[Cc]annot allocate memory|failed to map segment|can't start new thread"
)

#: Click's ClickException and UsageError, taken from Typer, which may bundle its own click.
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
_CLICK_EXCEPTION: Any = _USAGE_ERROR.__bases__[0]


class ErrorText(NamedTuple):
    """The description of an error.

    Attributes:
        message: What is wrong, in one line.
        hint: What to do about it; null if nothing is known.
        details: Facts about it, each a label and a text.
        exit_code: The exit code of the command.
    """

    message: str
    hint: str | None
    details: Details
    exit_code: int


class ErrorDocument(NamedTuple):
    """The document of any command with `--json` that ends with an error, which stderr has too.

    Attributes:
        error: The error.
    """

    error: ErrorText


class Ending:
    """The outcome of the command inside `guarded`."""

    code = 0


@contextmanager
def guarded(show_traceback: bool, format: FormatChoice = "text") -> Iterator[Ending]:
    """Catch exceptions of a command, print them on stderr, and record the exit code.

    Unless `format` is text, the error is also written to stdout as a document. A failed check has
    written its document already, so none is added.
    """
    ending = Ending()
    output.has_written_json.set(False)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _Warnings().show  # type: ignore[assignment]
            yield ending
            sys.stdout.flush()
    except (typer.Exit, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else stop.exit_code
        ending.code = code if isinstance(code, int) else int(code is not None)
    except BrokenPipeError:
        output.discard(output.STDOUT_DESCRIPTOR)
        ending.code = BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        output.say("interrupted")
        ending.code = INTERRUPTED
    except Exception as error:
        if _is_of_stdout(error):
            output.discard(output.STDOUT_DESCRIPTOR)
            error = OutputError(f"cannot write to stdout: {error.strerror}")
        elif show_traceback:
            traceback.print_exception(error)
        error = _failure_to_start(error) or error
        text = _error_text(error, show_traceback)
        if isinstance(error, UserFunctionError) and not show_traceback:
            _show_frames(error)
        output.error(text.message, text.hint, text.details)
        ending.code = text.exit_code
        if format != "text" and not output.has_written_json.get():
            _write_document(text, format)


def _failure_to_start(error: Exception) -> JaxprToolError | None:
    """Return the error to report if an exception is JAX's failure to start its backends.

    The user's code and plug-ins may start them too, and JAX raises exceptions of any type.
    """
    backends = sys.modules.get("jaxprtool.ir.backends")  # unless the command imports no JAX
    return None if backends is None else backends.backend_start_error(error)


def _write_document(text: ErrorText, format: FormatChoice) -> None:
    if format == "json":
        output.write_json(ErrorDocument(text))
        return
    details = [f"{label} {detail}" for label, detail in text.details]
    write_problems([], format, failure="\n".join([text.message, *details]))


def _error_text(error: Exception, show_traceback: bool) -> ErrorText:
    """Return the description of an exception."""
    if isinstance(error, JaxprToolError):
        return ErrorText(error.message, error.hint, error.details, error.exit_code)
    if isinstance(error, _CLICK_EXCEPTION):
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "jaxprtool"
        message = _one_line(error.format_message()).rstrip(".").replace("Value error, ", "")
        hint = f"run `{path} --help` for its arguments and options"
        return ErrorText(message[:1].lower() + message[1:], hint, (), 2)
    if _is_of_memory(error):
        message = f"out of memory: {_one_line(str(error)) or type(error).__name__}"
        return ErrorText(message, _LIMITS, (), OutOfMemoryError.exit_code)
    if isinstance(error, RecursionError):
        message = "the bodies of the program are nested too deeply for this command"
        return ErrorText(message, _WHERE, (), JaxprToolError.exit_code)
    message = f"internal error: {type(error).__name__}: {_one_line(str(error))}"
    report = None if show_traceback else "report it with the output of --traceback"
    return ErrorText(message, report, (), INTERNAL)


def _is_of_memory(error: Exception) -> bool:
    """Return True if an error of any library says that memory or threads are exhausted."""
    return isinstance(error, MemoryError) or bool(_MEMORY.search(str(error)))


def _show_frames(error: UserFunctionError) -> None:
    """Print the user's frames, outermost first, each with its source line.

    Consecutive library frames are represented by the innermost one, on one line.
    """
    from jaxprtool.ir.frames import Root, frames_now
    from jaxprtool.ir.places import BEHIND

    frames = frames_now([Root(*root) for root in error.roots])
    shown: list[list[str]] = []
    for is_users, group in groupby(
        user_traceback(error), lambda frame: frames.is_users(frame.filename)
    ):
        places = [
            (f"{frames.path(frame.filename)}:{frame.lineno}, in {frame.name}", frame.line)
            for frame in group
        ]
        if not is_users:
            shown.append([f"{BEHIND.lstrip()}{places[-1][0]}"])
            continue
        for (place, line), same in groupby(places):
            count = len(list(same))
            lines = [place, f"  {line}"] if line else [place]
            shown.append([*lines, f"  [{count} times]"] if count > 1 else lines)
    if len(shown) > 2 * FRAMES:
        shown[FRAMES:-FRAMES] = [[f"[{len(shown) - 2 * FRAMES} more frames]"]]
    for line in (line for lines in shown for line in lines):
        output.say(f"  {line}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


class _Warnings:
    """Shows warnings; only the first of those that JAX's cache issues per program."""

    _FAULT = re.compile(r"Error \w+ persistent compilation cache entry for '.*?': ")

    def __init__(self) -> None:
        self._cache_failed = False

    def show(self, message: Warning | str, *_: object, **__: object) -> None:
        text = _one_line(str(message))
        if fault := self._FAULT.match(text):
            if self._cache_failed:
                return
            self._cache_failed = True
            text = f"JAX's compilation cache failed: {text[fault.end() :]}"
        output.warning(text)


def _is_of_stdout(error: Exception) -> TypeGuard[OSError]:
    """Return True if an error is from a full or broken disk behind stdout."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    return isinstance(error, OSError) and error.filename is None and error.errno in full


# --- problems -------------------------------------------------------------------------------------
# Problems on stdout, in the formats that other programs read.


def write_problems(
    problems: Sequence[Problem],
    format: FormatChoice,
    about: Mapping[str, str] = MappingProxyType({}),
    failure: str | None = None,
) -> None:
    """Write problems to stdout, with paths from the root of the git repository.

    Args:
        problems: The problems.
        format: "sarif" or "github".
        about: The descriptions of the codes of problems.
        failure: Why the command could not look for problems; None if it did.
    """
    from jaxprtool import __version__
    from jaxprtool.ir.places import UNKNOWN
    from jaxprtool.render.documents import Problem, github_annotations, repository_root, sarif

    root = repository_root(os.getcwd())
    if format == "sarif":
        log = sarif(problems, __version__, root, about, failure)
        output.write_text(json.dumps(log, indent=2, allow_nan=False))
    elif failure is not None:
        output.write_text(github_annotations([Problem("error", UNKNOWN, failure, ())], root))
    elif problems:
        output.write_text(github_annotations(problems, root))


# --- signs ----------------------------------------------------------------------------------------
# ASCII substitutes for symbols of listings, curves and tables, if a stream's encoding lacks them.
#
# The encoding of a pipe on Windows lacks box-drawing characters and arrows. Other characters, such
# as in names, are written as escapes. Programs meant to be read again are never changed in this
# way: see `output`.

#: The name of the error handler.
_HANDLER = "jaxprtool.signs"

#: Python's default error handlers for characters that a stream lacks; PYTHONIOENCODING sets others.
_DEFAULTS = ("strict", "surrogateescape", "backslashreplace")

#: Symbols in ASCII; bars are in order of height.
_SIGNS = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True)),
    **dict(zip("↑↓▾▼▸►·•µ", "^vvv>>.*u", strict=True)),
    "→": "->",
    "←": "<-",
    "…": "...",
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
}


def use_ascii_where_needed() -> None:
    """Set stdout and stderr to write characters that their encodings lack in ASCII."""
    codecs.register_error(_HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in _DEFAULTS and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(in_ascii, error.object[error.start : error.end])), error.end


def in_ascii(sign: str) -> str:
    """Return a character in ASCII: a similar symbol, or else its escape."""
    if sign in _SIGNS:
        return _SIGNS[sign]
    name = unicodedata.name(sign, "")
    if name.startswith("BRAILLE"):
        return " " if name.endswith("BLANK") else "*"
    if name.startswith("BOX DRAWINGS"):
        lines = [line for line in ("HORIZONTAL", "VERTICAL") if line in name]
        ends = any(end in name for end in ("UP", "DOWN", "LEFT", "RIGHT"))
        return "+" if ends or len(lines) != 1 else "-" if lines == ["HORIZONTAL"] else "|"
    return sign.encode("ascii", "backslashreplace").decode()
