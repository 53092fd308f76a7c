"""`jaxprtool bounds`: a table of the bounds of each result."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.session import Session, command, only_program


def ranges(text: str) -> dict[str, tuple[float, float]]:
    """Return the bounds of arguments such as `x=0:1,h=-1:1`, by name."""
    bounds = {}
    for part in options.names(text):
        name, _, interval = part.rpartition("=")
        low, _, high = interval.partition(":")
        try:
            bounds[name] = float(low), float(high)
        except ValueError:
            bounds[name] = math.nan, math.nan
        if not (name and bounds[name][0] <= bounds[name][1]):
            raise typer.BadParameter(f"'{part}' is not NAME=LOW:HIGH, such as x=0:1")
    return bounds


_Within = Annotated[
    Any,
    options.FUNCTION.option(
        "--within",
        "NAME=LOW:HIGH,…",
        "Bounds of arguments: x=0:1,h=-1:1. These arguments then hold no NaN.",
        parser=ranges,
    ),
]


@command
def bounds_command(session: Session, within: _Within = None, json: options.Json = False) -> None:
    """Bound the results of a function, from bounds of its arguments.

    A bound holds for all elements of a result, for all arguments within --within; other arguments
    may have any value. Rounding, loops and branches are accounted for.

    [bold]Examples[/]

      jaxprtool bounds samples/rnn.py:loss
      jaxprtool bounds jax.nn:sigmoid --args "f32[8]" --within x=-1:1
    """
    session.start()
    from jaxprtool_intervals.results import program_bounds

    program = only_program("bounds takes", session.programs())
    session.on_progress("computing bounds")
    computed = program_bounds(program, within)
    if json:
        output.write_json(computed)
        return
    rows = [
        (result.name, result.type, f"{result.low:.6g}", f"{result.high:.6g}", "NaN" * result.nan)
        for result in computed.results
    ]
    output.write_table(("result", "type", "low", "high", "may be"), rows, right=("low", "high"))
