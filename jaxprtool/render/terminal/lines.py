"""Text in tokens, without JAX: lines that are cut, wrapped and colored, and rows in columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from jaxprtool.ir.notation import (
    BINDER,
    COMMENT_COLUMN,
    BinderToken,
    Comment,
    Heading,
    PrimitiveName,
    SourceLineToken,
    with_roles,
)
from jaxprtool.render.terminal.tables import STYLES

# --- lines ----------------------------------------------------------------------------------------
# The lines of a listing in tokens: splitting, cutting and wrapping.

#: The tokens of a line, or of a cell.
Cell: TypeAlias = Sequence[str]

#: Patterns of spaces, and of pieces after which a word may be broken: for files, names of values
#: such as `params['w'].value`, and for other words.
_PATH_PARTS = re.compile(r" +|[^ /]*/+|[^ /]+")
_NAME_PARTS = re.compile(r" +|\[[^\]]*\]|\.?[^ .\[]+|.")
_PARTS = re.compile(r" +|[^ ,:(=_|\]]*[,:(=_|\]]+|[^ ,:(=_|\]]+")

#: The indent of the continuation of a broken line.
_INDENT = 4


def printable(tokens: Iterable[str]) -> list[str]:
    """Return tokens with control characters escaped, such as those in a name.

    Non-breaking spaces, used while lines are wrapped, become ordinary spaces.
    """
    return [t if t.isprintable() else type(t)(_written_out(t)) for t in tokens]


def _written_out(text: str) -> str:
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def joined_lines(lines: Iterable[Iterable[str]]) -> list[str]:
    """Return the tokens of lines with newlines between them."""
    return [token for line in lines for token in ("\n", *line)][1:]


def lines_of(tokens: Iterable[str]) -> Iterator[list[str]]:
    """Yield the tokens of each line, without newlines."""
    line: list[str] = []
    for token in tokens:
        first, *others = token.split("\n") if "\n" in token else (token,)
        if first or token is BINDER:
            line.append(token if not others else type(token)(first))
        for rest in others:
            yield line
            line = [type(token)(rest)] if rest else []
    yield line


def cut_line(line: Sequence[str], width: int) -> list[str]:
    """Return a line's tokens, cut at the width."""
    if sum(map(len, line)) <= width:
        return list(line)
    tokens: list[str] = []
    free = width - 1
    for token in line:
        if len(token) > free:
            return [*tokens, type(token)(token[:free]), Comment("…")]
        tokens.append(token)
        free -= len(token)
    return tokens


def fitted(tokens: Iterable[str], width: int) -> list[str]:
    """Return the tokens of a listing with long lines broken.

    A comment that does not fit after its equation goes below it.
    """
    shown: list[str] = []
    start = length = 0
    for token in printable(tokens):
        if "\n" not in token:
            shown.append(token)
            length += len(token)
            continue
        for i, piece in enumerate(token.split("\n")):
            if i:
                if length > width:
                    shown[start:] = _broken(shown[start:], width)
                shown.append("\n")
                start, length = len(shown), 0
            if piece:
                shown.append(type(token)(piece))
                length += len(piece)
    if length > width:
        shown[start:] = _broken(shown[start:], width)
    return shown


def _broken(line: list[str], width: int) -> Iterator[str]:
    """Yield the tokens of a line broken into several lines."""
    binders = (previous is BINDER for previous in ("", *line))
    line = [BinderToken(t) if bound else t for t, bound in zip(line, binders, strict=False)]
    indent = line.pop(0) if line[0].isspace() else ""
    end = len(line)
    while end > 1 and isinstance(line[end - 1], Comment | SourceLineToken):
        end -= 1
    line, comment = line[:end], line[end:]
    if comment and line[-1].isspace():
        line.pop()
    room = width - len(indent) - _INDENT
    for number, rest in enumerate(wrapped_cell(line, room)):
        if number:
            yield "\n"
            indent += " " * _INDENT * (number == 1)
        yield indent
        yield from rest
        column = len(indent) + sum(map(len, rest))
    length = sum(map(len, comment))
    if not comment:
        return
    if column + 2 + length <= width:
        yield "  "
        yield from comment
        return
    start = max(len(indent), min(COMMENT_COLUMN, width - length))
    for rest in wrapped_cell(comment, width - start):
        yield "\n" + " " * start
        yield from rest


def breakable_parts(token: str) -> list[str]:
    """Return the spaces in a token and the pieces after which it may be broken."""
    if isinstance(token, Comment | PrimitiveName | SourceLineToken):
        return _PATH_PARTS.findall(token)
    return (_NAME_PARTS if isinstance(token, BinderToken) else _PARTS).findall(token)


def wrapped_cell(cell: Cell, width: int) -> list[Cell]:
    """Return the lines of a wrapped cell.

    It is broken between words. A word wider than a line is broken after a comma or the like, a file
    after a slash, a name before a dot or a bracket, and any other word anywhere.
    """
    if sum(map(len, cell)) <= width:
        return [cell]
    lines: list[list[str]] = [[]]
    free = width
    for word in _words(cell):
        size = sum(map(len, word))
        if lines[-1]:
            if size + 1 <= free:
                lines[-1].append(" ")
                free -= 1
            else:
                lines.append([])
                free = width
        for part in [word] if size <= free else _fitting(word, width):
            size = sum(map(len, part))
            if size > free:
                lines.append([])
                free = width
            lines[-1] += part
            free -= size
    return [*lines]


def _words(cell: Cell) -> Iterator[list[str]]:
    """Yield the words of a cell, each as parts of its tokens."""
    word: list[str] = []
    for token in cell:
        role = type(token)
        for part in breakable_parts(token):
            if part[0] != " ":
                word.append(role(part))
            elif word:
                yield word
                word = []
    if word:
        yield word


def _fitting(word: Sequence[str], width: int) -> Iterator[list[str]]:
    """Yield the parts of a word, with those that are too wide cut."""
    for part in word:
        for start in range(0, len(part), width):
            yield [type(part)(part[start : start + width])]


# --- text -----------------------------------------------------------------------------------------
# Text in tokens as a renderable of Rich, which colors each token by its class.


@dataclass(frozen=True)
class Listing:
    """A program's text in tokens, a Rich renderable; print it with `soft_wrap=True`."""

    tokens: list[str]

    def plain(self) -> str:
        """Return the text without colors and without a final newline."""
        return "".join(self.tokens)

    def segments(self) -> list[Segment]:
        """Return the text as segments with styles, without a final newline."""
        # Cached, since the same few pieces (types, primitives, parameters) recur.
        cached: dict[tuple[str, type[str]], Segment] = {}
        segments = []
        for piece in with_roles(self.tokens):
            segment = cached.get(piece)
            if segment is None:
                segment = cached[piece] = Segment(piece[0], STYLES.get(piece[1]))
            segments.append(segment)
        return segments

    def __str__(self) -> str:
        return self.plain()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from self.segments()
        yield Segment.line()


# --- grid -----------------------------------------------------------------------------------------
# Tables as tokens of a listing.
#
# Rich lays out a table in about two milliseconds per row, and programs have ten thousand rows. This
# module takes a twentieth of that. Columns are as wide as their cells; if they exceed the terminal
# together, the widest ones are narrowed, and their cells wrapped.

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
            lines += ([" " * indent, *line] for line in wrapped_cell(more, max(width - indent, 1)))
    return joined_lines(lines)


def fits_width(headings: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> bool:
    """Return True if most rows of a table fit on a line."""
    table = [[[Heading(heading)] for heading in headings], *rows]
    lengths = (
        sorted(sum(map(len, cell)) for cell in column) for column in zip(*table, strict=True)
    )
    return sum(map(_of_most, lengths)) + len(GAP) * (len(headings) - 1) <= width


def columns(rows: Sequence[Sequence[Cell]], width: int) -> list[str]:
    """Return the tokens of rows in columns, without headings and without a final newline."""
    widths = _widths(rows, width)
    return joined_lines(_row(row, widths) for row in rows)


def _widths(table: Sequence[Sequence[Cell]], width: int) -> list[int]:
    """Return the width of each column."""
    columns = list(zip(*table, strict=True))
    lengths = [sorted(sum(map(len, cell)) for cell in column) for column in columns]
    room = max(width - len(GAP) * (len(columns) - 1), len(columns))
    longest = [sizes[-1] for sizes in lengths]
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
    return max((len(part) for token in cell for part in breakable_parts(token)), default=0)


def _row(row: Sequence[Cell], widths: Sequence[int]) -> Iterator[str]:
    """Yield the tokens of a row, on as many lines as its longest cell needs."""
    cells = [wrapped_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
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
