"""Tables, curves, flame graphs and facts as the views of a page show them.

A view consists of sortable tables and of curves, with the contents of the terminal's tables. A
flame graph shows the numbers of a table by scope and line. The user's lines link to the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxprtool.ir.frames import BEHIND
from jaxprtool.ir.meshes import partitioner_note
from jaxprtool.ir.paths import alike

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
    """A level part of a curve: its start, end and height, its description and its line."""

    left: float
    right: float
    top: float
    text: str
    link: SourceLink | None = None


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
    link: Callable[[str], SourceLink | None],
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
