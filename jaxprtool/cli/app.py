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

from jaxprtool.cli import completion, errors, launch, signs, start
from jaxprtool.errors import OutputError

PROGRAM = "jaxprtool"
_COMPLETE = "_JAXPRTOOL_COMPLETE"

_HELP = {"help_option_names": ["-h", "--help"]}
_EPILOG = (
    "[dim]Exit codes: 0 done; 1 a check failed; 2 invalid usage or input; 3 your function "
    "raised; 70 internal error; 130 interrupted.[/]"
)

#: The commands, each a function in the module of its name, and the first lines of their docstrings.
_LISTED = """\
record: Run a script unchanged, and record what JAX compiles in it: what, how often, why again.
show: Show a function's jaxpr in JAX's own notation.
browse: Browse a function's jaxpr on the full screen, beside its source.
cost: Estimate a function's FLOPs and memory traffic; --measure also compiles and times it.
source: Show your source files with each line's FLOPs, bytes and residuals.
profile: Run a compiled function under JAX's profiler, and show the time by your own lines.
memory: Estimate a function's peak memory, and list the values that are live at the peak.
shardings: Show what XLA's partitioner makes of a function on several devices, by line.
residuals: Show the residuals: the values that a gradient keeps for its backward pass.
lint: Find what costs memory or time for nothing in a function, or makes its results wrong.
why: Show what an argument affects, or what a result depends on, by source line.
report: Write an HTML report: the listing after each pass, cost, memory and residuals.
opt: Run passes over a function's jaxpr and print the result.
diff: Show which equations were removed, added or changed between two programs, by line.
run: Compile a function, run it, and show its results and times.
nans: Find the equation that produces the first NaN or infinity, and whether it reaches a result.
watch: Run a function and summarise its intermediate values.
compare: Run variants of a function on the same inputs, and measure how their results differ.
bench: Time variants of a function in turns, with the confidence interval of their ratios.
reduce: Shrink a function while a check holds, to reproduce a crash or wrong result.
emit: Write a function as Python source, StableHLO, HLO, a graph or a jax.export artifact.
unzip: Split a function into init, which makes its variables, and apply, which takes them.
vmap: Map a function over an axis, as jax.vmap does; --args are those of one batch element.
outline: Show the bodies that a function repeats, and what shortens its compilation.
shapecheck: Check the types of a function's results for all sizes of its arguments.
passes: List the available passes and named pipelines; `explain NAME` describes one.
explain: Describe a pass with its options and rules, a named pipeline, or a primitive.
backends: List the backends and devices of this machine, and those that do not start.
"""
COMMANDS = dict(line.split(": ", 1) for line in _LISTED.splitlines())


class _Commands(TyperGroup):
    """The group of all commands. A command's module is imported when the command is called.

    The group's own help, and the completion of a command's name, need only the summaries.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        if arguments[0] in COMMANDS:
            self.add_command(command(arguments[0]))
        return super().resolve_command(context, arguments)

    def format_help(self, context: Any, formatter: object) -> None:
        from jaxprtool.cli import group_help

        group_help.write(self, context)


def command(name: str) -> Any:
    """Import the module of a command, and return its Click command."""
    alone = typer.Typer(
        rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
    )
    body = getattr(import_module(f"jaxprtool.cli.{name}"), name)
    alone.command(cls=getattr(body, "click_class", None), context_settings=_HELP)(body)
    return _with_types_escaped(get_command(alone))


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

      jaxprtool show samples/transformer.py:loss
      jaxprtool show jax.numpy:linalg.det --args "f32[4,4]"
      jaxprtool browse samples/transformer.py:loss
      jaxprtool cost samples/transformer.py:loss -p grad
      jaxprtool source samples/transformer.py:loss -p grad
      jaxprtool profile samples/transformer.py:loss -p grad
      jaxprtool memory samples/transformer.py:loss -p grad
      jaxprtool residuals samples/transformer.py:loss
      jaxprtool lint samples/transformer.py:loss
      jaxprtool why samples/transformer.py:loss "params['positions']"
      jaxprtool report samples/transformer.py:loss -p grad -o report.html
      jaxprtool opt  samples/transformer.py:loss -p dce --stats
      jaxprtool run  samples/transformer.py:loss --backend cpu
      jaxprtool nans samples/transformer.py:loss -p grad
      jaxprtool watch samples/transformer.py:loss --by scope
      jaxprtool compare samples/transformer.py:loss -p "" -p "-O2"
      jaxprtool bench samples/transformer.py:loss -p "" -p "-O2"
      jaxprtool diff samples/transformer.py:loss@HEAD samples/transformer.py:loss
      jaxprtool reduce samples/rnn.py:loss --check "grep -q tanh {}" -o small.jaxpr
      jaxprtool emit samples/transformer.py:loss --to stablehlo
      jaxprtool unzip samples/mlp_variables.py:net -o net/
      jaxprtool vmap samples/batching.py:loss --in-axes "(None, 0)" --axis-size 32
      jaxprtool outline samples/layers.py:loss -p value_and_grad
      jaxprtool shapecheck jax.nn:softmax "f32[n,d]" "f32[n,d]"
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


#: The bracket of a type, `f32[n]`, which Rich would read as a style.
_TYPE_BRACKET = re.compile(r"(?<=[\w>])\[(?=[a-z])")


def _with_types_escaped(command: Any) -> Any:
    """Return a command with types escaped in its help and in that of its parameters."""
    for each in (command, *command.params):
        if getattr(each, "help", None):
            each.help = _TYPE_BRACKET.sub(r"\\[", each.help)
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
    with errors.guarded(show_traceback) as ending:
        if sys.stdout is None:
            raise OutputError("stdout is closed")
        signs.use_ascii_where_needed()
        group: Any = _with_types_escaped(get_command(app))
        if _COMPLETE in os.environ:
            completion.answer(group, arguments, PROGRAM)
        launch.command_line.set(tuple(arguments))
        with start.jax_put_back(), group.make_context(PROGRAM, arguments) as context:
            group.invoke(context)
    launch.leave_at_once(ending.code)
    return ending.code
