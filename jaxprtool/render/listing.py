"""A program in JAX's own notation, as plain text or in colour.

The plain text of a whole program is, byte for byte, what JAX's `jaxpr.pretty_print` gives at the
same width. To that come what JAX does not have: source lines and scopes as comments, folding,
and the selection of some equations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from jaxprtool.ir.notation.layout import Layout
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.notation.tokens import with_roles
from jaxprtool.ir.outline import top_jaxpr
from jaxprtool.render.comments import Places
from jaxprtool.render.theme import STYLES


@dataclass(frozen=True)
class Listing:
    """A program's text in tokens. A Rich renderable; print it with `soft_wrap=True`.

    Lines that JAX's layout leaves longer than the width are not cut by the listing itself.
    """

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


def listing(
    program: Any,
    *,
    width: int = 80,
    source: bool = False,
    scopes: bool = False,
    types: bool = True,
    depth: int | None = None,
    only: Sequence[str] | None = None,
) -> Listing:
    """The listing of a `Program` or a closed jaxpr.

    `source` and `scopes` end each equation's (first) line with a comment that says where it comes
    from; `types=False` leaves out the types of what is bound. Bodies nested deeper than `depth`
    become one line with the count of their equations. `only` are patterns of primitive names, as
    in `conv*`: other equations are counted and left out, unless one asked for is inside them.
    """
    places = Places(source, scopes)
    comment = places.comment if source or scopes else None
    layout = Layout(top_jaxpr(program), width, types, Selection(depth, only), comment)
    return Listing(layout.tokens())
