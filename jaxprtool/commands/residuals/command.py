"""`jaxprtool residuals`: the values that a gradient keeps for its backward pass, and why."""

from __future__ import annotations

from typing import Annotated, Any

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, command, only_program

_Budget = Annotated[
    str | None,
    Panel("Residuals").option(
        "--budget",
        "SIZE",
        "Propose which values to save so that the residuals take at most this: 8GiB, 500MB, 2e9.",
    ),
]
_Compiled = Annotated[
    bool,
    Panel("Residuals").flag("--compiled", "Also compile, and show XLA's own figures of the peaks."),
]


_Argnums = Annotated[Any, options.argnums_option(Panel("Residuals"))]


@command
def residuals_command(
    session: Session,
    argnums: _Argnums = None,
    budget: _Budget = None,
    compiled: _Compiled = False,
    top: options.TopTall = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Show the values that a gradient keeps for its backward pass.

    The gradient is with respect to the first argument, unless --argnums has others. For each
    residual, show its line, what reads it, and the operations to recompute it from the others. Also
    show the residual bytes and the peak memory under each policy of jax.checkpoint, applied to the
    whole function and to parts of it. With --budget, show what to save so that the residuals fit,
    how many more FLOPs that takes, and the peak memory.

    [bold]Examples[/]

      jaxprtool residuals samples/transformer.py:loss
      jaxprtool residuals samples/transformer.py:loss -p "checkpoint(policy='dots_saveable')"
      jaxprtool residuals samples/transformer.py:loss --budget 4MiB
    """
    most = options.row_limit(top, all, options.TALL_ROWS)
    session.start()
    from jaxprtool.commands.residuals import table as render
    from jaxprtool.commands.residuals.policies import residuals as found_residuals
    from jaxprtool.ir.documents import bytes_of

    limit = None if budget is None else bytes_of(budget)
    program = only_program("residuals takes", session.programs())
    session.on_progress("differentiating")
    result = found_residuals(program, limit, argnums=argnums or 0, peaks=True, compiled=compiled)
    if json:
        output.write_json(result)
    else:
        output.write_rendered(render.residuals_table(result, output.width(), most))
