"""`jaxprtool residuals`: the values a gradient keeps of the forward pass, and why."""

from __future__ import annotations

from typing import Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, command, only_program

_Top = Annotated[
    int, Panel("What is shown").option("--top", "N", "Show the N largest residuals.", min=1)
]
_Budget = Annotated[
    str | None,
    Panel("What is shown").option(
        "--budget", "SIZE", "Propose what to save so that no more is kept: 8GiB, 500MB, 2e9 bytes."
    ),
]


@command
def residuals(
    session: Session,
    top: _Top = 20,
    budget: _Budget = None,
    json: options.Json = False,
) -> None:
    """Show what the gradient of a function keeps between its two passes: the residuals.

    For each its line, what reads it, and the operations that it takes to compute it again from the
    others; and how many bytes are kept under each policy of jax.checkpoint. With --budget, which
    values to save so that all that is kept fits, and what that costs.

    [bold]Examples[/]

      jaxprtool residuals samples/transformer.py:loss
      jaxprtool residuals samples/transformer.py:loss -p "checkpoint(policy='dots_saveable')"
      jaxprtool residuals samples/transformer.py:loss --budget 4MiB
    """
    session.start()
    from jaxprtool.api.investigate.residuals import residuals as found_residuals
    from jaxprtool.ir.basics.quantities import bytes_of
    from jaxprtool.render.reports import residuals as render

    limit = None if budget is None else bytes_of(budget)
    program = only_program("residuals are of", session.programs())
    session.on_progress("differentiating")
    found = found_residuals(program, limit)
    if json:
        output.write_json(found)
    else:
        output.write_rendered(render.residuals_table(found, output.width(), top))
