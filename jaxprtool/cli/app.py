"""The Typer application with all commands.

Neither this module nor its imports import JAX, so that help and completion are fast.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from jaxprtool import registry
from jaxprtool.cli import completion, errors, launch, options, output
from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    OutputError,
    PluginError,
    described,
    did_you_mean,
)
from jaxprtool.ir import process
from jaxprtool.registry import CommandInfo
from jaxprtool.render.terminal.tables import CYAN, GREEN, MAGENTA, RED, YELLOW, color_name

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
    with errors.guarded(show_traceback, options.format_in(arguments)) as ending:
        if sys.stdout is None:
            raise OutputError("stdout is closed")
        errors.use_ascii_where_needed()
        group: Any = _with_brackets_escaped(get_command(app))
        if _COMPLETE in os.environ:
            completion.print_completions(group, arguments, PROGRAM)
        launch.command_line.set(tuple(arguments))
        with (
            process.limit_raised(),
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
