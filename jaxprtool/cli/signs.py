"""ASCII for the signs of listings, curves and tables, on a stream whose encoding lacks them.

A pipe on Windows has no lines to draw boxes with, and no arrows. Other characters, as of names, are
written as escapes. Programs that are to be read again are never changed so: see `output`.
"""

from __future__ import annotations

import codecs
import sys
import unicodedata

#: The name of the error handler.
_HANDLER = "jaxprtool.signs"

#: How Python treats characters that a stream lacks, unless PYTHONIOENCODING says otherwise.
_DEFAULTS = ("strict", "surrogateescape", "backslashreplace")

#: Signs in ASCII; bars are in order of their heights.
_SIGNS = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True)),
    **dict(zip("↑↓▾▼▸►·•µ", "^vvv>>.*u", strict=True)),
    "→": "->",
    "←": "<-",
    "…": "...",
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
}


def use_ascii_where_needed() -> None:
    """Have stdout and stderr write in ASCII what their encodings lack."""
    codecs.register_error(_HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in _DEFAULTS and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(in_ascii, error.object[error.start : error.end])), error.end


def in_ascii(sign: str) -> str:
    """Return a character in ASCII: a sign that looks like it, or else its escape."""
    if sign in _SIGNS:
        return _SIGNS[sign]
    name = unicodedata.name(sign, "")
    if name.startswith("BRAILLE"):
        return " " if name.endswith("BLANK") else "*"
    if name.startswith("BOX DRAWINGS"):
        lines = [line for line in ("HORIZONTAL", "VERTICAL") if line in name]
        ends = any(end in name for end in ("UP", "DOWN", "LEFT", "RIGHT"))
        return "+" if ends or len(lines) != 1 else "-" if lines == ["HORIZONTAL"] else "|"
    return sign.encode("ascii", "backslashreplace").decode()
