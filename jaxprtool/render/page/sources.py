"""The source files on a page, and the locations of equations in them.

Only the user's own Python files are shown in full, and those of installed packages if their frames
are selected; others are referred to by path. A file that has changed since a program was recorded
has no lines; the page says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from jaxprtool.ir.source import source_text
from jaxprtool.ir.source.frames import BEHIND, Root, frames_now
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.jaxcompat.source_locations import is_installed
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.rendering import ShowOptions


@dataclass(frozen=True)
class SourceLink:
    """The source location of an equation.

    Attributes:
        text: The nearest frame of the user's files, `model.py:9`, or its substitute.
        behind: The library frames it calls, `flax/linen/linear.py:199`.
        line: The line, if its file is shown.
        code: The code of the line, if the file may be shown.
    """

    text: str
    behind: str
    line: str = ""
    code: str = ""


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A displayed file: its number on the page, its path, and its lines in HTML.

    A file without lines has a `fault`, the reason.
    """

    number: int
    path: str
    lines: Sequence[Markup]
    fault: str = ""


class Sources:
    """The source locations of equations, and their files.

    Args:
        options: The display options: whether sources are shown, and which frames.
        whole: Whether to show whole files instead of single lines.
        roots: The folders of the user's files, as a `Program` has them.
        texts: The text of files to show, by displayed path. The files need not exist.
    """

    def __init__(
        self,
        options: ShowOptions,
        whole: bool,
        roots: Sequence[Root],
        texts: Mapping[str, str] = MappingProxyType({}),
    ):
        self._whole = whole
        self._wanted = options.source
        self._frames = frames_now(roots)
        self._choice = options.frames or self._frames.choice
        self._locations: dict[object, SourceLink | None] = {}
        self._files: dict[str, SourceFile | None] = {}
        self._known: dict[str, SourceFile] = {}
        for path, text in texts.items():
            self._known[path] = SourceFile(len(self._known), _printable(path), _colored(text))

    def location(self, eqn: JaxprEqn) -> SourceLink | None:
        """Return the source location of an equation; None if unknown or not shown."""
        traceback = eqn.source_info.traceback
        if not self._wanted or traceback is None:
            return None
        if traceback not in self._locations:
            self._locations[traceback] = self._found(eqn)
        return self._locations[traceback]

    def files(self) -> list[SourceFile]:
        """Return the displayed files in order of first use."""
        read = [file for file in self._files.values() if file is not None]
        return list(dict.fromkeys((*self._known.values(), *read)))

    def line_of(self, name: str) -> SourceLink | None:
        """Return a line by its name, `model.py:9`; None if its file is not shown."""
        path, _, number = name.rpartition(":")
        for file in self.files():
            if file.path == path and number.isdecimal() and 0 < int(number) <= len(file.lines):
                code = Markup(file.lines[int(number) - 1].strip())
                return SourceLink(name, "", f"f{file.number}-{number}", code)
        return None

    def _found(self, eqn: JaxprEqn) -> SourceLink | None:
        location = self._frames.location(eqn)
        if location is None:
            return None
        frame, behind = location.chosen(self._choice)
        if frame.file not in self._files:
            self._files[frame.file] = self._read(frame.file)
        file = self._files[frame.file]
        first, *others = printable(map(self._frames.text, (frame, *behind)))
        if file is None or not 0 < frame.line <= len(file.lines):
            return SourceLink(first, BEHIND.join(others))
        code = Markup(file.lines[frame.line - 1].strip())
        line = f"f{file.number}-{frame.line}" if self._whole else ""
        return SourceLink(first, BEHIND.join(others), line, code)

    def _read(self, file: str) -> SourceFile | None:
        """Return a file if its text, or the reason why it has none, is known and may be shown."""
        if known := self._known.get(self._frames.path(file)):
            return known
        shown = self._frames.is_own(file) or (self._choice != "mine" and is_installed(file))
        if not (shown and file.endswith(".py")):
            return None
        text, path = source_text.text(file), _printable(self._frames.path(file))
        fault = source_text.citation_note(path) if source_text.reason(file) else ""
        lines = _colored(text) if text else ()
        return SourceFile(len(self.files()), path, lines, fault) if text or fault else None


def _printable(path: str) -> str:
    return "".join(printable([path]))


def _colored(text: str) -> list[Markup]:
    """Return the lines of Python source as HTML with Pygments classes."""
    plain = "\n".join("".join(printable([line.expandtabs()])) for line in text.split("\n"))
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    html = highlight(plain, lexer, HtmlFormatter(nowrap=True))
    return [Markup(line) for line in html.removesuffix("\n").split("\n")]
