"""Programs in JAX's own notation, as plain or colored text, laid out by Rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from jaxprtool import jaxcompat
from jaxprtool.ir.documents import in_bytes
from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import FrameChoice, Root, frames_now
from jaxprtool.ir.notation import (
    BinderToken,
    Comment,
    Heading,
    SourceLineToken,
    Type,
)
from jaxprtool.ir.notation.layout import Commenter, Layout, Selection
from jaxprtool.ir.notation.signatures import Notation, TerseNotation, UserNames
from jaxprtool.ir.program import Program, ProgramSignature, program_signature, size_of_values
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.jaxprs import identity
from jaxprtool.render.terminal.lines import Cell, Listing, columns, fitted, printable

# --- rendering ------------------------------------------------------------------------------------
# Options common to all renderings of a program, and layout by Rich.


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options for showing a program.

    Attributes:
        width: The width in columns.
        source: Whether to show the source line of each equation.
        frames: Which frames to show; None for those set by `jaxprtool.frames`.
        scopes: Whether to show the name stack of each equation.
        types: Whether to show the types of binders.
        depth: Bodies nested more deeply become one line with their number of equations.
        only: Patterns of primitive names, such as `conv*`: other equations are counted and left
            out, unless they contain a matching one.
        among: Equations by `id`: others are counted and left out.
        others: A description of the others: "that x does not touch".
        names: Whether to use the user's names of variables, if known.
        terse: Whether to leave out parameters with default values, and to cut long values.
        whole: Whether not to cut long values, even if `terse`.
        weak: Whether to mark weak types: `~f32[3]`.
        fit: Whether to break lines that JAX's layout leaves longer than the width.
        fold: Whether to fold long rows of variables, such as large signatures.
    """

    width: int = 80
    source: bool = False
    frames: FrameChoice | None = None
    scopes: bool = False
    types: bool = True
    depth: int | None = None
    only: Sequence[str] | None = None
    among: frozenset[int] | None = None
    others: str = ""
    names: bool = False
    terse: bool = False
    whole: bool = False
    weak: bool = False
    fit: bool = False
    fold: bool = False

    def selection(self) -> Selection:
        """Return the selection of equations to show."""
        return Selection(self.depth, self.only, self.among, self.others)

    def notation(self, about: ProgramSignature) -> Notation:
        """Return the notation for the equations of a program."""
        notation = TerseNotation(self.whole) if self.terse else Notation()
        notation.weak = self.weak
        if self.names:
            paths = [value.name for value in about.arguments]
            notation.variable_names = partial(UserNames, arguments=paths, roots=about.roots)
        return notation


#: A folded row with more variables shows only those that fit a line.
MOST_IN_A_ROW = 12

#: The default options.
DEFAULTS = ShowOptions()


# --- listing --------------------------------------------------------------------------------------
# Programs in JAX's own notation, as plain or colored text.
#
# The plain text of a whole program equals, byte for byte, the output of JAX's `jaxpr.pretty_print`
# at the same width. In addition, source lines and scopes may be shown as comments, bodies folded,
# and equations selected.

#: The number of the largest arguments listed below a program that has many.
LARGEST = 8


def listing(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Listing:
    """Return the listing of a program; source and scope are a comment at the end of a line.

    A comment also marks each opaque equation.

    With `fold`, many arguments are folded to their size, and the largest of them listed below.
    """
    about, selection = program_signature(program), options.selection()
    comment = SourceComments(options, about.roots).commenter(about.jaxpr)
    notation = options.notation(about)
    many = options.fold and len(about.arguments) > MOST_IN_A_ROW
    layout = Layout(
        about.jaxpr,
        options.width,
        options.types,
        selection,
        comment,
        notation,
        cut=MOST_IN_A_ROW if options.fold else None,
        arguments=size_of_values("argument", about.arguments) if many else "",
    )
    tokens = layout.tokens()
    if options.fit:
        tokens = fitted(tokens, options.width)
    return Listing([*tokens, *_largest(about, layout, options.width)] if many else tokens)


def _largest(about: ProgramSignature, layout: Layout, width: int) -> list[str]:
    """Return the tokens of a table of the largest arguments with names and sizes."""
    pairs = zip(about.arguments, about.jaxpr.invars, strict=True)
    ranked = sorted(pairs, key=lambda pair: pair[0].bytes or 0, reverse=True)
    rows: list[list[Cell]] = []
    for value, var in ranked[:LARGEST]:
        name = layout.names[var]
        letter = [BinderToken("" if name == value.name else name)]
        size = "" if value.bytes is None else in_bytes(value.bytes)
        rows.append([letter, [BinderToken(value.name)], [Type(value.type)], [size]])
    if not any(letter[0] for letter, *_ in rows):
        rows = [row[1:] for row in rows]
    more = f"… {len(ranked) - LARGEST:,} more; --full shows them"
    heading = Heading("the largest arguments")
    return ["\n\n", heading, "\n", *printable(columns(rows, width)), "\n", Comment(more)]


# --- comments -------------------------------------------------------------------------------------
# Comments on equations: the line in the user's code, the name scope, and what is opaque.

#: What an equation is that its file describes, but that JAX cannot rebuild from it.
OPAQUE = "opaque: cannot be run here"


class SourceComments:
    """Source locations of equations, each looked up once; the equations must outlive it.

    Args:
        options: The display options.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, options: ShowOptions, roots: Sequence[Root]):
        self._options = options
        self._frames = frames_now(roots)
        self._comments: dict[tuple[int, int, bool], Sequence[str]] = {}
        self._locations: dict[object, Sequence[str]] = {}

    def commenter(self, jaxpr: Jaxpr) -> Commenter | None:
        """Return `comment`; None if no equation of a jaxpr has a comment."""
        if not (self._options.source or self._options.scopes):
            return self.comment if any(map(jaxcompat.is_opaque, equations(jaxpr))) else None
        return self.comment

    def comment(self, eqn: JaxprEqn) -> Sequence[str]:
        """Return the tokens of `# file.py:3 ← library/file.py:8, scope: outer/inner`.

        It has the requested and known parts, says whether the equation is opaque, and is empty
        without any of these.
        """
        info, is_opaque = eqn.source_info, jaxcompat.is_opaque(eqn)
        key = identity(info.traceback), identity(info.name_stack), is_opaque
        tokens = self._comments.get(key)
        if tokens is None:
            location = self.location(eqn) if self._options.source else ()
            scope = jaxcompat.name_stack(eqn) if self._options.scopes else ""
            texts = [OPAQUE] * is_opaque + [f"scope: {scope}"] * bool(scope)
            parts = [location] * bool(location) + [[Comment(text)] for text in texts]
            tokens = [token for part in parts for token in (Comment(", "), *part)][1:]
            tokens = self._comments[key] = [Comment("# "), *tokens] if tokens else ()
        return tokens

    def location(self, eqn: JaxprEqn) -> Sequence[str]:
        """Return the tokens of `file.py:3 ← library/file.py:8`; empty if unknown."""
        traceback = eqn.source_info.traceback
        tokens = self._locations.get(traceback)
        if tokens is None:
            tokens = self._locations[traceback] = self._tokens(eqn)
        return tokens

    def _tokens(self, eqn: JaxprEqn) -> Sequence[str]:
        location = self._frames.location(eqn)
        if location is None:
            return ()
        location = location.chosen(self._options.frames or self._frames.choice)
        first, *behind = map(self._frames.text, (location.frame, *location.behind))
        is_own = self._frames.is_users(location.frame.file)
        tokens = [SourceLineToken(first) if is_own else Comment(first)]
        return [*tokens, Comment("".join(BEHIND + text for text in behind))] if behind else tokens
