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
            each.name,
            summary.heading(each),
            [
                (part.title, part.fact, [_summary_row(row, line_of) for row in part.rows])
                for part in summary.parts(each)
            ],
            each.suggestions,
        )
        for each in report.summaries
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
    found = report.residuals
    if isinstance(found, str):
        yield View("residuals", [found])
    else:
        tables = [_residuals_table(found, line_of)]
        if found.placements:
            tables.append(_placements_table(found))
        elif found.policies:
            tables.append(_policies_table(found))
        yield View("residuals", [residuals.total_text(found)], tables)


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
    several = len({each.name for each in costs}) > 1
    tables = [_cost_table(each, line_of, several, times) for each in costs if each.groups]
    facts = list(dict.fromkeys(_cost_fact(each, split is not None) for each in costs))
    facts = [*_notes(costs, split), *facts]
    if times is not None:
        facts.append("; ".join((profile.title(times), *profile.notes(times))))
    return View("cost", facts, tables)


def memory_view(
    memories: Sequence[Memory | str], line_of: Lines, split: Shardings | None = None
) -> View:
    """Return the view of the memory of programs, or why it is unknown; see `cost_view`."""
    known = [each for each in memories if not isinstance(each, str)]
    return View(
        "memory",
        [
            *_notes(known, split),
            *(each if isinstance(each, str) else _memory_fact(each, split) for each in memories),
        ],
        [_memory_table(each, line_of) for each in known],
        list(map(_curve, known)),
    )


def _notes(found: Sequence[Cost | Memory], split: Shardings | None) -> list[str]:
    """Return notes on programs that XLA would partition, or on the devices of a partitioned one."""
    if split is not None:
        return [shardings.heading(split)]
    notes = (partitioner_note(each.name, each.left_to_partitioner) for each in found)
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


def _cost_fact(found: Cost, is_split: bool) -> str:
    total = cost.total_text(found.total, is_split and bool(found.left_to_partitioner))
    return "; ".join((f"{found.name}: {total}", *cost.notes(found, None)))


def _cost_table(found: Cost, line_of: Lines, several: bool, times: Profile | None) -> Table:
    measured = times if found.by == "line" else None
    columns = (
        *(_MEASURED if measured is not None else ()),
        ("FLOPs", True),
        ("share", True),
        ("bytes", True),
        ("share", True),
        ("FLOPs/B", True),
        (found.by, False),
    )
    rows = [_cost_row(found, group, line_of) for group in found.groups]
    if measured is not None:
        rows = _with_times(found, rows, measured, line_of)
    return table(f"{found.name}, by {found.by}" if several else f"by {found.by}", columns, rows)


def _with_times(
    found: Cost, rows: Sequence[list[Cell]], times: Profile, line_of: Lines
) -> list[list[Cell]]:
    """Add the measured time to the rows of lines, and rows of lines without cost; sort by time."""
    known = {each.name: each for each in times.lines}
    pairs = zip(found.groups, rows, strict=True)
    timed = [[*_time_cells(known.pop(group.name, None)), *row] for group, row in pairs]
    for line in known.values():
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


def _cost_row(found: Cost, group: Group, line_of: Lines) -> list[Cell]:
    flops, size = (n if type(n) is int else None for n in (group.work.flops, group.work.bytes))
    intensity = flops / size if flops is not None and size else None
    return [
        Cell(cost.number_text(group, "flops") or "0", flops),
        share(cost.weight_of(group), cost.weight_of(found.total)),
        Cell(cost.bytes_text(group.work.bytes), size),
        share(size, found.total.work.bytes),
        Cell("" if intensity is None else f"{intensity:.1f}", intensity),
        Cell(
            "".join(cost.name_texts(found, group)),
            link=line_of(group.name) if group.line is not None else None,
            indent=max(len(group.path) - 1, 0),
        ),
    ]


# --- memory -----------------------------------------------------------------------------------


def _memory_fact(found: Memory, split: Shardings | None) -> str:
    is_whole = split is not None and found.left_to_partitioner
    whole = "arrays have their whole size" if is_whole else ""
    return "; ".join(filter(None, (memory.peak_text(found), memory.kinds_text(found), whole)))


def _memory_table(found: Memory, line_of: Lines) -> Table:
    columns = (
        ("bytes", True),
        ("share", True),
        ("values", False),
        ("value and last reader", False),
    )
    rows = [_live_row(each, found.peak_bytes, line_of) for each in found.live]
    return table(f"live at the peak of {found.name}", columns, rows)


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


def _curve(found: Memory) -> Curve:
    """Return the curve of bytes over the equations in execution order."""
    points, highest = found.curve, max(found.peak_bytes, 1)
    last = points[-1].position + 1
    ends = [*(point.position for point in points[1:]), last]
    steps = []
    for point, end in zip(points, ends, strict=True):
        left, right = (round(_SCALE * at / last, 1) for at in (point.position, end))
        top = round(_SCALE * (1 - point.bytes / highest), 1)
        steps.append(Step(left, right, top, f"{in_bytes(point.bytes)} {memory.place_text(point)}"))
    label = f"{found.name}: memory from the first equation to the last"
    marks = [(round(100 * size / highest, 1), in_bytes(size)) for size in memory.marks(highest, 4)]
    return Curve(label, steps, marks)


# --- residuals --------------------------------------------------------------------------------


def _residuals_table(found: Residuals, line_of: Lines) -> Table:
    columns = (
        ("bytes", True),
        ("share", True),
        ("type", False),
        ("recompute", True),
        ("value and readers", False),
    )
    groups = residuals.grouped(found.residuals)
    rows = [_residual_row(*group, found.total_bytes, line_of) for group in groups]
    return table("residuals", columns, rows)


def _residual_row(count: int, each: Residual, total: int | None, line_of: Lines) -> list[Cell]:
    reader = each.readers[0].source if each.readers else ""
    return [
        Cell(residuals.size_text(each.bytes), each.bytes),
        share(each.bytes, total),
        Cell(times(count, each.type), count),
        Cell(
            residuals.recompute_text(each),
            each.recompute if type(each.recompute) is int else None,
        ),
        Cell(
            _joined(residuals.what_texts(each)),
            link=linked(each.source, line_of),
            below=Cell(residuals.readers_text(each), link=linked(reader, line_of)),
        ),
    ]


def _placements_table(found: Residuals) -> Table:
    columns = (("bytes", True), ("peak", True), ("place", False), ("policy", False))
    rows = [
        [
            Cell(residuals.size_text(each.total_bytes), each.total_bytes),
            Cell(residuals.size_text(each.peak_bytes), each.peak_bytes),
            Cell(residuals.place_text(each)),
            Cell(residuals.policy_text(each.policy)),
        ]
        for each in found.placements
    ]
    return table(residuals.PLACEMENTS, columns, rows)


def _policies_table(found: Residuals) -> Table:
    columns = (("bytes", True), ("policy", False), ("largest dropped residual", False))
    rows = [
        [
            Cell(residuals.size_text(size), size),
            Cell(name),
            Cell(residuals.dropped_text(found, name)),
        ]
        for name, size in found.policies.items()
    ]
    return table("residuals under each policy of jax.checkpoint", columns, rows)


# --- shardings ------------------------------------------------------------------------------------
# The view of a report on several devices: collectives by line, and how values are sharded.


def shardings_view(found: Shardings, line_of: Lines) -> View:
    """Return the view of the shardings of a program.

    Args:
        found: The facts.
        line_of: Returns a line of a displayed file by name.
    """
    facts = [shardings.heading(found), *shardings.facts(found)]
    tables = [_collectives(found, line_of), _values(found, line_of)]
    if found.repeated:
        tables.insert(1, _repeated(found, line_of))
    return View("devices", facts, tables)


def _collectives(found: Shardings, line_of: Lines) -> Table:
    columns = (("sent", True), ("share", True), ("collective", False))
    groups = shardings.alike_collectives(found.collectives)
    rows = [_collective_row(each, found.sent_bytes, line_of) for each in groups]
    return table("collectives", columns, rows)


def _collective_row(alike: Sequence[Collective], whole: int, line_of: Lines) -> list[Cell]:
    first, sent = alike[0], sum(each.sent_bytes for each in alike)
    what, why = shardings.collective_texts(alike)
    asked = ", asked for by the program" if first.source == "program" else ""
    line = first.line or shardings.NO_LINE
    return [
        Cell(in_bytes(sent), sent),
        share(sent, whole),
        Cell(f"{line} {what}{asked}", link=linked(first.line, line_of), below=Cell(why)),
    ]


def _repeated(found: Shardings, line_of: Lines) -> Table:
    columns = (("each device", True), ("its share", True), ("operation", False))
    rows = []
    for each in found.repeated:
        work, sizes = shardings.repeated_work_texts(each)
        what = Cell(each.line or shardings.NO_LINE, link=linked(each.line, line_of))
        what = what._replace(below=Cell(shardings.repeated_text(each, found.devices)))
        rows.append([Cell(sizes[0], work), Cell(sizes[1], work / each.times), what])
    return table("computed by several devices alike", columns, rows)


def _values(found: Shardings, line_of: Lines) -> Table:
    columns = (("per device", True), ("whole", True), ("spec", False), ("value", False))
    rows = [_value_row(each, found, line_of) for each in shardings.alike_values(found.values)]
    return table("arguments, results and large values", columns, rows)


def _value_row(alike: Sequence[ShardedValue], found: Shardings, line_of: Lines) -> list[Cell]:
    first, count = alike[0], sum(each.count for each in alike)
    notes = shardings.value_notes(first, found)
    sizes = first.bytes_per_device * count, first.bytes * count
    what = f"{common_path([each.name for each in alike])} {times(count, first.type)}"
    return [
        *(Cell(in_bytes(size), size) for size in sizes),
        Cell(first.spec),
        Cell(", ".join((what, *notes)), link=linked(first.line, line_of)),
    ]
