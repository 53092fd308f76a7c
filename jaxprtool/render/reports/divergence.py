"""The divergence of a variant from the reference, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.basics.quantities import some
from jaxprtool.render.reports.measures import cells, errors_table, types
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.tables import facts_table, line_text

if TYPE_CHECKING:
    from jaxprtool.execute.compare.bisection import Divergence
    from jaxprtool.execute.compare.measures import Measure

#: The maximum number of equations named.
_FEW = 4


def divergence(found: Divergence) -> RenderableType:
    """Return the details of where a variant diverges from the reference."""
    parts: list[RenderableType] = [Text(heading(found), style=theme.HEADING)]
    if not found.found:
        return Group(*parts, Text(found.why))
    if found.source:
        parts.append(line_text(found.source, found.code))
    facts = facts_table(known(found))
    if facts.row_count:
        parts.append(facts)
    parts += [Text(), errors(found)]
    return Group(*parts)


def heading(found: Divergence) -> str:
    """Return where a variant diverges, on one line."""
    what = f"{found.variant} differs from {found.reference}"
    if found.step:
        what += f" after {found.step} (pass {found.place} of {found.passes})"
    return f"{what} at {found.primitive or 'a result'}" if found.found else what


def known(found: Divergence) -> Iterator[tuple[str, str]]:
    """Yield the labelled details of the equation."""
    if found.path:
        yield "in", ", ".join(found.path)
    if found.iteration:
        yield "iteration", ", ".join(map(str, found.iteration)) + " (counted from 0)"
    if found.scope:
        yield "scope", found.scope
    if found.counterpart:
        yield "counterpart", found.counterpart
    for each in found.parameters:
        yield "parameter", each
    if found.removed:
        yield "removed", some(dict.fromkeys(found.removed), _FEW)
    if found.added:
        yield "added", some(dict.fromkeys(found.added), _FEW)
    if found.within:
        yield (
            "note",
            "all results are within tolerance; this is the first equation whose bits differ",
        )
    if found.strict:
        yield "note", "about a rounding error in size; found with a tolerance for each element"


def rows(found: Divergence) -> Iterator[tuple[str, Measure]]:
    """Yield the operands and results of the equation, each with its role."""
    yield from (("operand", each) for each in found.operands)
    yield from (("result", each) for each in found.results)


def errors(found: Divergence) -> Table:
    """Return a table of the errors of the equation's operands and results."""
    table = errors_table("", "value")
    for which, each in rows(found):
        name = Text(each.name, style=theme.PRIMITIVE).append(f" {types(each)}", style=theme.TYPE)
        table.add_row(Text(which, style=theme.COMMENT), name, *cells(each))
    return table
