"""The Typer application with all commands, and the end of a command: errors and exit codes.

Neither this module nor its imports import JAX, so that help and completion are fast.

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
import inspect
import json
import os
import re
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeGuard

import typer
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from jaxprtool import registry
from jaxprtool.cli import completion, launch, options, output
from jaxprtool.cli.options import FormatChoice
from jaxprtool.errors import (
    ArgumentsError,
    Details,
    JaxprToolError,
    OutOfMemoryError,
    OutputError,
    PluginError,
    UserFunctionError,
    described,
    did_you_mean,
    user_traceback,
)
from jaxprtool.ir import process
from jaxprtool.registry import CommandInfo
from jaxprtool.render.terminal.tables import CYAN, GREEN, MAGENTA, RED, YELLOW, color_name

if TYPE_CHECKING:
    from jaxprtool.render.documents import Problem

PROGRAM = "jaxprtool"
_COMPLETE = "_JAXPRTOOL_COMPLETE"

_HELP = {"help_option_names": ["-h", "--help"]}
_EPILOG = (
    "[dim]Exit codes: 0 done; 1 a check failed; 2 invalid usage or input; 3 your function "
    "raised; 70 internal error; 130 interrupted.[/]"
)

#: Other names of commands.
_ALIASES = {"deps": "why"}

#: The names that commands and their options had before.
_RENAMED = {
    "passes": "explain",
    "compare --html": "--output",
    "profile --html": "--output",
    "memory --plot": "--output",
}


class _OrderedHelp:
    """Shows the names of the help option in one order: typer keeps them in a set."""

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return sorted(super().get_help_option_names(ctx), key=len)  # type: ignore[misc]


class _Commands(_OrderedHelp, TyperGroup):
    """The group of all commands. A command's module is imported when the command is called.

    The group's own help, and the completion of a command's name, need only the summaries.
    """

    def list_commands(self, context: Any) -> list[str]:
        return list(registry.commands())

    def get_command(self, context: Any, name: str) -> Any:
        found = self.commands.get(name)
        if found is None and (info := registry.command_info(name)) is not None:
            return TyperCommand(name, help=info.summary)
        return found

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        arguments = _with_present_names(arguments)
        if (info := registry.command_info(arguments[0])) is not None:
            self.add_command(load_command(arguments[0], info))
        elif not context.resilient_parsing and (
            near := did_you_mean(arguments[0], [*registry.commands(), *_ALIASES])
        ):
            raise ArgumentsError(f"no such command '{arguments[0]}'", near)
        return super().resolve_command(context, arguments)

    def format_help(self, context: Any, formatter: object) -> None:
        write_help(self, context, registry.panels())


def _with_present_names(arguments: list[str]) -> list[str]:
    """Return a command line in which old names are replaced, and warn of each."""
    name, *rest = arguments
    present = [_present_name(name, _ALIASES.get(name, name))]
    for argument in rest:
        option, sign, value = argument.partition("=")
        present.append(_present_name(f"{name} {option}", option) + sign + value)
    return present


def _present_name(former: str, name: str) -> str:
    """Return the present name of a command or an option, and warn if it is another one."""
    if renamed := _RENAMED.get(former):
        output.warning(f"`{former}` is now `{renamed}`")
    return renamed or name


def load_command(name: str, info: CommandInfo) -> Any:
    """Import a command, and return its Click command.

    Raises:
        PluginError: If it is of a plug-in, and cannot be imported.
    """
    alone = typer.Typer(
        rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
    )
    body = _imported_command(name, info)
    alone.command(name, cls=getattr(body, "click_class", ColoredCommand), context_settings=_HELP)(
        body
    )
    return _with_brackets_escaped(get_command(alone))


def _imported_command(name: str, info: CommandInfo) -> Any:
    """Import the function of a command."""
    try:
        return registry.imported(info.run)
    except (Exception, SystemExit) as error:
        if isinstance(error, JaxprToolError) or info.run.startswith(f"{PROGRAM}."):
            raise
        raise PluginError(f"command '{name}' cannot be imported: {described(error)}") from error


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=_HELP,
    epilog=_EPILOG,
)


def _version(wanted: bool) -> None:
    if wanted:
        from jaxprtool import __version__

        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", help="Print the version.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Show, rewrite and run jaxprs, the intermediate language of JAX.

    [bold]Examples[/]

      jaxprtool record samples/train.py
      jaxprtool show samples/transformer.py:loss
      jaxprtool show jax.numpy:linalg.det --args "f32[4,4]"
      jaxprtool source samples/transformer.py:loss -p grad
      jaxprtool nans samples/transformer.py:loss -p grad
      jaxprtool opt samples/transformer.py:loss -p dce --stats
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


#: The bracket of a type, `f32[n]`, or of a TOML table, which Rich would read as a style.
_BRACKET = re.compile(r"\[(?=[a-z])(?!(?:bold|dim)\])")


#: A line break between two lines of a paragraph; examples are indented.
_WITHIN_PARAGRAPH = re.compile(r"(?<=\S)\n(?=\S)")


def _with_brackets_escaped(command: Any) -> Any:
    """Return a command with brackets escaped in its help and in that of its parameters."""
    for element in (command, *command.params):
        if getattr(element, "help", None):
            element.help = _BRACKET.sub(r"\\[", element.help)
    if command.help:
        command.help = _WITHIN_PARAGRAPH.sub(" ", command.help)  # filled again by Rich
    return command


def run_command_line(arguments: list[str]) -> int:
    """Run a command line, and return its exit code."""
    show_traceback = "--traceback" in arguments
    # JAX reads these when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if show_traceback:
        os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
    if sys.stderr is None:  # closed by the parent process, like stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    with guarded(show_traceback, options.format_in(arguments)) as ending:
        if sys.stdout is None:
            raise OutputError("stdout is closed")
        use_ascii_where_needed()
        group: Any = _with_brackets_escaped(get_command(app))
        if _COMPLETE in os.environ:
            completion.print_completions(group, arguments, PROGRAM)
        launch.command_line.set(tuple(arguments))
        with (
            process.limit_raised(),
            process.rare_collections(),
            launch.jax_settings_restored(),
            group.make_context(PROGRAM, arguments) as context,
        ):
            group.invoke(context)
    launch.leave_at_once(ending.code)
    return ending.code


# --- command help ---------------------------------------------------------------------------------
# The help of a command: Typer's, in colors that can be read on black and on white.


class ColoredCommand(_OrderedHelp, TyperCommand):
    """A command whose help has the colors of `render.terminal.tables`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to stdout."""
        from typer import rich_utils  # slow to import

        rich_utils.STYLE_OPTION = f"bold {color_name(CYAN)}"
        rich_utils.STYLE_SWITCH = f"bold {color_name(GREEN)}"
        rich_utils.STYLE_NEGATIVE_OPTION = f"bold {color_name(MAGENTA)}"
        rich_utils.STYLE_NEGATIVE_SWITCH = f"bold {color_name(RED)}"
        rich_utils.STYLE_TYPES = f"bold {color_name(YELLOW)}"
        rich_utils.STYLE_USAGE = color_name(YELLOW)
        rich_utils.STYLE_REQUIRED_SHORT = color_name(RED)
        super().format_help(ctx, formatter)


# --- group help -----------------------------------------------------------------------------------
# The help of `jaxprtool` itself: summary, examples, commands and options.
#
# Typer renders the help of each command with Rich's Markdown and tracebacks, which are slower to
# import than everything this page needs.


def write_help(group: Any, context: Any, panels: Mapping[str, Mapping[str, CommandInfo]]) -> None:
    """Write the help of the command group to stdout, with the commands by panel."""
    console = output.console(sys.stdout)
    usage = Text.assemble(
        ("Usage: ", color_name(YELLOW)), (group.get_usage(context)[len("Usage: ") :], "bold")
    )
    console.print(Padding(usage, 1))
    console.print(Padding(Text.from_markup(inspect.cleandoc(group.help)), (0, 1, 1, 1)))
    width = max(len(name) for commands in panels.values() for name in commands)
    for title, commands in panels.items():
        rows = [(name, command.summary) for name, command in commands.items()]
        console.print(_panel(title, rows, width))
    options = [(", ".join(param.opts), param.help) for param in group.get_params(context)]
    console.print(_panel("Options", options))
    console.print(Padding(Text.from_markup(group.epilog), (1, 1)))


def _panel(title: str, rows: Iterable[tuple[str, str]], width: int | None = None) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=f"bold {color_name(CYAN)}", no_wrap=True, width=width)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return Panel(table, title=title, title_align="left", border_style="dim")


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
    from jaxprtool.ir.source_text import BEHIND

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
    from jaxprtool.ir.source_text import UNKNOWN
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
