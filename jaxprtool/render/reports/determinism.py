"""The differences between runs of a program, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from jaxprtool.ir.documents import plural, some, with_prefix
from jaxprtool.render.reports.compare import cells, divergence, errors_table, types
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.listing import Rendering
from jaxprtool.render.terminal.tables import facts_table, line_text, new_table, number, text

if TYPE_CHECKING:
    from jaxprtool.execute.compare.bisection import Cause, Determinism, Repetition
    from jaxprtool.execute.compare.divergence import Prefix

#: The maximum number of lines of a risk that are named.
_FEW = 3


def determinism(found: Determinism, width: int) -> Rendering:
    """Return a row for each run, where runs begin to differ, and the risks."""
    parts: list[RenderableType] = [Text(heading(found), style=tables.HEADING), Text(), _runs(found)]
    for cause in found.causes:
        parts += [Text(), _cause(cause)]
    if found.risks:
        parts += [Text(), Text("what may differ in other runs, or elsewhere", style=tables.HEADING)]
        parts.append(_risks(found))
    if found.not_tried:
        parts.append(Text())
        parts += [Text(f"not tried: {each}", style=tables.COMMENT) for each in found.not_tried]
    return Rendering(Group(*parts), width)


def heading(found: Determinism) -> str:
    """Return the program, its inputs, the device, and the verdict, on one line."""
    on = f" on {found.reference}" if found.reference else ""
    failed = sum(bool(each.error) for each in found.repetitions)
    differing = sum(not each.equal for each in found.repetitions) - failed
    runs = plural(len(found.repetitions), "run")
    counts = [
        f"{n} of {runs} {verb}" for n, verb in ((differing, "differ"), (failed, "failed")) if n
    ]
    return f"{found.name}{on}, {found.inputs}: {', '.join(counts) or 'the same bits in all runs'}"


def _runs(found: Determinism) -> Table:
    table = new_table(
        "", Column("run", no_wrap=True), text("results"), *map(number, ("ULPs", "absolute"))
    )
    for each in found.repetitions:
        table.add_row(each.name, *_verdict(each))
    return table


def _verdict(found: Repetition) -> tuple[str, str, str]:
    """Return whether the results are the same, and the largest errors."""
    if found.error:
        return f"failed: {found.error}", "", ""
    wrong = [each for each in found.results if not each.equal]
    ulps = [each.ulps for each in wrong if each.ulps is not None]
    errors = [each.absolute for each in wrong if each.absolute is not None]
    numbers = (
        with_prefix(max(ulps)) if ulps else "",
        f"{max(errors):.2g}" if errors else "",
    )
    if found.other_program:
        return f"another program: {found.other_program}", *numbers
    if not wrong:
        return "identical", "", ""
    elements = f"{sum(each.differing for each in wrong):,} of {sum(each.size for each in wrong):,}"
    if len(found.results) == 1:
        return f"differs in {elements} elements", *numbers
    many = f"{len(wrong)} of {plural(len(found.results), 'result')} differ"
    return f"{many}, in {elements} elements", *numbers


def _cause(cause: Cause) -> RenderableType:
    if cause.divergence.found or cause.prefix is None:
        return divergence(cause.divergence)
    return Group(*_prefix(cause, cause.prefix))


def _prefix(cause: Cause, found: Prefix) -> list[RenderableType]:
    """Return the comparison of compiled prefixes, if no single equation differs."""
    said = (
        "With all intermediate values as results, no equation differs, so the difference comes "
        f"from fusion. The first {plural(found.count, 'equation')} of {found.total}, compiled "
        "together, differ; without the last one they do not."
    )
    table = errors_table("value")
    for each in found.results:
        name = Text(each.name, style=tables.PRIMITIVE).append(f" {types(each)}", style=tables.TYPE)
        table.add_row(name, *cells(each))
    where = f"{cause.name} differs from {cause.divergence.reference} by fusion, up to "
    return [
        Text(f"{where}{found.primitive}", style=tables.HEADING),
        *([line_text(found.source, found.code)] if found.source else []),
        Text(said),
        Text(),
        table,
    ]


def _risks(found: Determinism) -> Table:
    rows = []
    for each in found.risks:
        name = f"{each.count} {each.primitive}" if each.count > 1 else each.primitive
        where = f" ({some(each.lines, _FEW)})" if each.lines else ""
        rows.append((name, f"{each.why}{where}"))
    return facts_table(rows)
