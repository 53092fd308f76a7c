"""Measures of differences as cells of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from jaxprtool.ir.basics.quantities import with_prefix
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.tables import new_table, text

if TYPE_CHECKING:
    from jaxprtool.execute.compare.measures import Measure

#: The columns of a result: errors, and the number of elements beyond tolerance.
COLUMNS = ("absolute", "relative", "ULPs", "cosine", "beyond")

#: The space between columns.
_GAP = "   "


def errors_table(*headings: str) -> Table:
    """Return an empty table of errors, without a title, which would be wrapped at its width."""
    errors = (Column(name, justify="right", no_wrap=True) for name in COLUMNS)
    return new_table("", *map(text, headings), *errors)


def errors_of(names: Sequence[Text], rows: Sequence[list[str]], width: int) -> RenderableType:
    """Return the errors of results, those of a long name below it.

    Args:
        names: The name of each result.
        rows: The `cells` of each.
        width: The width in characters.
    """
    sizes = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    room = width - sum(size + len(_GAP) for size in sizes)
    if max(name.cell_len for name in names) <= room:
        table = errors_table("result")
        for name, row in zip(names, rows, strict=True):
            table.add_row(name, *row)
        return table
    heading, *lines = (
        _GAP.join(cell.rjust(size) for cell, size in zip(row, sizes, strict=True))
        for row in (list(COLUMNS), *rows)
    )
    parts = [Text("result".ljust(room) + _GAP + heading, style=theme.HEADING), Text("─" * width)]
    for name, line in zip(names, lines, strict=True):
        if name.cell_len > room:
            parts.append(name)
            name = Text()
        parts.append(name.copy().append(" " * (room - name.cell_len) + _GAP + line))
    return Group(*parts)


def cells(each: Measure) -> list[str]:
    """Return the cells of a result for `COLUMNS`."""
    if each.equal:
        return ["same bits", "", "", "", _nonfinite(each)]
    return [
        _number(each.absolute),
        _number(each.relative),
        "" if each.ulps is None else with_prefix(each.ulps),
        _cosine(each.cosine),
        _beyond(each),
    ]


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"


def _cosine(cosine: float | None) -> str:
    """Return a cosine as text; near 1, as its distance from 1."""
    if cosine is None:
        return ""
    below = 1 - cosine
    return "1" if below < 1e-12 else f"1-{below:.0e}" if below < 1e-3 else f"{cosine:.3f}"


def _nonfinite(each: Measure) -> str:
    """Return the number of NaNs and infinities, if equal to the reference's."""
    counts = [(each.own_nans, "NaN"), (each.infinities, "inf")]
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _beyond(each: Measure) -> str:
    """Return the numbers of elements beyond tolerance, of NaNs and of infinities."""
    a, b = each.nans
    alike = each.nans[0] == each.nans[1] and each.nonfinite[0] == each.nonfinite[1]
    nans = f", {b:,} NaN, not {a:,}" if a != b else ""
    if alike and (said := _nonfinite(each)):
        nans = f", {said}"
    if not each.beyond:
        return "none" + nans
    if each.size < 1000:
        return f"{each.beyond} of {each.size}{nans}"
    share = 100 * each.beyond / each.size
    return f"{share:.0f}%{nans}" if share >= 10 else f"{share:.2g}%{nans}"


def types(each: Measure) -> str:
    """Return the type of a result, and that of the reference if it differs."""
    same = each.type == each.reference_type
    return each.type if same else f"{each.type}, not {each.reference_type}"
