"""`jaxprtool report`: one page of what a program is, costs, needs and keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.progress import Told
from jaxprtool.cli.start import start_jax
from jaxprtool.errors import JaxprToolError, OutputError

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import By
    from jaxprtool.analysis.memory import Memory
    from jaxprtool.analysis.residuals import Residuals
    from jaxprtool.ir.program import Program
    from jaxprtool.jaxcompat import Aval

_Out = Annotated[str | None, options.out_option("Write the page here.", "FILE.html")]


@options.command
def report(
    function: options.Function,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    out: _Out = None,
    *,
    told: Told,
) -> None:
    """Write a page of a function: its listing after each pass, cost, memory and residuals.

    The costs and the memory are those of what the passes make, the residuals those that a gradient
    of the function itself keeps.

    [bold]Examples[/]

      jaxprtool report samples/transformer.py:loss -o report.html
      jaxprtool report samples/transformer.py:loss -p "grad, -O2" -o report.html
    """
    if out is None:
        raise OutputError("report writes a page, and -o does not say where", "add -o report.html")
    output.check_out("report", out, False, (), "jaxprtool opt TARGET", page=True)
    start_jax(told, function.x64)
    from jaxprtool.analysis.cost import cost
    from jaxprtool.analysis.cost.all_runs import work_by_equation
    from jaxprtool.analysis.stats import stats
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.render.page import page
    from jaxprtool.render.page.report import Report
    from jaxprtool.render.rendering import ShowOptions

    pipeline = options.pipeline(passes, plugin)
    watcher = pipeline_steps.Watcher(False, False, frozenset(), True)
    traced = function.trace(function.find(told), pipeline, told)
    programs = options.each(pipeline_steps.run(pipeline, traced, told, watcher))
    told("counting")
    groupings: tuple[By, ...] = ("line", "scope", "primitive")
    known = Report(
        [cost(program, by) for _, program in programs for by in groupings],
        [_memory(program) for _, program in programs],
        _residuals(traced),
    )
    told("rendering")
    shown = ShowOptions(names=True, terse=True, source=True)
    states = pipeline_steps.states(watcher, programs)
    output.write_page(page(states, shown, stats, work_by_equation, known), out)


def _memory(program: Program) -> Memory | str:
    """Return the memory that a program needs, or why that is not known."""
    from jaxprtool.analysis.memory import memory

    try:
        return memory(program)
    except JaxprToolError as error:
        return str(error)


def _residuals(program: Program) -> Residuals | str:
    """Return what the gradient of a loss keeps; of what is no loss, that it has none."""
    from jaxprtool.api.residuals import residuals

    if not _is_loss(program.out_avals):
        return f"{program.name} has no residuals here: its result is not one floating-point number"
    try:
        return residuals(program)
    except JaxprToolError as error:
        return str(error)


def _is_loss(results: Sequence[Aval]) -> bool:
    import jax.numpy as jnp

    found = [(getattr(a, "shape", None), getattr(a, "dtype", None)) for a in results]
    return len(found) == 1 and found[0][0] == () and jnp.issubdtype(found[0][1], jnp.floating)
