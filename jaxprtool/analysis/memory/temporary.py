"""How much memory a compiled program needs besides its arguments and results: an estimate.

Donated arguments are not made use of.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxprtool.analysis.kernels import UnknownSize
from jaxprtool.analysis.memory.walk import MOST, Bodies
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.border import top_jaxpr
from jaxprtool.ir.program import Program


@dataclass(frozen=True)
class TemporaryMemory:
    """The bytes that an outlined program needs besides its arguments and results, estimated.

    Attributes:
        as_traced: What it would need if XLA inlined the calls.
        outlined: What it needs.
    """

    as_traced: int
    outlined: int

    @property
    def is_much(self) -> bool:
        """Whether outlining costs half as much again, and a number of bytes worth a warning."""
        more = self.outlined - self.as_traced
        return more > MUCH_MORE * self.as_traced and more > MUCH


#: What is worth a warning: such a part of the memory as traced, and so many bytes.
MUCH_MORE, MUCH = 0.5, 2**20


def outlined_memory(program: Program) -> TemporaryMemory | None:
    """Return what an outlined program needs, beside what it would need as traced.

    None if `temporary_memory` is.
    """
    as_traced, outlined = temporary_memory(program, opened=True), temporary_memory(program)
    if as_traced is None or outlined is None:
        return None
    return TemporaryMemory(as_traced, outlined)


def temporary_memory(program: Program, opened: bool = False) -> int | None:
    """Return how many bytes a program needs besides its arguments and results, estimated.

    Args:
        program: The program.
        opened: Whether calls that XLA keeps are taken for calls that it inlines.

    Returns:
        The bytes; None if a size is symbolic, or there are more equations than can be gone through.
    """
    if count_equations(program) > MOST:
        return None
    try:
        return Bodies(opened).memory(top_jaxpr(program)).peak
    except UnknownSize:
        return None
