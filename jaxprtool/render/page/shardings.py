"""The view of a report on several devices: collectives by line, and how values are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxprtool.ir.basics.paths import common_path
from jaxprtool.ir.basics.quantities import in_bytes, times
from jaxprtool.render.page.report import Cell, Lines, Table, View, linked, share, table
from jaxprtool.render.reports import shardings

if TYPE_CHECKING:
    from jaxprtool.analysis.shardings import Collective, ShardedValue, Shardings


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
