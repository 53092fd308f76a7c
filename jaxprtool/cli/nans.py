"""`jaxprtool nans`: the first equation that makes a NaN or an infinity."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.progress import Told
from jaxprtool.cli.run import note_random, printed_by_functions, require_device
from jaxprtool.cli.start import start_jax, use_cache

_All = Annotated[
    bool,
    Panel("What is shown").flag("--all", "Every equation that makes one; reaching results first."),
]


@options.command
def nans(
    function: options.Function,
    types: options.Types = None,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    backend: options.Backend = None,
    seed: options.Seed = 0,
    all: _All = False,
    json: options.Json = False,
    *,
    told: Told,
) -> None:
    """Find the equation that makes the first NaN or infinity, and whether it reaches a result.

    The function runs equation by equation, into calls, branches and every round of loops. What is
    shown is the first that reaches a result, or else the first. Exit code 1 if there is one.

    [bold]Examples[/]

      jaxprtool nans samples/transformer.py:loss -p grad
      jaxprtool nans samples/rnn.py:loss -p value_and_grad --all
    """
    start_jax(told, function.x64)
    use_cache(True)
    from jaxprtool.api.targets import given_to
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.execute.fill import fill
    from jaxprtool.execute.nans import find_nan
    from jaxprtool.execute.run import choose_device
    from jaxprtool.render import nans as render

    pipeline = options.pipeline(passes, plugin)
    entry = function.find(told, True, types, pipeline)
    require_device(backend)
    traced = function.trace(entry, pipeline, told)
    programs = options.each(pipeline_steps.run(pipeline, traced, told))
    given = given_to(options.only_program("nans are searched in", programs), entry, traced)
    filled = fill(given.program, given.values, seed)
    device = choose_device(given.program, backend, None)
    told(f"running {given.program.name}, equation by equation")
    with printed_by_functions(json):
        found = find_nan(given.program, filled.arguments, device)
    note_random(filled, seed, given.aside)
    if json:
        output.write_json(render.nans_document(found))
    elif all:
        output.write_rendered(render.all_found(found, output.width()))
    else:
        output.write_rendered(render.first_found(found, output.width()))
    if found.found:
        raise typer.Exit(1)
