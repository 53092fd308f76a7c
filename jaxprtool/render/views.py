"""Tables, curves and facts as the views of a page show them.

A view consists of sortable tables and of curves, with the contents of the terminal's tables. The
user's lines link to the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxprtool.ir.frames import BEHIND
from jaxprtool.ir.meshes import partitioner_note

if TYPE_CHECKING:
    from jaxprtool.render.page import SourceLink


#: The maximum number of rows of a table.
_MOST = 500


#: Looks up a line of source.
Lines = Callable[[str], "SourceLink | None"]


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


def page_table(
    caption: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[Cell]]
) -> Table:
    """Return a table of the first rows, and the number of further ones."""
    return Table(caption, columns, rows[:_MOST], max(len(rows) - _MOST, 0))


def linked(source: str, line_of: Lines) -> SourceLink | None:
    """Return the user's line in a place, if its file is displayed."""
    return line_of(source.partition(BEHIND)[0])


def joined(texts: Sequence[str]) -> str:
    """Return texts that are not empty, separated by spaces."""
    return " ".join(filter(None, texts))


def share(part: Any, whole: Any) -> Cell:
    """Return the cell of a share of a whole; empty if either is symbolic or unknown."""
    percent = 100 * part / whole if type(part) is type(whole) is int and whole else None
    return Cell("" if percent is None else f"{percent:.1f}%", percent, percent=percent)


def partitioner_notes(results: Sequence[Any], split: str | None) -> list[str]:
    """Return notes on programs that XLA would partition, or on the devices of a partitioned one.

    Args:
        results: The cost or the memory of each program.
        split: The line about the devices of the only program; None if it was not compiled.
    """
    if split is not None:
        return [split]
    notes = (partitioner_note(result.name, result.left_to_partitioner) for result in results)
    return list(dict.fromkeys(filter(None, notes)))
