"""The pieces that a listing is made of: strings that know what they stand for.

A piece that has a role (a binder, a type, a literal) is an instance of that role's class, a `str`
with nothing more: `"".join(pieces)` is the plain text, and the classes say which style each piece
gets where there are colours. An empty token lends its role to the piece after it. So binders are
marked: a name that is a plain `str` serves where it is bound and where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


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
    """What JAX's notation does not have: where an equation comes from, what is left out."""

    __slots__ = ()


class SourceLine(Token):
    """In a comment, a line of the user's own source."""

    __slots__ = ()


class SharedName(Token):
    """The name of a jaxpr that is printed once, above, and used more than once."""

    __slots__ = ()


class RemovedToken(Token):
    """In a diff, what only the first program has."""

    __slots__ = ()


class AddedToken(Token):
    """In a diff, what only the second program has."""

    __slots__ = ()


class ChangedToken(Token):
    """In a diff, the mark of what both programs have, and is not the same."""

    __slots__ = ()


class Heading(Token):
    """The heading of a column."""

    __slots__ = ()


#: Stands before the name of a variable where it is bound.
BINDER = BinderToken()


def with_roles(tokens: Iterable[str]) -> Iterator[tuple[str, type[str]]]:
    """Each piece of text with its role; those without one (`str`) in one piece if adjacent."""
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
    """Return the columns JAX's formatter counts for `token`: one for each byte of UTF-8."""
    return len(token) if token.isascii() else len(token.encode())
