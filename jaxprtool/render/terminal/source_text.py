"""The colored lines of source files, each read when it is first shown."""

from __future__ import annotations

import linecache

from rich.style import Style
from rich.text import Text

from jaxprtool.ir.source import source_text
from jaxprtool.render.terminal.colors import BLUE, CYAN, GREEN, MAGENTA, named

#: Longer files are shown without colors, which are slow to compute.
_LONGEST = 5000

#: The styles of source tokens, by prefix of their Pygments type.
_STYLES = {
    "Token.Keyword": Style(color=named(BLUE)),
    "Token.Literal.String": Style(color=named(GREEN)),
    "Token.Literal.Number": Style(color=named(MAGENTA)),
    "Token.Comment": Style(dim=True),
    "Token.Name.Decorator": Style(color=named(CYAN)),
    "Token.Name.Function": Style(bold=True),
    "Token.Name.Class": Style(bold=True),
}


class Sources:
    """The lines of source files."""

    def __init__(self) -> None:
        self._files: dict[str, list[Text]] = {}

    def lines(self, file: str) -> list[Text]:
        """Return the lines of a file; empty if it does not exist."""
        if file not in self._files:
            self._files[file] = _colored(source_text.text(file).expandtabs(4))
        return self._files[file]

    def fault(self, file: str) -> str:
        """Return why a file has no lines."""
        return source_text.reason(file) or "unavailable"

    def forget(self) -> None:
        """Clear the cache, since files may have been edited."""
        self._files.clear()
        linecache.checkcache()


def _colored(source: str) -> list[Text]:
    lines = source.splitlines()
    if len(lines) > _LONGEST:
        return [Text(_printable(line)) for line in lines]
    from pygments import lex
    from pygments.lexers.python import PythonLexer

    found = [Text()]
    for kind, part in lex(source, PythonLexer(stripnl=False, ensurenl=False)):
        style = _style(str(kind))
        for number, piece in enumerate(part.split("\n")):
            if number:
                found.append(Text())
            found[-1].append(_printable(piece), style)
    return found[: len(lines)]


def _style(kind: str) -> Style | None:
    return next((style for name, style in _STYLES.items() if kind.startswith(name)), None)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "·" for c in text)
