"""Where in the user's code an equation comes from, read and made."""

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
from typing import Any, NamedTuple, TypeAlias

from jax._src import source_info_util
from jax._src.lib import xla_client
from jax.extend.core import JaxprEqn

from jaxprtool.jaxcompat.identity import identity

#: Our own frames, as JAX's, are no place where a user would look for an equation.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
source_info_util.register_exclusion(_PACKAGE)

#: The rooms of ours that have functions traced. Frames older than theirs are not of a function that
#: is traced, but of whoever has it traced: a script, the command line, a test runner.
_TRACING = tuple(os.path.join(_PACKAGE, room, "") for room in ("cli", "loading", "passes"))

#: The name of a folder of installed packages.
PACKAGES = "site-packages"
_INSTALLED = re.compile(r"(?:^|[/\\])(?:site|dist)-packages[/\\]")


def hide_frames(path: str) -> None:
    """Have a file, or what lies in a folder that `path` names, not be taken for the user's code.

    For packages whose functions make equations on a user's behalf, as JAX's own do.
    """
    source_info_util.register_exclusion(path)
    is_users_file.cache_clear()
    _KINDS.clear()
    _nearness.cache_clear()


class UserFrame(NamedTuple):
    """A call in the user's code: the expression that makes it, and the function that it is in.

    Lines count from 1 and columns from 0, in bytes, as in Python's `ast`.
    """

    file: str
    line: int
    function: str
    column: int
    end_line: int
    end_column: int


#: The file of a frame, its line and column, and its function.
FramePosition: TypeAlias = tuple[str, int, int, str]


def user_frames(eqn: JaxprEqn) -> list[UserFrame]:
    """Where the user's code, and that of libraries it calls, made `eqn`; the innermost first.

    What has a function traced is left out: a script that calls `trace`, the command line.
    """
    return FrameReader().frames(eqn)


def user_frame(eqn: JaxprEqn) -> UserFrame | None:
    """Where the user's code, or that of a library, made `eqn`; None if that is unknown."""
    return next(iter(user_frames(eqn)), None)


#: The file of a frame that stands for no place: its function bears names of values.
_NAMES = os.path.join(_PACKAGE, "<names>")


def naming_frame(names: Sequence[str]) -> FramePosition:
    """Return a frame that gives the results of equations from it their names; no user's frame.

    It has to be the innermost. An empty name is none.
    """
    return _NAMES, 1, 0, ",".join(names)


def names_given(eqn: JaxprEqn) -> list[str]:
    """Return the names that a `naming_frame` gives to the results of an equation; none without."""
    traceback = eqn.source_info.traceback
    codes = [] if traceback is None else traceback.raw_frames()[0]
    return codes[0].co_qualname.split(",") if codes and codes[0].co_filename == _NAMES else []


#: To ask where an instruction is takes as long as the code is. Asked so often, all are listed.
_OFTEN = 100


class FrameReader:
    """Reads the frames of equations, as `user_frames` does; each traceback is read once."""

    def __init__(self) -> None:
        self._by_traceback: dict[object, list[UserFrame]] = {}
        # By the code, whose number is another's only once it is gone, and the instruction.
        self._known: dict[tuple[int, int], tuple[object, UserFrame]] = {}
        self._asked: Counter[int] = Counter()
        self._positions: dict[int, list[Any]] = {}

    def frames(self, eqn: JaxprEqn) -> list[UserFrame]:
        """Return the frames of an equation, the innermost first; the same list for a traceback."""
        traceback = eqn.source_info.traceback
        found = self._by_traceback.get(traceback)
        if found is None:
            found = [] if traceback is None else self.read(*traceback.raw_frames())
            self._by_traceback[traceback] = found
        return found

    def read(self, codes: Sequence[CodeType], instructions: Sequence[int]) -> list[UserFrame]:
        """Return the frames of a traceback that are the user's or a library's."""
        found = []
        for code, instruction in compress(zip(codes, instructions, strict=True), _kinds(codes)):
            entry = self._known.get((identity(code), instruction))
            if entry is None:
                entry = code, self._frame(code, instruction)
                self._known[identity(code), instruction] = entry
            found.append(entry[1])
        return found

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


class _Kinds(dict[str, int | None]):
    """Whose a file is: 0 JAX's, 1 a library's, 2 the user's; None if it has functions traced."""

    def __missing__(self, file: str) -> int | None:
        whose = 0 if not is_users_file(file) else 1 if is_installed(file) else 2
        self[file] = None if file.startswith(_TRACING) else whose
        return self[file]


_KINDS = _Kinds()


def _kinds(codes: Sequence[CodeType]) -> list[int]:
    """Return whose each code is, the innermost first, without those that have it traced."""
    # Most frames are JAX's. They are passed over here without a step of Python for each.
    kinds: list[Any] = [*map(_KINDS.__getitem__, map(_FILE, codes))]
    if None in kinds:  # frames older than the oldest of ours that has a function traced
        del kinds[len(kinds) - 1 - kinds[::-1].index(None) :]
    return kinds


@lru_cache(maxsize=4096)
def _nearness(traceback: Any) -> int:
    """Return 2 if a traceback has a frame of the user's own, 1 if it has one of a library's."""
    return 0 if traceback is None else max(_kinds(traceback.raw_frames()[0]), default=0)


@lru_cache(maxsize=4096)
def _behind(inner: Any, call: Any) -> Any:
    """Return the traceback of a call with a library's frames inside it.

    It has no `naming_frame`, which names the results of one equation.
    """
    if _nearness(inner) == 0:
        codes, _ = call.raw_frames()
        if codes[0].co_filename != _NAMES:
            return call
    reader = FrameReader()
    frames = [
        f for each in (inner, call) if each is not None for f in reader.read(*each.raw_frames())
    ]
    return _tracebacks([[(f.file, f.line, f.column, f.function) for f in reversed(frames)]])[0]


def source_under(
    call: JaxprEqn,
) -> Callable[[source_info_util.SourceInfo], source_info_util.SourceInfo]:
    """What an equation inside a call has for its `source_info` once it stands in its place.

    Its name scopes come to be inside those of the call. It gets the call's frames around its own if
    there is none of the user's: JAX traces a jitted function once for all its calls, and keeps of
    it only the frames inside.
    """
    outer, traceback = call.source_info.name_stack, call.source_info.traceback
    nearness = _nearness(traceback)

    def source(info: source_info_util.SourceInfo) -> source_info_util.SourceInfo:
        is_nearer = nearness > _nearness(info.traceback)
        if not (is_nearer or outer.stack):
            return info
        scopes = outer + info.name_stack if outer.stack else info.name_stack
        own = _behind(info.traceback, traceback) if is_nearer else info.traceback
        return source_info_util.SourceInfo(own, scopes)

    return source


@cache
def is_users_file(file: str) -> bool:
    """Whether code in a file is the user's, or a library's that is not JAX nor Python's own."""
    if source_info_util.is_user_filename(file):
        return True
    # Outside of a virtual environment packages lie below Python's own library, which JAX hides.
    return is_installed(file) and not file.startswith(_hidden())


def _hidden() -> tuple[str, ...]:
    python = sysconfig.get_path("stdlib"), os.path.dirname(contextlib.__file__)
    return tuple(path for path in source_info_util._exclude_paths if path not in python)


def is_installed(file: str) -> bool:
    """Whether a file lies where installed packages do."""
    return _INSTALLED.search(file) is not None


def after_packages(file: str) -> str:
    """Return the path of an installed file from the folder of packages: `flax/linen/linear.py`."""
    return _INSTALLED.split(file)[-1]


def name_stack(eqn: JaxprEqn) -> str:
    """The name scopes around `eqn`, as `outer/inner`, relative to the jaxpr it stands in."""
    return str(eqn.source_info.name_stack)


def common_scope(sources: Sequence[Any]) -> int:
    """Return the depth of the name scopes that all of these `source_info`s are in."""
    first: tuple[Any, ...] = sources[0].name_stack.stack
    depth = len(first)
    for source in sources:
        stack = source.name_stack.stack
        if stack is not first:
            same = (a == b for a, b in zip(first[:depth], stack, strict=False))
            depth = next((i for i, equal in enumerate(same) if not equal), min(depth, len(stack)))
    return depth


def in_scope(source: Any, start: int, stop: int | None) -> Any:
    """Return a `source_info` with some of its name scopes, counted from the outermost."""
    stack = source.name_stack
    return source.replace(name_stack=type(stack)(stack.stack[start:stop]))


def source_infos(places: Sequence[tuple[Sequence[FramePosition], str]]) -> list[Any]:
    """What equations bear as their `source_info`, made from where they come from.

    Args:
        places: Of each equation, the frames of the user's code and of libraries, the outermost
            first, and the name scopes around it, as `name_stack` gives them.
    """
    tracebacks = iter(_tracebacks([frames for frames, _ in places if frames]))
    return [
        source_info_util.SourceInfo(
            next(tracebacks) if frames else None, source_info_util.new_name_stack(scope)
        )
        for frames, scope in places
    ]


def _tracebacks(stacks: Sequence[Sequence[FramePosition]]) -> list[Any]:
    """A traceback for each stack of frames, with no other of a user's frames in it.

    A traceback can only be taken of a running stack. So for each frame there is a function whose
    code says that it comes from there; they call one another at the bottom of a thread's empty
    stack.
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
    thread.start()
    thread.join()
    return results


def _function_at(frame: FramePosition) -> Callable[..., Any]:
    """A function that calls its argument, and seems to do so in another place."""
    file, line, column, name = frame
    code = _code_at(column).replace(
        co_filename=file, co_firstlineno=line, co_name=name, co_qualname=name
    )
    return FunctionType(code, {})


@cache
def _code_at(column: int) -> CodeType:
    """The code of a function that calls its argument in a column of its first line."""
    tree = ast.parse("lambda f: f()", mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.arg):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = column
    code = compile(tree, "", "eval").co_consts[0]
    assert isinstance(code, CodeType)
    return code
