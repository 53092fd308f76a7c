"""What a report has beside its listing: tables of cost, the memory's curve, and residuals.

Each view is made of tables, whose columns sort, and of one picture. Lines of the user's lead to the
source that stands beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from jaxprtool.ir.frames import BEHIND
from jaxprtool.ir.quantities import in_bytes, plural, with_prefix
from jaxprtool.render.lines import printable

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import Cost, Group
    from jaxprtool.analysis.memory import Live, Memory, Point
    from jaxprtool.api.residuals import Residuals
    from jaxprtool.render.page.sources import Place

#: A table has so many rows.
_MOST = 500

#: Finds a line of source.
_Lines = Callable[[str], "Place | None"]

#: What stands for groups without a name.
_UNNAMED = {"line": "no line known", "scope": "outside of all scopes"}

#: The size of the curve's picture, in pixels.
_WIDTH, _HEIGHT = 800, 220


@dataclass(frozen=True)
class Report:
    """What is known of programs beside their equations.

    Attributes:
        costs: What each costs, by each grouping that is shown.
        memories: What memory each needs, or why that is not known.
        residuals: What the gradient of the traced program keeps, or why that is not shown.
    """

    costs: Sequence[Cost]
    memories: Sequence[Memory | str]
    residuals: Residuals | str


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: What it says.
        number: What its column is sorted by; None if by the text.
        place: The line of source that it leads to.
        indent: How deep it stands, in a tree.
        percent: The part of the whole, which is drawn behind it.
    """

    text: str
    number: float | None = None
    place: Place | None = None
    indent: int = 0
    percent: float | None = None


class Table(NamedTuple):
    """A table: each column has a heading, and whether it holds numbers."""

    caption: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    more: int


class View(NamedTuple):
    """A view of the page, beside that of the equations.

    Attributes:
        name: What it is called: `cost`.
        facts: What is said first.
        tables: Its tables.
        pictures: Its pictures, as SVG.
    """

    name: str
    facts: Sequence[str]
    tables: Sequence[Table] = ()
    pictures: Sequence[Markup] = ()


def views(report: Report, line_of: _Lines) -> Iterator[View]:
    """Return the views of a report.

    Args:
        report: What is known.
        line_of: Returns a line of a file that is shown, by its name: `model.py:9`.
    """
    several = len({cost.name for cost in report.costs}) > 1
    tables = [_cost_table(cost, line_of, several) for cost in report.costs if cost.groups]
    yield View("cost", list(dict.fromkeys(map(_cost_fact, report.costs))), tables)
    known = [each for each in report.memories if not isinstance(each, str)]
    yield View(
        "memory",
        [each if isinstance(each, str) else _memory_fact(each) for each in report.memories],
        [_memory_table(each, line_of) for each in known],
        [_curve(each) for each in known],
    )
    found = report.residuals
    if isinstance(found, str):
        yield View("residuals", [found])
    else:
        tables = [_residuals_table(found, line_of), _policies_table(found)]
        yield View("residuals", [_residuals_fact(found)], tables)


def _table(
    caption: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[Cell]]
) -> Table:
    shown = [[cell._replace(text=_text(cell.text)) for cell in row] for row in rows[:_MOST]]
    return Table(_text(caption), columns, shown, len(rows) - len(shown))


def _text(text: str) -> str:
    return "".join(printable([text]))


def _linked(source: str, line_of: _Lines) -> Place | None:
    return line_of(source.partition(BEHIND)[0])


# --- cost -------------------------------------------------------------------------------------


def _cost_fact(cost: Cost) -> str:
    total = cost.total.work
    facts = [f"{_number(total.flops)} FLOPs", _size(total.bytes)]
    if total.transcendentals != 0:
        facts.append(f"{_number(total.transcendentals)} transcendentals")
    if cost.total.per_round:
        facts.append("one round of each loop whose rounds are not known")
    if cost.unknown:
        facts.append(f"without {', '.join(cost.unknown)}, of which the cost is not known")
    return f"{cost.name}: {', '.join(facts)}"


def _cost_table(cost: Cost, line_of: _Lines, several: bool) -> Table:
    of = f"{cost.name}, by {cost.by}" if several else f"by {cost.by}"
    columns = (
        ("FLOPs", True),
        ("share", True),
        ("bytes", True),
        ("share", True),
        ("FLOPs/B", True),
        (cost.by, False),
    )
    return _table(of, columns, [_cost_row(cost, group, line_of) for group in cost.groups])


def _cost_row(cost: Cost, group: Group, line_of: _Lines) -> list[Cell]:
    work, whole = group.work, cost.total.work
    cells = []
    for number, total, text in (
        (work.flops, whole.flops, _number),
        (work.bytes, whole.bytes, _size),
    ):
        known = type(number) is int and type(total) is int
        percent = 100 * number / total if known and total else None
        order = float(number) if known else None
        cells.append(Cell(text(number), order))
        cells.append(Cell("" if percent is None else f"{percent:.1f}%", percent, percent=percent))
    intensity = work.flops / work.bytes if cells[0].number and cells[2].number else None
    cells.append(Cell("" if intensity is None else f"{intensity:.1f}", intensity))
    name = group.path[-1] if group.path else group.name or _UNNAMED.get(cost.by, "")
    place = line_of(group.name) if group.line is not None else None
    behind = f"{BEHIND}{group.behind}" if group.behind else ""
    cells.append(Cell(name + behind, None, place, max(len(group.path) - 1, 0)))
    return cells


def _number(number: object) -> str:
    return with_prefix(number) if isinstance(number, int) else str(number)


def _size(number: object) -> str:
    return in_bytes(number) if isinstance(number, int) else f"{number} bytes"


# --- memory -----------------------------------------------------------------------------------


def _memory_fact(found: Memory) -> str:
    parts = (
        ("arguments", found.argument_bytes),
        ("results", found.result_bytes),
        ("constants", found.constant_bytes),
        ("temporaries", found.temporary_bytes),
    )
    said = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts if size)
    return f"{found.name}: {in_bytes(found.peak_bytes)} at the peak ({said}){_at(found.at)}"


def _at(point: Point) -> str:
    where = " ".join(filter(None, (point.source, point.primitive)))
    return f", at {where}" if where else ""


def _memory_table(found: Memory, line_of: _Lines) -> Table:
    columns = (
        ("bytes", True),
        ("share", True),
        ("values", False),
        ("what", False),
        ("until", False),
    )
    rows = [_live_row(each, found.peak_bytes, line_of) for each in found.live]
    return _table(f"alive at the peak of {found.name}", columns, rows)


def _live_row(live: Live, peak: int, line_of: _Lines) -> list[Cell]:
    percent = 100 * live.bytes / (peak or 1)
    values = f"{live.count:,} x {live.type}" if live.count > 1 else live.type
    if live.kind == "room":
        what = f"room for {live.name}, made later by {live.primitive}"
    elif live.source:
        what = f"{live.source} {live.primitive}"
    else:
        what = live.name or live.primitive
    until = " ".join(filter(None, (live.reader, live.reader_source)))
    return [
        Cell(in_bytes(live.bytes), live.bytes),
        Cell(f"{percent:.1f}%", percent, percent=percent),
        Cell(values, live.count),
        Cell(what, None, _linked(live.source, line_of)),
        Cell(until, None, _linked(live.reader_source, line_of)),
    ]


def _curve(found: Memory) -> Markup:
    """Return the curve as SVG: from no byte to the peak, over the equations as they run."""
    points, peak = found.curve, max(found.peak_bytes, 1)
    last = max(points[-1].position, 1) if points else 1
    path, areas = [f"M0 {_HEIGHT}"], []
    ends = [*(point.position for point in points[1:]), last + 1]
    for point, end in zip(points, ends, strict=True):
        left, right = (round(_WIDTH * at / (last + 1), 1) for at in (point.position, end))
        top = round(_HEIGHT * (1 - point.bytes / peak), 1)
        path.append(f"L{left} {top}H{right}")
        title = Markup("<title>{}{}</title>").format(in_bytes(point.bytes), _text(_at(point)))
        areas.append(
            Markup('<rect x="{}" width="{}" height="{}">{}</rect>').format(
                left, round(max(right - left, 0.1), 1), _HEIGHT, title
            )
        )
    path.append(f"L{_WIDTH} {_HEIGHT}Z")
    label = f"{found.name}: memory from the first equation to the last"
    return Markup(
        '<figure><svg viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">'
        '<path d="{}"/>{}</svg><figcaption>{} at the peak; point at the curve</figcaption></figure>'
    ).format(_WIDTH, _HEIGHT, _text(label), "".join(path), Markup("").join(areas), in_bytes(peak))


# --- residuals --------------------------------------------------------------------------------


def _residuals_fact(found: Residuals) -> str:
    size = "" if found.total_bytes is None else f", {in_bytes(found.total_bytes)}"
    return f"{found.name} keeps {plural(len(found.residuals), 'residual')}{size}"


def _residuals_table(found: Residuals, line_of: _Lines) -> Table:
    columns = (
        ("bytes", True),
        ("share", True),
        ("type", False),
        ("again", True),
        ("what", False),
        ("for", False),
    )
    rows = []
    for each in found.residuals:
        known = found.total_bytes and each.bytes is not None
        percent = 100 * (each.bytes or 0) / (found.total_bytes or 1) if known else None
        again = each.recompute if isinstance(each.recompute, int) else None
        what = each.argument or f"{each.source} {each.name or each.primitive}"
        reader = each.readers[0] if each.readers else None
        rows.append(
            [
                Cell("?" if each.bytes is None else in_bytes(each.bytes), each.bytes),
                Cell("" if percent is None else f"{percent:.1f}%", percent, percent=percent),
                Cell(each.type),
                Cell("" if each.argument else _number(each.recompute), again),
                Cell(what, None, _linked(each.source, line_of)),
                Cell(
                    f"{reader.primitive} {reader.source}" if reader else "",
                    None,
                    _linked(reader.source, line_of) if reader else None,
                ),
            ]
        )
    return _table("residuals", columns, rows)


def _policies_table(found: Residuals) -> Table:
    rows = [
        [Cell("?" if size is None else in_bytes(size), size), Cell(name)]
        for name, size in found.policies.items()
    ]
    return _table(
        "kept under each policy of jax.checkpoint", (("bytes", True), ("policy", False)), rows
    )
