"""Compute the facts for the summary of `report` that its page does not compute otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxprtool.analysis.lint import lint
from jaxprtool.analysis.memory import outlined_memory
from jaxprtool.analysis.stats import stats
from jaxprtool.analysis.summary import ProgramFacts
from jaxprtool.api.investigate.residuals import gives_one_float
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.program import Program
from jaxprtool.ir.repetition import Repetition, repetition
from jaxprtool.passes.loops.outline import Outline

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import Cost
    from jaxprtool.analysis.memory import Memory
    from jaxprtool.analysis.profile import Profile
    from jaxprtool.analysis.residuals import Residuals


def facts_of(
    program: Program,
    cost: Cost,
    memory: Memory | str,
    residuals: Residuals | str,
    profile: Profile | None = None,
    is_partitioned: bool = False,
    codes: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> ProgramFacts:
    """Return the facts about a program, with its counts, findings of lint and repeated bodies.

    Args:
        program: The program.
        cost: Its cost by line.
        memory: Its memory, or why it is unknown.
        residuals: The residuals of the function as traced, or why it has none.
        profile: Its measured time; None if it was not measured.
        is_partitioned: Whether the report shows its shardings.
        codes: The codes of lint to select, and to ignore.
    """
    return ProgramFacts(
        stats(program),
        cost,
        memory,
        residuals,
        profile,
        lint(program, *codes),
        _repetition(program),
        gives_one_float(program),
        is_partitioned,
    )


def _repetition(program: Program) -> Repetition | None:
    """Return the repeated bodies that `outline` finds; None if it cannot outline the program."""
    try:
        outlined = Outline()(program)
    except JaxprToolError:
        return None
    repeats = repetition(outlined, program)
    return replace(repeats, memory=outlined_memory(outlined)) if repeats.bodies else repeats
