"""Comparisons of variants as text: measures, tables, and divergence from the reference."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.ir.documents import plural, some, with_prefix
from jaxprtool.ir.notation import BinderToken, Comment, PrimitiveName, Type
from jaxprtool.ir.trees import Alike, alike
from jaxprtool.render.page import environment
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import (
    PathText,
    Rendering,
    colored_text,
    drawn,
    facts_table,
    line_text,
    more,
    split_rows,
)
from jaxprtool.render.views import Cell, Column, Row, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.commands.compare.divergence import Comparison, Divergence
    from jaxprtool.commands.compare.variants import Compared, Measure

# --- compare --------------------------------------------------------------------------------------
# Comparisons of variants as text.

#: The terminal width from which types are shown next to names.
_WIDE = 110


def comparison_tables(report: Comparison, width: int, top: int | None = tables.ROWS) -> Rendering:
    """Return a table per variant, with a row for each of the `top` results that differ most.

    If there are more, results whose names differ only in numbers share a row, which has the errors
    of the worst of them.

    Args:
        report: The comparison.
        width: The width in characters.
        top: The number of results shown of each variant; None for all.
    """
    parts: list[RenderableType] = [Text(heading(report), style=tables.HEADING)]
    parts += [Text(f"{name}: {what}") for name, what in report.smallest]
    for variant in report.variants:
        parts += [Text(), _variant(variant, width, top)]
    for parting in report.partings:
        parts += [Text(), divergence(parting)]
    return Rendering(Group(*parts), width)


def how_to_bisect(report: Comparison, bisected: bool) -> str:
    """Return how to find the first difference of variants, if it was not searched for, or ""."""
    compared = [variant for variant in report.variants if not variant.error]
    if not bisected:
        differ = any(not result.within for variant in compared for result in variant.results)
        return "--bisect finds the first equation that differs" if differ else ""
    if report.partings or all(result.equal for variant in compared for result in variant.results):
        return ""
    return "no result is beyond tolerance; --rtol 0 --bisect finds the first difference in bits"


def heading(report: Comparison) -> str:
    """Return the program, its inputs, and the reference variant, on one line."""
    if report.error:
        return f"{report.name}: the reference {report.reference} failed: {report.error}"
    return f"{report.name} on {report.inputs}; reference: {report.reference}"


def variant_verdict(variant: Compared) -> str:
    """Return the verdict on a variant's results and effects, on one line."""
    if variant.error:
        return f"{variant.name}: {variant.error}"
    effects = f"; different effects: {variant.effects}" if variant.effects else ""
    return f"{variant.name}: {_of_results(variant)}{effects}"


def _of_results(variant: Compared) -> str:
    count = len(variant.results)
    what = plural(count, "result")
    unproven = len(variant.unproven)
    if unproven:
        beyond = sum(not result.within for result in variant.results)
        text = f"{what}, {unproven} not finite in most elements, which proves nothing"
        return f"{text}, {beyond} beyond tolerance" if beyond else text
    same = sum(result.equal for result in variant.results)
    if same == len(variant.results):
        return f"{what}, bitwise equal{_nonfinite(variant)}"
    bits = f"{same} bitwise equal" if same else "none bitwise equal"
    beyond = sum(not result.within for result in variant.results)
    if not beyond:
        return f"{what}, {bits}, all within tolerance"
    return f"{what}, {bits}, {beyond} beyond tolerance"


def _nonfinite(variant: Compared) -> str:
    """Return the number of NaNs and infinities, for a verdict without a table."""
    count = sum(result.nonfinite[1] for result in variant.results)
    size = sum(result.size for result in variant.results)
    return f", {count:,} of {size:,} elements not finite" if count else ""


def _variant(variant: Compared, width: int, top: int | None) -> RenderableType:
    results = _worst_first(variant.results)
    groups = [Alike(result.name, [result]) for result in results]
    if split_rows(groups, top)[1]:
        # The first result of a group is its worst, and its errors are shown.
        groups = alike(results, lambda result: result.name, _kind)
    rows, others = split_rows(groups, top)
    said = Text(variant_verdict(variant), style=tables.HEADING)
    all_equal = all(result.equal for result in variant.results)
    if variant.error or (all_equal and not variant.unproven) or not rows:
        return said
    table = errors_of(
        [_name(group, width) for group in rows],
        [measure_cells(group.items[0]) for group in rows],
        width,
    )
    rest = sum(len(group.items) for group in others)
    if not rest:
        return Group(said, table)
    left_out = more(rest, ", with smaller differences")
    return Group(said, table, Text(left_out, style=tables.COMMENT))


def _name(group: Alike[Measure], width: int) -> Cell:
    first, count = group.items[0], len(group.items)
    name = [f"{count} x " if count > 1 else "", BinderToken(group.path)]
    if width >= _WIDE or first.type != first.reference_type:
        name.append(Type(f" {result_type_text(first)}"))
    return Cell(name)


def _kind(result: Measure) -> Hashable:
    """Return what results that share a row have in common: all but the size of their errors."""
    kept = result.within, result.equal, result.nans, result.nonfinite
    return result.type, result.reference_type, *kept


def _worst_first(results: Sequence[Measure]) -> list[Measure]:
    """Return the results by error, the largest first, those beyond tolerance before others."""
    return sorted(results, key=lambda result: (result.within, result.equal, -result.error))


# --- divergence -----------------------------------------------------------------------------------
# The divergence of a variant from the reference, as text.

#: The maximum number of equations named.
_FEW = 4


def divergence(parting: Divergence) -> RenderableType:
    """Return the details of where a variant diverges from the reference."""
    parts: list[RenderableType] = [Text(divergence_heading(parting), style=tables.HEADING)]
    if not parting.found:
        return Group(*parts, Text(parting.why))
    if parting.source:
        parts.append(line_text(parting.source, parting.code))
    facts = facts_table(known(parting))
    if facts.row_count:
        parts.append(facts)
    parts += [Text(), drawn(errors(parting))]
    return Group(*parts)


def divergence_heading(parting: Divergence) -> str:
    """Return where a variant diverges, on one line."""
    what = f"{parting.variant} differs from {parting.reference}"
    if parting.step:
        what += f" after {parting.step} (pass {parting.place} of {parting.passes})"
    return f"{what} at {parting.primitive or 'a result'}" if parting.found else what


def known(parting: Divergence) -> Iterator[tuple[str, str]]:
    """Yield the labelled details of the equation."""
    if parting.path:
        yield "in", ", ".join(parting.path)
    if parting.iteration:
        yield "iteration", ", ".join(map(str, parting.iteration)) + " (counted from 0)"
    if parting.scope:
        yield "scope", parting.scope
    if parting.counterpart:
        yield "counterpart", parting.counterpart
    for parameter in parting.parameters:
        yield "parameter", parameter
    if parting.removed:
        yield "removed", some(dict.fromkeys(parting.removed), _FEW)
    if parting.added:
        yield "added", some(dict.fromkeys(parting.added), _FEW)
    if parting.within:
        yield (
            "note",
            "all results are within tolerance; this is the first equation whose bits differ",
        )
    if parting.strict:
        yield "note", "about a rounding error in size; found with a tolerance for each element"


def operands_and_results(parting: Divergence) -> Iterator[tuple[str, Measure]]:
    """Yield the operands and results of the equation, each with its role."""
    yield from (("operand", operand) for operand in parting.operands)
    yield from (("result", result) for result in parting.results)


def errors(parting: Divergence) -> Table:
    """Return a table of the errors of the equation's operands and results."""
    rows: list[Row] = [
        [Comment(which), typed_cell(measure), *measure_cells(measure)]
        for which, measure in operands_and_results(parting)
    ]
    return errors_table(["", "value"], rows)


def typed_cell(measure: Measure) -> Cell:
    """Return the cell of the name and the type of a value."""
    return Cell([PrimitiveName(measure.name), Type(f" {result_type_text(measure)}")])


# --- measures -------------------------------------------------------------------------------------
# Measures of differences as cells of a table.

#: The columns of a result: errors, and the number of elements beyond tolerance.
COLUMNS = ("absolute", "relative", "ULPs", "cosine", "beyond")

#: The space between columns.
_GAP = "   "


def errors_table(headings: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return a table of errors, without a title, which would be wrapped at its width."""
    return Table("", [*map(Column, headings), *map(number_column, COLUMNS)], rows)


def errors_of(names: Sequence[Cell], rows: Sequence[list[str]], width: int) -> RenderableType:
    """Return the errors of results, those of a long name below it.

    Args:
        names: The name of each result.
        rows: The `measure_cells` of each.
        width: The width in characters.
    """
    sizes = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    room = width - sum(size + len(_GAP) for size in sizes)
    texts = [colored_text(name.text) for name in names]
    if max(text.cell_len for text in texts) <= room:
        named: list[Row] = [[name, *row] for name, row in zip(names, rows, strict=True)]
        return drawn(errors_table(["result"], named))
    heading, *lines = (
        _GAP.join(cell.rjust(size) for cell, size in zip(row, sizes, strict=True))
        for row in (list(COLUMNS), *rows)
    )
    parts = [Text("result".ljust(room) + _GAP + heading, style=tables.HEADING), Text("─" * width)]
    for text, line in zip(texts, lines, strict=True):
        if text.cell_len > room:
            parts.append(text)
            text = PathText()
        parts.append(text.append(" " * (room - text.cell_len) + _GAP + line))
    return Group(*parts)


def measure_cells(measure: Measure) -> list[str]:
    """Return the cells of a result for `COLUMNS`."""
    if measure.equal:
        return ["same bits", "", "", "", _nonfinite_counts(measure)]
    return [
        _number(measure.absolute),
        _number(measure.relative),
        "" if measure.ulps is None else with_prefix(measure.ulps),
        _cosine(measure.cosine),
        _beyond(measure),
    ]


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"


def _cosine(cosine: float | None) -> str:
    """Return a cosine as text; near 1, as its distance from 1."""
    if cosine is None:
        return ""
    below = 1 - cosine
    return "1" if below < 1e-12 else f"1-{below:.0e}" if below < 1e-3 else f"{cosine:.3f}"


def _nonfinite_counts(measure: Measure) -> str:
    """Return the number of NaNs and infinities, if equal to the reference's."""
    counts = [(measure.own_nans, "NaN"), (measure.infinities, "inf")]
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _beyond(measure: Measure) -> str:
    """Return the numbers of elements beyond tolerance, of NaNs and of infinities."""
    a, b = measure.nans
    alike = measure.nans[0] == measure.nans[1] and measure.nonfinite[0] == measure.nonfinite[1]
    nans = f", {b:,} NaN, not {a:,}" if a != b else ""
    if alike and (said := _nonfinite_counts(measure)):
        nans = f", {said}"
    if not measure.beyond:
        return "none" + nans
    if measure.size < 1000:
        return f"{measure.beyond} of {measure.size}{nans}"
    share = 100 * measure.beyond / measure.size
    return f"{share:.0f}%{nans}" if share >= 10 else f"{share:.2g}%{nans}"


def result_type_text(measure: Measure) -> str:
    """Return the type of a result, and that of the reference if it differs."""
    same = measure.type == measure.reference_type
    return measure.type if same else f"{measure.type}, not {measure.reference_type}"


# --- comparison -----------------------------------------------------------------------------------
# The HTML page of a comparison of variants.


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
            where=divergence_heading,
            known=known,
            given=operands_and_results,
        )
    )
