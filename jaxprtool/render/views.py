"""Tables, curves and facts, as the terminal and the views of a page show them.

A table is written once: its columns, and rows of cells. `terminal.tables.drawn` shows it in the
terminal, and `page.page_table` on a page, where columns sort, shares are bars, and the user's lines
are links to the source. A view of a page consists of such tables, of curves and of facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jaxprtool.ir.documents import in_bytes
from jaxprtool.ir.notation.tokens import BinderToken, PrimitiveName

if TYPE_CHECKING:
    from jaxprtool.render.page import SourceLink


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: Its heading.
        role: The role of its texts, a class of `tokens`; the terminal has a color for each.
        is_number: Whether it has numbers, which are on the right.
        total: Writes the sum of the numbers in rows that are left out; None to leave it empty.
    """

    heading: str
    role: type[str] = str
    is_number: bool = False
    total: Callable[[Any], str] | None = None


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: Its text, in parts if some of them have another role than the column.
        number: The sort key of its column; None to sort by text.
        link: The source line that it links to, by name until it is on a page.
        indent: Its depth in a tree.
        percent: Its share of the whole; a page draws it in the background.
        below: The text below it.
        code: The code below it in the terminal. On a page, that of the linked line.
    """

    text: str | Sequence[str]
    number: float | None = None
    link: SourceLink | str | None = None
    indent: int = 0
    percent: float | None = None
    below: Cell | None = None
    code: str = ""


#: A row: a cell that has only a text may be a string.
Row: TypeAlias = "Sequence[Cell | str]"


class RowGroup(NamedTuple):
    """A row, and the rows that it consists of.

    The terminal shows the latter below it, without their shares. A page, whose rows are sorted,
    has only them, with the name of the whole before their own.
    """

    cells: Row
    parts: Sequence[Row]


class Table(NamedTuple):
    """A table.

    Attributes:
        caption: Its caption.
        columns: Its columns.
        rows: Its rows.
        more: The number of rows that are left out.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row | RowGroup]
    more: int = 0

    @property
    def name_column(self) -> int:
        """The index of the column that names the rows: the first, or the last after numbers."""
        return -1 if self.columns[0].is_number else 0

    def cells(self, row: Row | RowGroup) -> tuple[list[Cell], list[list[Cell]]]:
        """Return the cells of a row, and those of its parts."""
        whole, parts = row if isinstance(row, RowGroup) else (row, ())
        return _cells(whole), list(map(_cells, parts))


def _cells(row: Row) -> list[Cell]:
    return [Cell(cell) if isinstance(cell, str) else cell for cell in row]


class CurveStep(NamedTuple):
    """A level part of a curve: its start, end and height, and its description."""

    left: float
    right: float
    top: float
    text: str


class Curve(NamedTuple):
    """A curve: its title, its parts, and the marks of its axis with their heights."""

    label: str
    steps: Sequence[CurveStep]
    marks: Sequence[tuple[float, str]]


class PageView(NamedTuple):
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


def number_column(heading: str, total: Callable[[Any], str] | None = None) -> Column:
    """Return a column of numbers."""
    return Column(heading, is_number=True, total=total)


def share_column(is_summed: bool = False) -> Column:
    """Return a column of the shares of a whole; the rows left out may have their sum."""
    return number_column("share", "{:.1f}%".format if is_summed else None)


def share(part: Any, whole: Any) -> Cell:
    """Return the cell of a share of a whole; empty if either is symbolic or unknown."""
    numbers = isinstance(part, int | float) and isinstance(whole, int | float) and whole
    percent = 100 * part / whole if numbers else None
    return Cell("" if percent is None else f"{percent:.1f}%", percent, percent=percent)


def value_cell(name: str, primitive: str) -> Cell:
    """Return the cell of a value: its name or line, and the primitive that computes it."""
    return Cell([BinderToken(name), PrimitiveName(f" {primitive}" if primitive else "")])


def bytes_cell(number: int) -> Cell:
    """Return the cell of a number of bytes."""
    return Cell(in_bytes(number), number)
