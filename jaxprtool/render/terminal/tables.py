"""Common parts of terminal tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.style import StyleType
from rich.table import Column, Table
from rich.text import Text

from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.top import ALL, more
from jaxprtool.render.terminal.wrapping import PathText


def new_table(heading: str, *columns: Column | str) -> Table:
    """Return an empty table, with a heading if it has any."""
    return Table(
        *columns,
        title=Text(heading, style=theme.HEADING) if heading else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )


def number(name: str) -> Column:
    """Return a column of numbers."""
    return Column(name, justify="right")


def text(name: str, style: StyleType = "") -> Column:
    """Return a column of texts, which are wrapped if too long."""
    return Column(name, style=style, overflow="fold")


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table of labels and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=theme.COMMENT, no_wrap=True)
    table.add_column(overflow="fold")
    for label, fact in facts:
        table.add_row(label, fact)
    return table


def add_more(table: Table, count: int, *cells: str, option: str = ALL) -> None:
    """Add a row with the number of further rows, after its first cells, if there are any.

    `option` shows them; "" if none does.
    """
    if count > 0:
        table.add_row(*cells, Text(more(count, option=option), style=theme.COMMENT))


def share_text(part: float | None, whole: float | None) -> str:
    """Return a share of a whole in percent; empty if either is unknown."""
    return f"{part / whole:.1%}" if whole and part is not None else ""


def described(name: str, made: str, below: str) -> Text:
    """Return a cell with a value's name, the primitive that computes it, and a line below."""
    cell = PathText(name, style=theme.BINDER)
    if made:
        cell.append(f" {made}", style=theme.PRIMITIVE)
    if below:
        cell.append(f"\n{below}", style=theme.COMMENT)
    return cell


def line_text(source: str, code: str) -> Text:
    """Return a source line with its code, if known."""
    line = PathText(source, style=theme.BINDER)
    return line.append(f"  {code}", style="default") if code else line
