"""Where in the user's code an equation comes from, read and made."""

from __future__ import annotations

import ast
import operator
import os
import threading
from collections.abc import Callable, Sequence
from itertools import repeat
from types import FunctionType
from typing import Any, NamedTuple

from jax._src import source_info_util
from jax._src.lib import xla_client
from jax.extend.core import JaxprEqn

#: Our own frames, as JAX's, are no place where a user would look for an equation.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
source_info_util.register_exclusion(os.path.join(_PACKAGE, ""))


def hide_frames(path: str) -> None:
    """Have a file, or what lies in a folder that `path` names, not be taken for the user's code.

    For packages whose functions make equations on a user's behalf, as JAX's own do.
    """
    source_info_util.register_exclusion(path)


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


def user_frames(eqn: JaxprEqn) -> list[UserFrame]:
    """Where the user's code, and that of libraries it calls, made `eqn`; the innermost first."""
    return list(map(_users, source_info_util.user_frames(eqn.source_info.traceback)))


def user_frame(eqn: JaxprEqn) -> UserFrame | None:
    """Where the user's code made `eqn`, or None if that is unknown."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else _users(frame)


def _users(frame: source_info_util.Frame) -> UserFrame:
    file, function, line, *rest = frame
    return UserFrame(file, line, function, *rest)


def is_users_file(file: str) -> bool:
    """Whether code in a file is the user's, or a library's that is not JAX nor Python's own."""
    return source_info_util.is_user_filename(file)


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


def source_infos(places: Sequence[tuple[tuple[str, int, int, str] | None, str]]) -> list[Any]:
    """What equations bear as their `source_info`, made from where they come from.

    A place is a frame of the user's code, if known (file, line, column, function), and the name
    scopes around the equation, as `name_stack` gives them.
    """
    frames = [frame for frame, _ in places if frame is not None]
    tracebacks = iter(_tracebacks(frames))
    return [
        source_info_util.SourceInfo(
            None if frame is None else next(tracebacks), source_info_util.new_name_stack(scope)
        )
        for frame, scope in places
    ]


def _tracebacks(frames: Sequence[tuple[str, int, int, str]]) -> list[Any]:
    """A traceback for each frame, with no other of a user's frames in it.

    A traceback can only be taken of a running stack. So for each frame there is a function whose
    code says that it comes from there, called at the bottom of a thread's empty stack.
    """
    results: list[Any] = []
    functions = [_function_at(frame) for frame in frames]
    calls = map(operator.call, functions, repeat(xla_client.Traceback.get_traceback))
    thread = threading.Thread(target=results.extend, args=(calls,))
    thread.start()
    thread.join()
    return results


def _function_at(frame: tuple[str, int, int, str]) -> Callable[..., Any]:
    """A function that calls its argument, and seems to do so in another place."""
    file, line, column, name = frame
    tree = ast.parse("lambda f: f()", mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.arg):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = column
    code = compile(tree, file, "eval").co_consts[0]
    return FunctionType(code.replace(co_name=name, co_qualname=name), {})
