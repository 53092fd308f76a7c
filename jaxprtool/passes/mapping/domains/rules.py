"""The rule context of domains whose types mention sizes that are only known at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxprtool.jaxcompat import JaxprEqn


class RuleContext:
    """The context argument of a rule while it is traced.

    A *fact* is a value that is computed from a size, such as the mask of an axis of this size. Each
    is computed once in a body, and passed to the templates that use it. The method `_NAME(size)` of
    a subclass computes the fact NAME.

    Args:
        symbols: The value of each symbol.
        known: The facts computed so far, by name and size.
    """

    #: The class of an operand, whose attribute `array` is its array.
    operand: ClassVar[type[Any]]

    def __init__(self, symbols: Mapping[str, Any], known: dict[tuple[str, Any], Any]) -> None:
        self._symbols = symbols
        self._known = known

    def fact(self, what: str, size: Any) -> Any:
        """Return the fact of this name about a size."""
        if (what, size) not in self._known:
            self._known[what, size] = getattr(self, f"_{what}")(size)
        return self._known[what, size]

    def held_size(self, size: Any) -> Any:
        """Return the size of the axis of an array that holds an axis of a logical size."""
        raise NotImplementedError

    def bind(self, eqn: JaxprEqn, *operands: Any, **params: Any) -> Any:
        """Apply an equation's primitive to the arrays of operands.

        Args:
            eqn: The equation.
            operands: Arrays, or operands, whose arrays are used.
            params: Parameters that replace those of the equation, used as they are.
        """
        arrays = [x.array if isinstance(x, self.operand) else x for x in operands]
        return eqn.primitive.bind(*arrays, **{**self.params(eqn), **params})

    def params(self, eqn: JaxprEqn) -> dict[str, Any]:
        """Return the parameters of an equation, with the sizes that arrays have."""
        return {name: self._held(value) for name, value in eqn.params.items()}

    def _held(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._held, value))
        return self.held_size(value)
