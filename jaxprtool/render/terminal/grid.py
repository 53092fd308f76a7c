"""Tables as tokens of a listing.

Rich lays out a table in about two milliseconds per row, and programs have ten thousand rows. This
module takes a twentieth of that. Columns are as wide as their cells; if they exceed the terminal
together, the widest ones are narrowed, and their cells wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from jaxprtool.ir.notation.tokens import Comment, Heading
from jaxprtool.render.terminal.lines import Cell, joined, parts, wrapped

#: The gap between two columns.
GAP = "  "

#: The share of a column's cells that must fit its width if not all do.
_FITTING = 0.95


def grid(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    below: Sequence[Cell] | None = None,
) -> list[str]:
    """Return a table's tokens without a final newline.

    Args:
        headings: The name of each column.
        rows: A cell for each column of each row.
        width: The width in characters.
        below: A cell below each row, from its second column on.
    """
    first = [[Heading(heading)] for heading in headings]
    widths = _widths([first, *rows], width)
    rule = "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    lines: list[Iterable[str]] = [_row(first, widths), [Comment(rule)]]
    indent = widths[0] + 2 * len(GAP)
    for row, more in zip(rows, below or [()] * len(rows), strict=True):
        lines.append(_row(row, widths))
        if more:
            lines += ([" " * indent, *line] for line in wrapped(more, max(width - indent, 1)))
    return joined(lines)


def fits(headings: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> bool:
    """Return True if most rows of a table fit on a line."""
    table = [[[Heading(heading)] for heading in headings], *rows]
    lengths = (
        sorted(sum(map(len, cell)) for cell in column) for column in zip(*table, strict=True)
    )
    return sum(map(_of_most, lengths)) + len(GAP) * (len(headings) - 1) <= width


def columns(rows: Sequence[Sequence[Cell]], width: int) -> list[str]:
    """Return the tokens of rows in columns, without headings and without a final newline."""
    widths = _widths(rows, width)
    return joined(_row(row, widths) for row in rows)


def _widths(table: Sequence[Sequence[Cell]], width: int) -> list[int]:
    """Return the width of each column."""
    columns = list(zip(*table, strict=True))
    lengths = [sorted(sum(map(len, cell)) for cell in column) for column in columns]
    room = max(width - len(GAP) * (len(columns) - 1), len(columns))
    longest = [each[-1] for each in lengths]
    if sum(longest) <= room:
        return longest
    wanted = list(map(_of_most, lengths))
    words = [max(map(_longest_word, column)) for column in columns]
    parts = [
        max(_longest_part(column[0]), _of_most(sorted(map(_longest_part, column))))
        for column in columns
    ]
    least = list(words)
    for column in sorted(range(len(columns)), key=words.__getitem__, reverse=True):
        if sum(least) > room:  # break words in the columns with the longest ones
            least[column] = parts[column]
    if sum(least) > room:
        least, wanted = [1] * len(columns), least
    widths = _shared(least, wanted, room)
    missing = [most - width for most, width in zip(longest, widths, strict=True)]
    for column in sorted(range(len(columns)), key=missing.__getitem__):
        widths[column] += max(0, min(missing[column], room - sum(widths)))
    return widths


def _of_most(lengths: Sequence[int]) -> int:
    """Return the length that most of these sorted lengths do not exceed."""
    return lengths[math.ceil(_FITTING * (len(lengths) - 1))]


def _shared(least: list[int], wanted: list[int], room: int) -> list[int]:
    """Return widths between the least and the wanted ones that fit, cutting the widest."""
    for most in range(max(wanted), 0, -1):
        widths = [max(low, min(high, most)) for low, high in zip(least, wanted, strict=True)]
        if sum(widths) <= room:
            break
    return widths


def _longest_word(cell: Cell) -> int:
    return max(map(len, "".join(cell).split(" ")))


def _longest_part(cell: Cell) -> int:
    return max((len(part) for token in cell for part in parts(token)), default=0)


def _row(row: Sequence[Cell], widths: Sequence[int]) -> Iterator[str]:
    """Yield the tokens of a row, on as many lines as its longest cell needs."""
    cells = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, cells))):
        if number:
            yield "\n"
        spaces = 0
        for lines, width in zip(cells, widths, strict=True):
            line = lines[number] if number < len(lines) else ()
            if length := sum(map(len, line)):
                if spaces:
                    yield " " * spaces
                    spaces = 0
                yield from line
            spaces += width - length + len(GAP)
