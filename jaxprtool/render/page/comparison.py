"""The HTML page of a comparison of variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.render.page import environment
from jaxprtool.render.reports import compare
from jaxprtool.render.reports.compare import (
    COLUMNS,
    heading,
    measure_cells,
    result_type_text,
    variant_verdict,
)

if TYPE_CHECKING:
    from jaxprtool.execute.compare.bisection import Comparison


def comparison_page(comparison: Comparison) -> str:
    """Return a page of all results of all variants, and of their divergences."""
    return (
        environment()
        .get_template("compare.html")
        .render(
            found=comparison,
            heading=heading(comparison),
            verdict=variant_verdict,
            columns=COLUMNS,
            cells=measure_cells,
            types=result_type_text,
            unmarked=lambda results: [("", result) for result in results],
            where=compare.divergence_heading,
            known=compare.known,
            given=compare.operands_and_results,
        )
    )
