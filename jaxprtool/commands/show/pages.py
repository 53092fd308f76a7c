"""Programs on stdout: whole, or an overview of those that do not fit; and pages of programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxprtool.cli import output

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program
    from jaxprtool.render.page import PageState, PageView
    from jaxprtool.render.terminal.listing import Listing, ShowOptions
    from jaxprtool.render.views import Lines


def write_pages(programs: Sequence[tuple[str, Program]], above: int = 0) -> None:
    """Write programs to stdout: on a terminal, an overview of each that does not fit, else in full.

    `above` is the number of lines above them that must stay visible.
    """
    if not sys.stdout.isatty():
        output.write_listings(programs)
        return
    from jaxprtool.analysis.stats import count_equations
    from jaxprtool.commands.show.summary import overview
    from jaxprtool.commands.show.table import overview_page
    from jaxprtool.render.terminal.listing import ShowOptions, listing

    columns, lines = output.size(sys.stdout)
    height = lines - above - 3  # the command above and a prompt below

    def page(program: Program) -> Listing:
        if count_equations(program) < height:
            whole = listing(program, ShowOptions(width=columns, fit=True))
            if whole.plain().count("\n") < height:
                return whole
        return overview_page(program, overview(program), columns, height)

    output.write_programs(programs, page)


def write_pages_or_listings(
    programs: Sequence[tuple[str, Program]], full: bool, pager: bool, **shown: Any
) -> None:
    """Write programs as pages, or as listings with --full, --pager or source locations."""
    if not (full or pager or shown["source"]):
        write_pages(programs)
        return
    with output.paged(pager):
        fold = sys.stdout.isatty() and not (full or pager)
        output.write_listings(programs, fold=fold, **shown)


def write_states(
    states: Sequence[PageState],
    shown: ShowOptions,
    out: str | None,
    added: Callable[[Lines], tuple[Sequence[Any], Sequence[PageView]]] | None = None,
) -> None:
    """Write a page of programs to the file of -o, with a tab for each of their states.

    `added` returns the summaries and the views of a report.
    """
    from jaxprtool.analysis.stats import stats
    from jaxprtool.commands.cost.estimate import work_by_equation
    from jaxprtool.render.page import program_page

    output.write_page(program_page(states, shown, stats, work_by_equation, added), out)
