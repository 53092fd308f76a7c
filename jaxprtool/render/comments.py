"""Where an equation comes from, in a few words: its line in the user's code, its name scope."""

from __future__ import annotations

import os
from pathlib import Path

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.render.rendering import ShowOptions


class SourceComments:
    """Where equations come from, each looked up once; the equations must outlive it."""

    def __init__(self, options: ShowOptions):
        self._options = options
        self._comments: dict[tuple[int, int], str | None] = {}
        self._lines: dict[object, str | None] = {}

    def comment(self, eqn: JaxprEqn) -> str | None:
        """Return `# file.py:3, scope: outer/inner`, as far as it is asked for and known."""
        info = eqn.source_info
        key = id(info.traceback), id(info.name_stack)
        if key not in self._comments:
            line = self.line(eqn) if self._options.source else None
            scope = jaxcompat.name_stack(eqn) if self._options.scopes else None
            parts = [line, f"scope: {scope}" if scope else None]
            text = ", ".join(part for part in parts if part)
            self._comments[key] = f"# {text}" if text else None
        return self._comments[key]

    def line(self, eqn: JaxprEqn) -> str | None:
        """Return `file.py:3`, or None if it is unknown."""
        traceback = eqn.source_info.traceback
        if traceback not in self._lines:
            frame = jaxcompat.user_frame(eqn)
            self._lines[traceback] = f"{short_path(frame[0])}:{frame[1]}" if frame else None
        return self._lines[traceback]


def short_path(path: str) -> str:
    """Return a path relative to the current folder if it lies below it, else its last two parts."""
    if not os.path.isabs(path):
        return path
    relative = os.path.relpath(path)
    if not relative.startswith(os.pardir):
        return relative
    parts = Path(path).parts
    return "/".join(("…", *parts[-2:])) if len(parts) > 3 else path
