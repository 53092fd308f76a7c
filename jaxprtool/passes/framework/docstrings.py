"""Docstrings in parts: the sections of Google's and NumPy's styles."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass

from docstring_parser import Docstring, DocstringParam, DocstringRaises, ParseError
from docstring_parser.google import DEFAULT_SECTIONS, GoogleParser, Section, SectionType
from docstring_parser.numpydoc import NumpydocParser

_TITLES = {"examples": "Example"}
_MORE = ("Note", "Notes", "See Also", "References", "Warning", "Warnings")
_GOOGLE = GoogleParser(
    [*DEFAULT_SECTIONS, *(Section(title, title, SectionType.SINGULAR) for title in _MORE)]
)


@dataclass(frozen=True)
class Documentation:
    """A docstring in parts.

    Attributes:
        text: The text before the sections, with its line breaks.
        parameters: The description of each parameter or attribute.
        raises: The descriptions of exceptions.
        sections: All other sections by their titles: an example, notes.
    """

    text: str
    parameters: dict[str, str]
    raises: list[str]
    sections: dict[str, str]


def documentation(cls: type) -> Documentation:
    """Return the documentation of a class, with the parameters and exceptions of its bases."""
    parsed = _documentation(cls)
    for base in cls.__mro__[1:-1]:
        inherited = _documentation(base)
        parsed.parameters.update({**inherited.parameters, **parsed.parameters})
        parsed.raises.extend(text for text in inherited.raises if text not in parsed.raises)
    return parsed


def _documentation(cls: type) -> Documentation:
    parsed = max(_parsed(inspect.cleandoc(cls.__doc__ or "")), key=lambda parsed: len(parsed.meta))
    documentation = Documentation(_prose(parsed), {}, [], {})
    for part in parsed.meta:
        text = part.description or ""
        if isinstance(part, DocstringParam):
            documentation.parameters[part.arg_name] = text
        elif isinstance(part, DocstringRaises):
            documentation.raises.append(text)
        else:
            snippet = getattr(part, "snippet", None)  # NumPy's, of an example
            title = _TITLES.get(part.args[0], part.args[0].replace("_", " ").capitalize())
            lines = [documentation.sections.get(title), snippet, text]
            documentation.sections[title] = "\n".join(filter(None, lines))
    return documentation


def _prose(parsed: Docstring) -> str:
    space = "\n\n" if parsed.blank_after_short_description else "\n"
    return space.join(filter(None, [parsed.short_description, parsed.long_description]))


def _parsed(text: str) -> list[Docstring]:
    """Return a docstring as parsed in each style; as plain text if neither parses it."""
    docstrings = []
    for parser in (_GOOGLE, NumpydocParser()):
        with suppress(ParseError):  # a section that this style cannot parse
            docstrings.append(parser.parse(text))
    if not docstrings:
        docstrings.append(Docstring())
        docstrings[0].short_description = text
    return docstrings
