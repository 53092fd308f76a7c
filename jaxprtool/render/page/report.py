"""The views of a report besides the listing: cost tables, the memory curve, and residuals.

A view consists of sortable tables and of curves, with the contents of the terminal's tables. The
user's lines link to the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxprtool.ir.documents import in_bytes, times
from jaxprtool.ir.frames import BEHIND
from jaxprtool.ir.meshes import partitioner_note
from jaxprtool.ir.paths import common_path
from jaxprtool.render.reports import cost, memory, profile, residuals, shardings, summary

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import Cost, Group
    from jaxprtool.analysis.memory import Live, Memory
    from jaxprtool.analysis.profile import Profile, TimedLine
    from jaxprtool.analysis.residuals import Residual, Residuals
    from jaxprtool.analysis.shardings import Collective, ShardedValue, Shardings
    from jaxprtool.analysis.summary import Suggestion, Summary
    from jaxprtool.render.page import SourceLink

#: The maximum number of rows of a table.
_MOST = 500

#: Looks up a line of source.
Lines = Callable[[str], "SourceLink | None"]

#: The width and height of a curve in units of its picture.
_SCALE = 1000


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


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: Its text.
        number: The sort key of its column; None to sort by text.
        link: The source line that it links to.
        indent: Its depth in a tree.
        percent: Its share of the whole, drawn in the background.
        below: The text below it.
    """

    text: str
    number: float | None = None
    link: SourceLink | None = None
    indent: int = 0
    percent: float | None = None
    below: Cell | None = None


class Table(NamedTuple):
    """A table: each column has a heading, and whether it is numeric."""

    caption: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    more: int


class Step(NamedTuple):
    """A level part of a curve: its start, end and height, and its description."""

    left: float
    right: float
    top: float
    text: str


class Curve(NamedTuple):
    """A curve: its title, its parts, and the marks of its axis with their heights."""

    label: str
    steps: Sequence[Step]
    marks: Sequence[tuple[float, str]]


class View(NamedTuple):
    """A view of the page in addition to the equations.

    Attributes:
        name: Its name: `cost`.
        facts: The lines at its top.
        tables: Its tables.
        curves: Its curves.
    """

    name: str
    facts: Sequence[str]
    tables: Sequence[Table] = ()
    curves: Sequence[Curve] = ()


class SummaryView(NamedTuple):
    """The summary of a program: its name, its size, its parts with rows of cells, suggestions."""

    name: str
    size: str
    parts: Sequence[tuple[str, str, Sequence[Sequence[Cell]]]]
    suggestions: Sequence[Suggestion]


def summary_views(report: Report, line_of: Lines) -> list[SummaryView]:
    """Return the summaries that a report begins with; see `views`."""
    return [
        SummaryView(
            program_summary.name,
            summary.heading(program_summary),
            [
                (part.title, part.fact, [_summary_row(row, line_of) for row in part.rows])
                for part in summary.parts(program_summary)
            ],
            program_summary.suggestions,
        )
        for program_summary in report.summaries
    ]


def _summary_row(row: summary.Row, line_of: Lines) -> list[Cell]:
    link = linked(row.source, line_of)
    return [Cell(row.share), Cell(row.number), Cell(row.name, link=link, below=Cell(row.about))]


def views(report: Report, line_of: Lines) -> Iterator[View]:
    """Yield the views of a report.

    Args:
        report: The report.
        line_of: Returns a line of a displayed file by name: `model.py:9`.
    """
    yield cost_view(report.costs, line_of, report.profile, report.shardings)
    yield memory_view(report.memories, line_of, report.shardings)
    saved = report.residuals
    if isinstance(saved, str):
        yield View("residuals", [saved])
    else:
        tables = [_residuals_table(saved, line_of)]
        if saved.placements:
            tables.append(_placements_table(saved))
        elif saved.policies:
            tables.append(_policies_table(saved))
        yield View("residuals", [residuals.total_text(saved)], tables)


def cost_view(
    costs: Sequence[Cost],
    line_of: Lines,
    times: Profile | None = None,
    split: Shardings | None = None,
) -> View:
    """Return the view of costs, each of a program by a grouping, with the measured time of lines.

    Args:
        costs: The costs.
        line_of: Returns a line of a displayed file by name.
        times: The measured time of the program, if there is only one.
        split: The shardings of the program, if it was compiled.
    """
    several = len({program_cost.name for program_cost in costs}) > 1
    tables = [
        _cost_table(program_cost, line_of, several, times)
        for program_cost in costs
        if program_cost.groups
    ]
    facts = list(
        dict.fromkeys(_cost_fact(program_cost, split is not None) for program_cost in costs)
    )
    facts = [*_notes(costs, split), *facts]
    if times is not None:
        facts.append("; ".join((profile.title(times), *profile.notes(times))))
    return View("cost", facts, tables)


def memory_view(
    memories: Sequence[Memory | str], line_of: Lines, split: Shardings | None = None
) -> View:
    """Return the view of the memory of programs, or why it is unknown; see `cost_view`."""
    usages = [usage for usage in memories if not isinstance(usage, str)]
    return View(
        "memory",
        [
            *_notes(usages, split),
            *(
                usage if isinstance(usage, str) else _memory_fact(usage, split)
                for usage in memories
            ),
        ],
        [_memory_table(usage, line_of) for usage in usages],
        list(map(_curve, usages)),
    )


def _notes(results: Sequence[Cost | Memory], split: Shardings | None) -> list[str]:
    """Return notes on programs that XLA would partition, or on the devices of a partitioned one."""
    if split is not None:
        return [shardings.heading(split)]
    notes = (partitioner_note(result.name, result.left_to_partitioner) for result in results)
    return list(dict.fromkeys(filter(None, notes)))


def table(
    caption: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[Cell]]
) -> Table:
    """Return a table of the first rows, and the number of further ones."""
    return Table(caption, columns, rows[:_MOST], max(len(rows) - _MOST, 0))


def linked(source: str, line_of: Lines) -> SourceLink | None:
    """Return the user's line in a place, if its file is displayed."""
    return line_of(source.partition(BEHIND)[0])


def _joined(texts: Sequence[str]) -> str:
    return " ".join(filter(None, texts))


def share(part: Any, whole: Any) -> Cell:
    """Return the cell of a share of a whole; empty if either is symbolic or unknown."""
    percent = 100 * part / whole if type(part) is type(whole) is int and whole else None
    return Cell("" if percent is None else f"{percent:.1f}%", percent, percent=percent)


# --- cost -------------------------------------------------------------------------------------


#: The columns of the measured time.
_MEASURED = ("measured", True), ("share", True)


def _cost_fact(program_cost: Cost, is_split: bool) -> str:
    total = cost.total_text(program_cost.total, is_split and bool(program_cost.left_to_partitioner))
    return "; ".join((f"{program_cost.name}: {total}", *cost.notes(program_cost, None)))


def _cost_table(program_cost: Cost, line_of: Lines, several: bool, times: Profile | None) -> Table:
    measured = times if program_cost.by == "line" else None
    columns = (
        *(_MEASURED if measured is not None else ()),
        ("FLOPs", True),
        ("share", True),
        ("bytes", True),
        ("share", True),
        ("FLOPs/B", True),
        (program_cost.by, False),
    )
    rows = [_cost_row(program_cost, group, line_of) for group in program_cost.groups]
    if measured is not None:
        rows = _with_times(program_cost, rows, measured, line_of)
    return table(
        f"{program_cost.name}, by {program_cost.by}" if several else f"by {program_cost.by}",
        columns,
        rows,
    )


def _with_times(
    program_cost: Cost, rows: Sequence[list[Cell]], times: Profile, line_of: Lines
) -> list[list[Cell]]:
    """Add the measured time to the rows of lines, and rows of lines without cost; sort by time."""
    by_name = {line.name: line for line in times.lines}
    pairs = zip(program_cost.groups, rows, strict=True)
    timed = [[*_time_cells(by_name.pop(group.name, None)), *row] for group, row in pairs]
    for line in by_name.values():
        name = Cell(line.name or "unknown line", link=line_of(line.name))
        timed.append([*_time_cells(line), *[Cell("")] * 5, name])
    return sorted(timed, key=lambda row: -(row[0].number or 0.0))


def _time_cells(line: TimedLine | None) -> list[Cell]:
    """Return the cells of the measured time of a line and its share; empty if it has none."""
    if line is None:
        return [Cell(""), Cell("")]
    percent = 100 * line.share
    return [
        Cell(profile.numbers(line)["time"], line.seconds),
        Cell(f"{percent:.1f}%", percent, percent=percent),
    ]


def _cost_row(program_cost: Cost, group: Group, line_of: Lines) -> list[Cell]:
    flops, size = (n if type(n) is int else None for n in (group.work.flops, group.work.bytes))
    intensity = flops / size if flops is not None and size else None
    return [
        Cell(cost.number_text(group, "flops") or "0", flops),
        share(cost.weight_of(group), cost.weight_of(program_cost.total)),
        Cell(cost.bytes_text(group.work.bytes), size),
        share(size, program_cost.total.work.bytes),
        Cell("" if intensity is None else f"{intensity:.1f}", intensity),
        Cell(
            "".join(cost.name_texts(program_cost, group)),
            link=line_of(group.name) if group.line is not None else None,
            indent=max(len(group.path) - 1, 0),
        ),
    ]


# --- memory -----------------------------------------------------------------------------------


def _memory_fact(usage: Memory, split: Shardings | None) -> str:
    is_whole = split is not None and usage.left_to_partitioner
    whole = "arrays have their whole size" if is_whole else ""
    return "; ".join(filter(None, (memory.peak_text(usage), memory.kinds_text(usage), whole)))


def _memory_table(usage: Memory, line_of: Lines) -> Table:
    columns = (
        ("bytes", True),
        ("share", True),
        ("values", False),
        ("value and last reader", False),
    )
    rows = [_live_row(live, usage.peak_bytes, line_of) for live in usage.live]
    return table(f"live at the peak of {usage.name}", columns, rows)


def _live_row(live: Live, peak: int, line_of: Lines) -> list[Cell]:
    until = linked(live.source if live.kind == "room" else live.reader_source, line_of)
    return [
        Cell(in_bytes(live.bytes), live.bytes),
        share(live.bytes, peak),
        Cell(times(live.count, live.type), live.count),
        Cell(
            _joined(memory.what_texts(live)),
            link=linked(live.source, line_of),
            below=Cell(memory.how_long_text(live), link=until),
        ),
    ]


def _curve(usage: Memory) -> Curve:
    """Return the curve of bytes over the equations in execution order."""
    points, highest = usage.curve, max(usage.peak_bytes, 1)
    last = points[-1].position + 1
    ends = [*(point.position for point in points[1:]), last]
    steps = []
    for point, end in zip(points, ends, strict=True):
        left, right = (round(_SCALE * at / last, 1) for at in (point.position, end))
        top = round(_SCALE * (1 - point.bytes / highest), 1)
        steps.append(Step(left, right, top, f"{in_bytes(point.bytes)} {memory.place_text(point)}"))
    label = f"{usage.name}: memory from the first equation to the last"
    marks = [(round(100 * size / highest, 1), in_bytes(size)) for size in memory.marks(highest, 4)]
    return Curve(label, steps, marks)


# --- residuals --------------------------------------------------------------------------------


def _residuals_table(saved: Residuals, line_of: Lines) -> Table:
    columns = (
        ("bytes", True),
        ("share", True),
        ("type", False),
        ("recompute", True),
        ("value and readers", False),
    )
    groups = residuals.grouped(saved.residuals)
    rows = [_residual_row(*group, saved.total_bytes, line_of) for group in groups]
    return table("residuals", columns, rows)


def _residual_row(count: int, residual: Residual, total: int | None, line_of: Lines) -> list[Cell]:
    reader = residual.readers[0].source if residual.readers else ""
    return [
        Cell(residuals.size_text(residual.bytes), residual.bytes),
        share(residual.bytes, total),
        Cell(times(count, residual.type), count),
        Cell(
            residuals.recompute_text(residual),
            residual.recompute if type(residual.recompute) is int else None,
        ),
        Cell(
            _joined(residuals.what_texts(residual)),
            link=linked(residual.source, line_of),
            below=Cell(residuals.readers_text(residual), link=linked(reader, line_of)),
        ),
    ]


def _placements_table(saved: Residuals) -> Table:
    columns = (("bytes", True), ("peak", True), ("place", False), ("policy", False))
    rows = [
        [
            Cell(residuals.size_text(placement.total_bytes), placement.total_bytes),
            Cell(residuals.size_text(placement.peak_bytes), placement.peak_bytes),
            Cell(residuals.place_text(placement)),
            Cell(residuals.policy_text(placement.policy)),
        ]
        for placement in saved.placements
    ]
    return table(residuals.PLACEMENTS, columns, rows)


def _policies_table(saved: Residuals) -> Table:
    columns = (("bytes", True), ("policy", False), ("largest dropped residual", False))
    rows = [
        [
            Cell(residuals.size_text(size), size),
            Cell(name),
            Cell(residuals.dropped_text(saved, name)),
        ]
        for name, size in saved.policies.items()
    ]
    return table("residuals under each policy of jax.checkpoint", columns, rows)


# --- shardings ------------------------------------------------------------------------------------
# The view of a report on several devices: collectives by line, and how values are sharded.


def shardings_view(split: Shardings, line_of: Lines) -> View:
    """Return the view of the shardings of a program.

    Args:
        split: The shardings.
        line_of: Returns a line of a displayed file by name.
    """
    facts = [shardings.heading(split), *shardings.facts(split)]
    tables = [_collectives(split, line_of), _values(split, line_of)]
    if split.repeated:
        tables.insert(1, _repeated(split, line_of))
    return View("devices", facts, tables)


def _collectives(split: Shardings, line_of: Lines) -> Table:
    columns = (("sent", True), ("share", True), ("collective", False))
    groups = shardings.alike_collectives(split.collectives)
    rows = [_collective_row(alike, split.sent_bytes, line_of) for alike in groups]
    return table("collectives", columns, rows)


def _collective_row(alike: Sequence[Collective], whole: int, line_of: Lines) -> list[Cell]:
    first, sent = alike[0], sum(collective.sent_bytes for collective in alike)
    what, why = shardings.collective_texts(alike)
    asked = ", asked for by the program" if first.source == "program" else ""
    line = first.line or shardings.NO_LINE
    return [
        Cell(in_bytes(sent), sent),
        share(sent, whole),
        Cell(f"{line} {what}{asked}", link=linked(first.line, line_of), below=Cell(why)),
    ]


def _repeated(split: Shardings, line_of: Lines) -> Table:
    columns = (("each device", True), ("its share", True), ("operation", False))
    rows = []
    for operation in split.repeated:
        work, sizes = shardings.repeated_work_texts(operation)
        what = Cell(operation.line or shardings.NO_LINE, link=linked(operation.line, line_of))
        what = what._replace(below=Cell(shardings.repeated_text(operation, split.devices)))
        rows.append([Cell(sizes[0], work), Cell(sizes[1], work / operation.times), what])
    return table("computed by several devices alike", columns, rows)


def _values(split: Shardings, line_of: Lines) -> Table:
    columns = (("per device", True), ("whole", True), ("spec", False), ("value", False))
    rows = [_value_row(alike, split, line_of) for alike in shardings.alike_values(split.values)]
    return table("arguments, results and large values", columns, rows)


def _value_row(alike: Sequence[ShardedValue], split: Shardings, line_of: Lines) -> list[Cell]:
    first, count = alike[0], sum(value.count for value in alike)
    notes = shardings.value_notes(first, split)
    sizes = first.bytes_per_device * count, first.bytes * count
    what = f"{common_path([value.name for value in alike])} {times(count, first.type)}"
    return [
        *(Cell(in_bytes(size), size) for size in sizes),
        Cell(first.spec),
        Cell(", ".join((what, *notes)), link=linked(first.line, line_of)),
    ]
