"""Lines of source files, as all results and their documents name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxprtool.ir.documents import document

#: The separator between the user's own line and those of libraries behind it.
BEHIND = " ← "


@document(optional=("library",))
@dataclass(frozen=True, eq=False, repr=False)
class Place(str):
    """A line of a source file.

    In Python it is also the text that the terminal shows: `model.py:9 ← flax/linen/linear.py:199`,
    or "" if the line is unknown.

    Attributes:
        path: The file, with its absolute path if that is known.
        line: The line, from 1.
        function: The function that has the line, as Python qualifies it: `Model.loss`; "" if it is
            unknown.
        display: The path as the terminal shows it: from the current folder, or a library's package.
        library: The lines of libraries that it calls, the outermost first; None if there are none.
    """

    path: str = ""
    line: int = 0
    function: str = ""
    display: str = ""
    library: tuple[Place, ...] | None = None

    def __new__(
        cls,
        path: str = "",
        line: int = 0,
        function: str = "",
        display: str = "",
        library: tuple[Place, ...] | None = None,
    ) -> Place:
        texts = (f"{display}:{line}", *(library or ())) if display else ()
        return super().__new__(cls, BEHIND.join(texts))

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> Place:
        """Return the place that a document has."""
        if document is None:
            return cls()
        library = tuple(map(cls.from_json, document.get("library", ())))
        return cls(**{**document, "library": library or None})

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def user(self) -> Place:
        """The place without the lines of libraries."""
        return replace(self, library=None) if self.library else self

    @property
    def behind(self) -> str:
        """The lines of libraries: `flax/linen/linear.py:199`, or ""."""
        return BEHIND.join(self.library or ())

    def calling(self, library: Place) -> Place:
        """Return the place with a line of a library behind it, unless that is unknown."""
        return replace(self, library=(library,)) if library else self


#: The place of what has no known line.
UNKNOWN = Place()


def place_in(name: str) -> Place | None:
    """Return the name of a group if it is a place, or else None."""
    return name if isinstance(name, Place) and name else None
