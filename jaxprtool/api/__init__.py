"""The Python functions that are no command, and the methods of Program that need rooms above `ir`.

The methods import these rooms when they are called.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxprtool.ir.program import Program, Programs


def applied(
    program: Program, passes: str | Callable[[Program], Program | Programs]
) -> Program | Programs:
    """Return a program rewritten by a pass, or by a pipeline as text."""
    from jaxprtool.passes import Pipeline

    transform = Pipeline.parse(passes) if isinstance(passes, str) else passes
    return transform(program)


def program_text(program: Program) -> str:
    """Return the listing of a program."""
    from jaxprtool.render.terminal.listing import listing

    return listing(program).plain()


def program_summary(program: Program) -> str:
    """Return a one-line summary of a program."""
    from jaxprtool.analysis.stats import count_equations
    from jaxprtool.render.reports import program_line

    return program_line(program, count_equations(program))


def program_html(program: Program | Programs) -> str:
    """Return the HTML of programs for notebooks."""
    from jaxprtool.analysis.stats import stats
    from jaxprtool.render.page import cell

    return cell(program if isinstance(program, Programs) else {program.name: program}, stats)
