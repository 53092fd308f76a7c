"""Comparisons of variants as text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.ir.basics.paths import Alike, alike
from jaxprtool.ir.basics.quantities import plural
from jaxprtool.render.reports.divergence import divergence
from jaxprtool.render.reports.measures import cells, errors_of, types
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.top import more, split
from jaxprtool.render.terminal.wrapping import PathText

if TYPE_CHECKING:
    from jaxprtool.execute.compare.comparison import Comparison
    from jaxprtool.execute.compare.measures import Measure
    from jaxprtool.execute.compare.variants import Compared

#: The terminal width from which types are shown next to names.
_WIDE = 110


def comparison(found: Comparison, width: int, top: int | None) -> Rendering:
    """Return a table per variant, with a row for each of the `top` results that differ most.

    If there are more, results whose names differ only in numbers share a row, which has the errors
    of the worst of them.

    Args:
        found: The comparison.
        width: The width in characters.
        top: The number of results shown of each variant; None for all.
    """
    parts: list[RenderableType] = [Text(heading(found), style=theme.HEADING)]
    parts += [Text(f"{name}: {what}") for name, what in found.smallest]
    for each in found.variants:
        parts += [Text(), _variant(each, width, top)]
    for where in found.partings:
        parts += [Text(), divergence(where)]
    return Rendering(Group(*parts), width)


def heading(found: Comparison) -> str:
    """Return the program, its inputs, and the reference variant, on one line."""
    if found.error:
        return f"{found.name}: the reference {found.reference} failed: {found.error}"
    return f"{found.name} on {found.inputs}; reference: {found.reference}"


def verdict(variant: Compared) -> str:
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
        beyond = sum(not each.within for each in variant.results)
        text = f"{what}, {unproven} not finite in most elements, which proves nothing"
        return f"{text}, {beyond} beyond tolerance" if beyond else text
    same = sum(each.equal for each in variant.results)
    if same == len(variant.results):
        return f"{what}, bitwise equal{_nonfinite(variant)}"
    bits = f"{same} bitwise equal" if same else "none bitwise equal"
    beyond = sum(not each.within for each in variant.results)
    if not beyond:
        return f"{what}, {bits}, all within tolerance"
    return f"{what}, {bits}, {beyond} beyond tolerance"


def _nonfinite(variant: Compared) -> str:
    """Return the number of NaNs and infinities, for a verdict without a table."""
    count = sum(each.nonfinite[1] for each in variant.results)
    size = sum(each.size for each in variant.results)
    return f", {count:,} of {size:,} elements not finite" if count else ""


def _variant(variant: Compared, width: int, top: int | None) -> RenderableType:
    results = _worst_first(variant.results)
    groups = [Alike(each.name, [each]) for each in results]
    if split(groups, top)[1]:
        # The first result of a group is its worst, and its errors are shown.
        groups = alike(results, lambda each: each.name, _kind)
    rows, others = split(groups, top)
    said = Text(verdict(variant), style=theme.HEADING)
    all_equal = all(each.equal for each in variant.results)
    if variant.error or (all_equal and not variant.unproven) or not rows:
        return said
    table = errors_of(
        [_name(group, width) for group in rows], [cells(group.items[0]) for group in rows], width
    )
    rest = sum(len(group.items) for group in others)
    if not rest:
        return Group(said, table)
    left_out = more(rest, ", with smaller differences")
    return Group(said, table, Text(left_out, style=theme.COMMENT))


def _name(group: Alike[Measure], width: int) -> Text:
    each, count = group.items[0], len(group.items)
    name = PathText(f"{count} x " if count > 1 else "").append(group.path, style=theme.BINDER)
    if width >= _WIDE or each.type != each.reference_type:
        name.append(f" {types(each)}", style=theme.TYPE)
    return name


def _kind(each: Measure) -> Hashable:
    """Return what results that share a row have in common: all but the size of their errors."""
    kept = each.within, each.equal, each.nans, each.nonfinite
    return each.type, each.reference_type, *kept


def _worst_first(results: Sequence[Measure]) -> list[Measure]:
    """Return the results by error, the largest first, those beyond tolerance before others."""
    return sorted(results, key=lambda each: (each.within, each.equal, -each.error))
