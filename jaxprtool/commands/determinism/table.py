"""The differences between runs of a program, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.commands.compare.table import (
    divergence,
    errors_table,
    measure_cells,
    typed_cell,
)
from jaxprtool.ir.documents import plural, some, with_prefix
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn, facts_table, line_text
from jaxprtool.render.views import Column, Row, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.commands.compare.divergence import Cause, Determinism, Prefix, Repetition

#: The maximum number of lines of a risk that are named.
_FEW = 3


def determinism_table(report: Determinism, width: int) -> Rendering:
    """Return a row for each run, where runs begin to differ, and the risks."""
    parts: list[RenderableType] = [
        Text(heading(report), style=tables.HEADING),
        Text(),
        drawn(_runs(report)),
    ]
    for cause in report.causes:
        parts += [Text(), _cause(cause)]
    if report.risks:
        parts += [Text(), Text("what may differ in other runs, or elsewhere", style=tables.HEADING)]
        parts.append(_risks(report))
    if report.not_tried:
        parts.append(Text())
        parts += [Text(_untried(untried), style=tables.COMMENT) for untried in report.not_tried]
    return Rendering(Group(*parts), width)


def _untried(untried: str) -> str:
    """Return what was not tried as a sentence: `not tried: tracing again, because …`."""
    kind, _, reason = untried.partition(": ")
    return f"not tried: {kind}, because {reason}"


def heading(report: Determinism) -> str:
    """Return the program, its inputs, the device, and the verdict, on one line."""
    on = f" on {report.reference}" if report.reference else ""
    failed = sum(bool(repetition.error) for repetition in report.repetitions)
    differing = sum(not repetition.equal for repetition in report.repetitions) - failed
    runs = plural(len(report.repetitions), "run")
    counts = [
        f"{n} of {runs} {verb}" for n, verb in ((differing, "differ"), (failed, "failed")) if n
    ]
    return f"{report.name}{on}, {report.inputs}: {', '.join(counts) or 'the same bits in all runs'}"


def _runs(report: Determinism) -> Table:
    columns = Column("run"), Column("results"), *map(number_column, ("ULPs", "absolute"))
    rows = [[repetition.name, *_verdict(repetition)] for repetition in report.repetitions]
    return Table("", columns, rows)


def _verdict(repetition: Repetition) -> tuple[str, str, str]:
    """Return whether the results are the same, and the largest errors."""
    if repetition.error:
        return f"failed: {repetition.error}", "", ""
    wrong = [result for result in repetition.results if not result.equal]
    ulps = [result.ulps for result in wrong if result.ulps is not None]
    errors = [result.absolute for result in wrong if result.absolute is not None]
    numbers = (
        with_prefix(max(ulps)) if ulps else "",
        f"{max(errors):.2g}" if errors else "",
    )
    if repetition.other_program:
        return f"another program: {repetition.other_program}", *numbers
    if not wrong:
        return "identical", "", ""
    elements = (
        f"{sum(result.differing for result in wrong):,} of {sum(result.size for result in wrong):,}"
    )
    if len(repetition.results) == 1:
        return f"differs in {elements} elements", *numbers
    many = f"{len(wrong)} of {plural(len(repetition.results), 'result')} differ"
    return f"{many}, in {elements} elements", *numbers


def _cause(cause: Cause) -> RenderableType:
    if cause.divergence.found or cause.prefix is None:
        return divergence(cause.divergence)
    return Group(*_prefix(cause, cause.prefix))


def _prefix(cause: Cause, prefix: Prefix) -> list[RenderableType]:
    """Return the comparison of compiled prefixes, if no single equation differs."""
    said = (
        "With all intermediate values as results, no equation differs, so the difference comes "
        f"from fusion. The first {plural(prefix.count, 'equation')} of {prefix.total}, compiled "
        "together, differ; without the last one they do not."
    )
    rows: list[Row] = [[typed_cell(result), *measure_cells(result)] for result in prefix.results]
    where = f"{cause.name} differs from {cause.divergence.reference} by fusion, up to "
    return [
        Text(f"{where}{prefix.primitive}", style=tables.HEADING),
        *([line_text(prefix.source, prefix.code)] if prefix.source else []),
        Text(said),
        Text(),
        drawn(errors_table(["value"], rows)),
    ]


def _risks(report: Determinism) -> RenderableType:
    rows = []
    for risk in report.risks:
        name = f"{risk.count} {risk.primitive}" if risk.count > 1 else risk.primitive
        where = f" ({some(risk.lines, _FEW)})" if risk.lines else ""
        rows.append((name, f"{risk.why}{where}"))
    return facts_table(rows)
