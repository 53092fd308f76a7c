"""Common parts of terminal output, without JAX: tables, prose, source lines, colors."""

from __future__ import annotations

import io
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    OverflowMethod,
    RenderableType,
    RenderResult,
)
from rich.containers import Lines
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text
from rich.theme import Theme

from jaxprtool.ir import notation as tokens
from jaxprtool.ir import source_text

if TYPE_CHECKING:
    from rich.markdown import Markdown

    from jaxprtool.render.views import Cell, Column, Table

# --- top ------------------------------------------------------------------------------------------
# The first rows of a list, and how many more there are.

T = TypeVar("T")

#: The number of rows of a list that commands show by default, and where rows have several lines.
ROWS, TALL_ROWS = 20, 10

#: The option of commands that shows all rows.
ALL = "--all"


def split_rows(rows: Sequence[T], top: int | None) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first `top` rows of a list, or all if it is None, and the others."""
    most = len(rows) if top is None else top
    return rows[:most], rows[most:]


def more(count: int, remark: str = "", option: str = ALL) -> str:
    """Return `… 291 more: --all` for rows that are not shown; "" if there are none.

    Args:
        count: The number of the other rows.
        remark: A remark on them.
        option: The option that shows them; "" if none does.
    """
    if not count:
        return ""
    return f"… {count:,} more{remark}" + (f": {option}" if option else "")


# --- tables ---------------------------------------------------------------------------------------
# Common parts of terminal tables.


def drawn(table: Table, top: int | None = None, option: str = ALL) -> RichTable:
    """Return a table for the terminal.

    The row of what is left out has the sums of the columns that have a total.

    Args:
        table: The table.
        top: The number of rows shown; None for all.
        option: The option that shows all rows; "" if none does.
    """
    grid = RichTable(
        title=Text(table.caption, style=HEADING) if table.caption else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for column in table.columns:
        style = STYLES.get(column.role, "")
        if column.is_number:
            grid.add_column(column.heading, justify="right", style=style, no_wrap=True)
        else:
            grid.add_column(column.heading, style=style, overflow="fold")
    shown, rest = split_rows(table.rows, top)
    for row in shown:
        cells, parts = table.cells(row)
        grid.add_row(*map(_drawn_cell, cells))
        for part in parts:
            grid.add_row(*map(_drawn_part, part))
    if left_out := table.more + len(rest):
        others = [table.cells(row)[0] for row in rest]
        totals = [_total(column, others, i) for i, column in enumerate(table.columns)]
        totals[table.name_column] = Text(more(left_out, option=option), style=COMMENT)
        grid.add_row(*totals)
    return grid


def _total(column: Column, rows: Sequence[Sequence[Cell]], at: int) -> RenderableType:
    """Return the sum of a column of rows; empty if it has none."""
    numbers = [number for row in rows if column.total and (number := row[at].number) is not None]
    return column.total(sum(numbers)) if column.total and numbers else ""


def _drawn_part(cell: Cell) -> RenderableType:
    """Return a cell of a row that is a part of the row above it."""
    return "" if cell.percent is not None else _drawn_cell(cell)


def _drawn_cell(cell: Cell) -> RenderableType:
    parts: list[RenderableType] = [colored_text(cell.text)]
    if cell.code:
        parts.append(Text(cell.code, COMMENT, no_wrap=True, overflow="ellipsis"))
    if cell.below is not None and cell.below.text:
        text = cell.below.text
        below = tokens.Comment(text) if isinstance(text, str) else text
        parts.append(_drawn_cell(cell.below._replace(text=below)))
    whole = Group(*parts) if parts[1:] else parts[0]
    return Padding(whole, (0, 0, 0, 2 * cell.indent)) if cell.indent else whole


def colored_text(text: str | Sequence[str]) -> PathText:
    """Return text whose parts have the colors of their roles."""
    colored = PathText()
    for part in [text] if isinstance(text, str) else text:
        colored.append(part, STYLES.get(type(part)))
    return colored


def facts_table(facts: Iterable[tuple[str, str]]) -> RichTable:
    """Return a table of labels and values."""
    table = RichTable.grid(padding=(0, 2))
    table.add_column(style=COMMENT, no_wrap=True)
    table.add_column(overflow="fold")
    for label, fact in facts:
        table.add_row(label, fact)
    return table


def share_text(part: float | None, whole: float | None) -> str:
    """Return a share of a whole in percent; empty if either is unknown."""
    return f"{part / whole:.1%}" if whole and part is not None else ""


def line_text(source: str, code: str) -> Text:
    """Return a source line with its code, if known."""
    line = PathText(source, style=BINDER)
    return line.append(f"  {code}", style="default") if code else line


@dataclass(frozen=True)
class Rendering:
    """A Rich renderable laid out for `width` columns, with a plain text."""

    renderable: RenderableType
    width: int

    def plain(self) -> str:
        """Return the text without colors and without a final newline."""
        file = io.StringIO()
        console = Console(
            file=file, width=self.width, color_system=None, markup=False, force_jupyter=False
        )
        console.print(self.renderable)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Wrap here, at our width, even if the caller prints with soft_wrap=True. A type such as
        # f32[n] is not markup.
        options = options.update(width=self.width, no_wrap=False, overflow="fold", markup=False)
        yield from console.render(self.renderable, options)


# --- wrapping -------------------------------------------------------------------------------------
# Text with long names and paths, which are divided between their parts.
#
#     optimizer.opt_state[0].nu
#     .blocks[0..5].down.kernel
#     flax/nnx/nn/
#     normalization.py:180
#
# Rich divides a word that is longer than a line anywhere.

#: Where a word may be divided: after slashes, and before attributes and indices.
_BREAK = re.compile(r"(?<=/)(?=[^\s/])|(?<=[\w\])])(?=\.(?!py\b)[A-Za-z_])|(?<=[\w\])])(?=\[)")

_WORD = re.compile(r"\s*\S+\s*|\s+")


class PathText(Text):
    """Text whose long words are divided between the parts of names and paths."""

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> Lines:
        """Return the text in lines of at most `width` columns."""
        if no_wrap or overflow == "ellipsis":
            return super().wrap(
                console,
                width,
                justify=justify,
                overflow=overflow,
                tab_size=tab_size,
                no_wrap=no_wrap,
            )
        lines = Lines()
        for line in self.split(allow_blank=True):
            lines.extend(line.divide(list(_offsets(line.plain, width))))
        for line in lines:
            line.rstrip_end(width)
        return lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the widths of the longest part of a word and of the longest line."""
        lines = self.plain.splitlines() or [""]
        parts = (part for line in lines for word in _WORD.findall(line) for part in _parts(word))
        least = max((cell_len(part.rstrip()) for part in parts), default=0)
        return Measurement(least, max(map(cell_len, lines)))


def _parts(word: str) -> list[str]:
    places = [0, *(match.start() for match in _BREAK.finditer(word)), len(word)]
    return [word[start:stop] for start, stop in pairwise(places) if start < stop]


def _offsets(line: str, width: int) -> Iterator[int]:
    """Yield the offsets at which a line is divided.

    A word that is longer than a line is divided between its parts, and a longer part anywhere.
    """
    position, used = 0, 0
    for word in _WORD.findall(line):
        for part in [word] if cell_len(word.rstrip()) <= width else _parts(word):
            if used and used + cell_len(part.rstrip()) > width:
                yield position
                used = 0
            while cell_len(part.rstrip()) > width:
                position, part = position + width, part[width:]
                yield position
            position, used = position + len(part), used + cell_len(part)


# --- colors ---------------------------------------------------------------------------------------
# The colors of the terminal: numbers of the 256-color palette.
#
# Themes redefine the first 16 colors, and terminals without a theme have a blue that cannot be read
# on black, and a cyan and yellow that cannot be read on white. The others are the same everywhere.
# These have a contrast of at least 3 on black and white, and nearly so on common backgrounds.

BLUE = 63
CYAN = 30
GREEN = 28
MAGENTA = 133
RED = 196
YELLOW = 136


def color_name(number: int) -> str:
    """Return Rich's name of a color."""
    return f"color({number})"


# --- source text ----------------------------------------------------------------------------------
# The colored lines of source files, each read when it is first shown.

#: Longer files are shown without colors, which are slow to compute.
_LONGEST = 5000

#: The styles of source tokens, by prefix of their Pygments type.
_TOKEN_STYLES = {
    "Token.Keyword": Style(color=color_name(BLUE)),
    "Token.Literal.String": Style(color=color_name(GREEN)),
    "Token.Literal.Number": Style(color=color_name(MAGENTA)),
    "Token.Comment": Style(dim=True),
    "Token.Name.Decorator": Style(color=color_name(CYAN)),
    "Token.Name.Function": Style(bold=True),
    "Token.Name.Class": Style(bold=True),
}


class Sources:
    """The lines of source files."""

    def __init__(self) -> None:
        self._files: dict[str, list[Text]] = {}

    def lines(self, file: str) -> list[Text]:
        """Return the lines of a file; empty if it does not exist."""
        if file not in self._files:
            self._files[file] = _colored(source_text.file_text(file).expandtabs(4))
        return self._files[file]

    def fault(self, file: str) -> str:
        """Return why a file has no lines."""
        return source_text.reason(file) or "unavailable"

    def forget(self) -> None:
        """Clear the cache, since files may have been edited."""
        self._files.clear()
        linecache.checkcache()


def _colored(source: str) -> list[Text]:
    lines = source.splitlines()
    if len(lines) > _LONGEST:
        return [Text(_printable(line)) for line in lines]
    from pygments import lex
    from pygments.lexers.python import PythonLexer

    texts = [Text()]
    for kind, part in lex(source, PythonLexer(stripnl=False, ensurenl=False)):
        style = _style(str(kind))
        for number, piece in enumerate(part.split("\n")):
            if number:
                texts.append(Text())
            texts[-1].append(_printable(piece), style)
    return texts[: len(lines)]


def _style(kind: str) -> Style | None:
    return next((style for name, style in _TOKEN_STYLES.items() if kind.startswith(name)), None)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "·" for c in text)


# --- theme ----------------------------------------------------------------------------------------
# The styles of the roles of tokens in listings, tables and trees.

BINDER = Style(color=color_name(BLUE))
TYPE = Style(color=color_name(MAGENTA))
PRIMITIVE = Style(bold=True)
PARAMETER = Style(color=color_name(CYAN))
LITERAL = Style(color=color_name(GREEN))
KEYWORD = Style(color=color_name(BLUE), bold=True)
#: Without the color of a text around it, since no terminal shows a dim color well.
COMMENT = Style(color="default", dim=True)
SHARED_NAME = Style(color=color_name(RED))
HEADING = Style(bold=True)
REMOVED = Style(color=color_name(RED))
ADDED = Style(color=color_name(GREEN))
CHANGED = Style(color=color_name(MAGENTA))

#: The style of each class of token; plain strings have none.
STYLES: dict[type[str], Style] = {
    tokens.BinderToken: BINDER,
    tokens.Type: TYPE,
    tokens.PrimitiveName: PRIMITIVE,
    tokens.ParameterToken: PARAMETER,
    tokens.LiteralToken: LITERAL,
    tokens.Keyword: KEYWORD,
    tokens.Comment: COMMENT,
    tokens.SharedName: SHARED_NAME,
    tokens.Heading: HEADING,
    tokens.RemovedToken: REMOVED,
    tokens.AddedToken: ADDED,
    tokens.ChangedToken: CHANGED,
}


# --- prose ----------------------------------------------------------------------------------------
# Rendering of docstrings and other prose as Markdown: paragraphs, lists, verbatim code.
#
# It uses only the colors of the theme; without colors, code keeps its backticks.

#: The maximal width, for readability.
MOST_COLUMNS = 100

_MARKDOWN_STYLES = Theme(
    {
        "markdown.code": HEADING,
        "markdown.item.bullet": COMMENT,
        "markdown.item.number": COMMENT,
        "markdown.link": BINDER,
        "markdown.link_url": BINDER,
        "markdown.block_quote": COMMENT,
        **{f"markdown.h{level}": HEADING for level in range(1, 7)},
    }
)


@dataclass(frozen=True)
class Code:
    """Verbatim lines of text; long ones are broken between words."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(self.text.strip("\n"), overflow="fold"), (0, 0, 0, 2))


@cache
def _markdown() -> type[Markdown]:
    """Return the Markdown of Rich, imported when prose is first shown, with our code blocks."""
    from rich.markdown import CodeBlock, Markdown

    class OurCodeBlock(CodeBlock):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield Code(str(self.text))

    class OurMarkdown(Markdown):
        elements = {  # noqa: RUF012
            **Markdown.elements,
            "fence": OurCodeBlock,
            "code_block": OurCodeBlock,
        }

    return OurMarkdown


@dataclass(frozen=True)
class Prose:
    """Text in Markdown, or in the reStructuredText of docstrings."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = re.sub(r":[\w:]+:(?=`)", "", self.text)  # a role: :func:`vmap`
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        if console.color_system is None:
            text = re.sub(r"(?<!`)`((?:[^`\n]|\n(?!\s*\n))+)`(?!`)", r"`` `\1` ``", text)
        options = options.update(width=min(options.max_width, MOST_COLUMNS))
        with console.use_theme(_MARKDOWN_STYLES):
            yield from console.render(_markdown()(text, hyperlinks=False), options)
