"""Display of programs on a screen: the tokens of equations, counts, and styles.

A `Reader` names the variables of a `program_signature` as listings do, and returns the tokens of
an equation's parts; `ShowOptions` has the options. `with_roles` pairs each token with its role, and
`STYLES` has Rich's style of each role. `printable` escapes control characters. `Selection` counts
equations.
"""

from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.notation.layout import Selection
from jaxprtool.ir.notation.tokens import (
    AddedToken,
    BinderToken,
    ChangedToken,
    Comment,
    ParameterToken,
    RemovedToken,
    SharedName,
    Type,
    with_roles,
)
from jaxprtool.ir.rules import summary
from jaxprtool.render.terminal.listing import ShowOptions, printable
from jaxprtool.render.terminal.tables import STYLES
from jaxprtool.render.terminal.tree import Reader

__all__ = [
    "STYLES",
    "AddedToken",
    "BinderToken",
    "ChangedToken",
    "Comment",
    "ParameterToken",
    "Reader",
    "RemovedToken",
    "Selection",
    "SharedName",
    "ShowOptions",
    "Type",
    "in_bytes",
    "plural",
    "printable",
    "summary",
    "with_roles",
]
