"""The views of a report besides the listing: its summaries, cost, memory, residuals, devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxprtool.commands.cost import table
from jaxprtool.commands.kernels import table as kernels_table
from jaxprtool.commands.memory import table as memory_table
from jaxprtool.commands.profile import table as profile_table
from jaxprtool.commands.profile.table import time_icicle
from jaxprtool.commands.residuals import table as residuals_table
from jaxprtool.commands.shardings import table as shardings_table
from jaxprtool.commands.show import table as show_table
from jaxprtool.render.page import linked_view, on_page
from jaxprtool.render.views import Cell, Icicle, Lines, PageView

if TYPE_CHECKING:
    from jaxprtool.commands.cost.estimate import Cost, FrameCost
    from jaxprtool.commands.kernels.kernels import KernelReport
    from jaxprtool.commands.memory.estimate import Memory
    from jaxprtool.commands.profile.lines import Profile
    from jaxprtool.commands.residuals.residuals import Residuals
    from jaxprtool.commands.shardings.partitions import Shardings
    from jaxprtool.commands.show.summary import Suggestion, Summary
    from jaxprtool.ir.frames import Root


@dataclass(frozen=True)
class Report:
    """Analyses of programs for a report.

    Attributes:
        costs: The cost of each program, by each grouping shown.
        memories: The memory of each program, or why it is unknown.
        residuals: The residuals of the traced program's gradient, or why they are not shown.
        profile: The measured time of the only program; None if it was not measured.
        shardings: The shardings of the only program; None if it was not compiled.
        summaries: The summary of each program.
        frames: The cost of each program by scope and line.
        roots: The folders of the user's files of each program.
        kernels: The Pallas kernels of each program.
    """

    costs: Sequence[Cost]
    memories: Sequence[Memory | str]
    residuals: Residuals | str
    profile: Profile | None = None
    shardings: Shardings | None = None
    summaries: Sequence[Summary] = ()
    frames: Sequence[Sequence[FrameCost]] = ()
    roots: Sequence[Sequence[Root]] = ()
    kernels: Sequence[KernelReport] = ()


class SummaryView(NamedTuple):
    """The summary of a program.

    Attributes:
        name: Its name.
        size: Its size.
        icicles: Its flame graphs.
        parts: The title and the fact of each part, and its rows of cells.
        suggestions: What to do next.
    """

    name: str
    size: str
    icicles: Sequence[Icicle]
    parts: Sequence[tuple[str, str, Sequence[Sequence[Cell]]]]
    suggestions: Sequence[Suggestion]


def _summary_views(report: Report, line_of: Lines) -> list[SummaryView]:
    return [
        SummaryView(
            program_summary.name,
            show_table.heading(program_summary),
            list(filter(None, _icicles(report, number, line_of))),
            [
                (part.title, part.fact, [_summary_row(row, line_of) for row in part.rows])
                for part in show_table.summary_parts(program_summary)
            ],
            program_summary.suggestions,
        )
        for number, program_summary in enumerate(report.summaries)
    ]


def _icicles(report: Report, number: int, line_of: Lines) -> Iterator[Icicle | None]:
    """Yield the flame graphs of the `number`-th program, the measured time first."""
    if report.profile is not None:
        yield time_icicle(report.profile, line_of)
    by_line = [estimate for estimate in report.costs if estimate.by == "line"]
    yield from table.cost_icicles(by_line[number], report.frames[number], line_of)
    usage = report.memories[number]
    if not isinstance(usage, str):
        yield memory_table.memory_icicle(usage, report.roots[number], line_of)


def _summary_row(row: show_table.SummaryRow, line_of: Lines) -> list[Cell]:
    name = Cell(row.name, link=row.source, below=Cell(row.about))
    return [Cell(row.share), Cell(row.number), on_page(name, line_of)]


def report_views(report: Report, line_of: Lines) -> tuple[list[SummaryView], list[PageView]]:
    """Return the summaries and the other views of a report.

    Args:
        report: The report.
        line_of: Returns a line of a displayed file by name: `model.py:9`.
    """
    times, split = report.profile, report.shardings
    devices = None if split is None else shardings_table.heading(split)
    cells = (
        None
        if times is None
        else {line.name: profile_table.time_cells(line) for line in times.lines}
    )
    costs = table.cost_view(report.costs, cells, devices)
    if times is not None:
        fact = "; ".join((profile_table.title(times), *profile_table.profile_notes(times)))
        costs = costs._replace(facts=[*costs.facts, fact])
    views = [
        costs,
        memory_table.memory_view(report.memories, devices),
        residuals_table.residuals_view(report.residuals),
    ]
    if kernel_reports := [entry for entry in report.kernels if entry.kernels]:
        views.append(kernels_table.kernels_view(kernel_reports))
    if split is not None:
        views.append(shardings_table.shardings_view(split))
    return _summary_views(report, line_of), [linked_view(view, line_of) for view in views]
