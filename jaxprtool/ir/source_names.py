"""Find the name that the user's source gives to the value of an expression.

    w = 0.1 * normal(key, (3, 4))      w
    self.kernel = init(key)            kernel
    params["b"] = zeros(4)             b
    {"scale": ones(4)}                 scale
    dense(w=normal(key, (3, 4)))       w
    get_parameter("w", (3, 4))         w

The source is parsed with `ast`. It may be missing, or have changed since it ran: an expression that
is not found has no name.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Collection
from itertools import chain
from typing import Any

from jaxprtool.ir import source_text
from jaxprtool.jaxcompat.source_locations import UserFrame

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
