"""Find the values from which a path of equations with derivatives leads to a result."""

from __future__ import annotations

from jaxprtool.analysis.lint.graph import Node, Scope, Value
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import is_inexact
from jaxprtool.ir.core.regions import Regions


class Differentiable:
    """Finds the values of scopes from which a path of equations with derivatives leads to results.

    Equations of which nothing is known count as having a derivative. JAX's own rules, by which
    `gradient_flow` decides, take longer.

    Attributes:
        moved: The values, at every depth.
    """

    def __init__(self) -> None:
        self.moved = set[Value]()

    @cached_method
    def arguments(self, scope: Scope, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return which arguments of a scope lead to some of its results."""
        ends = zip(scope.results, wanted, strict=True)
        moved = {value for value, flag in ends if flag and is_inexact(value)}
        for node in reversed(scope.nodes):
            flags = [out in moved for out in node.outs]
            if not any(flags) or not has_derivative(node):
                continue
            operands = [True] * len(node.ins)
            if node.held is not None:
                operands = self._through(node, node.held, flags)
            pairs = zip(node.ins, operands, strict=True)
            moved.update(value for value, flag in pairs if flag and is_inexact(value))
        self.moved |= moved
        return tuple(value in moved for value in scope.arguments)

    def _through(self, node: Node, held: Regions, flags: list[bool]) -> list[bool]:
        def through(number: int, asked: list[bool]) -> tuple[bool, ...]:
            return self.arguments(node.inner[number], tuple(asked))

        return held.backward(flags, through)


def has_derivative(node: Node) -> bool:
    """Return False for an equation whose derivative is zero, such as that of `round`."""
    return node.has_rule or not node.traits.stops_derivative
