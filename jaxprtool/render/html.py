"""A program as a piece of HTML for a notebook: its listing, coloured, in one `<pre>`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from jaxprtool.ir.notation.tokens import (
    Binder,
    Comment,
    Keyword,
    LiteralText,
    Parameter,
    PrimitiveName,
    SharedName,
    Type,
    with_roles,
)
from jaxprtool.render.listing import listing

#: Colours of middle lightness, legible on white and on black; what has no role inherits.
_STYLES: dict[type[str], str] = {
    Binder: "color:#4a80d8",
    Type: "color:#b566b5",
    PrimitiveName: "font-weight:bold",
    Parameter: "color:#1f8a99",
    LiteralText: "color:#3d8f3d",
    Keyword: "color:#4a80d8;font-weight:bold",
    Comment: "opacity:0.65",
    SharedName: "color:#d05c4a",
}


def html(
    program: Any,
    *,
    width: int = 100,
    source: bool = False,
    scopes: bool = False,
    types: bool = True,
    depth: int | None = None,
    only: Sequence[str] | None = None,
) -> str:
    """The listing of a `Program` or a closed jaxpr as HTML; the options are those of `listing`."""
    shown = listing(
        program, width=width, source=source, scopes=scopes, types=types, depth=depth, only=only
    )
    spans = []
    for text, role in with_roles(shown.tokens):
        style = _STYLES.get(role)
        spans.append(f'<span style="{style}">{escape(text)}</span>' if style else escape(text))
    return f'<pre style="overflow-x:auto;line-height:1.25">{"".join(spans)}</pre>'
