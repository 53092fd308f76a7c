"""Queries of a search, and matching rows.

    dot_general            a primitive, or part of its name; also reduce_*
    f32[8,3]  bf16  [8,3]  a type, a dtype or a shape of a result or operand
    params['w']            an argument, and its readers
    Dense_0                a scope, or the function of a call
    model.py:9  :9         a line of the source

All words of a query must match. Lower case letters also match capitals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxprtool.browse.document import Document
from jaxprtool.browse.outline import Kind
from jaxprtool.extend import Atom, Jaxpr, JaxprEqn, Literal, type_of

_LINE = re.compile(r"(?P<file>\S*):(?P<line>\d+)")

#: A matching row: the body and position of an equation, or the kind and position of an argument or
#: result.
Match = tuple[Jaxpr | Kind, int]


def matches(document: Document, query: str) -> list[Match]:
    """Return the matches of a query in program order; a shared body at its first occurrence."""
    words = query.split()
    if not words:
        return []
    tests = [_Word(document, word) for word in words]
    equations = [
        (jaxpr, index)
        for jaxpr, index in document.order
        if all(test.fits(jaxpr, index) for test in tests)
    ]
    return [
        *_ends(document, Kind.argument, tests),
        *equations,
        *_ends(document, Kind.result, tests),
    ]


def _ends(document: Document, kind: Kind, tests: list[_Word]) -> Iterator[Match]:
    """Yield the matching arguments or results."""
    for index, value in enumerate(document.ends(kind)):
        if all(test.fits_text(value.name) or test.fits_text(value.type) for test in tests):
            yield kind, index


class _Word:
    """One word of a query."""

    def __init__(self, document: Document, word: str):
        self._document = document
        self._folds = word == word.lower()
        self._word = word
        self._types: dict[int, bool] = {}
        self._texts: dict[str, bool] = {}
        self._tracebacks: dict[object, bool] = {}
        escaped = re.escape(word).replace(r"\*", ".*")
        self._pattern = re.compile(escaped) if "*" in word else None
        line = _LINE.fullmatch(word)
        self._line = (line["file"], int(line["line"])) if line else None
        self._arguments = {
            var
            for var, value in zip(document.top.invars, document.about.arguments, strict=True)
            if self.fits_text(value.name)
        }

    def fits_text(self, text: str) -> bool:
        """Return True if a text contains the word or matches its pattern."""
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = self._is_in(text)
        return found

    def _is_in(self, text: str) -> bool:
        text = text.lower() if self._folds else text
        return self._pattern.fullmatch(text) is not None if self._pattern else self._word in text

    def fits(self, jaxpr: Jaxpr, index: int) -> bool:
        """Return True if an equation matches."""
        eqn = jaxpr.eqns[index]
        if self._line is not None:
            return self._fits_line(eqn)
        name = eqn.params.get("name")
        if self.fits_text(eqn.primitive.name) or (isinstance(name, str) and self.fits_text(name)):
            return True
        if any(map(self._fits_value, eqn.outvars)) or any(map(self._fits_value, eqn.invars)):
            return True
        if self._arguments and any(
            type(v) is not Literal and v in self._arguments for v in eqn.invars
        ):
            return True
        return self.fits_text("/".join(self._document.scopes(jaxpr)[index]))

    def _fits_value(self, atom: Atom) -> bool:
        key = id(atom.aval)
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = self.fits_text(type_of(atom.aval))
        return found

    def _fits_line(self, eqn: JaxprEqn) -> bool:
        assert self._line is not None
        traceback = eqn.source_info.traceback
        found = self._tracebacks.get(traceback)
        if found is None:
            file, line = self._line
            shown = self._document.all_frames(eqn)
            path = self._document.frames.path
            found = self._tracebacks[traceback] = any(
                frame.line == line and (not file or f"/{path(frame.file)}".endswith(f"/{file}"))
                for frame in (shown if file else shown[:1])
            )
        return found
