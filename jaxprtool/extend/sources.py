"""Source locations of equations: the frames of the user's files and of libraries, and their lines.

`frames_now(program_signature(program).roots)` returns the `Frames`, which find the `SourceLocation`
of an equation and the text of a frame; `Sources` has the lines of source files. A `ScopeReader`
finds the scopes around equations, by which `cost --by scope` groups them.
"""

from jaxprtool.ir.frames import BEHIND, FrameChoice, Frames, SourceLocation, frames_now
from jaxprtool.ir.scopes import ScopeReader
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.render.terminal.tables import Sources

__all__ = [
    "BEHIND",
    "FrameChoice",
    "Frames",
    "ScopeReader",
    "SourceLocation",
    "Sources",
    "UserFrame",
    "frames_now",
]
