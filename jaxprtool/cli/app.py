"""The Typer application with all commands.

Neither this module nor its imports import JAX, so that help and completion are fast.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from jaxprtool.cli import completion, errors, launch, options, output, start
from jaxprtool.errors import OutputError
from jaxprtool.ir import process
from jaxprtool.render.terminal.tables import CYAN, GREEN, MAGENTA, RED, YELLOW, named

PROGRAM = "jaxprtool"
_COMPLETE = "_JAXPRTOOL_COMPLETE"

_HELP = {"help_option_names": ["-h", "--help"]}
_EPILOG = (
    "[dim]Exit codes: 0 done; 1 a check failed; 2 invalid usage or input; 3 your function "
    "raised; 70 internal error; 130 interrupted.[/]"
)

#: The panels of the help: a title, then its commands with the first lines of their docstrings. A
#: command is the function of this name in the module of this name.
_LISTED = """\
Look
show: Show a function's jaxpr in JAX's own notation.
browse: Browse a jaxpr on the full screen, beside its source.
source: Show each source line with its FLOPs, bytes and residuals.
diff: Show by line which equations differ between two programs.
why: Show what a value affects, and why a gradient is zero.

Measure
cost: Estimate FLOPs and memory traffic; --measure also times it.
memory: Estimate the peak memory, and list what is live at the peak.
residuals: Show the values that a gradient keeps for its backward pass.
profile: Time a compiled function by your lines, with JAX's profiler.
bench: Time variants in turns, with confidence intervals of ratios.
outline: Show code that repeats, and what shortens compilation.
report: Write an HTML report: each pass, cost, memory and residuals.

Run and debug
record: Run a script; record what JAX compiles, and why it recompiles.
run: Compile a function, run it, and show its results and times.
nans: Find the equation that produces the first NaN or infinity.
watch: Run a function and summarize its intermediate values.
compare: Measure how the results of variants of a function differ.
precision: Find the lines that have to stay in f32.
determinism: Run a function in several ways, and compare results bitwise.
reduce: Shrink a function while a check holds, to reproduce a fault.

Rewrite and export
opt: Run passes over a function's jaxpr and print the result.
emit: Export to Python, StableHLO, HLO, a graph or jax.export.
unzip: Split a function into init and apply, by its variables.
vmap: Map a function over an axis, as jax.vmap does.
shapecheck: Check the types of results for all sizes of the arguments.

Several devices
shardings: Show how XLA partitions a function over devices, by line.
backends: List the backends and devices, and those that do not start.

In your repository
check: Check the budgets in pyproject.toml.
lint: Find wasted memory and time, and likely mistakes.

Reference
explain: List the passes; describe a pass, a pipeline or a primitive.
"""
_BLOCKS = [block.splitlines() for block in _LISTED.split("\n\n")]
PANELS = {title: dict(line.split(": ", 1) for line in lines) for title, *lines in _BLOCKS}
COMMANDS = {name: summary for panel in PANELS.values() for name, summary in panel.items()}

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

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        arguments = _with_present_names(arguments)
        if arguments[0] in COMMANDS:
            self.add_command(command(arguments[0]))
        return super().resolve_command(context, arguments)

    def format_help(self, context: Any, formatter: object) -> None:
        from jaxprtool.cli import group_help

        group_help.write(self, context, PANELS)


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


def command(name: str) -> Any:
    """Import the module of a command, and return its Click command."""
    alone = typer.Typer(
        rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
    )
    body = getattr(import_module(f"jaxprtool.cli.{name}"), name)
    alone.command(cls=getattr(body, "click_class", Command), context_settings=_HELP)(body)
    return _with_brackets_escaped(get_command(alone))


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


def answer(arguments: list[str]) -> int:
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
            completion.answer(group, arguments, PROGRAM)
        launch.command_line.set(tuple(arguments))
        with (
            process.limit_raised(),
            start.jax_settings_restored(),
            group.make_context(PROGRAM, arguments) as context,
        ):
            group.invoke(context)
    launch.leave_at_once(ending.code)
    return ending.code


# --- command help ---------------------------------------------------------------------------------
# The help of a command: Typer's, in colors that can be read on black and on white.


class Command(_OrderedHelp, TyperCommand):
    """A command whose help has the colors of `render.terminal.tables`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to stdout."""
        from typer import rich_utils  # slow to import

        rich_utils.STYLE_OPTION = f"bold {named(CYAN)}"
        rich_utils.STYLE_SWITCH = f"bold {named(GREEN)}"
        rich_utils.STYLE_NEGATIVE_OPTION = f"bold {named(MAGENTA)}"
        rich_utils.STYLE_NEGATIVE_SWITCH = f"bold {named(RED)}"
        rich_utils.STYLE_TYPES = f"bold {named(YELLOW)}"
        rich_utils.STYLE_USAGE = named(YELLOW)
        rich_utils.STYLE_REQUIRED_SHORT = named(RED)
        super().format_help(ctx, formatter)
