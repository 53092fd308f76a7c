"""Read and create the source locations of equations: user frames and name scopes."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import compress
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from jax._src import source_info_util
from jax._src.lib import xla_client
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import SourceInfo, new_name_stack, register_exclusion

from jaxprtool.jaxcompat.jaxprs import identity

#: Our own frames are hidden, as JAX hides its own, since users look for equations in their code.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
register_exclusion(_PACKAGE)

#: Our packages that trace functions. Older frames than theirs do not belong to the traced function,
#: but to its caller: a script, the command line, a test runner.
_TRACING = tuple(
    os.path.join(_PACKAGE, room, "") for room in ("cli", "formats", "loading", "passes")
)

#: The name of a folder of installed packages.
PACKAGES = "site-packages"
_INSTALLED = re.compile(r"(?:^|[/\\])(?:site|dist)-packages[/\\]")


def hide_frames(path: str) -> None:
    """Exclude a file or folder from the user's code.

    This is for packages whose functions create equations for the user, as JAX's own do.

    Args:
        path: The path of a file, or of a folder with a separator at the end.
    """
    if path in source_info_util._exclude_paths:
        return  # JAX would keep it twice, and compile its pattern of all paths again
    register_exclusion(path)
    is_users_file.cache_clear()
    _KINDS.clear()
    _nearness.cache_clear()


class UserFrame(NamedTuple):
    """A frame of the user's code: the position of the call expression, and its function.

    Lines count from 1 and columns from 0, in bytes, as in Python's `ast`.
    """

    file: str
    line: int
    function: str
    column: int
    end_line: int
    end_column: int


def user_frames(eqn: JaxprEqn) -> list[UserFrame]:
    """Return the frames of the user and of libraries that created `eqn`, the innermost first.

    Frames of the code that called the tracer, a script or the command line, are left out.
    """
    return FrameReader().frames(eqn)


def user_frame(eqn: JaxprEqn) -> UserFrame | None:
    """Return the innermost of `user_frames`, or None if there is none."""
    return next(iter(user_frames(eqn)), None)


#: The file of a `naming_frame`, which has no position: its function is a list of names.
_NAMES = os.path.join(_PACKAGE, "<names>")


def naming_frame(names: Sequence[str]) -> UserFrame:
    """Return a frame with names for the results of an equation.

    It must be the innermost frame of the equation. It is not one of its `user_frames`.

    Args:
        names: The name of each result, or "".
    """
    return UserFrame(_NAMES, 1, ",".join(names), 0, 1, 0)


def names_given(eqn: JaxprEqn) -> list[str]:
    """Return the names of an equation's results from its `naming_frame`; empty without one."""
    traceback = eqn.source_info.traceback
    codes = [] if traceback is None else traceback.raw_frames()[0]
    return codes[0].co_qualname.split(",") if codes and codes[0].co_filename == _NAMES else []


#: Looking up the position of one instruction takes time linear in the size of the code. After this
#: many look-ups, the positions of all instructions are listed.
_OFTEN = 100


class FrameReader:
    """Reads the frames of equations, as `user_frames` does, and reads each traceback once."""

    def __init__(self) -> None:
        self._by_traceback: dict[object, list[UserFrame]] = {}
        # By the identity of the code and the instruction. The code is kept alive, so that no other
        # code gets its id.
        self._known: dict[tuple[int, int], tuple[object, UserFrame]] = {}
        self._asked: Counter[int] = Counter()
        self._positions: dict[int, list[Any]] = {}

    def frames(self, eqn: JaxprEqn) -> list[UserFrame]:
        """Return the frames of an equation, the innermost first.

        Equations with the same traceback get the same list.
        """
        traceback = eqn.source_info.traceback
        frames = self._by_traceback.get(traceback)
        if frames is None:
            frames = [] if traceback is None else self.read(*traceback.raw_frames())
            self._by_traceback[traceback] = frames
        return frames

    def read(self, codes: Sequence[CodeType], instructions: Sequence[int]) -> list[UserFrame]:
        """Return the frames of a traceback that are the user's or a library's.

        Args:
            codes: The code of each frame, the innermost first.
            instructions: The offset of the instruction in each code, in bytes.
        """
        frames = []
        for code, instruction in compress(zip(codes, instructions, strict=True), _kinds(codes)):
            entry = self._known.get((identity(code), instruction))
            if entry is None:
                entry = code, self._frame(code, instruction)
                self._known[identity(code), instruction] = entry
            frames.append(entry[1])
        return frames

    def _frame(self, code: CodeType, instruction: int) -> UserFrame:
        number = identity(code)
        self._asked[number] += 1
        if self._asked[number] < _OFTEN:
            place = xla_client.Traceback.code_addr2location(code, instruction)
        else:
            if number not in self._positions:
                self._positions[number] = list(code.co_positions())
            line, end_line, column, end_column = self._positions[number][instruction // 2]
            place = line or 0, column or 0, end_line or 0, end_column or 0
        return UserFrame(code.co_filename, place[0], code.co_qualname, *place[1:])


_FILE = attrgetter("co_filename")


class _FileKinds(dict[str, int | None]):
    """The kind of each file: 0 hidden (JAX's), 1 a library's, 2 the user's; None if it traces."""

    def __missing__(self, file: str) -> int | None:
        whose = 0 if not is_users_file(file) else 1 if is_installed(file) else 2
        self[file] = None if file.startswith(_TRACING) else whose
        return self[file]


_KINDS = _FileKinds()


def _kinds(codes: Sequence[CodeType]) -> list[int | None]:
    """Return the kind of each code, the innermost first, without the callers of the tracer.

    More than one of our frames may be between a traced function and JAX: theirs is None.
    """
    # Most frames are JAX's: `map` skips them without running Python code for each.
    kinds: list[Any] = [*map(_KINDS.__getitem__, map(_FILE, codes))]
    if None in kinds:
        # Drop the oldest of our frames that trace, and all that are older.
        del kinds[len(kinds) - 1 - kinds[::-1].index(None) :]
    return kinds


@lru_cache(maxsize=4096)
def _nearness(traceback: Any) -> int:
    """Return 2 if a traceback has a frame of user code, 1 if only of library code, and else 0."""
    if traceback is None:
        return 0
    return max(filter(None, _kinds(traceback.raw_frames()[0])), default=0)


@lru_cache(maxsize=4096)
def _behind(inner: Any, call: Any) -> Any:
    """Return a traceback with the frames of an inner equation, followed by those of its call.

    A `naming_frame` is dropped, since it names the results of one equation.
    """
    if _nearness(inner) == 0:
        codes, _ = call.raw_frames()
        if codes[0].co_filename != _NAMES:
            return call
    reader = FrameReader()
    frames = [f for tb in (inner, call) if tb is not None for f in reader.read(*tb.raw_frames())]
    # Without its end, an expression in the call gives no name to an equation of the inlined body.
    begun = [f._replace(end_line=f.line, end_column=f.column) for f in reversed(frames)]
    return _tracebacks([begun])[0]


def source_under(
    call: JaxprEqn,
) -> Callable[[SourceInfo], SourceInfo]:
    """Return a function from the `source_info` of an equation in a call to its inlined form.

    The name scopes of the call are put around those of the equation. If the equation has no frames
    of user code, those of the call are put behind its own. JAX traces a jitted function once for
    all its calls, and keeps only the frames inside it.
    """
    outer, traceback = call.source_info.name_stack, call.source_info.traceback

    def source(info: SourceInfo) -> SourceInfo:
        # Most equations have frames of user code, and then those of the call are not read.
        nearness = _nearness(info.traceback)
        is_nearer = nearness < 2 and _nearness(traceback) > nearness
        if not (is_nearer or outer.stack):
            return info
        scopes = outer + info.name_stack if outer.stack else info.name_stack
        merged = _behind(info.traceback, traceback) if is_nearer else info.traceback
        return SourceInfo(merged, scopes)

    return source


@cache
def is_users_file(file: str) -> bool:
    """Return True if a file is the user's or a library's, but not JAX's, Python's or ours."""
    if source_info_util.is_user_filename(file):
        return True
    # Outside of a virtual environment, packages are below Python's own library, which JAX hides.
    return is_installed(file) and not file.startswith(_hidden())


def _hidden() -> tuple[str, ...]:
    python = sysconfig.get_path("stdlib"), os.path.dirname(contextlib.__file__)
    return tuple(path for path in source_info_util._exclude_paths if path not in python)


def is_installed(file: str) -> bool:
    """Return True if a file is in a folder of installed packages."""
    return _INSTALLED.search(file) is not None


def after_packages(file: str) -> str:
    """Return the path of an installed file below `site-packages`: `flax/linen/linear.py`."""
    return _INSTALLED.split(file)[-1]


def name_stack(eqn: JaxprEqn) -> str:
    """Return the name scopes around `eqn`, as `outer/inner`, relative to the jaxpr it is in."""
    return str(eqn.source_info.name_stack)


#: JAX's function that batches a `cond` whose predicate is batched.
_BRANCHES_BATCHED = "_cond_batching_rule"


def selects_branches(eqn: JaxprEqn) -> bool:
    """Return True if `jax.vmap` created an equation in place of a `cond` with all its branches."""
    traceback = eqn.source_info.traceback
    codes = [] if traceback is None else traceback.raw_frames()[0]
    return any(code.co_name == _BRANCHES_BATCHED for code in codes)


def common_scope(sources: Sequence[Any]) -> int:
    """Return the number of outer name scopes that these `source_info`s share."""
    first: tuple[Any, ...] = sources[0].name_stack.stack
    depth = len(first)
    for source in sources:
        stack = source.name_stack.stack
        if stack is not first:
            same = (a == b for a, b in zip(first[:depth], stack, strict=False))
            depth = next((i for i, equal in enumerate(same) if not equal), min(depth, len(stack)))
    return depth


def in_scope(source: Any, start: int, stop: int | None) -> Any:
    """Return a `source_info` with a slice of its name scopes, counted from the outermost."""
    stack = source.name_stack
    return source.replace(name_stack=type(stack)(stack.stack[start:stop]))


def source_infos(places: Sequence[tuple[Sequence[UserFrame], str]]) -> list[Any]:
    """Make the `source_info` of equations.

    Args:
        places: For each equation, its frames, the outermost first, and the name scopes around it,
            as `name_stack` returns them.
    """
    tracebacks = iter(_tracebacks([frames for frames, _ in places if frames]))
    return [
        SourceInfo(next(tracebacks) if frames else None, new_name_stack(scope))
        for frames, scope in places
    ]


def _tracebacks(stacks: Sequence[Sequence[UserFrame]]) -> list[Any]:
    """Make a traceback for each stack of frames, the outermost first.

    A traceback can only be taken of a running stack. So a function is created for each frame, whose
    code has the frame's position. These functions call each other in a new thread, whose stack has
    no other frames of user code.
    """
    results: list[Any] = []
    function_at = cache(_function_at)

    def fill() -> None:
        for frames in stacks:
            call = xla_client.Traceback.get_traceback
            for frame in reversed(frames):
                call = partial(function_at(frame), call)
            results.append(call())

    thread = threading.Thread(target=fill)
    try:
        thread.start()
    except RuntimeError:  # at the end of a process, whose stack has no frames of user code either
        fill()
    else:
        thread.join()
    return results


def _function_at(frame: UserFrame) -> Callable[..., Any]:
    """Return a function that calls its argument, and whose code has another position."""
    height = max(frame.end_line - frame.line, 0)
    code = _code_at(frame.column, height, frame.end_column).replace(
        co_filename=frame.file,
        co_firstlineno=frame.line,
        co_name=frame.function,
        co_qualname=frame.function,
    )
    return FunctionType(code, {})


@cache
def _code_at(column: int, height: int, end_column: int) -> CodeType:
    """Return the code of a function that calls its argument.

    Args:
        column: The column where the call begins, on the first line.
        height: The number of lines from there to the end of the call.
        end_column: The column where it ends.
    """
    tree = ast.parse("lambda f: f()", mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.arg):
            node.lineno, node.col_offset = 1, column
            node.end_lineno, node.end_col_offset = 1 + height, end_column
    code = compile(tree, "", "eval").co_consts[0]
    assert isinstance(code, CodeType)
    return code
