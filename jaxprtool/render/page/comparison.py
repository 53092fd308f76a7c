"""The HTML page of a comparison of variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.render.page import environment
from jaxprtool.render.reports import divergence
from jaxprtool.render.reports.compare import heading, verdict
from jaxprtool.render.reports.measures import COLUMNS, cells, types

if TYPE_CHECKING:
    from jaxprtool.execute.compare.comparison import Comparison


def comparison_page(found: Comparison) -> str:
    """Return a page of all results of all variants, and of their divergences."""
    return (
        environment()
        .get_template("compare.html")
        .render(
            found=found,
            heading=heading(found),
            verdict=verdict,
            columns=COLUMNS,
            cells=cells,
            types=types,
            unmarked=lambda results: [("", each) for each in results],
            where=divergence.heading,
            known=divergence.known,
            given=divergence.rows,
        )
    )
