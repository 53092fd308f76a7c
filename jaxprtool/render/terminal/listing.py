"""Programs in JAX's own notation, as plain or colored text, laid out by Rich."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from jaxprtool import jaxcompat
from jaxprtool.ir.documents import in_bytes
from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import FrameChoice, Root, frames_now
from jaxprtool.ir.notation.layout import COMMENT_COLUMN, Commenter, Layout, Selection
from jaxprtool.ir.notation.signatures import Notation, TerseNotation, UserNames
from jaxprtool.ir.notation.tokens import (
    BINDER,
    BinderToken,
    Comment,
    Heading,
    PrimitiveName,
    SourceLineToken,
    Type,
    with_roles,
)
from jaxprtool.ir.places import BEHIND
from jaxprtool.ir.program import Program, ProgramSignature, program_signature, size_of_values
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.jaxprs import identity
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


# --- rendering ------------------------------------------------------------------------------------
# Options common to all renderings of a program, and layout by Rich.


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options for showing a program.

    Attributes:
        width: The width in columns.
        source: Whether to show the source line of each equation.
        frames: Which frames to show; None for those set by `jaxprtool.frames`.
        scopes: Whether to show the name stack of each equation.
        types: Whether to show the types of binders.
        depth: Bodies nested more deeply become one line with their number of equations.
        only: Patterns of primitive names, such as `conv*`: other equations are counted and left
            out, unless they contain a matching one.
        among: Equations by `id`: others are counted and left out.
        others: A description of the others: "that x does not touch".
        names: Whether to use the user's names of variables, if known.
        terse: Whether to leave out parameters with default values, and to cut long values.
        whole: Whether not to cut long values, even if `terse`.
        weak: Whether to mark weak types: `~f32[3]`.
        fit: Whether to break lines that JAX's layout leaves longer than the width.
        fold: Whether to fold long rows of variables, such as large signatures.
    """

    width: int = 80
    source: bool = False
    frames: FrameChoice | None = None
    scopes: bool = False
    types: bool = True
    depth: int | None = None
    only: Sequence[str] | None = None
    among: frozenset[int] | None = None
    others: str = ""
    names: bool = False
    terse: bool = False
    whole: bool = False
    weak: bool = False
    fit: bool = False
    fold: bool = False

    def selection(self) -> Selection:
        """Return the selection of equations to show."""
        return Selection(self.depth, self.only, self.among, self.others)

    def notation(self, about: ProgramSignature) -> Notation:
        """Return the notation for the equations of a program."""
        notation = TerseNotation(self.whole) if self.terse else Notation()
        notation.weak = self.weak
        if self.names:
            paths = [value.name for value in about.arguments]
            notation.variable_names = partial(UserNames, arguments=paths, roots=about.roots)
        return notation


#: A folded row with more variables shows only those that fit a line.
MOST_IN_A_ROW = 12

#: The default options.
DEFAULTS = ShowOptions()


# --- listing --------------------------------------------------------------------------------------
# Programs in JAX's own notation, as plain or colored text.
#
# The plain text of a whole program equals, byte for byte, the output of JAX's `jaxpr.pretty_print`
# at the same width. In addition, source lines and scopes may be shown as comments, bodies folded,
# and equations selected.

#: The number of the largest arguments listed below a program that has many.
LARGEST = 8


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


def listing(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Listing:
    """Return the listing of a program; source and scope are a comment at the end of a line.

    A comment also marks each opaque equation.

    With `fold`, many arguments are folded to their size, and the largest of them listed below.
    """
    about, selection = program_signature(program), options.selection()
    comment = SourceComments(options, about.roots).commenter(about.jaxpr)
    notation = options.notation(about)
    many = options.fold and len(about.arguments) > MOST_IN_A_ROW
    layout = Layout(
        about.jaxpr,
        options.width,
        options.types,
        selection,
        comment,
        notation,
        cut=MOST_IN_A_ROW if options.fold else None,
        arguments=size_of_values("argument", about.arguments) if many else "",
    )
    tokens = layout.tokens()
    if options.fit:
        tokens = fitted(tokens, options.width)
    return Listing([*tokens, *_largest(about, layout, options.width)] if many else tokens)


def _largest(about: ProgramSignature, layout: Layout, width: int) -> list[str]:
    """Return the tokens of a table of the largest arguments with names and sizes."""
    pairs = zip(about.arguments, about.jaxpr.invars, strict=True)
    ranked = sorted(pairs, key=lambda pair: pair[0].bytes or 0, reverse=True)
    rows: list[list[Cell]] = []
    for value, var in ranked[:LARGEST]:
        name = layout.names[var]
        letter = [BinderToken("" if name == value.name else name)]
        size = "" if value.bytes is None else in_bytes(value.bytes)
        rows.append([letter, [BinderToken(value.name)], [Type(value.type)], [size]])
    if not any(letter[0] for letter, *_ in rows):
        rows = [row[1:] for row in rows]
    more = f"… {len(ranked) - LARGEST:,} more; --full shows them"
    heading = Heading("the largest arguments")
    return ["\n\n", heading, "\n", *printable(columns(rows, width)), "\n", Comment(more)]


# --- comments -------------------------------------------------------------------------------------
# Comments on equations: the line in the user's code, the name scope, and what is opaque.

#: What an equation is that its file describes, but that JAX cannot rebuild from it.
OPAQUE = "opaque: cannot be run here"


class SourceComments:
    """Source locations of equations, each looked up once; the equations must outlive it.

    Args:
        options: The display options.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, options: ShowOptions, roots: Sequence[Root]):
        self._options = options
        self._frames = frames_now(roots)
        self._comments: dict[tuple[int, int, bool], Sequence[str]] = {}
        self._locations: dict[object, Sequence[str]] = {}

    def commenter(self, jaxpr: Jaxpr) -> Commenter | None:
        """Return `comment`; None if no equation of a jaxpr has a comment."""
        if not (self._options.source or self._options.scopes):
            return self.comment if any(map(jaxcompat.is_opaque, equations(jaxpr))) else None
        return self.comment

    def comment(self, eqn: JaxprEqn) -> Sequence[str]:
        """Return the tokens of `# file.py:3 ← library/file.py:8, scope: outer/inner`.

        It has the requested and known parts, says whether the equation is opaque, and is empty
        without any of these.
        """
        info, is_opaque = eqn.source_info, jaxcompat.is_opaque(eqn)
        key = identity(info.traceback), identity(info.name_stack), is_opaque
        tokens = self._comments.get(key)
        if tokens is None:
            location = self.location(eqn) if self._options.source else ()
            scope = jaxcompat.name_stack(eqn) if self._options.scopes else ""
            texts = [OPAQUE] * is_opaque + [f"scope: {scope}"] * bool(scope)
            parts = [location] * bool(location) + [[Comment(text)] for text in texts]
            tokens = [token for part in parts for token in (Comment(", "), *part)][1:]
            tokens = self._comments[key] = [Comment("# "), *tokens] if tokens else ()
        return tokens

    def location(self, eqn: JaxprEqn) -> Sequence[str]:
        """Return the tokens of `file.py:3 ← library/file.py:8`; empty if unknown."""
        traceback = eqn.source_info.traceback
        tokens = self._locations.get(traceback)
        if tokens is None:
            tokens = self._locations[traceback] = self._tokens(eqn)
        return tokens

    def _tokens(self, eqn: JaxprEqn) -> Sequence[str]:
        location = self._frames.location(eqn)
        if location is None:
            return ()
        location = location.chosen(self._options.frames or self._frames.choice)
        first, *behind = map(self._frames.text, (location.frame, *location.behind))
        is_own = self._frames.is_users(location.frame.file)
        tokens = [SourceLineToken(first) if is_own else Comment(first)]
        return [*tokens, Comment("".join(BEHIND + text for text in behind))] if behind else tokens


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
