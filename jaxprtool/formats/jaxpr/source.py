"""The text of a `.jaxpr` file, and errors with places in it.

Positions are indices into the text; a message gives them as a line and a column, from 1. The Python
expressions in a file are read with `ast` and never evaluated.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from jaxprtool.errors import ProgramFileError

#: The nesting limits of brackets and of jaxprs, which fit Python's default recursion limit. Writers
#: observe them as well.
MAX_DEPTH = 80
#: The maximum number of commas in one expression.
MAX_VALUES = 1_000_000

#: The maximum number of characters of a line, without its constants.
MAX_LINE = 4_000_000
#: The maximum number of characters of a message, since it may quote the file.
_MAX_MESSAGE = 400

_CONSTANTS = re.compile(r"base64\('[\w+/=]*+'")
_STRINGS_AND_COMMENTS = re.compile(
    r"""'(?:[^'\\\n]|\\.)*+' | "(?:[^"\\\n]|\\.)*+" | \#[^\n]*+""", re.VERBOSE
)


class FileText:
    """A file's text, with its comments separated.

    In `text`, comments are blanked, so that positions are unchanged; `comments` has the position
    and text, without `#`, of each comment.
    """

    def __init__(self, name: str, text: str):
        self.name = name
        self.comments: list[tuple[int, str]] = []
        self.text = text
        self._check_lines()
        self.text = _STRINGS_AND_COMMENTS.sub(self._blank, text)

    def _check_lines(self) -> None:
        """Raise ProgramFileError for a line that would take minutes to read."""
        text, start = self.text, 0
        while len(text) - start > MAX_LINE:
            end = text.rfind("\n", start, start + MAX_LINE + 1)
            if end < 0:
                end = text.find("\n", start) % (len(text) + 1)
                constants = sum(len(found[0]) for found in _CONSTANTS.finditer(text, start, end))
                if end - start - constants > MAX_LINE:
                    raise self.fail(start, f"a line is longer than {MAX_LINE:,} characters")
            start = end + 1

    def _blank(self, match: re.Match[str]) -> str:
        found = match.group()
        if found[0] != "#":
            return found
        self.comments.append((match.start(), found[1:].strip()))
        return " " * len(found)

    def fail(self, position: int, message: str, hint: str | None = None) -> ProgramFileError:
        """Return the error for a place, to be raised by the caller."""
        line, column = self.line_and_column(position)
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE // 2]}...{message[-_MAX_MESSAGE // 2 :]}"
        message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        return ProgramFileError(f"{self.name}:{line}:{column}: {message}", hint)

    def line_and_column(self, position: int) -> tuple[int, int]:
        """Return the line and the column of a place, from 1."""
        line = self.text.count("\n", 0, position) + 1
        return line, position - self.text.rfind("\n", 0, position)

    def shown(self, position: int) -> str:
        """Return a short excerpt of the text at a place, for a message."""
        rest = self.text[position : position + 200].split(maxsplit=1)
        if not rest:
            return "the end of the file"
        return f"'{rest[0]}'" if len(rest[0]) <= 30 else f"'{rest[0][:27]}...'"


@dataclass(slots=True)
class Expression:
    """A Python expression in a file. `bodies` are the jaxprs in it, by their placeholder names."""

    text: str
    position: int
    bodies: dict[str, Any]

    def parse(self, source: FileText) -> ast.expr:
        """Return the expression's syntax tree. Raises ProgramFileError if it is not well formed."""
        if not self.text.strip():
            raise source.fail(self.position, "expected a value")
        if self.text.count(",") > MAX_VALUES:
            raise source.fail(self.position, f"a nested value has more than {MAX_VALUES:,} parts")
        try:
            return ast.parse(f"({self.text})", mode="eval").body
        except SyntaxError as error:
            position = self._index(error.lineno or 1, (error.offset or 1) - 1)
            raise source.fail(position, f"invalid value: {error.msg}") from None
        except (ValueError, MemoryError, RecursionError):
            # NUL characters, lone surrogates, integers of thousands of digits, endless operators
            raise source.fail(self.position, "this value cannot be read") from None

    def position_of(self, node: ast.expr) -> int:
        """Return the position in the file of a node of the expression's tree."""
        lines = f"({self.text}".split("\n")
        before = lines[node.lineno - 1].encode()[: node.col_offset]
        return self._index(node.lineno, len(before.decode(errors="replace")))

    def _index(self, line: int, column: int) -> int:
        """Return the position in the file of a line and column in `(text)`."""
        lines = self.text.split("\n")
        before = sum(len(text) + 1 for text in lines[: line - 1])
        last = min(max(before + column - (line == 1), 0), len(self.text))
        return self.position + last
