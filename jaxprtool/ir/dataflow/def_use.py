"""Definitions and uses of the variables of a body."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var


class DefUse:
    """The definitions and uses of variables among equations, each indexed on first use.

    Args:
        eqns: The equations of a body.
    """

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.eqns = eqns

    @cached_property
    def definitions(self) -> dict[Var, tuple[int, int]]:
        """The position of the equation that defines each variable, and of the result."""
        return {v: (i, k) for i, eqn in enumerate(self.eqns) for k, v in enumerate(eqn.outvars)}

    @cached_property
    def uses(self) -> dict[Var, list[tuple[int, int]]]:
        """The positions of the equations that read each variable, and of the operand, in order."""
        found: dict[Var, list[tuple[int, int]]] = {}
        for i, eqn in enumerate(self.eqns):
            for place, atom in enumerate(eqn.invars):
                if type(atom) is not Literal:
                    found.setdefault(atom, []).append((i, place))
        return found

    def position(self, atom: Atom) -> int | None:
        """Return the position of the equation that defines an atom, or None if no equation does."""
        found = None if type(atom) is Literal else self.definitions.get(atom)
        return None if found is None else found[0]

    def equation(self, atom: Atom) -> JaxprEqn | None:
        """Return the equation that defines an atom; None for an argument, constant or literal."""
        position = self.position(atom)
        return None if position is None else self.eqns[position]

    def readers(self, var: Var) -> list[int]:
        """Return the positions of the equations that read a variable, each once, in order."""
        return list(dict.fromkeys(i for i, _ in self.uses.get(var, ())))
