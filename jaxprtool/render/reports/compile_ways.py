"""Pipelines that shorten compilation, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from jaxprtool.ir.basics.quantities import in_bytes
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.tables import new_table, number, text

if TYPE_CHECKING:
    from jaxprtool.analysis.compile_time import CompileWay
    from jaxprtool.ir.programs.repetition import Repetition

#: Programs that compile faster than this, in seconds of CPU time, need no advice.
_LEAST_SECONDS = 0.2


def table(ways: Sequence[CompileWay], found: Repetition, width: int) -> Rendering | None:
    """Return the given pipeline and those that compile faster, or a line that none does.

    Returns None if there is nothing to shorten: a program that compiles fast or repeats nothing.
    """
    if not ways or (len(ways) == 1 and not (found.bodies or found.small)):
        return None
    given = ways[0].estimate
    if len(ways) == 1:
        if given.seconds < _LEAST_SECONDS:
            return None
        return Rendering(Text(_nothing_helps(ways[0])), width)
    columns = [*map(number, ("kernels", "different", "compile time", "temporary memory"))]
    measured = any(way.cpu_seconds is not None for way in ways)
    rows = new_table(
        "", text("passes", theme.SHARED_NAME), *columns, *[number("measured")] * measured
    )
    for way in ways:
        estimate = way.estimate
        cells = f"{estimate.kernels:,}", f"{estimate.different:,}", duration(estimate.seconds)
        memory = "" if way.memory is None else in_bytes(way.memory)
        took = [duration(way.cpu_seconds) if way.cpu_seconds is not None else ""] * measured
        rows.add_row(_name(way), *cells, memory, *took)
    return Rendering(Group(rows, Text(), Text(_best(ways))), width)


def _best(ways: Sequence[CompileWay]) -> str:
    times = ways[0].estimate.seconds / ways[1].estimate.seconds
    return f"{_name(ways[1])} compiles about {times:.1f} times faster, as estimated"


def _nothing_helps(way: CompileWay) -> str:
    estimate = way.estimate
    return (
        "neither outline nor roll shortens compilation by a fifth, as estimated: "
        f"{estimate.different:,} of {estimate.kernels:,} kernels are different, and XLA compiles "
        "equal ones once"
    )


def _name(way: CompileWay) -> str:
    return f'-p "{way.pipeline}"' if way.pipeline else "as traced"
