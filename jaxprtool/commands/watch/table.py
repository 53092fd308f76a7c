"""Watched values, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from jaxprtool.ir.places import BEHIND
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, more, split_rows

if TYPE_CHECKING:
    from jaxprtool.commands.watch.watch import Numbers, Watched, WatchedRow

_BARS = "▁▂▃▄▅▆▇█"

#: The minimum share of elements for which losses are shown, and for separate powers of two.
_LEAST = 0.001

#: The width of a number, and the minimal and maximal width of the histogram.
_NUMBER, _NARROW, _WIDE = 10, 16, 40

_INDENT = "  "


def watched_text(watched: Watched, width: int, top: int | None = tables.ROWS) -> Rendering:
    """Return a row for each line, scope or equation: the source, then statistics.

    Args:
        watched: The values.
        width: The width in characters.
        top: The number of rows; None for all.
    """
    if not watched.rows:
        return Rendering(Text(f"{watched.name}: no selected value is computed"), width)
    low, high = _range(watched.rows)
    bars = max(_NARROW, min(_WIDE, width // 5))
    rows, rest = split_rows(watched.rows, top)
    numbered = max(len(_label(row)) for row in rows)
    lines = [
        Text(f"{watched.name}: values by {watched.by}", style=tables.HEADING),
        Text(
            _INDENT
            + "".join([" " * numbered, *(f"{name:>{_NUMBER}}" for name in _NUMBERS)])
            + (f"  2^{low} … 2^{high}" if low <= high else ""),
            style=tables.COMMENT,
        ),
    ]
    previous: tuple[str, bool] | None = None
    for row in rows:
        if (row.name, row.backward) != previous:
            lines.append(_name(watched, row, width))
        previous = row.name, row.backward
        numbers = Text(_INDENT + f"{_label(row):<{numbered}}", style=tables.COMMENT)
        numbers.append("".join(f"{_number(x):>{_NUMBER}}" for x in _four(row.numbers)), "default")
        histogram = f"  {_histogram(row.numbers, low, high, bars)}".rstrip()
        numbers.append(histogram, style=tables.PARAMETER)
        remarks = ", ".join(_remarks(row.numbers))
        room = width - len(numbers) - 2
        if remarks and len(remarks) <= room:
            numbers.append(f"  {remarks}", style=tables.LITERAL)
            remarks = ""
        lines.append(numbers)
        indent = _INDENT + " " * numbered
        for line in wrap(remarks, width, initial_indent=indent, subsequent_indent=indent):
            lines.append(Text(line, style=tables.LITERAL))
    lines += [Text(_more(rest), style=tables.COMMENT)] if rest else []
    return Rendering(Group(*lines), width)


def _more(rest: Sequence[WatchedRow]) -> str:
    """Return the number of rows that are not shown, and how many of them are not finite."""
    bad = sum(bool(row.numbers.nans or row.numbers.infs) for row in rest)
    return more(len(rest), f", {bad:,} of them with NaN or inf" if bad else "")


_NUMBERS = "minimum", "maximum", "mean", "std"


def _four(numbers: Numbers) -> Iterator[float | None]:
    yield from (numbers.low, numbers.high, numbers.mean, numbers.deviation)


def _range(rows: Sequence[WatchedRow]) -> tuple[int, int]:
    """Return the least and greatest power of two of a histogram, without rare smallest ones."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.numbers.exponents)
    powers, below, total = sorted(counts), 0, counts.total()
    for low in powers:
        below += counts[low]
        if below >= _LEAST * total:
            return low, powers[-1]
    return 0, -1


def _label(row: WatchedRow) -> str:
    """Return the iteration of a row, and whether it has the intermediates of a line."""
    label = f"iteration {', '.join(map(str, row.iteration))} " if row.iteration else ""
    return f"{label}inside " if row.intermediate else label


def _name(watched: Watched, row: WatchedRow, width: int) -> Text:
    name, behind, library = row.name.partition(BEHIND)
    text = Text(name, style=tables.BINDER).append(behind + library, style=tables.COMMENT)
    if watched.by == "equation":
        (primitive,), (type_text,) = row.primitives, row.types
        if primitive != row.name:
            text.append(f" {primitive}", style=tables.PRIMITIVE)
        text.append(f" {type_text}", style=tables.TYPE)
        text.append(f" {row.source.partition(BEHIND)[0]}", style=tables.COMMENT)
    if row.backward and watched.by != "scope":
        text.append(" backward", style=tables.KEYWORD)
    if row.code:
        text.append(f"  {row.code}", style="default")
    text.truncate(width, overflow="ellipsis")
    return text


def _remarks(numbers: Numbers) -> Iterator[str]:
    for count, what in ((numbers.nans, "NaN"), (numbers.infs, "infinite"), (numbers.zeros, "zero")):
        if count:
            yield f"{_share(count / numbers.size)} {what}"
    for name, lost in numbers.lost.items():
        over = f"{_share(lost.overflow)} over" if lost.overflow >= _LEAST else ""
        under = f"{_share(lost.underflow)} under" if lost.underflow >= _LEAST else ""
        if over or under:
            yield f"{name} {' '.join(filter(None, (over, under)))}"


def _share(part: float) -> str:
    return "all" if part == 1 else f"{part:.1%}" if part >= _LEAST else "< 0.1%"


def _histogram(numbers: Numbers, low: int, high: int, bars: int) -> str:
    """Return a histogram of the powers of two from `low` to `high` in at most `bars` bars."""
    if not numbers.exponents:
        return ""
    step = -(-(high - low + 1) // bars)
    counts = [0] * -(-(high - low + 1) // step)
    for power, count in numbers.exponents.items():
        counts[max(power - low, 0) // step] += count
    most = max(counts)
    return "".join(_BARS[(len(_BARS) * n - 1) // most] if n else " " for n in counts)


def _number(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.3g}" if abs(number) < 1e5 or not isfinite(number) else f"{number:.2e}"
