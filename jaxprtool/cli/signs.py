"""ASCII substitutes for symbols of listings, curves and tables, if a stream's encoding lacks them.

The encoding of a pipe on Windows lacks box-drawing characters and arrows. Other characters, such as
in names, are written as escapes. Programs meant to be read again are never changed in this way: see
`output`.
"""

from __future__ import annotations

import codecs
import sys
import unicodedata

#: The name of the error handler.
_HANDLER = "jaxprtool.signs"

#: Python's default error handlers for characters that a stream lacks; PYTHONIOENCODING sets others.
_DEFAULTS = ("strict", "surrogateescape", "backslashreplace")

#: Symbols in ASCII; bars are in order of height.
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
    """Set stdout and stderr to write characters that their encodings lack in ASCII."""
    codecs.register_error(_HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in _DEFAULTS and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(in_ascii, error.object[error.start : error.end])), error.end


def in_ascii(sign: str) -> str:
    """Return a character in ASCII: a similar symbol, or else its escape."""
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
