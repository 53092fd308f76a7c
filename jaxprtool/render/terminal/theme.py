"""The styles of the roles of tokens in listings, tables and trees.

Only the terminal's own named colors are used, which are legible on the user's background, and none
close to dark or light backgrounds: no white, no black, no bright yellow.
"""

from __future__ import annotations

from rich.style import Style

from jaxprtool.ir.notation import tokens

BINDER = Style(color="blue")
TYPE = Style(color="magenta")
PRIMITIVE = Style(bold=True)
PARAMETER = Style(color="cyan")
LITERAL = Style(color="green")
KEYWORD = Style(color="blue", bold=True)
COMMENT = Style(dim=True)
SHARED_NAME = Style(color="red")
HEADING = Style(bold=True)
REMOVED = Style(color="red")
ADDED = Style(color="green")
CHANGED = Style(color="magenta")

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
