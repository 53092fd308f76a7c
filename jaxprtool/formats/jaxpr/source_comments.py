"""Where equations come from, as the comments of a `.jaxpr` file say it.

    # model.py:12:8 (loss) in layer/dense

Each part may be missing. The file is one of the header's table, which has its whole path; a
comment that names none of them, or that is not of this form, is just a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import PurePath
from typing import TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.jaxcompat.places import UserFrame

#: The file, line, column and function of an equation, and the name scopes around it.
Location: TypeAlias = tuple[tuple[str, int, int, str] | None, str]

_LOCATION = re.compile(
    r"(?:(?P<file>\S.*?):(?P<line>\d{1,8})(?::(?P<column>\d{1,8}))?(?: \((?P<function>[^()]*)\))?)?"
    r"(?:(?:^| )in (?:'(?P<quoted>[^']+)'|(?P<scope>\S+)))?"
)


class SourceComments:
    """The source locations of equations as comments, and the files that the comments mention.

    Each is looked up once; the equations must outlive it.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self._names: dict[str, str | None] = {}
        self._comments: dict[tuple[int, int], str | None] = {}
        self._frames: dict[object, str] = {}

    def comment(self, eqn: JaxprEqn) -> str | None:
        """`# file.py:12:8 (function) in outer/inner`, as far as it is known."""
        info = eqn.source_info
        key = id(info.traceback), id(info.name_stack)
        if key not in self._comments:
            scope = _scope_text(jaxcompat.name_stack(eqn))
            parts = [self._frame(eqn), f"in {scope}" if scope else ""]
            text = " ".join(filter(None, parts))
            self._comments[key] = f"# {text}" if text else None
        return self._comments[key]

    def _frame(self, eqn: JaxprEqn) -> str:
        traceback = eqn.source_info.traceback
        if traceback not in self._frames:
            frame = jaxcompat.user_frame(eqn)
            self._frames[traceback] = self._frame_text(frame) if frame else ""
        return self._frames[traceback]

    def _frame_text(self, frame: UserFrame) -> str:
        name, function = self._file(frame.file), frame.function
        if name is None:
            return ""
        known = function.isprintable() and not set(function) & set("()")
        return f"{name}:{frame.line}:{frame.column + 1}" + (f" ({function})" if known else "")

    def _file(self, path: str) -> str | None:
        """The name of a file in comments: the end of its path, as much of it as tells it."""
        if path not in self._names:
            name = self._distinct(path) if path.isprintable() else None
            self._names[path] = name
            if name is not None:
                self.files[name] = path
        return self._names[path]

    def _distinct(self, path: str) -> str:
        parts = [re.sub(r"[^\w./+-]", "_", part) for part in PurePath(path).parts] or ["file"]
        names = ("/".join(parts[-n:]) for n in range(1, len(parts) + 1))
        numbered = (f"{parts[-1]}.{n}" for n in count(2))
        return next(n for names in (names, numbered) for n in names if n not in self.files)


def _scope_text(scope: str) -> str:
    """A name scope in a comment; in quotes if it has spaces, and without what cannot be there."""
    scope = "".join(c if c.isprintable() and c != "'" else "_" for c in scope)
    return f"'{scope}'" if " " in scope else scope


def source_infos(comments: Iterable[str], files: Mapping[str, str]) -> dict[str | None, object]:
    """What an equation with each of the comments, or with none, bears as its `source_info`."""
    texts = list(dict.fromkeys(comments))
    locations = [(None, ""), *(_location(text, files) for text in texts)]
    return dict(zip((None, *texts), jaxcompat.source_infos(locations), strict=True))


def _location(comment: str, files: Mapping[str, str]) -> Location:
    found = _LOCATION.fullmatch(comment)
    if not comment.isprintable() or not found or found["file"] not in (None, *files):
        return None, ""
    scope = found["scope"] or found["quoted"] or ""
    if not found["file"]:
        return None, scope
    line, column = int(found["line"]), int(found["column"] or 1) - 1
    return (files[found["file"]], line, column, found["function"] or "<unknown>"), scope
