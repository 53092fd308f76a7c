"""Source locations of equations in the comments of a `.jaxpr` file.

    # model.py:12:8 (loss) ← flax/linen/linear.py:199:8 (call) from 4 in layer/dense as hidden

First comes the user's own frame, then the library frame that it calls, if any; `from 4`, if there
are more frames, is their entry in the header's table of call stacks. Then come the name scopes, and
the names of the results in the user's source, `low, _` if only the first of two has one. Each part
may be missing. The header's table has the paths of the files: relative to the user's
folder or, for libraries, to the folder of installed packages on the reading machine. A comment that
names none of these files, or has another form, is an ordinary comment.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import PurePath
from typing import TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.call_stacks import StackWriter, frame_text, read_frame
from jaxprtool.ir.notation.names import VariableNames
from jaxprtool.ir.notation.user_names import source_names
from jaxprtool.ir.source import source_text
from jaxprtool.ir.source.frames import BEHIND, Root, frames_now
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.identity import identity
from jaxprtool.jaxcompat.source_locations import (
    PACKAGES,
    UserFrame,
    is_installed,
    naming_frame,
)

#: The frames of an equation, outermost first, and the name scopes around it.
Location: TypeAlias = tuple[tuple[UserFrame, ...], str]

_LOCATION = re.compile(
    r"(?:(?P<frames>\S.*?:\d{1,8}(?::\d{1,8})?(?: \([^()]*\))?)(?: from (?P<stack>\w+))?)?"
    r"(?:(?:^| )in (?:'(?P<quoted>[^']+)'|(?P<scope>\S+)))?"
    r"(?:(?:^| )as (?P<names>\w+(?:, \w+)*))?"
)


class SourceComments:
    """The source locations of equations as comments, with their files and call stacks.

    Each location is looked up once; the equations must outlive this object.

    Args:
        root: The jaxpr of the program.
        source: Whether the comments include source lines and not only name scopes.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, root: Jaxpr, source: bool, roots: Sequence[Root]) -> None:
        self.files: dict[str, str] = {}
        self._users: dict[str, str] = {}
        self._source = source
        # An unused result of the program is written as `_` and has no name when it is read.
        unread = VariableNames(root, set())
        names = source_names(root, roots) if source else {}
        self._given = {var: name for var, name in names.items() if var not in unread}
        self._reader = frames_now(roots, chosen=False)
        self._names: dict[tuple[str, bool], str | None] = {}
        self._comments: dict[Hashable, tuple[str, ...]] = {}
        self._frames: dict[object, str] = {}
        self._stacks = StackWriter()

    @property
    def stacks(self) -> Mapping[str, str]:
        """The table of the call stacks that the comments mention."""
        return self._stacks.table

    def digests(self, since: float | None = None) -> dict[str, str]:
        """Return a digest of each of the user's files that the comments mention.

        Args:
            since: As for `source_text.digest`.
        """
        return {name: source_text.digest(file, since) for name, file in self._users.items()}

    def comment(self, eqn: JaxprEqn) -> tuple[str, ...]:
        """Return `# file.py:12:8 (function) in scope as name`, or known parts, as one token."""
        info = eqn.source_info
        names = tuple(self._given.get(var, "_") for var in eqn.outvars)
        key = identity(info.traceback), identity(info.name_stack), names
        if key not in self._comments:
            scope = _scope_text(jaxcompat.name_stack(eqn))
            parts = [self._frame(eqn) if self._source else "", f"in {scope}" if scope else ""]
            parts.append(f"as {', '.join(names)}" if set(names) - {"_"} else "")
            text = " ".join(filter(None, parts))
            self._comments[key] = (f"# {text}",) if text else ()
        return self._comments[key]

    def _frame(self, eqn: JaxprEqn) -> str:
        traceback = eqn.source_info.traceback
        if traceback not in self._frames:
            self._frames[traceback] = self._location_text(eqn)
        return self._frames[traceback]

    def _location_text(self, eqn: JaxprEqn) -> str:
        frames = self._reader.of(eqn)
        if not frames:
            return ""
        own = self._reader.nearest(frames)
        # All that the user's own frame calls is written as a library's, and read as such.
        libraries = [i < own or not self._reader.is_users(f.file) for i, f in enumerate(frames)]
        shown = dict.fromkeys((own, 0))
        text = BEHIND.join(filter(None, (self._frame_text(frames[i], libraries[i]) for i in shown)))
        if not text or len(frames) == len(shown):
            return text
        texts = map(partial(self._frame_text, ends=True), frames, libraries)
        entry = self._stacks.entry([*filter(None, texts)])
        return f"{text} from {entry}" if entry else text

    def _frame_text(self, frame: UserFrame, library: bool, ends: bool = False) -> str:
        name = self._file(frame.file, library)
        return "" if name is None else frame_text(name, frame, ends)

    def _file(self, file: str, library: bool) -> str | None:
        """Return the name of a file in comments: a library's path, else the shortest name."""
        if (file, library) not in self._names:
            path = self._reader.path(file)
            path = f"{PACKAGES}/{path}" if library else path
            name = self._distinct(path) if path.isprintable() else None
            self._names[file, library] = name
            if name is not None:
                self.files[name] = path
                if not library and not path.startswith("<"):
                    self._users[name] = file
        return self._names[file, library]

    def _distinct(self, path: str) -> str:
        parts = [re.sub(r"[^\w./+-]", "_", part) for part in PurePath(path).parts] or ["file"]
        if is_installed(path):
            parts = ["/".join(parts[1:])]
        names = ("/".join(parts[-n:]) for n in range(1, len(parts) + 1))
        numbered = (f"{parts[-1]}.{n}" for n in count(2))
        return next(n for names in (names, numbered) for n in names if n not in self.files)


def _scope_text(scope: str) -> str:
    """Return a name scope in a comment, quoted if it has spaces, without invalid characters."""
    if "'" in scope or not scope.isprintable():
        scope = "".join(c if c.isprintable() and c != "'" else "_" for c in scope)
    return f"'{scope}'" if " " in scope else scope


def source_infos(
    comments: Iterable[str], files: Mapping[str, str], stacks: Mapping[str, tuple[UserFrame, ...]]
) -> dict[str | None, object]:
    """Return the `source_info` for each comment, and for equations without one.

    Args:
        comments: The comments.
        files: The path of each file by its name in comments.
        stacks: The call stacks by their names in comments, the outermost frame first.
    """
    texts = list(dict.fromkeys(comments))
    locations: list[Location] = [((), ""), *(_location(text, files, stacks) for text in texts)]
    return dict(zip((None, *texts), jaxcompat.source_infos(locations), strict=True))


def _location(
    comment: str, files: Mapping[str, str], stacks: Mapping[str, tuple[UserFrame, ...]]
) -> Location:
    found = _LOCATION.fullmatch(comment)
    if not comment.isprintable() or not found:
        return (), ""
    frames: list[UserFrame] = []
    for text in found["frames"].split(BEHIND) if found["frames"] else ():
        frame = read_frame(text, files)
        if frame is None:
            return (), ""
        frames.append(frame)
    if found["stack"]:
        if found["stack"] not in stacks:
            return (), ""
        frames = [*stacks[found["stack"]]]
    if frames or found["names"]:  # a result has the name of the file or none: the source may differ
        names = (found["names"] or "").split(", ")
        frames.append(naming_frame([name.strip("_") and name for name in names]))
    return tuple(frames), found["scope"] or found["quoted"] or ""
