"""`jaxprtool source`: the user's own files with the cost of each line."""

from __future__ import annotations

from typing import Annotated, Any

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, Compiled, ModeledDevice, Panel
from jaxprtool.cli.session import Session, command, only_program, require_device
from jaxprtool.commands.cost.command import require_numbers
from jaxprtool.commands.profile.command import Measure, measured_profile, require_measure
from jaxprtool.commands.shardings.command import compiled_partition
from jaxprtool.errors import OutputError

_Residuals = Annotated[
    bool | None,
    Panel("Cost").option(
        "--residuals/--no-residuals",
        "",
        "Show the residual bytes of each line, or not. Default: if the result is one float.",
    ),
]
_Argnums = Annotated[Any, options.argnums_option(Panel("Cost"))]
_Full = Annotated[bool, OUTPUT.flag("--full", "Show whole files, including lines of little cost.")]


@command
def source_command(
    session: Session,
    residuals: _Residuals = None,
    argnums: _Argnums = None,
    device: ModeledDevice = None,
    compiled: Compiled = False,
    measure: Measure = False,
    backend: options.Backend = None,
    seed: options.Seed = 0,
    full: _Full = False,
    json: options.Json = False,
) -> None:
    """Show each source line with its FLOPs, bytes and residuals.

    The forward and the backward part of a gradient are counted separately. --measure adds measured
    times; without it, nothing is compiled.

    [bold]Examples[/]

      jaxprtool source samples/transformer.py:loss
      jaxprtool source samples/transformer.py:loss -p grad --device h100
      jaxprtool source samples/transformer.py:loss -p grad --measure
    """
    require_measure(measure, backend)
    session.start(True if measure else None)
    from jaxprtool.analysis.devices import device_named
    from jaxprtool.commands.cost.table import is_symbolic
    from jaxprtool.commands.source import table as render
    from jaxprtool.commands.source.lines import source as found_source
    from jaxprtool.commands.source.lines import with_device

    on = None if device is None else device_named(device)
    require_device(session.function, backend)
    traced = session.traced(runs=measure)
    programs = session.programs(traced)
    times = None
    if measure:
        inputs = traced.given_to(only_program("--measure takes", programs))
        times = measured_profile(
            inputs, session.target, seed, backend, None, json, session.on_progress
        )
    split = compiled_partition(session, traced, programs) if compiled else None
    session.on_progress("counting")
    listings = [
        found_source(
            program, residuals=residuals, argnums=argnums or 0, profile=times, shardings=split
        )
        for _, program in programs
    ]
    for listing in listings:
        require_numbers(on is not None and is_symbolic(listing.total))
        if not listing.files:
            raise OutputError(
                f"the equations of {listing.name} come from no known line of your files",
                "`jaxprtool cost --by primitive` needs no lines",
            )
    if on is not None:
        listings = [with_device(listing, on) for listing in listings]
    if split is None:
        output.say_if_partitioned((program for _, program in programs), json)
    if json:
        from jaxprtool.commands.source.table import SourceDocument

        output.write_json(SourceDocument(listings))
        return
    output.write_each(render.source_text(listing, output.width(), full, on) for listing in listings)
