"""The Typer application, with a command for each of the modules beside it.

Nothing here, nor what it imports, imports JAX: help and completion answer without it.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any

import typer
from typer.main import get_command

from jaxprtool.cli import completion, errors, signs, start
from jaxprtool.cli.backends import backends
from jaxprtool.cli.browse import browse
from jaxprtool.cli.compare import compare
from jaxprtool.cli.cost import cost
from jaxprtool.cli.diff import diff
from jaxprtool.cli.emit import emit
from jaxprtool.cli.explain import explain
from jaxprtool.cli.memory import memory
from jaxprtool.cli.nans import nans
from jaxprtool.cli.opt import opt
from jaxprtool.cli.outline import outline
from jaxprtool.cli.passes import passes
from jaxprtool.cli.reduce import reduce
from jaxprtool.cli.report import report
from jaxprtool.cli.residuals import residuals
from jaxprtool.cli.run import run
from jaxprtool.cli.shapecheck import shapecheck
from jaxprtool.cli.show import show
from jaxprtool.cli.source import source
from jaxprtool.cli.unzip import unzip
from jaxprtool.cli.vmap import vmap
from jaxprtool.cli.watch import watch
from jaxprtool.cli.why import why
from jaxprtool.errors import OutputError

PROGRAM = "jaxprtool"
_COMPLETE = "_JAXPRTOOL_COMPLETE"

_HELP = {"help_option_names": ["-h", "--help"]}
_EPILOG = (
    "[dim]Exit codes: 0 done; 1 a check failed; 2 bad usage or input; 3 your function raised; "
    "70 a fault of jaxprtool's own; 130 interrupted.[/]"
)

app = typer.Typer(
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=_HELP,
    epilog=_EPILOG,
)
for command in (
    *(show, browse, cost, source, memory, residuals, why, report, opt, diff, run, nans),
    *(watch, compare, reduce, emit, unzip, vmap, outline, shapecheck, passes, explain, backends),
):
    app.command(context_settings=_HELP)(command)


def _version(wanted: bool | None) -> None:
    if wanted:
        from jaxprtool import __version__

        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", metavar="", help="Print the version.", callback=_version, is_eager=True
        ),
    ] = None,  # not False, which Typer would import pydantic to convert
) -> None:
    """Show, rewrite and run jaxprs, the intermediate language of JAX.

    [bold]Examples[/]

      jaxprtool show samples/transformer.py:loss
      jaxprtool show jax.numpy:linalg.det --args "f32[4,4]"
      jaxprtool browse samples/transformer.py:loss
      jaxprtool cost samples/transformer.py:loss -p grad
      jaxprtool source samples/transformer.py:loss -p grad
      jaxprtool memory samples/transformer.py:loss -p grad
      jaxprtool residuals samples/transformer.py:loss
      jaxprtool why samples/transformer.py:loss "params['positions']"
      jaxprtool report samples/transformer.py:loss -p grad -o report.html
      jaxprtool opt  samples/transformer.py:loss -p dce --stats
      jaxprtool run  samples/transformer.py:loss --backend cpu
      jaxprtool nans samples/transformer.py:loss -p grad
      jaxprtool watch samples/transformer.py:loss --by scope
      jaxprtool compare samples/transformer.py:loss -p "" -p "-O2"
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


#: The bracket of a type, `f32[n]`, which Rich takes for a style.
_TYPE_BRACKET = re.compile(r"(?<=[\w>])\[(?=[a-z])")


def _escape_types(group: Any) -> None:
    """Escape the types in the help of a group, of its commands, and of their parameters."""
    for command in (group, *group.commands.values()):
        for each in (command, *command.params):
            if getattr(each, "help", None):
                each.help = _TYPE_BRACKET.sub(r"\\[", each.help)


def answer(arguments: list[str]) -> int:
    """Run a command line, and give its exit code."""
    show_traceback = "--traceback" in arguments
    # JAX reads these when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if show_traceback:
        os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
    if sys.stderr is None:  # closed by whoever started this process, as stdout may be
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    with errors.guarded(show_traceback) as ending:
        if sys.stdout is None:
            raise OutputError("stdout is closed")
        signs.use_ascii_where_needed()
        command: Any = get_command(app)
        if _COMPLETE in os.environ:
            completion.answer(command, arguments, PROGRAM)
        _escape_types(command)
        name = PROGRAM
        if arguments and arguments[0] in command.commands:
            # Straight to the command: on the way through the group Typer imports pydantic, which
            # takes longer than all the rest of a --help.
            name, command = f"{PROGRAM} {arguments[0]}", command.commands[arguments[0]]
            arguments = arguments[1:]
        with start.jax_put_back(), command.make_context(name, arguments) as context:
            command.invoke(context)
    return ending.code
