"""The views of a report besides the listing: its summaries, cost, memory, residuals, devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxprtool.render.reports import cost, memory, profile, residuals, shardings, summary
from jaxprtool.render.views import Cell, Lines, PageView, linked

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import Cost
    from jaxprtool.analysis.memory import Memory
    from jaxprtool.analysis.profile import Profile
    from jaxprtool.analysis.residuals import Residuals
    from jaxprtool.analysis.shardings import Shardings
    from jaxprtool.analysis.summary import Suggestion, Summary


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
    """

    costs: Sequence[Cost]
    memories: Sequence[Memory | str]
    residuals: Residuals | str
    profile: Profile | None = None
    shardings: Shardings | None = None
    summaries: Sequence[Summary] = ()


class SummaryView(NamedTuple):
    """The summary of a program: its name, its size, its parts with rows of cells, suggestions."""

    name: str
    size: str
    parts: Sequence[tuple[str, str, Sequence[Sequence[Cell]]]]
    suggestions: Sequence[Suggestion]


def _summary_views(report: Report, line_of: Lines) -> list[SummaryView]:
    return [
        SummaryView(
            program_summary.name,
            summary.heading(program_summary),
            [
                (part.title, part.fact, [_summary_row(row, line_of) for row in part.rows])
                for part in summary.summary_parts(program_summary)
            ],
            program_summary.suggestions,
        )
        for program_summary in report.summaries
    ]


def _summary_row(row: summary.SummaryRow, line_of: Lines) -> list[Cell]:
    link = linked(row.source, line_of)
    return [Cell(row.share), Cell(row.number), Cell(row.name, link=link, below=Cell(row.about))]


def report_views(report: Report, line_of: Lines) -> tuple[list[SummaryView], list[PageView]]:
    """Return the summaries and the other views of a report.

    Args:
        report: The report.
        line_of: Returns a line of a displayed file by name: `model.py:9`.
    """
    times, split = report.profile, report.shardings
    devices = None if split is None else shardings.heading(split)
    cells = None if times is None else {line.name: profile.time_cells(line) for line in times.lines}
    costs = cost.cost_view(report.costs, line_of, cells, devices)
    if times is not None:
        fact = "; ".join((profile.title(times), *profile.profile_notes(times)))
        costs = costs._replace(facts=[*costs.facts, fact])
    views = [
        costs,
        memory.memory_view(report.memories, line_of, devices),
        residuals.residuals_view(report.residuals, line_of),
    ]
    if split is not None:
        views.append(shardings.shardings_view(split, line_of))
    return _summary_views(report, line_of), views
