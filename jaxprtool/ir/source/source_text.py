"""The text of source files, for all that shows or reads source lines.

A line's number is that of the file when the program was traced. A program in a file comes with
digests of its source files (`digest`), and `check` compares them when it is read: a file that has
changed since then, or for which nothing is known, has no text. `withheld` says which, and why.
"""

from __future__ import annotations

import hashlib
import linecache
import os

#: The number of digits of a digest.
_DIGITS = 16

#: The files whose text is not what it was, and the files that other names stand for.
_changed: set[str] = set()
_found: dict[str, str] = {}
#: The digest that a program from a file has of each file; "" if two programs differ in it.
_digests: dict[str, str] = {}
#: The path of each name in the programs that were read last.
_paths: dict[str, str] = {}
#: The changed files of which text was wanted.
_withheld: dict[str, None] = {}


def lines(file: str) -> list[str]:
    """Return the lines of a file, with their ends; empty if its text is not known."""
    if file in _changed:
        _withheld[file] = None
        return []
    is_known = os.path.isabs(file) or file.startswith("<") or file in linecache.cache
    if not (is_known or file in _found):
        return []  # in a program from a file, for which nothing was checked
    return linecache.getlines(_found.get(file, file))


def line(file: str, number: int) -> str:
    """Return a line of a file, from 1, without spaces around it; "" if it is not known."""
    found = lines(file)
    return found[number - 1].strip() if 0 < number <= len(found) else ""


def text(file: str) -> str:
    """Return the text of a file; "" if it is not known."""
    return "".join(lines(file))


def digest(file: str, since: float | None = None) -> str:
    """Return a digest of the text of a file; "" if it is not known.

    Args:
        file: The file.
        since: A time. The file's text is not known if it was written after this.
    """
    if file in _digests:
        return _digests[file]
    try:
        if since is not None and os.stat(file).st_mtime > since:
            return ""
        with open(file, "rb") as opened:
            return hashlib.sha256(opened.read()).hexdigest()[:_DIGITS]
    except OSError:
        return ""


def check(name: str, file: str, known: str) -> bool:
    """Return True if a source file is as it was when a program was written.

    Args:
        name: The name of the file in the program. `lines` takes it from now on.
        file: Its path.
        known: Its digest at that time; "" if it had already changed then.
    """
    path = os.path.abspath(file)
    if _paths.setdefault(name, path) != path:  # of another folder
        _paths[name] = path
        _changed.discard(name)
        for table in (_found, _digests, _withheld):
            table.pop(name, None)
    if not os.path.isabs(name):
        same = _digests.setdefault(name, known) == known
        _digests[name] = known if same else ""
    if not os.path.isfile(file):
        return False
    if not known or digest(path) != known:
        _changed.add(name)
        return False
    _found[name] = path
    return name not in _changed


def reason(file: str) -> str:
    """Return that a file `has changed`, the reason why it has no text; "" otherwise."""
    return "has changed since it was recorded: record it again" if file in _changed else ""


def withheld() -> list[str]:
    """Return why each file has no text whose text was wanted since the last call."""
    reasons = [
        f"{file} has changed since it was recorded, so its lines are not shown: record it again"
        for file in _withheld
    ]
    _withheld.clear()
    return reasons
