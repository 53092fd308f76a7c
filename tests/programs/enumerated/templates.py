"""The equations of an operation, traced once for each choice of types and literals.

Enumerated programs consist of copies of templates, so that none has to be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Operation:
    """A function of `arity` values or literals that returns a value or a list of values."""

    name: str
    function: Callable[..., Any]
    arity: int


@dataclass(frozen=True)
class Template:
    """The equations of an operation, and the types of its results."""

    jaxpr: Any
    results: tuple[int, ...]

    def copy(self, operands: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
        """Return the equations on fresh variables, and the results."""
        names = dict(zip(self.jaxpr.invars, operands, strict=True))
        eqns = []
        for eqn in self.jaxpr.eqns:
            ins = [v if type(v) is Literal else names[v] for v in eqn.invars]
            outs = [Var(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outs, strict=True))
            eqns.append(eqn.replace(invars=ins, outvars=outs))
        return eqns, [names[v] for v in self.jaxpr.outvars]


class Templates:
    """The templates of a family's operations, by the numbers of their types."""

    def __init__(self, operations: Sequence[Operation], literals: Sequence[Any]) -> None:
        self.operations, self.literals = operations, literals
        self.types: list[Any] = []
        self._known: dict[Hashable, Template | None] = {}

    def number(self, aval: Any) -> int:
        """Return the number of a type."""
        if aval not in self.types:
            self.types.append(aval)
        return self.types.index(aval)

    def of(self, operation: int, operands: tuple[int, ...]) -> Template | None:
        """Return a template. None if the operation is not defined on these operands.

        An operand is the number of a type, or ~n for the literal number n.
        """
        key = operation, operands
        if key not in self._known:
            self._known[key] = self._traced(self.operations[operation].function, operands)
        return self._known[key]

    def _traced(self, function: Callable[..., Any], operands: Sequence[int]) -> Template | None:
        types = [self.types[n] for n in operands if n >= 0]

        def flat(*variables: Any) -> Any:
            given = iter(variables)
            return function(*(next(given) if n >= 0 else self.literals[~n] for n in operands))

        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
        try:
            closed = jax.make_jaxpr(flat)(*structs)
        except (TypeError, ValueError, IndexError, AttributeError):
            return None
        ins, outs = set(closed.jaxpr.invars), closed.jaxpr.outvars
        if closed.consts or any(type(v) is Literal or v in ins for v in outs):
            return None
        return Template(closed.jaxpr, tuple(self.number(v.aval) for v in outs))
