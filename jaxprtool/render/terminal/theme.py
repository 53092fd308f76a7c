"""The styles of the roles of tokens in listings, tables and trees."""

from __future__ import annotations

from rich.style import Style

from jaxprtool.ir.notation import tokens
from jaxprtool.render.terminal.colors import BLUE, CYAN, GREEN, MAGENTA, RED, named

BINDER = Style(color=named(BLUE))
TYPE = Style(color=named(MAGENTA))
PRIMITIVE = Style(bold=True)
PARAMETER = Style(color=named(CYAN))
LITERAL = Style(color=named(GREEN))
KEYWORD = Style(color=named(BLUE), bold=True)
COMMENT = Style(dim=True)
SHARED_NAME = Style(color=named(RED))
HEADING = Style(bold=True)
REMOVED = Style(color=named(RED))
ADDED = Style(color=named(GREEN))
CHANGED = Style(color=named(MAGENTA))

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
