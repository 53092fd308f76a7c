"""The lines of a listing in tokens: splitting, cutting and wrapping."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from jaxprtool.ir.notation.layout import COMMENT_COLUMN
from jaxprtool.ir.notation.tokens import BINDER, BinderToken, Comment, PrimitiveName, SourceLine

#: The tokens of a line, or of a cell.
Cell: TypeAlias = Sequence[str]

#: Patterns of spaces, and of pieces after which a word may be broken: for files, names of values
#: such as `params['w'].value`, and for other words.
_PATH_PARTS = re.compile(r" +|[^ /]*/+|[^ /]+")
_NAME_PARTS = re.compile(r" +|\[[^\]]*\]|\.?[^ .\[]+|.")
_PARTS = re.compile(r" +|[^ ,:(=_|\]]*[,:(=_|\]]+|[^ ,:(=_|\]]+")

#: The indent of the continuation of a broken line.
_INDENT = 4


def printable(tokens: Iterable[str]) -> list[str]:
    """Return tokens with control characters escaped, such as those in a name.

    Non-breaking spaces, used while lines are wrapped, become ordinary spaces.
    """
    return [t if t.isprintable() else type(t)(_written_out(t)) for t in tokens]


def _written_out(text: str) -> str:
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def joined(lines: Iterable[Iterable[str]]) -> list[str]:
    """Return the tokens of lines with newlines between them."""
    return [token for line in lines for token in ("\n", *line)][1:]


def lines_of(tokens: Iterable[str]) -> Iterator[list[str]]:
    """Yield the tokens of each line, without newlines."""
    line: list[str] = []
    for token in tokens:
        first, *others = token.split("\n") if "\n" in token else (token,)
        if first or token is BINDER:
            line.append(token if not others else type(token)(first))
        for rest in others:
            yield line
            line = [type(token)(rest)] if rest else []
    yield line


def cut(line: Sequence[str], width: int) -> list[str]:
    """Return a line's tokens, cut at the width."""
    if sum(map(len, line)) <= width:
        return list(line)
    tokens: list[str] = []
    free = width - 1
    for token in line:
        if len(token) > free:
            return [*tokens, type(token)(token[:free]), Comment("…")]
        tokens.append(token)
        free -= len(token)
    return tokens


def fitted(tokens: Iterable[str], width: int) -> list[str]:
    """Return the tokens of a listing with long lines broken.

    A comment that does not fit after its equation goes below it.
    """
    shown: list[str] = []
    start = length = 0
    for token in printable(tokens):
        if "\n" not in token:
            shown.append(token)
            length += len(token)
            continue
        for i, piece in enumerate(token.split("\n")):
            if i:
                if length > width:
                    shown[start:] = _broken(shown[start:], width)
                shown.append("\n")
                start, length = len(shown), 0
            if piece:
                shown.append(type(token)(piece))
                length += len(piece)
    if length > width:
        shown[start:] = _broken(shown[start:], width)
    return shown


def _broken(line: list[str], width: int) -> Iterator[str]:
    """Yield the tokens of a line broken into several lines."""
    binders = (before is BINDER for before in ("", *line))
    line = [BinderToken(t) if bound else t for t, bound in zip(line, binders, strict=False)]
    indent = line.pop(0) if line[0].isspace() else ""
    end = len(line)
    while end > 1 and isinstance(line[end - 1], Comment | SourceLine):
        end -= 1
    line, comment = line[:end], line[end:]
    if comment and line[-1].isspace():
        line.pop()
    room = width - len(indent) - _INDENT
    for number, rest in enumerate(wrapped(line, room)):
        if number:
            yield "\n"
            indent += " " * _INDENT * (number == 1)
        yield indent
        yield from rest
        column = len(indent) + sum(map(len, rest))
    length = sum(map(len, comment))
    if not comment:
        return
    if column + 2 + length <= width:
        yield "  "
        yield from comment
        return
    start = max(len(indent), min(COMMENT_COLUMN, width - length))
    for rest in wrapped(comment, width - start):
        yield "\n" + " " * start
        yield from rest


def parts(token: str) -> list[str]:
    """Return the spaces in a token and the pieces after which it may be broken."""
    if isinstance(token, Comment | PrimitiveName | SourceLine):
        return _PATH_PARTS.findall(token)
    return (_NAME_PARTS if isinstance(token, BinderToken) else _PARTS).findall(token)


def wrapped(cell: Cell, width: int) -> list[Cell]:
    """Return the lines of a wrapped cell.

    It is broken between words. A word wider than a line is broken after a comma or the like, a file
    after a slash, a name before a dot or a bracket, and any other word anywhere.
    """
    if sum(map(len, cell)) <= width:
        return [cell]
    lines: list[list[str]] = [[]]
    free = width
    for word in _words(cell):
        size = sum(map(len, word))
        if lines[-1]:
            if size + 1 <= free:
                lines[-1].append(" ")
                free -= 1
            else:
                lines.append([])
                free = width
        for part in [word] if size <= free else _fitting(word, width):
            size = sum(map(len, part))
            if size > free:
                lines.append([])
                free = width
            lines[-1] += part
            free -= size
    return [*lines]


def _words(cell: Cell) -> Iterator[list[str]]:
    """Yield the words of a cell, each as parts of its tokens."""
    word: list[str] = []
    for token in cell:
        role = type(token)
        for part in parts(token):
            if part[0] != " ":
                word.append(role(part))
            elif word:
                yield word
                word = []
    if word:
        yield word


def _fitting(word: Sequence[str], width: int) -> Iterator[list[str]]:
    """Yield the parts of a word, with those that are too wide cut."""
    for part in word:
        for start in range(0, len(part), width):
            yield [type(part)(part[start : start + width])]
