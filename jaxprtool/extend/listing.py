"""Display of programs on a screen: the tokens of equations, counts, and styles.

A `Reader` names the variables of a `program_signature` as listings do, and returns the tokens of
an equation's parts; `ShowOptions` has the options. `with_roles` pairs each token with its role, and
`STYLES` has Rich's style of each role. `printable` escapes control characters. `Selection` counts
equations.
"""

from jaxprtool.ir.basics.primitive_docs import summary
from jaxprtool.ir.basics.quantities import in_bytes, plural
from jaxprtool.ir.notation.selection import Selection
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
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.rendering import ShowOptions
from jaxprtool.render.terminal.rows import Reader
from jaxprtool.render.terminal.theme import STYLES

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
