"""Find the values from which a path of equations with derivatives leads to a result."""

from __future__ import annotations

from jaxprtool.analysis.lint.graph import Node, Scope, Value
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import is_inexact
from jaxprtool.ir.core.regions import Regions
from jaxprtool.ir.core.structured import Scan

#: The maximum number of iterations of a loop that are followed one by one.
_MAX_ITERATIONS = 64


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

        scan = held.view if isinstance(held.view, Scan) else None
        if scan is None or not isinstance(scan.length, int) or scan.length < 1:
            return held.backward(flags, through)
        # At least one iteration computes the carries, so they are not those before the loop.
        first, count = len(scan.consts), len(scan.carry)
        asked, operands = list(flags), [False] * len(node.ins)
        for _ in range(min(scan.length, _MAX_ITERATIONS)):
            flags_in = through(0, asked)
            pairs = zip(operands, flags_in, strict=True)
            operands = [a or b for a, b in pairs]
            carries = list(flags_in[first : first + count])
            again, asked = asked, [*carries, *flags[count:]]
            if again == asked:
                break
        operands[first : first + count] = carries
        return operands


def has_derivative(node: Node) -> bool:
    """Return False for an equation whose derivative is zero, such as that of `round`."""
    return node.has_rule or not node.traits.stops_derivative
