"""Read values from Python's syntax trees, which are walked and never evaluated.

Displays and numbers are values everywhere. Subclasses interpret names, calls and other nodes by
methods `visit_Name`, `visit_Call` and so on; a node without a method is refused by name.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from typing import Any

_CONSTRUCTS: dict[str, str] = {
    "Attribute": "attribute access",
    "Await": "'await'",
    "BinOp": "arithmetic",
    "BoolOp": "'and' or 'or'",
    "Call": "a call",
    "Compare": "a comparison",
    "Dict": "a dict",
    "DictComp": "a comprehension",
    "GeneratorExp": "a comprehension",
    "IfExp": "a conditional expression",
    "JoinedStr": "an f-string",
    "Lambda": "a lambda",
    "List": "a list",
    "ListComp": "a comprehension",
    "Name": "a name",
    "NamedExpr": "an assignment ':='",
    "Set": "a set",
    "SetComp": "a comprehension",
    "Slice": "a slice",
    "Starred": "unpacking with '*'",
    "Subscript": "a subscript",
    "Tuple": "a tuple",
    "UnaryOp": "an operator",
    "Yield": "'yield'",
    "YieldFrom": "'yield'",
}


class WhitelistReader(ABC, ast.NodeVisitor):
    """Reads constants, tuples, lists, dicts, and numbers with a sign, and refuses everything else.

    Attributes:
        what: The name of the text in messages.
    """

    what: str

    @abstractmethod
    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> Exception:
        """Return the error for a node; to be raised by the caller."""

    def not_allowed(self, node: ast.expr, hint: str | None = None) -> Exception:
        """Return the error that names the construct of a node and states that it is refused."""
        return self.fail(node, f"{self.construct(node)} is not allowed in {self.what}", hint)

    def construct(self, node: ast.expr) -> str:
        """Return the name of a node's construct in Python."""
        if isinstance(node, ast.Name):
            return f"the name '{node.id}'"
        return _CONSTRUCTS.get(type(node).__name__, type(node).__name__)

    def generic_visit(self, node: Any) -> Any:
        raise self.not_allowed(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return tuple(map(self.visit, node.elts))

    def visit_List(self, node: ast.List) -> Any:
        return list(map(self.visit, node.elts))

    def visit_Dict(self, node: ast.Dict) -> Any:
        pairs = zip(node.keys, node.values, strict=True)
        return {self.key(key, node): self.visit(value) for key, value in pairs}

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if is_number(value) and isinstance(node.op, ast.USub | ast.UAdd):
            return -value if isinstance(node.op, ast.USub) else value
        return self.generic_visit(node)

    def key(self, node: ast.expr | None, parent: ast.Dict) -> Any:
        """Return the value of a dict's key, which must be hashable and not a `**` unpacking."""
        if node is None:
            raise self.fail(parent, f"unpacking with '**' is not allowed in {self.what}")
        value = self.visit(node)
        try:
            hash(value)
        except TypeError:
            raise self.fail(node, "a dict's key cannot be a list or a dict") from None
        return value


def is_number(value: object) -> bool:
    """Return True if a value is a number and not a bool."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)
