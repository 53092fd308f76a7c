"""Comments on equations: the line in the user's code, the name scope, and what is opaque."""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.notation.layout import Commenter
from jaxprtool.ir.notation.tokens import Comment, SourceLine
from jaxprtool.ir.source.frames import BEHIND, Frames, Root, frames_now
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.identity import identity
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.render.documents import programs as documents
from jaxprtool.render.terminal.rendering import ShowOptions

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
        own = self._frames.is_users(location.frame.file)
        tokens = [SourceLine(first) if own else Comment(first)]
        return [*tokens, Comment("".join(BEHIND + each for each in behind))] if behind else tokens


def source_line(frames: Frames, frame: UserFrame) -> documents.SourcePosition:
    """Return the document of a frame."""
    return {"file": frames.path(frame.file), "line": frame.line}
