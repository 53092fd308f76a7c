"""Choose the frames that show where an equation comes from, and the name that it has there.

    with jaxprtool.frames("library"):
        print(jaxprtool.source(program))

This affects only what is shown and counted by lines, not programs.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from jaxprtool.errors import ArgumentsError
from jaxprtool.ir import source_text
from jaxprtool.ir.source_text import BEHIND, UNKNOWN, Place
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.jaxcompat.source_locations import (
    FrameReader,
    UserFrame,
    after_packages,
    is_installed,
    user_frames,
)

# --- frame choice ---------------------------------------------------------------------------------
# Choose which source lines represent an equation, for a block of code.

#: Which frames are shown: the user's own followed by the library's, only the library's, or all.
FrameChoice: TypeAlias = Literal["mine", "library", "all"]


class FrameView(NamedTuple):
    """Which frames are shown, and the installed packages whose files are the user's."""

    choice: FrameChoice = "mine"
    mine: tuple[str, ...] = ()


_DEFAULT = FrameView()

#: The modules whose frames JAX hides: their innermost frame is always one of the few lines that
#: bind primitives.
_HIDDEN = ("jax", "jaxlib")

_view = ContextVar("view", default=_DEFAULT)


def current_frame_view() -> FrameView:
    """Return the view that the innermost `frames` sets."""
    return _view.get()


@contextmanager
def frames(choice: FrameChoice = "mine", mine: str | Sequence[str] = ()) -> Iterator[None]:
    """Choose the lines that equations are shown and counted by, in a `with` block.

    Args:
        choice: `"mine"`: the nearest line of the user's own files. `"library"`: the innermost line,
            in whatever file. `"all"`: like `"mine"`, followed by all library frames behind it.
        mine: Installed packages, such as `"pgx"` or `"mujoco.mjx"`, whose files are the user's own.

    Raises:
        ArgumentsError: If the choice is unknown, a name is not the name of a package, or it is JAX.
    """
    if choice not in get_args(FrameChoice):
        raise ArgumentsError(f"frames must be mine, library or all, not {choice!r}")
    names = [mine] if isinstance(mine, str) else list(mine)
    for name in names:
        if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
            raise ArgumentsError(f"'{name}' is not the name of a package")
        if name.partition(".")[0] in _HIDDEN:
            raise ArgumentsError(
                f"the lines of {name} cannot be your own: JAX hides its own frames",
                "`cost --by primitive` shows what JAX does for a line",
            )
    packages = tuple(name.replace("-", "_").replace(".", "/") for name in names)
    token = _view.set(FrameView(choice, packages))
    try:
        yield
    finally:
        _view.reset(token)


# --- frames ---------------------------------------------------------------------------------------
# Choose the frames that show where an equation comes from.
#
#     model.py:9 ← flax/linen/linear.py:199
#
# First comes the nearest frame in the user's own files, and behind it the library frames that it
# calls. A file is the user's own if it lies under the current folder, or under the folder or
# package of a TARGET, but not among packages installed there. So is a file in a package that
# `frame_choice.frames` declares the user's. If an equation has no such frame, the nearest frame
# outside of installed packages takes its place; without one, the library's frame is shown alone.
#
# These folders depend on where a process runs. So `Frames` is for display; a pass that names values
# by their source uses `own_frame`, which does not read the folders.


class SourceLocation(NamedTuple):
    """Where an equation comes from.

    Attributes:
        frame: The nearest frame of the user's own, or its substitute.
        behind: The library frames that it calls, the outermost first.
    """

    frame: UserFrame
    behind: tuple[UserFrame, ...] = ()

    @property
    def library(self) -> UserFrame | None:
        """The innermost frame behind the user's own."""
        return self.behind[-1] if self.behind else None

    def chosen(self, choice: FrameChoice) -> SourceLocation:
        """Return the location with only the frames that `choice` shows."""
        if choice == "all" or not self.behind:
            return self
        if choice == "library":
            return SourceLocation(self.behind[-1])
        return SourceLocation(self.frame, self.behind[-1:])


class Line(NamedTuple):
    """A source line.

    Attributes:
        file: The path of the file.
        line: The number of the line, from 1.
        own: Whether it is the user's and not a library's.
        behind: The file and line of each frame of libraries that it calls, the outermost first, if
            lines are distinguished by these.
    """

    file: str
    line: int
    own: bool
    behind: tuple[tuple[str, int], ...] = ()


class Root(NamedTuple):
    """A folder whose files are the user's, and the folder that their paths are shown from."""

    folder: str
    base: str


def target_root(file: str) -> Root:
    """Return the folder of a TARGET's files: its file's package, or the folder of a lone file."""
    folder = os.path.dirname(os.path.abspath(file))
    base = _above_packages(folder)
    package = os.path.relpath(folder, base).split(os.sep)[0]
    return Root(os.path.normpath(os.path.join(base, package)), base)


def own_frame(eqn: JaxprEqn) -> UserFrame | None:
    """Return the nearest frame outside of installed packages, or else the nearest, or None."""
    frames = user_frames(eqn)
    return next((f for f in frames if not is_installed(f.file)), frames[0] if frames else None)


def frames_now(roots: Sequence[Root] = (), chosen: bool = True) -> Frames:
    """Return the `Frames` of the current folder and of a TARGET.

    Args:
        roots: The folders of the TARGET, as a `Program` has them.
        chosen: Whether to show the frames that `frame_choice.frames` selects. Results that are not
            displayed, such as names and files, must not depend on the choice.
    """
    view = current_frame_view() if chosen else FrameView()
    try:
        folder = os.getcwd()
    except OSError:  # the folder was removed
        return Frames(tuple(roots), view, chosen)
    return Frames((Root(folder, folder), *roots), view, chosen)


class Frames:
    """Reads the frames of equations; decides which are the user's, and how files are shown.

    Args:
        roots: The folders of the user's files. The first one that a file lies in determines its
            path.
        view: Which frames are shown. If these are the library's, all files count as the user's.
        cites: Whether paths are displayed, so that changed files are in `source_text.citations`.
    """

    def __init__(
        self, roots: tuple[Root, ...] = (), view: FrameView = _DEFAULT, cites: bool = True
    ):
        self._roots, self._view, self._cites = roots, view, cites
        self._paths: dict[str, tuple[bool, str]] = {}
        #: The file that each path stands for.
        self._files: dict[str, str] = {}
        self._locations: dict[object, SourceLocation | None] = {}
        self._reader = FrameReader()

    @property
    def choice(self) -> FrameChoice:
        """The frames that are shown by default."""
        return self._view.choice

    def of(self, eqn: JaxprEqn) -> list[UserFrame]:
        """Return the frames of an equation, the user's and those of libraries, innermost first."""
        return self._reader.frames(eqn)

    def location(self, eqn: JaxprEqn) -> SourceLocation | None:
        """Return where an equation comes from; None if that is unknown."""
        traceback = eqn.source_info.traceback
        if traceback not in self._locations:
            self._locations[traceback] = self.location_in(self.of(eqn))
        return self._locations[traceback]

    def location_in(self, frames: Sequence[UserFrame]) -> SourceLocation | None:
        """Return the location that a call stack shows, its innermost frame first."""
        index = self.nearest(frames)
        behind = tuple(reversed(frames[:index]))
        return SourceLocation(frames[index], behind) if frames else None

    def nearest(self, frames: Sequence[UserFrame]) -> int:
        """Return the position of the user's nearest frame among frames, the innermost first."""
        for accepted in (self.is_own, self.is_users):
            for i, frame in enumerate(frames):
                if accepted(frame.file):
                    return i
        return 0

    def is_own(self, file: str) -> bool:
        """Return True if a file lies in one of the user's folders."""
        return self._path(file)[0]

    def is_users(self, file: str) -> bool:
        """Return True if a file is the user's own, or at least not an installed library's."""
        return self.is_own(file) or not is_installed(file)

    def path(self, file: str) -> str:
        """Return the displayed path of a file: from the user's folder, or a library's package."""
        path = self._path(file)[1]
        if self._cites:
            source_text.cite(file, path)
        return path

    def package(self, file: str) -> str:
        """Return the name of the package of a file, or of a lone module."""
        return self.path(file).split(os.sep)[0].removesuffix(".py")

    def texts(self, eqn: JaxprEqn) -> tuple[str, ...]:
        """Return `file.py:3` for each frame shown for an equation."""
        location = self.location(eqn)
        if location is None:
            return ()
        shown = location.chosen(self.choice)
        return tuple(map(self.text, (shown.frame, *shown.behind)))

    def location_of(self, eqns: Sequence[JaxprEqn]) -> SourceLocation | None:
        """Return the location of the innermost equation that has a line of user code.

        Args:
            eqns: An equation, preceded by those whose bodies contain it, the outermost first.

        Returns:
            A location in a library if no equation has a line of user code; None if no location is
            known.
        """
        best: SourceLocation | None = None
        for eqn in reversed(eqns):
            location = self.location(eqn)
            if location is not None and self.is_users(location.frame.file):
                return location
            best = best or location
        return best

    def stack(self, eqns: Sequence[JaxprEqn]) -> tuple[UserFrame, ...]:
        """Return the call stack of nested equations, the innermost frame first.

        Args:
            eqns: An equation, preceded by those whose bodies contain it, the outermost first.

        Returns:
            The frames of the innermost equation, then those of the equations around it, up to the
            first that has a frame of user code.
        """
        frames: tuple[UserFrame, ...] = ()
        for eqn in reversed(eqns):
            if any(self.is_users(frame.file) for frame in frames):
                break
            frames += tuple(self.of(eqn))
        return frames

    def line_of(self, eqns: Sequence[JaxprEqn]) -> Place:
        """Return the line of `location_of`: `model.py:9 ← flax/linen/linear.py:199`, or ""."""
        return self.place(self.location_of(eqns))

    def place(self, location: SourceLocation | None) -> Place:
        """Return a location with the frames that are shown: `model.py:9 ← flax/linear.py:199`."""
        if location is None:
            return UNKNOWN
        frame, behind = location.chosen(self.choice)
        return self.text(frame, behind)

    def named(self, eqns: Sequence[JaxprEqn]) -> str:
        """Return the innermost of nested equations with its line: `log at model.py:9`."""
        line = self.line_of(eqns).user
        return " at ".join(filter(None, (str(eqns[-1].primitive.name), line)))

    def path_of(self, eqns: Sequence[JaxprEqn]) -> tuple[str, ...]:
        """Return `named` for each of nested equations, the outermost first."""
        return tuple(self.named(eqns[: i + 1]) for i in range(len(eqns)))

    def code_of(self, eqns: Sequence[JaxprEqn]) -> str:
        """Return the source code of the line of `location_of`, or "" if its file does not exist."""
        location = self.location_of(eqns)
        if location is None:
            return ""
        return " ".join(source_text.line(location.frame.file, location.frame.line).split())

    def text(self, frame: UserFrame, behind: Sequence[UserFrame] = ()) -> Place:
        """Return the place of a frame, `file.py:3`, with library frames behind it."""
        return self.at(*frame[:3], map(self.text, behind))

    def at(self, file: str, line: int, function: str = "", library: Iterable[Place] = ()) -> Place:
        """Return the place of a line of a file."""
        path = source_text.current_file(file) or source_text.path(file)
        return Place(path, line, function, self.path(file), tuple(library) or None)

    def folders(self) -> str:
        """Return a pattern of the prefix that `path` removes from an absolute path."""
        bases = "".join(f"{re.escape(os.path.join(root.base, ''))}|" for root in self._roots)
        return rf"^(?:{source_text.MARK}|/.*/(?:site|dist)-packages/|{bases}/(?:.*/)?)"

    def _path(self, file: str) -> tuple[bool, str]:
        if file not in self._paths:
            self._paths[file] = self._found(file)
        return self._paths[file]

    def _found(self, file: str) -> tuple[bool, str]:
        is_own, path = self._in_roots(file)
        package = path.removesuffix(".py") + "/"
        mine = any(package.startswith(f"{name}/") for name in self._view.mine)
        return is_own or mine or self.choice == "library", self._distinct(path, file)

    def _distinct(self, path: str, file: str) -> str:
        """Return the path of a file, with more of its folders if another file has the same path."""
        if not os.path.isabs(file):  # in a program that was read: another one may be traced from it
            return path
        parts = PurePath(file).parts
        longer = range(len(PurePath(path).parts) + 1, len(parts))
        paths = [path, *(os.path.join(*parts[-n:]) for n in longer)]
        return next((p for p in paths if self._files.setdefault(p, file) == file), path)

    def _in_roots(self, file: str) -> tuple[bool, str]:
        file = source_text.path(file)
        if cell := _cell(file):
            return True, cell
        if not os.path.isabs(file):  # in a program read from a file, or an interactive session
            installed = is_installed(file)
            return not installed, after_packages(file) if installed else file
        for folder, base in self._roots:
            below = os.path.relpath(file, folder)
            if below.split(os.sep)[0] != os.pardir and not is_installed(below):
                return True, os.path.relpath(file, base)
        if is_installed(file):
            return False, after_packages(file)
        return False, os.path.relpath(file, _above_packages(os.path.dirname(file)))


def _cell(file: str) -> str | None:
    """Return the name of the notebook cell that a file name stands for, `In [4]`; else None."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    describe = getattr(getattr(get_shell(), "compile", None), "format_code_name", None)
    if describe is None:  # no IPython, or one before 8
        return None
    _, name = describe(file) or ("", "")
    return name.replace("In[", "In [") or None


def short_paths(locations: Sequence[str]) -> list[str]:
    """Return `file.py:3` for `folder/file.py:3`, with as many folders as distinguish the files."""
    files = {location.rpartition(":")[0] or location for location in locations}
    ends: dict[str, set[str]] = {}
    for file in files:
        parts = file.split(os.sep)
        for i in range(len(parts)):
            ends.setdefault(os.sep.join(parts[i:]), set()).add(file)

    def shortest(file: str) -> str:
        parts = file.split(os.sep)
        candidates = (os.sep.join(parts[i:]) for i in range(len(parts) - 1, 0, -1))
        return next((path for path in candidates if len(ends[path]) == 1), file)

    paths = []
    for location in locations:
        file, colon, line = location.rpartition(":")
        paths.append(f"{shortest(file)}:{line}" if colon else shortest(location))
    return paths


def _above_packages(folder: str) -> str:
    """Return the folder that contains a folder's package; the folder itself if it is in none."""
    while os.path.isfile(os.path.join(folder, "__init__.py")) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def source_place(eqn: JaxprEqn) -> str | None:
    """Return `model.py:9 ← flax/linen/linear.py:199`, by `frames_now`; None if it is unknown."""
    return BEHIND.join(frames_now().texts(eqn)) or None


# --- names in the source --------------------------------------------------------------------------
# Find the name that the user's source gives to the value of an expression.
#
#     w = 0.1 * normal(key, (3, 4))      w
#     self.kernel = init(key)            kernel
#     params["b"] = zeros(4)             b
#     {"scale": ones(4)}                 scale
#     dense(w=normal(key, (3, 4)))       w
#     get_parameter("w", (3, 4))         w
#
# The source is parsed with `ast`. It may be missing, or have changed since it ran: an expression
# that is not found has no name.

#: The range of an expression: lines from 1, columns in bytes from 0.
Range = tuple[int, int, int, int]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

_NAME = re.compile(r"[A-Za-z_][\w.-]*")


def range_of(frame: UserFrame) -> Range:
    """Return the range of a frame's expression."""
    return frame.line, frame.column, frame.end_line, frame.end_column


#: The fields of statements, and of handlers and cases in them, that hold other statements.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class _SourceExpressions:
    """The expressions of a file by range, calls by their end, and the parent of each node.

    A statement is indexed on the first look-up of something in it.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.nodes: dict[Range, ast.AST] = {}
        self.calls: dict[tuple[int, int], ast.AST] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        #: The parent of a statement; None if it is at the top level.
        self.around: dict[ast.stmt, ast.stmt | None] = {}
        todo: list[tuple[Any, ast.stmt | None]] = [(tree, None)]
        for node, around in todo:
            for child in chain.from_iterable(getattr(node, field, ()) for field in _BLOCKS):
                if isinstance(child, ast.stmt):
                    self.around[child] = around
                todo.append((child, child if child in self.around else around))
        self._unknown = set(self.around)
        self._statements = sorted(self.around, key=_start)
        self._beginnings = [*map(_start, self._statements)]

    def find(self, place: Range) -> ast.AST | None:
        """Return the expression with a range, or the call that ends there, or None."""
        if place[:2] == place[2:]:  # from a file that has only beginnings
            return None
        last = bisect_right(self._beginnings, place[:2])
        statement = self._statements[last - 1] if last else None
        while statement in self._unknown:
            self._add(statement)
            statement = self.around[statement]
        # Python reports the position of the method's name as the beginning of a method call.
        return self.nodes.get(place) or self.calls.get(place[2:])

    def _add(self, statement: ast.stmt) -> None:
        """Index a statement, but not the statements in it."""
        self._unknown.remove(statement)
        todo: list[ast.AST] = [statement]
        for node in todo:
            if isinstance(node, ast.expr | ast.AugAssign):
                self.nodes.setdefault(_range(node), node)
            if isinstance(node, ast.Call):
                self.calls[_range(node)[2:]] = node
            inside = [child for child in _children(node) if child not in self.around]
            self.parents.update(dict.fromkeys(inside, node))
            todo += inside


def _children(node: ast.AST) -> list[ast.AST]:
    """Return the child nodes of a node that have parts; see `ast.iter_child_nodes`."""
    values: list[Any] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if type(value) is list:
            values += value
        else:
            values.append(value)
    return [value for value in values if isinstance(value, ast.AST) and value._fields]


def _start(statement: ast.stmt) -> tuple[int, int]:
    """Return the beginning of a statement, including its decorators."""
    decorators = getattr(statement, "decorator_list", ())
    return min((node.lineno, node.col_offset - 1) for node in (statement, *decorators))


class SourceNames:
    """The names in source files, each of which is parsed once."""

    def __init__(self) -> None:
        self._files: dict[str, _SourceExpressions] = {}

    def assigned(
        self,
        frame: UserFrame,
        others: Collection[Range] = (),
        result: tuple[int, int] | None = None,
    ) -> str | None:
        """Return the name that the value of a frame's expression is assigned to.

        The value may be only a part of the assigned one, for example an operand of its expression.
        If an expression in between has a range in `others`, there is no name. If the expression has
        several values, `result` is the index of the value and their number.
        """
        file, node = self._find(frame)
        if node is None or range_of(frame) in others:
            return None
        if isinstance(node, ast.AugAssign):
            return _target(node.target)
        if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Store):
            return _element(node, result)  # the target of an unpacking assignment
        while (parent := file.parents.get(node)) is not None:
            match parent:
                case ast.Assign(targets=[*_, ast.Tuple() | ast.List() as several]) if result:
                    return _element(several, result)
                case ast.Assign(targets=[*_, target]) | ast.AnnAssign(target=target):
                    return _target(target)
                case ast.NamedExpr(target=target) | ast.AugAssign(target=target):
                    return _target(target)
                case ast.For(iter=of, target=target) | ast.comprehension(iter=of, target=target):
                    return _target(target) if of is node else None
                case ast.keyword(arg=str(name)):
                    return name
                case ast.Dict(keys=keys, values=values) if node in values:
                    key = keys[values.index(node)]
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        return key.value
                case ast.Tuple(elts=elements) | ast.List(elts=elements):
                    if (targets := _counterpart(file, parent)) is not None:
                        return _target(targets.elts[elements.index(node)])
                case ast.keyword() | ast.Starred() | ast.Set():
                    pass
                case ast.expr() if not isinstance(parent, ast.Lambda | ast.Yield | ast.YieldFrom):
                    if _range(parent) in others:
                        return None
                case _:
                    return None
            node, result = parent, None
        return None

    def returned(self, frame: UserFrame, others: Collection[Range] = ()) -> bool:
        """Return True if a function returns the value of an expression, or an expression with it.

        The result is False if that is a part of an expression with a range in `others`.
        """
        file, node = self._find(frame)
        while isinstance(node, ast.expr) and _range(node) not in others:
            parent = file.parents.get(node)
            if isinstance(parent, ast.Return | ast.Lambda):
                return True
            node = parent
        return False

    def repeated(self, frame: UserFrame) -> bool:
        """Return True if an expression is in a loop of its function, or in a comprehension."""
        file, node = self._find(frame)
        while node is not None and not isinstance(node, _FUNCTIONS):
            if isinstance(node, _LOOPS):
                return True
            node = file.parents.get(node) or file.around.get(node)
        return False

    def given(self, frame: UserFrame) -> str | None:
        """Return the name that a call gets as a string: its first argument, or `name=`."""
        _, node = self._find(frame)
        if not isinstance(node, ast.Call):
            return None
        first = [arg for arg in node.args[:1] if not isinstance(arg, ast.Starred)]
        named = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
        for value in (*named, *first):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value if _NAME.fullmatch(value.value) else None
        return None

    def text(self, frame: UserFrame) -> str | None:
        """Return the source of an expression, on one line."""
        _, node = self._find(frame)
        if not isinstance(node, ast.expr):
            return None
        text = ast.get_source_segment(source_text.file_text(frame.file), node)
        return None if text is None else " ".join(text.split())

    def target(self, frame: UserFrame) -> str | None:
        """Return the name that exactly this expression is assigned to."""
        file, node = self._find(frame)
        match file.parents.get(node) if isinstance(node, ast.expr) else node:
            case ast.Assign(targets=[*_, target]) | ast.AnnAssign(target=target):
                return _target(target)
            case ast.NamedExpr(target=target) | ast.AugAssign(target=target):
                return _target(target)
        return None

    def called(self, frame: UserFrame) -> str | None:
        """Return the function or class that an expression calls: `Dense` for `nn.Dense(3)(x)`."""
        _, node = self._find(frame)
        while isinstance(node, ast.Call):
            node = node.func
            if isinstance(node, ast.Name | ast.Attribute):
                return _target(node)
        return None

    def _find(self, frame: UserFrame) -> tuple[_SourceExpressions, Any]:
        if frame.file not in self._files:
            self._files[frame.file] = _SourceExpressions(_parsed(frame.file))
        file = self._files[frame.file]
        return file, file.find(range_of(frame))


def _parsed(name: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one if the file is missing or is not Python."""
    try:
        return ast.parse(source_text.file_text(name))
    except (SyntaxError, ValueError, RecursionError):
        return ast.parse("")


def _range(node: ast.expr | ast.stmt) -> Range:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _counterpart(
    file: _SourceExpressions, value: ast.Tuple | ast.List
) -> ast.Tuple | ast.List | None:
    """Return the targets that a display's elements are assigned to one by one, or None."""
    parent = file.parents[value]
    if not isinstance(parent, ast.Assign):
        return None
    target = parent.targets[-1]
    if not isinstance(target, ast.Tuple | ast.List) or len(target.elts) != len(value.elts):
        return None
    stars = (*target.elts, *value.elts)
    return None if any(isinstance(element, ast.Starred) for element in stars) else target


def _element(targets: ast.Tuple | ast.List, result: tuple[int, int] | None) -> str | None:
    """Return the name of one of several targets, if there are as many as results."""
    starred = any(isinstance(element, ast.Starred) for element in targets.elts)
    if result is None or starred or result[1] != len(targets.elts):
        return None
    return _target(targets.elts[result[0]])


def _target(target: ast.expr) -> str | None:
    """Return the name of a target: a variable, an attribute, a key, or the subscripted value."""
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Subscript(value=value):
            return _target(value)
    return None
