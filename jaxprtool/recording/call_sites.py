"""Find the user's line that is running: the nearest frame of the user's code on the stack."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

from jaxprtool.jaxcompat.source_locations import is_installed, is_users_file


class Line(NamedTuple):
    """A line of a file. `file` is "" if no line is known."""

    file: str
    line: int


class Site(NamedTuple):
    """Where a call comes from.

    Attributes:
        user: The nearest line of the user's code, or of a library if there is none.
        library: The innermost line of a library called from there; without a file if there is none.
    """

    user: Line
    library: Line


NOWHERE = Line("", 0)


class Sites:
    """Reads sites from the running stack.

    The kind of each file is cached, so that reading a stack takes a few microseconds.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {}

    def here(self) -> Site:
        """Return the site of the caller."""
        frame: FrameType | None = sys._getframe(1)
        library = NOWHERE
        while frame is not None:
            file = frame.f_code.co_filename
            kind = self._kinds.get(file)
            if kind is None:
                kind = self._kinds[file] = _kind(file)
            if kind == 2:
                return Site(Line(file, frame.f_lineno), library)
            if kind == 1 and not library.file:
                library = Line(file, frame.f_lineno)
            frame = frame.f_back
        return Site(library, NOWHERE)


def _kind(file: str) -> int:
    """Return 0 for a file of Python, JAX or this package, 1 for a library, 2 for the user."""
    if file.startswith("<frozen ") or not is_users_file(file):
        return 0
    return 1 if is_installed(file) else 2
