"""Where a variant parts from the reference, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.render import theme
from jaxprtool.render.measures import COLUMNS, cells, types
from jaxprtool.render.stats import new_table

if TYPE_CHECKING:
    from jaxprtool.execute.compare.bisection import Parting
    from jaxprtool.execute.compare.measures import Measure

#: So many equations are named.
_FEW = 4


def parting(found: Parting) -> RenderableType:
    """Return all that is known of where a variant parts from the reference."""
    parts: list[RenderableType] = [Text(heading(found), style=theme.HEADING)]
    if not found.found:
        return Group(*parts, Text(found.why))
    if found.source:
        line = Text(found.source, style=theme.BINDER)
        parts.append(line.append(f"  {found.code}" if found.code else "", style="default"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style=theme.COMMENT, no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in known(found):
        facts.add_row(name, fact)
    if facts.row_count:
        parts.append(facts)
    parts += [Text(), errors(found)]
    return Group(*parts)


def heading(found: Parting) -> str:
    """Return where a variant parts, on one line."""
    what = f"{found.variant} parts from {found.reference}"
    if found.step:
        what += f" by {found.step} (pass {found.place} of {found.passes})"
    return f"{what} at {found.primitive or 'a result'}" if found.found else what


def known(found: Parting) -> Iterator[tuple[str, str]]:
    """Yield what is known of the equation, each with a label."""
    if found.path:
        yield "in", ", ".join(found.path)
    if found.iteration:
        yield "round", ", ".join(map(str, found.iteration)) + " (counted from 0)"
    if found.scope:
        yield "scope", found.scope
    if found.counterpart:
        yield "counterpart", found.counterpart
    for each in found.parameters:
        yield "parameter", each
    if found.removed:
        yield "removed", some(found.removed)
    if found.added:
        yield "added", some(found.added)
    if found.strict:
        yield "note", "found by the tolerance of each element: a rounding error, or little more"


def some(names: Sequence[str]) -> str:
    """Return some of many names as text, those of one line once."""
    names = list(dict.fromkeys(names))
    more = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {more:,} more" if more > 0 else "")


def rows(found: Parting) -> Iterator[tuple[str, Measure]]:
    """Yield the values that the equation is given and gives, each with which it is."""
    yield from (("given", each) for each in found.operands)
    yield from (("gives", each) for each in found.results)


def errors(found: Parting) -> Table:
    """Return a table of the errors of what the equation is given, and of what it gives."""
    table = new_table("")
    table.title = None
    table.add_column("")
    table.add_column("value", overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for which, each in rows(found):
        name = Text(each.name, style=theme.PRIMITIVE).append(f" {types(each)}", style=theme.TYPE)
        table.add_row(Text(which, style=theme.COMMENT), name, *cells(each))
    return table
