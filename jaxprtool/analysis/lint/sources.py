"""Read the user's files: the comments that silence findings, loops, and names.

    x = x.astype(jnp.float32)  # jaxprtool: ignore[JT202]
    # jaxprtool: ignore[JT202, JT203]      (for the line below)
    def f(x):  # jaxprtool: ignore         (all codes, in the whole function)

A missing file counts as empty.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.source import source_text
from jaxprtool.ir.source.source_names import SourceNames
from jaxprtool.jaxcompat.source_locations import UserFrame

_COMMENT = re.compile(r"#\s*jaxprtool:\s*ignore(?:\[([^\]]*)\])?")

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Scope:
    """A function in a file: the lines of its head, all its lines, and its local names."""

    first: int
    line: int
    head: int
    last: int
    local: frozenset[str]


_LOOPS = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class _Loop:
    """A loop or a comprehension: its first line, and the start and end of each repeated part."""

    line: int
    parts: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


class Sources:
    """Reads the user's files, each once."""

    def __init__(self) -> None:
        self._names = SourceNames()

    def is_silenced(self, frame: UserFrame, code: str) -> bool:
        """Return True if a comment silences a code at a line."""
        lines = source_text.lines(frame.file)
        numbers = {*range(frame.line, max(frame.line, frame.end_line) + 1)}
        above = frame.line - 1
        if 1 <= above <= len(lines) and lines[above - 1].lstrip().startswith("#"):
            numbers.add(above)
        for scope in self._around(frame):
            numbers.update(range(scope.first, scope.head + 1))
        return any(_silences(lines[n - 1], code) for n in numbers if 1 <= n <= len(lines))

    def definition(self, file: str, line: int) -> int:
        """Return the line of a function's `def`, given that of its first decorator."""
        return next((s.line for s in self._scopes(file) if s.first == line), line)

    def loops(self, frame: UserFrame) -> list[int]:
        """Return the first lines of the loops that run an expression repeatedly."""
        around, place = self._around(frame), (frame.line, frame.column)
        first = around[-1].first if around else 0
        return [
            loop.line
            for loop in self._loops(frame.file)
            if loop.line >= first and any(part[0] <= place <= part[1] for part in loop.parts)
        ]

    def code(self, frame: UserFrame) -> str:
        """Return the text of a line."""
        return source_text.line(frame.file, frame.line)

    def expression(self, frame: UserFrame | None) -> str:
        """Return the text of an expression, on one line; "" if it is unknown."""
        return "" if frame is None else self._names.text(frame) or ""

    def captured_name(self, frame: UserFrame, array: Any) -> str:
        """Return the name by which an expression reads an array that its function closes over.

        Returns:
            The name of the global variable that is this array; else the only name in the
            expression that is not local, or is an attribute of an object; "" if there is not one.
        """
        module = next((m for m in list(sys.modules.values()) if _file_of(m) == frame.file), None)
        own = {} if module is None else vars(module)
        for name, value in list(own.items()):
            if value is array:
                return name
        text = self._names.text(frame)
        local = frozenset[str]().union(*(scope.local for scope in self._around(frame)[-1:]))
        found = dict.fromkeys(_dotted(ast.parse(text, mode="eval")) if text else ())
        free, attributes = [], []
        for dotted in found:
            base, _, rest = dotted.partition(".")
            if base in own:
                if _shape(own[base], rest) == array.shape:
                    free.append(dotted)
            elif base not in local and not hasattr(builtins, base):
                free.append(dotted)
            elif base == "self" and rest:
                attributes.append(dotted)
        names = free or attributes
        return names[0] if len(names) == 1 else ""

    def _around(self, frame: UserFrame) -> list[_Scope]:
        """Return the functions that a line is in, the outermost first."""
        return [s for s in self._scopes(frame.file) if s.first <= frame.line <= s.last]

    @cached_method
    def _loops(self, file: str) -> list[_Loop]:
        nodes = ast.walk(self._tree(file))
        return [_loop(node) for node in nodes if isinstance(node, _LOOPS)]

    @cached_method
    def _scopes(self, file: str) -> list[_Scope]:
        functions = (n for n in ast.walk(self._tree(file)) if isinstance(n, _Function))
        return sorted(map(_scope, functions), key=lambda scope: scope.first)

    @cached_method
    def _tree(self, file: str) -> ast.Module:
        try:
            return ast.parse(source_text.text(file))
        except (SyntaxError, ValueError, RecursionError):
            return ast.parse("")


def _loop(node: Any) -> _Loop:
    repeated: list[Any]
    if isinstance(node, ast.For | ast.While):
        repeated = node.body
    else:  # the iterable of the first `for` is evaluated once
        first, *others = node.generators
        repeated = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        repeated += [*first.ifs, *(part for other in others for part in (other.iter, *other.ifs))]
    return _Loop(node.lineno, tuple(map(_range, repeated)))


def _range(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _scope(function: _Function) -> _Scope:
    arguments = (n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg))
    stored = (
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store
    )
    first = min((d.lineno for d in function.decorator_list), default=function.lineno)
    head = max(function.body[0].lineno - 1, function.lineno)
    last = function.end_lineno or function.lineno
    return _Scope(first, function.lineno, head, last, frozenset((*arguments, *stored)))


def _dotted(tree: ast.AST) -> list[str]:
    """Return the names in an expression, with their attributes, without functions called."""
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    found, inner = [], set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            inner.update(id(part) for part in ast.walk(node))
            text = ast.unparse(node)
            if id(node) in called:
                text = text.rpartition(".")[0]  # the object of a method
            if re.fullmatch(r"[\w.]+", text):
                found.append(text)
    return found


def _silences(line: str, code: str) -> bool:
    found = _COMMENT.search(line)
    if found is None:
        return False
    given = [each.strip() for each in (found[1] or "").split(",")]
    return found[1] is None or any(each and code.startswith(each) for each in given)


def _file_of(module: Any) -> str:
    return str(getattr(module, "__file__", None) or "")


def _shape(value: Any, attributes: str) -> Any:
    """Return the shape of an attribute of an object; None if it is not an array."""
    for name in attributes.split(".") if attributes else ():
        value = vars(value).get(name) if hasattr(value, "__dict__") else None
    return getattr(value, "shape", None)
