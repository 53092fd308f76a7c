"""The statistics of a program as tables: equations by primitive and depth, values by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.basics.paths import Alike, alike
from jaxprtool.ir.basics.quantities import plural
from jaxprtool.ir.programs.program_signature import NamedValue, size_of_values
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.tables import add_more, new_table, number, text
from jaxprtool.render.terminal.top import split
from jaxprtool.render.terminal.wrapping import PathText

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats

#: Greater depths share one column, so that a deep program fits a narrow terminal.
MOST_DEPTHS = 6


def stats(counted: Stats, width: int, top: int | None) -> Rendering:
    """Return the tables of a program's `Stats`.

    Args:
        counted: The statistics.
        width: The width in characters.
        top: The number of primitives, and of values of each kind, shown; None for all.
    """
    parts: list[RenderableType] = [_equations(counted, top)]
    values = {
        "argument": counted.arguments,
        "output": counted.outputs,
        "constant": counted.constants,
    }
    for what, named in values.items():
        if named:
            parts += [Text(), values_table(what, named, top=top)]
    return Rendering(Group(*parts), width)


def _equations(counted: Stats, top: int | None) -> Table:
    depths = len(counted.by_depth)
    columns = min(depths, MOST_DEPTHS)
    heading = f"{counted.name}: {plural(counted.equations, 'equation')}"
    grid = new_table(heading, text("primitive", theme.PRIMITIVE), number("in all"))
    if depths > 1:
        for depth in range(columns):
            more = depth == columns - 1 and depths > columns
            label = (
                f"depth {depth}{'+' if more else ''}" if depth in (0, columns - 1) else str(depth)
            )
            grid.add_column(label, justify="right", style=theme.COMMENT)
    shown, rest = split(counted.primitives, top)
    for primitive in shown:
        grid.add_row(primitive.name, *_counts(primitive.total, primitive.by_depth))
    add_more(grid, len(rest))
    grid.add_section()
    grid.add_row("in all", *_counts(counted.equations, counted.by_depth))
    return grid


def _counts(total: int, by_depth: Sequence[int]) -> list[str]:
    shown = [*by_depth[: MOST_DEPTHS - 1], sum(by_depth[MOST_DEPTHS - 1 :])]
    depths = shown[: len(by_depth)] if len(by_depth) > 1 else []
    return [f"{total:,}", *(f"{count:,}" if count else "·" for count in depths)]


def values_table(
    what: str,
    values: Sequence[NamedValue],
    sources: Sequence[str] | None = None,
    top: int | None = None,
) -> Table:
    """Return a row for each value: its name, type, bytes, and source location.

    If there are more than `top`, values whose names differ only in numbers share a row, with their
    total size, and values left out are counted. `top` is None for a row for each value.
    """
    columns = text(what, theme.BINDER), text("type", theme.TYPE), number("bytes")
    grid = new_table(size_of_values(what, values), *columns)
    if sources is not None:
        grid.add_column("source", style=theme.COMMENT, overflow="fold")
    rows = list(zip(values, sources or [""] * len(values), strict=True))
    groups = [Alike(value.name, [(value, source)]) for value, source in rows]
    if split(groups, top)[1]:
        groups = alike(rows, lambda row: row[0].name, lambda row: (row[0].described, row[1]))
    shown, others = split(groups, top)
    for group in shown:
        value, source = group.items[0]
        count = len(group.items)
        sizes = [each.bytes for each, _ in group.items if each.bytes is not None]
        grid.add_row(
            PathText(group.path),
            Text(f"{count} x {value.described}" if count > 1 else value.described),
            f"{sum(sizes):,}" if len(sizes) == count else "?",
            *([] if sources is None else [Text(source)]),
        )
    add_more(grid, sum(len(group.items) for group in others))
    return grid
