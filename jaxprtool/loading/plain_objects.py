"""Find plain Python objects that a function mutates when it is traced; its Program does not.

    losses.append(loss)      self.count += 1      cache["x"] = x

Objects reachable from a function are compared before and after tracing: its arguments, its closure,
and the globals read by it and by the user's functions that it calls. The contents of lists, dicts,
sets and objects of the user's classes are recorded. Arrays are not copied.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType
from typing import Any

from jaxprtool.ir.programs.state import has_objects
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat.source_locations import is_installed, is_users_file

#: The maximum number of objects that are compared, the nearest first.
_MOST = 1000

_CONTAINERS = (dict, list, set, deque, tuple)

#: The name of a method's own object.
_SELF = "self"

#: Types whose values are compared by equality.
_SCALARS = (bool, int, float, complex, str, bytes)

_MUTATORS = {
    *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
    *("update", "setdefault", "popitem", "add", "discard", "appendleft", "popleft"),
}


@contextlib.contextmanager
def warn_about_changes(name: str, fun: Any, given: Mapping[str, object]) -> Iterator[None]:
    """Warn once about plain objects that a function mutates in a `with` block.

    Args:
        name: The function's name.
        fun: The function.
        given: Its arguments by name.
    """
    reached = _Reached(fun, given)
    yield
    changed = reached.changed()
    if changed:
        first, *others = changed
        line = reached.line(first)
        more = f" and {len(others)} more" if others else ""
        warnings.warn(
            f"{name} changes {first}{more} in place{f' at {line}' if line else ''}: the change "
            "happens once, during tracing, and not when the Program is called",
            stacklevel=2,
        )


class _Reached:
    """The objects reachable from a function, by path, and their contents."""

    def __init__(self, fun: Any, given: Mapping[str, object]) -> None:
        self._functions: list[FunctionType] = []
        #: The path of each object, the object, and its contents by path.
        self._held: list[tuple[str, object, dict[str, object]]] = []
        seen: set[int] = set()
        called = getattr_static(type(fun), "__call__", None)
        todo: list[tuple[str, object]] = [*given.items(), (_SELF, fun), (_SELF, called)]
        for path, value in todo:
            if id(value) in seen:
                continue
            seen.add(id(value))
            held = self._contents(path, value)
            if held is not None:
                self._held.append((path, value, held))
                todo += held.items()
            if len(todo) > _MOST:
                break

    def changed(self) -> list[str]:
        """Return the paths of changed values, the nearest first."""
        found: dict[str, None] = {}
        for path, value, before in self._held:
            after = self._contents(path, value) or {}
            if isinstance(value, FunctionType):
                found.update((n, None) for n in after if not _same(before.get(n), after[n]))
            elif before.keys() != after.keys() or not all(
                _same(before[name], after[name]) for name in before
            ):
                found[path] = None
        return list(found)

    def line(self, path: str) -> str:
        """Return the part of the source line that changes the value at a path, or ""."""
        root = path.partition(".")[0].partition("[")[0]
        for fun in self._functions:
            if (line := _changing_line(fun, root)) is not None:
                return f"{frames_now().path(fun.__code__.co_filename)}:{line}"
        return ""

    def _contents(self, path: str, value: object) -> dict[str, object] | None:
        """Return the contents of an object by path; None if it is not inspected."""
        if isinstance(value, functools.partial):
            args = {f"args[{i}]": each for i, each in enumerate(value.args)}
            return {**args, **value.keywords, _SELF: value.func}
        if isinstance(value, MethodType):
            return {_SELF: value.__self__, "__func__": value.__func__}
        if isinstance(value, FunctionType):
            return self._of_function(value)
        wrapped = None if isinstance(value, type) else getattr_static(value, "__wrapped__", None)
        if callable(wrapped):
            return {_SELF: wrapped}
        cls = type(value)
        if isinstance(value, _CONTAINERS) and cls.__module__ in ("builtins", "collections"):
            if len(value) > _MOST:
                return {f"len({path})": len(value)}
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return {f"{path}[{_text(key)}]": each for key, each in items}
        if not isinstance(value, type) and _is_users(cls) and not has_objects(value):
            fields = getattr(value, "__dict__", {})
            held: dict[str, object] = {f"{path}.{name}": each for name, each in fields.items()}
            return held
        return None

    def _of_function(self, fun: FunctionType) -> dict[str, object] | None:
        """Return the closure of a user's function and the globals that it names."""
        file = fun.__code__.co_filename
        if is_installed(file) or not is_users_file(file):
            return {_SELF: fun.__wrapped__} if hasattr(fun, "__wrapped__") else None
        if fun not in self._functions:
            self._functions.append(fun)
        held: dict[str, object] = {_SELF: fun.__wrapped__} if hasattr(fun, "__wrapped__") else {}
        for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a closure variable that is not assigned yet
                held[name] = cell.cell_contents
        names = {name for code in _codes(fun.__code__) for name in code.co_names}
        known = fun.__globals__
        return {**{name: known[name] for name in sorted(names) if name in known}, **held}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions defined in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _is_users(cls: type) -> bool:
    """Return True if a class is defined in one of the user's files."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and is_users_file(file) and not is_installed(file)


def _text(key: object) -> str:
    return repr(key) if isinstance(key, str | int) else f"<{id(key)}>"


def _same(before: object, after: object) -> bool:
    if before is after:
        return True
    return type(before) is type(after) and type(before) in _SCALARS and before == after


def _changing_line(fun: FunctionType, name: str) -> int | None:
    """Return the first line in a function that changes the variable `name`."""
    try:
        lines, first = inspect.getsourcelines(fun)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = [
        node.lineno + max(first, 1) - 1
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr)
        for target in _targets(node)
        if _root(target) == name
    ]
    return min(found, default=None)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement or a call changes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _MUTATORS:
            return [value]
    return []


def _root(target: ast.expr) -> str:
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""
