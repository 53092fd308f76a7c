"""Programs in JAX's own notation, as plain or colored text.

The plain text of a whole program equals, byte for byte, the output of JAX's `jaxpr.pretty_print` at
the same width. In addition, source lines and scopes may be shown as comments, bodies folded, and
equations selected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from jaxprtool.ir.basics.quantities import in_bytes
from jaxprtool.ir.notation.layout import Layout
from jaxprtool.ir.notation.tokens import BinderToken, Comment, Heading, Type, with_roles
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import (
    ProgramSignature,
    program_signature,
    size_of_values,
)
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.render.terminal.comments import SourceComments
from jaxprtool.render.terminal.grid import columns
from jaxprtool.render.terminal.lines import Cell, fitted, printable
from jaxprtool.render.terminal.rendering import DEFAULTS, MOST_IN_A_ROW, ShowOptions
from jaxprtool.render.terminal.theme import STYLES

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
        made: dict[tuple[str, type[str]], Segment] = {}
        segments = []
        for piece in with_roles(self.tokens):
            segment = made.get(piece)
            if segment is None:
                segment = made[piece] = Segment(piece[0], STYLES.get(piece[1]))
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
