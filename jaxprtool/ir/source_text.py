"""The text of source files, for all that shows or reads source lines.

A line's number is that of the file when the program was traced. A program in a file comes with
digests of its source files, which are compared when it is read (`name_read`). A file that is as it
was then has its absolute path in the program's frames. Others have a name that no file can have, so
that the program itself says which of its files have no text, why, and what they were:

    <changed 93d1c0a8e5b7f246>/model.py
    <unknown 93d1c0a8e5b7f246>/model.py     not found, or nothing is known of it

`path` is the path in such a name. `citations` collects the changed files that a command shows.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: The number of digits of a digest.
_DIGITS = 16

#: The beginning of the name of a file without text.
MARK = r"<(?:changed|unknown)(?: (?P<digest>[0-9a-f]+))?>/"
_MARKED = re.compile(rf"{MARK}(?P<path>.+)", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]+")

#: The changed files that a command shows, and their displayed paths, if it collects them.
_cited: ContextVar[dict[str, str] | None] = ContextVar("cited", default=None)


def lines(file: str) -> list[str]:
    """Return the lines of a file, with their ends; empty if its text is not known."""
    cite(file, path(file))
    is_known = os.path.isabs(file) or file.startswith("<") or file in linecache.cache
    return linecache.getlines(file) if is_known and not _MARKED.match(file) else []


def line(file: str, number: int) -> str:
    """Return a line of a file, from 1, without spaces around it; "" if it is not known."""
    file_lines = lines(file)
    return file_lines[number - 1].strip() if 0 < number <= len(file_lines) else ""


def file_text(file: str) -> str:
    """Return the text of a file; "" if it is not known."""
    return "".join(lines(file))


def path(file: str) -> str:
    """Return the path in the name of a file without text; any other name as it is."""
    marked = _MARKED.match(file)
    return marked["path"] if marked else file


def source_digest(file: str, since: float | None = None) -> str:
    """Return a digest of the text that a file had for its program; "" if it is not known.

    Args:
        file: The file.
        since: A time. The file's text is not known if it was written after this.
    """
    if marked := _MARKED.match(file):
        return marked["digest"] or ""
    try:
        if since is not None and os.stat(file).st_mtime > since:
            return ""
        with open(file, "rb") as opened:
            return hashlib.sha256(opened.read()).hexdigest()[:_DIGITS]
    except OSError:
        return ""


def name_read(relative: str, file: str, recorded: str, is_same: bool) -> str:
    """Return the name of a source file in the frames of a program that is read.

    Args:
        relative: The path of the file in the program.
        file: Where the file is, if it exists.
        recorded: Its digest when the program was written; "" if it is not known.
        is_same: Whether the file is as it was then.
    """
    if is_same:
        name = os.path.abspath(file)
        linecache.checkcache(name)  # which may have the text of an earlier time
        return name
    state = "changed" if os.path.isfile(file) else "unknown"
    digest = f" {recorded}" if _DIGEST.fullmatch(recorded) else ""
    return f"<{state}{digest}>/{relative}"


def name_since(file: str, since: float | None) -> str:
    """Return the name of a source file in frames that were recorded at a time; None for now."""
    try:
        changed = since is not None and os.path.isabs(file) and os.stat(file).st_mtime > since
    except OSError:
        changed = False
    return f"<changed>/{file}" if changed else file


def reason(file: str) -> str:
    """Return why a file has no text: it `has changed since ...`; "" if it is not known to have."""
    changed = file.startswith("<changed") and _MARKED.match(file)
    return "has changed since it was recorded: record it again" if changed else ""


def cite(file: str, shown: str) -> None:
    """Add a file to the innermost `citations`, if it has changed.

    Args:
        file: The file.
        shown: Its displayed path.
    """
    cited = _cited.get()
    if cited is not None and reason(file):
        cited.setdefault(file, shown)


@contextmanager
def citations() -> Iterator[dict[str, str]]:
    """Collect the changed files whose lines are cited or wanted, in a `with` block.

    Yields:
        The displayed path of each file.
    """
    cited: dict[str, str] = {}
    token = _cited.set(cited)
    try:
        yield cited
    finally:
        _cited.reset(token)


def citation_note(path: str) -> str:
    """Return that a file has changed, and what that means for its lines, by its displayed path."""
    return (
        f"{path} has changed since it was recorded, so the numbers of its lines are those of then,"
        " and their text is not shown: record it again"
    )
