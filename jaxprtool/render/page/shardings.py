"""The view of a report on several devices: collectives by line, and how values are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.ir.basics.quantities import in_bytes, times
from jaxprtool.render.page.report import Cell, Lines, Table, View, linked, share, table
from jaxprtool.render.reports import shardings

if TYPE_CHECKING:
    from jaxprtool.analysis.shardings import Collective, ShardedValue, Shardings


def shardings_view(found: Shardings, line_of: Lines) -> View:
    """Return the view of what XLA's partitioner made of a program.

    Args:
        found: The facts.
        line_of: Returns a line of a displayed file by name.
    """
    facts = [shardings.heading(found), *shardings.facts(found)]
    return View("devices", facts, [_collectives(found, line_of), _values(found, line_of)])


def _collectives(found: Shardings, line_of: Lines) -> Table:
    columns = (("sent", True), ("share", True), ("collective", False))
    rows = [_collective_row(each, found.sent_bytes, line_of) for each in found.collectives]
    return table("collectives", columns, rows)


def _collective_row(each: Collective, whole: int, line_of: Lines) -> list[Cell]:
    what, why = shardings.collective_texts([each])
    asked = ", asked for by the program" if each.source == "program" else ""
    return [
        Cell(in_bytes(each.sent_bytes), each.sent_bytes),
        share(each.sent_bytes, whole),
        Cell(f"{each.line} {what}{asked}", link=linked(each.line, line_of), below=Cell(why)),
    ]


def _values(found: Shardings, line_of: Lines) -> Table:
    columns = (("per device", True), ("whole", True), ("spec", False), ("value", False))
    rows = [_value_row(each, found, line_of) for each in found.values]
    return table("arguments, results and large values", columns, rows)


def _value_row(each: ShardedValue, found: Shardings, line_of: Lines) -> list[Cell]:
    notes = shardings.value_notes(each, found)
    sizes = each.bytes_per_device * each.count, each.bytes * each.count
    what = f"{each.name} {times(each.count, each.type)}"
    return [
        *(Cell(in_bytes(size), size) for size in sizes),
        Cell(each.spec),
        Cell(", ".join((what, *notes)), link=linked(each.line, line_of)),
    ]
