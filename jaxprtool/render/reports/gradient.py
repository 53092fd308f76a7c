"""Why gradients are missing, zero or NaN, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.basics.quantities import listed, plural
from jaxprtool.ir.programs.program_signature import covering
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.tables import add_more
from jaxprtool.render.terminal.top import split

if TYPE_CHECKING:
    from jaxprtool.analysis.gradient_causes import Cause, GradientAnswer, GradientGroup

_some = partial(listed, most=4)

#: The number of operations shown by default for a group.
CAUSES = 6

_CAUSED = "The first operation that makes one is:"
_UNCAUSED = "No single operation makes it."


def gradient_text(found: GradientAnswer, width: int, top: int | None) -> Rendering:
    """Return a paragraph for each group of arguments, with the operations that cause the result.

    Args:
        found: The answer.
        width: The width in characters.
        top: The number of operations shown of each group; None for all.
    """
    parts: list[RenderableType] = []
    for group in found.groups:
        parts += [Text()] if parts else []
        sentence = _sentence(found, group)
        parts += [Text(line, style=theme.HEADING) for line in textwrap.wrap(sentence, width)]
        parts += [_causes(group, top)] if group.causes and group.kind != "nonzero" else []
    return Rendering(Group(*parts), width)


def _sentence(found: GradientAnswer, group: GradientGroup) -> str:
    """Return a sentence on the gradients of a group."""
    names, count = _named(found, group), len(group.causes)
    be, do = ("is", "does") if len(group.arguments) == 1 else ("are", "do")
    of = f"The gradient of {found.result} with respect to {names} is"
    operations, stop = plural(count, "operation"), "stops" if count == 1 else "stop"
    match group.kind:
        case "integer":
            return f"{names} {be} {group.type}, which has no gradient (JAX gives float0)."
        case "unused":
            return f"{names} {be} not used: the gradient is zero."
        case "missing":
            only = f", only {_some(group.reaches)}" if group.reaches else ""
            last = "; the last of its operations:" if count else "."
            return f"{names} {do} not affect {found.result}{only}: the gradient is zero{last}"
        case "zero":
            return f"{of} zero for all inputs" + (
                f": {operations} {stop} every path." if count else "."
            )
        case "vanishing":
            where = f": it becomes zero at {operations}." if count else "."
            return f"{of} zero on these inputs, although a path exists{where}"
        case "NaN" | "infinity":
            bad = "NaN" if group.kind == "NaN" else "infinite"
            value = f"{found.result} itself is {str(found.value).replace('nan', 'NaN')}"
            return f"{of} {bad}; {value}. {_CAUSED if count else _UNCAUSED}"
        case "nonzero":
            stops = [f"{each.primitive} ({each.source or 'unknown line'})" for each in group.causes]
            others = f"; {_some(stops)} {stop} other paths." if count else "."
            return f"{of} not zero: its norm is {group.norm:.4g}{others}"


def _named(found: GradientAnswer, group: GradientGroup) -> str:
    """Return the names of the arguments of a group, or prefixes that cover just these."""
    count = len(group.arguments)
    if count == 1:
        return group.arguments[0]
    names = [name for each in found.groups for name in each.arguments]
    chosen = set(group.arguments)
    paths = [*covering(names, [name in chosen for name in names])]
    return _some(paths) + (f" ({count} arguments)" if len(paths) != count else "")


def _causes(group: GradientGroup, top: int | None) -> Table:
    """Return the operations of a group, each with its line, its reason and its remedy."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=theme.PRIMITIVE)
    table.add_column(style=theme.BINDER, overflow="fold")
    table.add_column(overflow="fold")
    shown, rest = split(group.causes, top)
    for cause in shown:
        for number, (line, style) in enumerate(_lines(cause)):
            first = (cause.forward or cause.primitive, cause.source or "unknown line")
            table.add_row(*(first if number == 0 else ("", "")), Text(line, style=style))
    add_more(table, len(rest))
    return table


def _lines(cause: Cause) -> Iterator[tuple[str, StyleType]]:
    """Yield the lines of a cause: code, loops and branches around it, reason and remedy."""
    yield cause.code, ""
    around = [each for each in cause.path if not each.startswith("jit at ")]
    if cause.iteration:
        around.append(f"iteration {', '.join(map(str, cause.iteration))} (counted from 0)")
    if around:
        yield f"in {', '.join(around)}", theme.COMMENT
    if cause.reason:
        yield cause.reason, theme.COMMENT
    if cause.remedy:
        yield f"hint: {cause.remedy}", theme.COMMENT
