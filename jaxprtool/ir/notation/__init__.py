"""A jaxpr as text: JAX's notation, and the layout that other notations share with it.

The pieces of a listing are strings with roles. A piece that has a role (a binder, a type, a
literal) is an instance of that role's class, a plain subclass of `str`. So `"".join(pieces)` is the
plain text, and the classes determine the style of each piece if there are colors. An empty token
gives its role to the piece after it. Binders are marked in this way: a variable's name is one plain
`str`, where it is bound and where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: The column where comments begin, unless the line is longer than that.
COMMENT_COLUMN = 50


class Token(str):
    """A piece of text with a role; plain `str` pieces (names in use, punctuation) have none."""

    __slots__ = ()


class BinderToken(Token):
    """A variable where it is bound."""

    __slots__ = ()


class Type(Token):
    """The type of a variable, with its colon: `:f32[3]`."""

    __slots__ = ()


class PrimitiveName(Token):
    """The primitive of an equation."""

    __slots__ = ()


class ParameterToken(Token):
    """The name of a parameter, with its equals sign: `axes=`."""

    __slots__ = ()


class LiteralToken(Token):
    """A constant written in place: `2.0:f32[]`."""

    __slots__ = ()


class Keyword(Token):
    """`lambda`, `let` and `in`."""

    __slots__ = ()


class Comment(Token):
    """Text that JAX's notation does not have: a source line, or a note on omitted parts."""

    __slots__ = ()


class SourceLineToken(Token):
    """In a comment, a line of the user's own source."""

    __slots__ = ()


class SharedName(Token):
    """The name of a jaxpr that is printed once, above, and used more than once."""

    __slots__ = ()


class RemovedToken(Token):
    """In a diff, text that only the first program has."""

    __slots__ = ()


class AddedToken(Token):
    """In a diff, text that only the second program has."""

    __slots__ = ()


class ChangedToken(Token):
    """In a diff, the mark of an equation that both programs have, with differences."""

    __slots__ = ()


class Heading(Token):
    """The heading of a column."""

    __slots__ = ()


#: Precedes the name of a variable where it is bound.
BINDER = BinderToken()


def with_roles(tokens: Iterable[str]) -> Iterator[tuple[str, type[str]]]:
    """Yield each piece of text with its role, merging adjacent pieces without one (`str`)."""
    run: list[str] = []
    pieces = iter(tokens)
    for piece in pieces:
        role = type(piece)
        if role is str:
            run.append(piece)
            continue
        if run:
            yield "".join(run), str
            run.clear()
        yield piece or next(pieces), role
    if run:
        yield "".join(run), str


def width_of(token: str) -> int:
    """Return the columns that JAX's formatter counts for `token`: one for each byte of UTF-8."""
    return len(token) if token.isascii() else len(token.encode())
