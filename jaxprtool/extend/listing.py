"""Display of programs on a screen: tokens of equations, counts, styles, and source lines.

A `Reader` names the variables of a `program_signature` as listings do, and returns the tokens of
an equation's parts; `ShowOptions` has the options. `with_roles` pairs each token with its role, and
`STYLES` has Rich's style of each role. `printable` escapes control characters. `Selection` counts
equations.

`frames_now(program_signature(program).roots)` returns the `Frames`, which find the `SourceLocation`
of an equation, in the user's files or a library's, and the text of a frame; `Sources` has the lines
of source files. A `ScopeReader` finds the scopes around equations, by which `cost --by scope`
groups them. A `ModuleJaxpr` presents an HLO module as a jaxpr.
"""

from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.frames import FrameChoice, Frames, SourceLocation, frames_now
from jaxprtool.ir.notation import (
    AddedToken,
    BinderToken,
    ChangedToken,
    Comment,
    ParameterToken,
    PrimitiveName,
    RemovedToken,
    SharedName,
    Type,
    with_roles,
)
from jaxprtool.ir.notation.layout import Selection
from jaxprtool.ir.rules import summary
from jaxprtool.ir.scopes import ScopeReader
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.terminal.tables import STYLES, Sources
from jaxprtool.render.terminal.tree import ModuleJaxpr, Reader

__all__ = [
    "BEHIND",
    "STYLES",
    "AddedToken",
    "BinderToken",
    "ChangedToken",
    "Comment",
    "FrameChoice",
    "Frames",
    "ModuleJaxpr",
    "ParameterToken",
    "PrimitiveName",
    "Reader",
    "RemovedToken",
    "ScopeReader",
    "Selection",
    "SharedName",
    "ShowOptions",
    "SourceLocation",
    "Sources",
    "Type",
    "UserFrame",
    "frames_now",
    "in_bytes",
    "plural",
    "printable",
    "summary",
    "with_roles",
]
