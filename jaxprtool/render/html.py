"""A program as a piece of HTML for a notebook: its listing, coloured, in one `<pre>`."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from jaxprtool.ir.notation import tokens
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.render.listing import listing
from jaxprtool.render.rendering import DEFAULTS, ShowOptions

#: Colours of middle lightness, legible on white and on black; what has no role inherits.
_STYLES: dict[type[str], str] = {
    tokens.BinderToken: "color:#4a80d8",
    tokens.Type: "color:#b566b5",
    tokens.PrimitiveName: "font-weight:bold",
    tokens.ParameterToken: "color:#1f8a99",
    tokens.LiteralToken: "color:#3d8f3d",
    tokens.Keyword: "color:#4a80d8;font-weight:bold",
    tokens.Comment: "opacity:0.65",
    tokens.SharedName: "color:#d05c4a",
}


#: Notebooks are wider than terminals.
_WIDE = replace(DEFAULTS, width=100)


def html(program: Program | AnyJaxpr, options: ShowOptions = _WIDE) -> str:
    """Return the listing of a program as HTML."""
    spans = []
    for text, role in tokens.with_roles(listing(program, options).tokens):
        style = _STYLES.get(role)
        spans.append(f'<span style="{style}">{escape(text)}</span>' if style else escape(text))
    return f'<pre style="overflow-x:auto;line-height:1.25">{"".join(spans)}</pre>'
