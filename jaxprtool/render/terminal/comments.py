"""Source comments of equations: the line in the user's code, and the name scope."""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool import jaxcompat
from jaxprtool.ir.notation.tokens import Comment, SourceLine
from jaxprtool.ir.source.frames import BEHIND, Frames, Root, frames_now
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.jaxcompat.identity import identity
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.render.documents import programs as documents
from jaxprtool.render.terminal.rendering import ShowOptions


class SourceComments:
    """Source locations of equations, each looked up once; the equations must outlive it.

    Args:
        options: The display options.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, options: ShowOptions, roots: Sequence[Root]):
        self._options = options
        self._frames = frames_now(roots)
        self._comments: dict[tuple[int, int], Sequence[str]] = {}
        self._locations: dict[object, Sequence[str]] = {}

    def comment(self, eqn: JaxprEqn) -> Sequence[str]:
        """Return the tokens of `# file.py:3 ← library/file.py:8, scope: outer/inner`.

        It has the requested and known parts, and is empty without any.
        """
        info = eqn.source_info
        key = identity(info.traceback), identity(info.name_stack)
        tokens = self._comments.get(key)
        if tokens is None:
            location = self.location(eqn) if self._options.source else ()
            scope = jaxcompat.name_stack(eqn) if self._options.scopes else ""
            scoped = [Comment(f"{', ' if location else ''}scope: {scope}")] if scope else []
            tokens = [Comment("# "), *location, *scoped] if location or scoped else ()
            self._comments[key] = tokens
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
