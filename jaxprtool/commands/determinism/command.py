"""`jaxprtool determinism`: a function run in several ways, with its results compared bitwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from jaxprtool.cli import launch, options, output
from jaxprtool.cli.main import main
from jaxprtool.cli.options import Panel, parsed_numbers
from jaxprtool.cli.session import Session, command, printed_by_functions, ready

_AGAIN = Panel("Runs")


def run_command_line_here(arguments: Sequence[str]) -> None:
    """Run a command line in the place of the one of this process, which ends if it fails."""
    sys.argv[1:] = arguments
    if code := main():
        sys.exit(code)


def _xla_options(text: str) -> Any:
    """Return the options of `NAME=VALUE,…`, or None for `default`."""
    if text == "default":
        return None
    pairs = [part.partition("=") for part in options.names(text)]
    if bad := [name for name, sign, value in pairs if not (name and sign and value)]:
        raise typer.BadParameter(f"'{bad[0]}' is not NAME=VALUE, nor `default`")
    words = {"true": True, "false": False}
    return {name.lstrip("-"): words.get(value.lower(), value) for name, _, value in pairs}


_Runs = Annotated[
    int, _AGAIN.option("--runs", "N", "Run the compiled program N times in this process.", min=2)
]
_Threads = Annotated[
    Any,
    _AGAIN.option(
        "--threads",
        "N,…",
        "Numbers of threads of XLA's CPU backend, each run in its own process.",
        parser=parsed_numbers,
    ),
]
_Options = Annotated[
    Any,
    _AGAIN.option(
        "--xla-options",
        "NAME=VALUE,…",
        "Options of XLA, each tried alone. `default` is a set for the platform. Default: none.",
        parser=_xla_options,
    ),
]


@command
def determinism_command(
    session: Session,
    types: options.Types = None,
    runs: _Runs = 3,
    threads: _Threads = "1,8",
    xla_options: _Options = "",
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Run a function in several ways, and compare results bitwise.

    Run the program again, compile it again, trace it again in this and in other processes, and run
    it on each device, with other numbers of threads and with options of XLA. Compare each result
    with that of the first run. Exit code 1 if a bit differs. If results differ with and without
    jit, compare --op-by-op --bisect tells where.

    [bold]Examples[/]

      jaxprtool determinism samples/rnn.py:loss -p grad
      jaxprtool determinism samples/rnn.py:loss --threads 1,2,16
      jaxprtool determinism samples/rnn.py:loss --xla-options default
    """
    session.start(cache=False)
    from jaxprtool.api.targets import STDIN, is_file
    from jaxprtool.commands.determinism import determinism
    from jaxprtool.commands.determinism import table as render
    from jaxprtool.commands.determinism.determinism import Ways, default_options, run_again

    prepared = ready(session.given("determinism takes", types), seed)
    program, arguments = prepared.program, prepared.filled.arguments
    if determinism.FRESH in os.environ:
        determinism.report_fresh(program, arguments)
        return
    ways = Ways(runs, threads, xla_options or {})
    lacking: list[str] = []
    if xla_options is None:
        defaults, lacking = default_options()
        ways = replace(ways, options=defaults)
    not_tried = [f"{name}: this release of JAX has no such option" for name in lacking]
    compare = session.command_line("compare --op-by-op --bisect")
    not_tried.append(
        f"eager execution: it rounds where fused code does not; for other differences: {compare}"
    )
    if is_file(session.target) or session.target == STDIN:
        not_tried.insert(
            0, f"tracing again: {session.target} is a stored program, without its function"
        )
    else:
        run = partial(run_command_line_here, launch.command_line.get())
        ways = replace(
            ways,
            trace_again=lambda: session.given("determinism takes", types).program,
            run_fresh=lambda environment: determinism.run_fresh(run, environment, program),
        )
    with printed_by_functions(json):
        outcome = run_again(program, arguments, ways, session.on_progress)
    outcome = replace(
        outcome,
        inputs=prepared.filled.described(seed),
        random=prepared.filled.random,
        not_tried=(*not_tried, *outcome.not_tried),
    )
    if json:
        output.write_json(outcome)
    else:
        output.write_rendered(render.determinism_table(outcome, output.width()))
    for measure in outcome.unproven:
        output.warning(
            f"{max(measure.nonfinite):,} of {measure.size:,} elements of {measure.name} are not "
            f"finite; their equal bits prove nothing"
        )
    if not outcome.equal:
        raise typer.Exit(1)
