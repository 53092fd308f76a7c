"""Estimate the temporary memory of a compiled program: all except its arguments and results.

The memory of donated arguments is not reused.
"""

from __future__ import annotations

from jaxprtool.analysis.kernels import MOST_OPENED, UnknownSize
from jaxprtool.analysis.memory.walk import Bodies
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.dataflow.slicing import live_part
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.ir.programs.repetition import TemporaryMemory


def outlined_memory(program: Program) -> TemporaryMemory | None:
    """Estimate the temporary memory of a program outlined and as traced.

    Returns None if `temporary_memory` does.
    """
    as_traced, outlined = temporary_memory(program, opened=True), temporary_memory(program)
    if as_traced is None or outlined is None:
        return None
    return TemporaryMemory(as_traced, outlined)


def temporary_memory(program: Program, opened: bool = False) -> int | None:
    """Estimate the bytes that a program needs besides its arguments and results.

    Args:
        program: The program.
        opened: Whether to treat calls that XLA keeps as if it inlined them.

    Returns:
        The bytes, or None if a size is symbolic or the program has too many equations.
    """
    if count_equations(program) > MOST_OPENED:
        return None
    try:
        return Bodies(opened).memory(live_part(top_jaxpr(program))).peak
    except UnknownSize:
        return None
