"""Tables, curves, flame graphs and facts, as the terminal and the views of a page show them.

A table is written once: its columns, and rows of cells. `terminal.tables.drawn` shows it in the
terminal, and `page.page_table` on a page, where columns sort, shares are bars, and the user's lines
are links to the source. A view of a page consists of such tables, of curves and of facts. A
flame graph shows the numbers of a table by scope and line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jaxprtool.ir.documents import in_bytes
from jaxprtool.ir.notation import BinderToken, PrimitiveName

if TYPE_CHECKING:
    from jaxprtool.render.page import SourceLink


#: Looks up a line of a displayed file, by name.
Lines: TypeAlias = "Callable[[str], SourceLink | None]"


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
    """A level part of a curve: its start, end and height, its description and its line."""

    left: float
    right: float
    top: float
    text: str
    link: SourceLink | str | None = None


class Curve(NamedTuple):
    """A curve.

    Attributes:
        label: Its title.
        steps: Its parts.
        marks: The marks of its axis, with their heights.
        peak: Its highest part.
        at_peak: What is there, the largest first.
    """

    label: str
    steps: Sequence[CurveStep]
    marks: Sequence[tuple[float, str]]
    peak: CurveStep
    at_peak: Sequence[Cell]


class IcicleFrame(NamedTuple):
    """A frame of a flame graph.

    Attributes:
        name: A scope, a function, a line, or the number of frames that are too small to be shown.
        amount: Its amount, which includes those of the frames inside.
        text: The amount as text.
        line: The id of its source line, or of another place on the page; "" if it has none.
        inside: The frames inside, the largest first.
    """

    name: str
    amount: float
    text: str
    line: str
    inside: Sequence[IcicleFrame]


class Icicle(NamedTuple):
    """A flame graph of one quantity, drawn from the root down.

    Attributes:
        quantity: The quantity: `FLOPs`.
        root: The whole.
        note: What to know about the amounts; "" if there is nothing.
        lines: The amount of each source line, by its id.
    """

    quantity: str
    root: IcicleFrame
    note: str
    lines: Mapping[str, float]


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


# --- flame graphs ---------------------------------------------------------------------------------

#: Frames with a smaller share of the whole are merged, so that a page has few frames of a depth.
_LEAST_FRAME = 0.001

#: Scopes with a smaller share are merged with those whose names differ only in numbers.
_LEAST_ALIKE = 0.02

#: The number of scopes around a line that are shown.
_MOST_SCOPES = 40

#: A path to an amount: the scopes, the outermost first, and the line.
FramePath = tuple[str, ...]


def icicle(
    quantity: str,
    root: str,
    amounts: Mapping[FramePath, float],
    text: Callable[[float], str],
    link: Lines,
    note: str = "",
) -> Icicle | None:
    """Return the flame graph of a quantity; None if nothing has any.

    Args:
        quantity: The quantity: `FLOPs`.
        root: The name of the whole.
        amounts: The amount of each path, without those of the paths that it begins.
        text: Writes an amount.
        link: Returns the place of a frame on the page, by the name of the frame.
        note: What to know about the amounts.
    """
    from jaxprtool.ir.trees import alike  # imports JAX, which tables do not need

    whole = sum(amounts.values())
    if not whole:
        return None
    rows = [
        ((*path[:-1][:_MOST_SCOPES], path[-1]), amount)
        for path, amount in amounts.items()
        if amount
    ]

    def frame(name: str, rows: Sequence[tuple[FramePath, float]]) -> IcicleFrame:
        inside: defaultdict[str, list[tuple[FramePath, float]]] = defaultdict(list)
        for path, amount in rows:
            if path:
                inside[path[0]].append((path[1:], amount))

        def kind(name: str) -> str:
            is_scope = any(path for path, _ in inside[name])
            return "" if is_scope and _sum(inside[name]) < _LEAST_ALIKE * whole else name

        frames = [
            frame(group.path, [row for name in group.items for row in inside[name]])
            for group in alike(inside, str, kind)
        ]
        frames.sort(key=lambda inner: -inner.amount)
        large = [inner for inner in frames if inner.amount >= _LEAST_FRAME * whole]
        if len(large) < len(frames):
            rest = sum(inner.amount for inner in frames[len(large) :])
            label = f"{len(frames) - len(large):,} under {_LEAST_FRAME:.1%}"
            large.append(IcicleFrame(label, rest, text(rest), "", ()))
        amount = _sum(rows)
        return IcicleFrame(name or "unknown line", amount, text(amount), line_id(name), large)

    @cache
    def line_id(name: str) -> str:
        place = link(name)
        return "" if place is None else place.line

    lines: defaultdict[str, float] = defaultdict(float)
    for path, amount in rows:
        lines[next(filter(None, map(line_id, reversed(path))), "")] += amount
    return Icicle(quantity, frame(root, rows), note, lines)


def _sum(rows: Iterable[tuple[FramePath, float]]) -> float:
    return sum(amount for _, amount in rows)
