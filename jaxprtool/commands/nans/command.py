"""`jaxprtool nans`: the first equation that produces a NaN or an infinity."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.running import printed_by_functions, ready, require_device
from jaxprtool.cli.session import Session, command

_Top = Annotated[int | None, options.top_option("only the first, in detail")]


@command
def nans_command(
    session: Session,
    types: options.Types = None,
    backend: options.Backend = None,
    seed: options.Seed = 0,
    top: _Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Find the equation that produces the first NaN or infinity.

    Run the function equation by equation, also inside calls, branches and every iteration of loops.
    Show the first NaN or infinity that reaches a result or, if none does, the first one. The exit
    code is 1 if there is one. --all shows every equation that produces one, those that reach a
    result first.

    [bold]Examples[/]

      jaxprtool nans samples/transformer.py:loss -p grad
      jaxprtool nans samples/rnn.py:loss -p value_and_grad --all
    """
    rows = options.row_limit(top, all)
    session.start(cache=True)
    from jaxprtool.commands.nans import table as render
    from jaxprtool.commands.nans.nans import find_nan

    require_device(session.function, backend)
    prepared = ready(session.given("nans takes", types), seed, backend)
    session.on_progress(f"running {prepared.program.name}, equation by equation")
    with printed_by_functions(json):
        search = find_nan(prepared.program, prepared.filled.arguments, prepared.device)
    prepared.note_random(session.target)
    if json:
        output.write_json(render.nans_document(search))
    elif top or all:
        output.write_rendered(render.all_found(search, output.width(), rows))
    else:
        output.write_rendered(render.first_found(search, output.width()))
    if search.found:
        raise typer.Exit(1)
