"""What a docstring says, in parts: those that Google's style and NumPy's have names for."""

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
        text: What stands before the sections, as it is laid out.
        parameters: What is said of each parameter or attribute.
        raises: When something is raised.
        sections: All other sections by their titles: an example, notes.
    """

    text: str
    parameters: dict[str, str]
    raises: list[str]
    sections: dict[str, str]


def documentation(cls: type) -> Documentation:
    """Return what the docstring of a class says, and of what it inherits those of its bases."""
    said = _documentation(cls)
    for base in cls.__mro__[1:-1]:
        inherited = _documentation(base)
        said.parameters.update({**inherited.parameters, **said.parameters})
        said.raises.extend(text for text in inherited.raises if text not in said.raises)
    return said


def _documentation(cls: type) -> Documentation:
    said = max(_parsed(inspect.cleandoc(cls.__doc__ or "")), key=lambda said: len(said.meta))
    found = Documentation(_prose(said), {}, [], {})
    for part in said.meta:
        text = part.description or ""
        if isinstance(part, DocstringParam):
            found.parameters[part.arg_name] = text
        elif isinstance(part, DocstringRaises):
            found.raises.append(text)
        else:
            snippet = getattr(part, "snippet", None)  # NumPy's, of an example
            title = _TITLES.get(part.args[0], part.args[0].replace("_", " ").capitalize())
            lines = [found.sections.get(title), snippet, text]
            found.sections[title] = "\n".join(filter(None, lines))
    return found


def _prose(said: Docstring) -> str:
    space = "\n\n" if said.blank_after_short_description else "\n"
    return space.join(filter(None, [said.short_description, said.long_description]))


def _parsed(text: str) -> list[Docstring]:
    """Return a docstring as each style reads it; plain, if none can."""
    found = []
    for parser in (_GOOGLE, NumpydocParser()):
        with suppress(ParseError):  # a section in which something else stands
            found.append(parser.parse(text))
    if not found:
        found.append(Docstring())
        found[0].short_description = text
    return found
