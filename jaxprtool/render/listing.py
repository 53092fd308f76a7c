"""A program in JAX's own notation, as plain text or in colour.

The plain text of a whole program is, byte for byte, what JAX's `jaxpr.pretty_print` gives at the
same width. To that come what JAX does not have: source lines and scopes as comments, folding,
and the selection of some equations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from jaxprtool.ir.border import border
from jaxprtool.ir.notation.layout import Layout
from jaxprtool.ir.notation.tokens import with_roles
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.render.comments import SourceComments
from jaxprtool.render.lines import fitted
from jaxprtool.render.rendering import DEFAULTS, ShowOptions
from jaxprtool.render.theme import STYLES


@dataclass(frozen=True)
class Listing:
    """A program's text in tokens. A Rich renderable; print it with `soft_wrap=True`."""

    tokens: list[str]

    def plain(self) -> str:
        """The text, without colours and without a newline at its end."""
        return "".join(self.tokens)

    def segments(self) -> list[Segment]:
        """The text as segments with their styles, without a newline at its end."""
        # The same few pieces (types, primitives, parameters) come again and again.
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
    """Return the listing of a program; a line's source and scope are a comment at its end."""
    comments = SourceComments(options)
    comment = comments.comment if options.source or options.scopes else None
    about, selection = border(program), options.selection()
    notation = options.notation(about)
    layout = Layout(about.jaxpr, options.width, options.types, selection, comment, notation)
    tokens = layout.tokens()
    return Listing(fitted(tokens, options.width) if options.fit else tokens)
