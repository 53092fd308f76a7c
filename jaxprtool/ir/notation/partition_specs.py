"""Read trees of PartitionSpecs from text: `(P(), {'w': P(None, 'model')})`.

The text is parsed and walked, never evaluated.
"""

from __future__ import annotations

import ast
from abc import abstractmethod
from typing import Any, ClassVar

from jax.sharding import PartitionSpec

from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.notation import expressions
from jaxprtool.ir.notation.whitelist import WhitelistReader

#: The names of `PartitionSpec` in a text.
NAMES = ("P", "PartitionSpec", "jax.P", "jax.sharding.PartitionSpec")


class SpecReader(WhitelistReader):
    """Reads trees of PartitionSpecs and None. Subclasses read the entries of a PartitionSpec.

    Args:
        text: The trees, separated by commas; those by name are written `name=P(…)`.
        what: The name of the text in messages.
    """

    #: What the entries are, and examples of specs, for messages.
    entries: ClassVar[str]
    examples: ClassVar[str]

    def __init__(self, text: str, what: str):
        self.source, self.what = expressions.read(text, what, ArgumentsError), what

    def trees(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the trees by position and by name.

        Raises ArgumentsError for text that cannot be read, with its place.
        """
        named = {name: self.visit(node) for name, node in self.source.keywords}
        return tuple(map(self.visit, self.source.args)), named

    @abstractmethod
    def entry(self, node: ast.expr) -> Any:
        """Return an entry of a PartitionSpec."""

    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> Exception:
        return self.source.fail(node, message, hint)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if node.value is not None:
            text = self.source.segment(node)
            message = f"expected a PartitionSpec in {self.what}, not {text}"
            raise self.fail(node, message, f"write {self.examples}, or None")
        return None

    def key(self, node: ast.expr | None, parent: ast.Dict) -> Any:
        return node.value if isinstance(node, ast.Constant) else super().key(node, parent)

    def visit_Call(self, node: ast.Call) -> PartitionSpec:
        if ast.unparse(node.func) not in NAMES:
            raise self.not_allowed(node, f"write {self.examples}")
        if node.keywords:
            raise self.fail(node, f"a PartitionSpec takes {self.entries} by position")
        return PartitionSpec(*map(self.entry, node.args))
