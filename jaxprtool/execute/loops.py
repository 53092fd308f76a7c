"""Loops that are stepped through: which round runs, and which loops can be compiled instead."""

from __future__ import annotations

from dataclasses import dataclass

from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.meshes import mesh_of
from jaxprtool.ir.structured import Scan, View, While
from jaxprtool.jaxcompat import JaxprEqn

#: So many equations of a loop run one by one before its rounds are compiled.
BY_HAND = 300


@dataclass(eq=False)
class Frame:
    """An equation whose bodies are running, and how many were entered."""

    eqn: JaxprEqn
    held: View
    entered: int = 0

    @property
    def round(self) -> int | None:
        """The number of the round of a loop."""
        if isinstance(self.held, Scan):
            number = self.entered - 1
            return self.held.length - 1 - number if self.held.reverse else number
        return (self.entered - 1) // 2 if isinstance(self.held, While) else None


def can_be_compiled(loop: Scan | While) -> bool:
    """Return True if the rounds of a loop can be compiled, and run again."""
    if loop.eqn.effects:
        return False
    if any(mesh_of(atom.aval) is not None for atom in (*loop.eqn.invars, *loop.eqn.outvars)):
        return False
    stacked = loop.ys if isinstance(loop, Scan) else ()
    return not any(is_extended(var.aval.dtype) for var in stacked)
