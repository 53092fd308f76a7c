"""Lines of source files, as all results name them, and the text of these files.

A line's number is that of the file when the program was traced. A program in a file comes with
digests of its source files, which are compared when it is read (`name_read`). A file that is as it
was then has its absolute path in the program's frames. Others have a name that no file can have, so
that the program itself says which of its files are others now, and what they were:

    <changed 93d1c0a8e5b7f246>/model.py
    <unknown 93d1c0a8e5b7f246>/model.py     not found, or nothing is known of it

A recorded run keeps the texts of its source files by digest (`recording.folder`). Once `use_kept`
names the run, files with such a digest have the recorded text; the others have none.

`path` is the path in such a name. `citations` collects the changed files that a command shows, for
`changed_notes`.
"""

from __future__ import annotations

import difflib
import hashlib
import linecache
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxprtool.ir.documents import document, plural

#: The separator between the user's own line and those of libraries behind it.
BEHIND = " ← "


@document(optional=("library",))
@dataclass(frozen=True, eq=False, repr=False)
class Place(str):
    """A line of a source file.

    In Python it is also the text that the terminal shows: `model.py:9 ← flax/linen/linear.py:199`,
    or "" if the line is unknown.

    Attributes:
        path: The file, with its absolute path if that is known.
        line: The line, from 1.
        function: The function that has the line, as Python qualifies it: `Model.loss`; "" if it is
            unknown.
        display: The path as the terminal shows it: from the current folder, or a library's package.
        library: The lines of libraries that it calls, the outermost first; None if there are none.
    """

    path: str = ""
    line: int = 0
    function: str = ""
    display: str = ""
    library: tuple[Place, ...] | None = None

    def __new__(
        cls,
        path: str = "",
        line: int = 0,
        function: str = "",
        display: str = "",
        library: tuple[Place, ...] | None = None,
    ) -> Place:
        texts = (f"{display}:{line}", *(library or ())) if display else ()
        return super().__new__(cls, BEHIND.join(texts))

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> Place:
        """Return the place that a document has."""
        if document is None:
            return cls()
        library = tuple(map(cls.from_json, document.get("library", ())))
        return cls(**{**document, "library": library or None})

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def user(self) -> Place:
        """The place without the lines of libraries."""
        return replace(self, library=None) if self.library else self

    @property
    def behind(self) -> str:
        """The lines of libraries: `flax/linen/linear.py:199`, or ""."""
        return BEHIND.join(self.library or ())

    def calling(self, library: Place) -> Place:
        """Return the place with a line of a library behind it, unless that is unknown."""
        return replace(self, library=(library,)) if library else self


#: The place of what has no known line.
UNKNOWN = Place()


def place_in(name: str) -> Place | None:
    """Return the name of a group if it is a place, or else None."""
    return name if isinstance(name, Place) and name else None


#: The number of digits of a digest.
_DIGITS = 16

#: The beginning of the name of a file without text.
MARK = r"<(?:changed|unknown)(?: (?P<digest>[0-9a-f]+))?>/"
_MARKED = re.compile(rf"{MARK}(?P<path>.+)", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]+")

#: The folder of a run in which its source texts are, each in a file named by its digest. The names
#: do not end in `.py`, so that tools that collect Python files leave them alone.
SOURCES, KEPT = "sources", ".txt"


class _KeptText(NamedTuple):
    """A source text of a run: its file, and the folder of the run as the user names it."""

    file: str
    run: str


#: The source texts of the runs in use, by digest.
_kept: dict[str, _KeptText] = {}

#: The file as it is now, for each name of a changed file.
_current: dict[str, str] = {}

#: The changed files that a command shows, and their displayed paths, if it collects them.
_cited: ContextVar[dict[str, str] | None] = ContextVar("cited", default=None)


def lines(file: str) -> list[str]:
    """Return the lines of a file, with their ends; empty if its text is not known."""
    cite(file, path(file))
    if _MARKED.match(file):
        return _recorded_lines(file)
    is_known = os.path.isabs(file) or file.startswith("<") or file in linecache.cache
    return linecache.getlines(file) if is_known else []


def _recorded_lines(file: str) -> list[str]:
    """Return the lines that a file without its text had when its run was recorded, or none."""
    kept = _kept.get(source_digest(file))
    return [] if kept is None else linecache.getlines(kept.file)


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
    data = text_since(file, since)
    return "" if data is None else text_digest(data)


def text_since(file: str, since: float | None = None) -> bytes | None:
    """Return the contents of a file; None if they are not known or were written after a time."""
    try:
        with open(file, "rb") as opened:
            if since is not None and os.fstat(opened.fileno()).st_mtime > since:
                return None
            return opened.read()
    except (OSError, ValueError):
        return _cell_text(file)


def _cell_text(file: str) -> bytes | None:
    """Return the text of code without a file, such as a notebook cell; None if it is not known."""
    entry = linecache.cache.get(file)
    if entry is None or len(entry) == 1 or entry[1] is not None:  # lazy, or that of a file
        return None
    return "".join(entry[2]).encode()


def text_digest(data: bytes) -> str:
    """Return the digest of a text that names it in programs and runs."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


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
    name = f"<{state}{digest}>/{relative}"
    if state == "changed":
        _current[name] = os.path.abspath(file)
    return name


def name_since(
    file: str, since: float | None, digests: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the name of a source file in frames that were recorded at a time.

    Args:
        file: The file.
        since: The time; None for now.
        digests: The digests of files at that time that a run keeps.
    """
    if recorded := digests.get(file):
        return name_read(file, file, recorded, recorded == source_digest(file))
    try:
        changed = since is not None and os.path.isabs(file) and os.stat(file).st_mtime > since
    except OSError:
        changed = False
    return f"<changed>/{file}" if changed else file


def has_changed(file: str) -> bool:
    """Return True if a file is known to have changed since its program was recorded."""
    return file.startswith("<changed") and _MARKED.match(file) is not None


def reason(file: str) -> str:
    """Return why a file has no text: it `has changed since ...`; "" if it is not known to have."""
    if not has_changed(file) or source_digest(file) in _kept:
        return ""
    return "has changed since it was recorded: record it again"


def cite(file: str, shown: str) -> None:
    """Add a file to the innermost `citations`, if it has changed.

    Args:
        file: The file.
        shown: Its displayed path.
    """
    cited = _cited.get()
    if cited is not None and has_changed(file):
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
    """Return that a file without recorded text has changed, by its displayed path."""
    return (
        f"{path} has changed since it was recorded, so the numbers of its lines are those of then,"
        " and their text is not shown: record it again"
    )


def recorded_in(file: str) -> str:
    """Return the run that keeps the text of a file that has changed; "" if there is none."""
    kept = _kept.get(source_digest(file))
    return "" if kept is None else kept.run


def current_file(file: str) -> str:
    """Return the file as it is now, of one that has changed; "" if it is not known."""
    return _current.get(file, "")


def use_kept(run: str) -> None:
    """Let files that have changed since a run was recorded have the text that it keeps.

    Args:
        run: The folder of the run, as the user names it.
    """
    with suppress(OSError):
        for name in os.listdir(os.path.join(run, SOURCES)):
            digest, ending = os.path.splitext(name)
            if ending == KEPT and _DIGEST.fullmatch(digest):
                path = os.path.abspath(os.path.join(run, SOURCES, name))
                _kept[digest] = _KeptText(path, run)


# --- changes --------------------------------------------------------------------------------------
# Notes on source files that have changed since their program was recorded.

#: The number of changed files that a note names, if there are two or more others.
_NAMED = 3


def changed_notes(files: Mapping[str, str]) -> list[str]:
    """Return that files have changed, and what that means for their lines: a note for each run.

    Args:
        files: The displayed path of each file, as `citations` yields them.
    """
    by_run: dict[str, dict[str, int | None]] = {}
    notes: dict[str, None] = {}
    for file, path in files.items():
        if run := recorded_in(file):
            by_run.setdefault(run, {}).setdefault(path, _changed_lines(file))
        else:
            notes[citation_note(path)] = None
    return [*(_run_note(run, changed) for run, changed in by_run.items()), *notes]


def _run_note(run: str, changed: Mapping[str, int | None]) -> str:
    """Return that files have changed since a run was recorded, from the numbers of lines."""
    end = f"since {run}/ was recorded"
    counts = {path: "" if n is None else f" ({plural(n, 'line')})" for path, n in changed.items()}
    if len(counts) == 1:
        [(path, count)] = counts.items()
        return f"{path} has changed {end}{count}; record it again"
    texts = [f"{path}{count}" for path, count in counts.items()]
    more = len(texts) - _NAMED
    last = f"{plural(more, 'more file')}" if more > 1 else texts.pop()
    return f"{', '.join(texts[:_NAMED])} and {last} have changed {end}; record it again"


def _changed_lines(file: str) -> int | None:
    """Return the number of lines of a recorded file that differ now; None if it is not known."""
    data = text_since(current_file(file))
    if data is None:
        return None
    recorded = file_text(file).splitlines()
    matcher = difflib.SequenceMatcher(None, recorded, data.decode(errors="replace").splitlines())
    return sum(
        max(old_end - old_start, new_end - new_start)
        for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes()
        if tag != "equal"
    )
