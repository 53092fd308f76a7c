"""`jaxprtool watch`: statistics of the intermediate values of a function."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, RUN, Panel
from jaxprtool.cli.running import (
    file_to_save,
    printed_by_functions,
    ready,
    require_device,
    save_arrays,
)
from jaxprtool.cli.session import Session, command
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.commands.watch.watch import Stopped
    from jaxprtool.ir.program import Program

_WATCHED = Panel("Values")


#: The groupings of values.
By = Literal["line", "scope", "equation"]


def parsed_rounds(text: str) -> tuple[int | slice, ...]:
    """Return the numbers and slices of a list such as `0,10,-1` or `::100`."""
    iterations: list[int | slice] = []
    for part in text.split(","):
        if re.fullmatch(r"\s*-?\d+\s*", part):
            iterations.append(int(part))
            continue
        ends = part.split(":")
        if len(ends) not in (2, 3) or not all(re.fullmatch(r"\s*(-?\d+)?\s*", e) for e in ends):
            raise typer.BadParameter(
                f"'{text}' is not a list of iterations such as 0,10,-1 or ::100"
            )
        numbers = [int(end) if end.strip() else None for end in ends]
        if numbers[2:] == [0]:
            raise typer.BadParameter(f"'{part}' has a step of 0")
        iterations.append(slice(*numbers))
    return tuple(iterations)


_By = Annotated[
    By,
    _WATCHED.choice(
        "--by",
        By,
        "Show one row per source line, module scope, or equation.",
    ),
]
_Only = Annotated[
    Any,
    _WATCHED.option(
        "--only",
        "NAME,…",
        "Show only the results of these primitives: dot_general,conv*",
        parser=options.names,
    ),
]
_Rounds = Annotated[
    Any,
    _WATCHED.option(
        "--rounds",
        "N,…",
        "Show these loop iterations, each in its own row: 0,10,-1 or ::100. Default: all in one "
        "row.",
        parser=parsed_rounds,
    ),
]
_Break = Annotated[
    str | None,
    RUN.option(
        "--break",
        "LINE",
        "Open a prompt with the values of this line (model.py:12, or 12 in TARGET's file).",
    ),
]
_Save = Annotated[
    str | None,
    OUTPUT.option(
        "--save",
        "FILE.npz",
        "Write the values, with the names of --by equation. bfloat16 is stored as float32.",
    ),
]


@command
def watch_command(
    session: Session,
    types: options.Types = None,
    by: _By = "line",
    only: _Only = None,
    rounds: _Rounds = None,
    backend: options.Backend = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    stop: _Break = None,
    save: _Save = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
    pager: options.Pager = False,
) -> None:
    """Run a function and summarize its intermediate values.

    Show the range, mean, deviation, zeros, NaNs, infinities, a histogram of exponents, and the loss
    in bf16, f16 and fp8. Values inside calls, branches, loop iterations and backward passes are
    included.

    [bold]Examples[/]

      jaxprtool watch samples/rnn.py:loss -p grad
      jaxprtool watch samples/rnn.py:loss --by equation --only dot_general
      jaxprtool watch samples/rnn.py:loss --rounds 0,-1 --save values.npz
    """
    shown = options.row_limit(top, all, None if pager else options.ROWS)
    output.refuse_stdout("--save", save, "watch")
    session.start(cache=True)
    from jaxprtool.commands.watch import table as render
    from jaxprtool.commands.watch.watch import watch
    from jaxprtool.ir.conversions import with_scalar_predicates

    require_device(session.function, backend, device)
    with file_to_save(save) as file:
        prepared = ready(session.given("watch takes", types), seed, backend, device)
        # Stop at equations of the program that is actually run.
        program = with_scalar_predicates(prepared.program)
        stops = _equations_of(program, stop, session.target) if stop else frozenset[int]()
        session.on_progress("" if stop else f"running {program.name}")
        with printed_by_functions(json):
            watched = watch(
                program,
                prepared.filled.arguments,
                by=by,
                only=only,
                rounds=rounds,
                values=save is not None,
                device=prepared.device,
                stops=stops,
                stop=_prompt,
            )
        if file:
            save_arrays(watched.values, file)
    prepared.note_random(session.target)
    for loop in watched.left_out:
        output.note(f"values inside {loop}, in a shard_map, are not watched")
    if json:
        output.write_json(watched)
        return
    with output.paged(pager):
        output.write_rendered(render.watched_text(watched, output.width(), shown))


def _equations_of(program: Program, line: str, target: str) -> frozenset[int]:
    """Return the equations of a source line, by `id`."""
    from jaxprtool.analysis.points import point
    from jaxprtool.loading.target import split_target

    file = split_target(target).place
    if line.isdigit():
        if not file.endswith(".py"):
            raise OutputError(
                f"TARGET is not a file, so '{line}' is not a line of it",
                f"write --break FILE.py:{line}",
            )
        line = f"{file}:{line}"
    ids = point(program, f"line:{line}").start.equations.values()
    return frozenset(eqn_id for of_body in ids for eqn_id in of_body)


def _prompt(stopped: Stopped) -> None:
    """Open a prompt with the values of a line; Ctrl-D continues the run, exit() ends it."""
    import jax.numpy as jnp
    import numpy as np

    iterations = ", ".join(map(str, stopped.iteration))
    about = stopped.source + (f", iteration {iterations}" if iterations else "")
    named = {name: value for name, value in stopped.values.items() if name.isidentifier()}
    local = {"np": np, "jnp": jnp, **named, "values": dict(stopped.values)}
    lines = [f"{name}: {getattr(x, 'aval', x)}" for name, x in stopped.values.items()]
    banner = "\n".join(
        [about, *(f"  {line}" for line in lines), "values is a dict of all; Ctrl-D continues, "]
    )
    try:
        from IPython.terminal import embed  # type: ignore[import-not-found]
    except ImportError:
        import code

        try:
            code.interact(f"{banner}exit() ends the run", local=local, exitmsg="")
        except SystemExit:
            raise typer.Exit from None
        return
    banner += "%exit_raise ends the run\n"
    try:
        embed.embed(user_ns=local, banner1=banner, confirm_exit=False, colors="neutral")
    except embed.KillEmbedded:
        raise typer.Exit from None
