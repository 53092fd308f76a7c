"""NaNs and infinities that were found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.quantities import plural
from jaxprtool.render import theme
from jaxprtool.render.rendering import Rendering
from jaxprtool.render.stats import new_table

if TYPE_CHECKING:
    from jaxprtool.execute.nans import BadValue, NanSearch, Operand
    from jaxprtool.render.documents.found import NansDocument

#: So many results, equations or devices are named.
_FEW = 4


def first_found(found: NanSearch, width: int) -> Rendering:
    """Return all that is known of the first that was found, and how many others there are."""
    first = found.first
    if first is None:
        return Rendering(Text(f"{found.name}: no equation makes a NaN or an infinity"), width)
    parts: list[RenderableType] = [Text(_heading(found, first), style=theme.HEADING), Text()]
    if first.source:
        line = Text(first.source, style=theme.BINDER)
        parts.append(line.append(f"  {first.code}" if first.code else "", style="default"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style=theme.COMMENT, no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in _facts(first):
        facts.add_row(name, fact)
    parts.append(facts)
    if first.operands:
        parts += [Text(), _values("what it was given", first.operands)]
        if first.way and first.way != first.operands:
            parts += [Text(), _values("what led to it, the nearest first", first.way)]
    others = len(found.found) - 1
    if others:
        verb = "makes" if others == 1 else "make"
        parts += [Text(), Text(f"{plural(others, 'other')} {verb} one: --all", style=theme.COMMENT)]
    return Rendering(Group(*parts), width)


def all_found(found: NanSearch, width: int) -> Rendering:
    """Return a row for each that was found; those that reach a result first."""
    if not found.found:
        return first_found(found, width)
    table = new_table(f"{found.name}: {len(found.found):,} found")
    table.add_column("what")
    table.add_column("made by", style=theme.PRIMITIVE)
    table.add_column("line", style=theme.BINDER, overflow="fold")
    table.add_column("round")
    table.add_column("reaches", overflow="fold")
    for each in found.found:
        rounds = ", ".join(map(str, each.iteration))
        maker = each.primitive or each.argument or "the program"
        table.add_row(each.kind, maker, each.source, rounds, _reached(each))
    return Rendering(table, width)


def _heading(found: NanSearch, first: BadValue) -> str:
    a = "a NaN" if first.kind == "NaN" else "an infinity"
    reached = f"reaches {_reached(first)}"
    if first.argument:
        return f"{found.name}: {a} comes with the argument {first.argument} and {reached}"
    if not first.primitive:
        verb = "is" if len(first.reaches) == 1 else "are"
        return f"{found.name}: {_reached(first)} {verb} NaN (held by the program)"
    return f"{found.name}: {first.primitive} makes {a}, which {reached}"


def _reached(found: BadValue) -> str:
    if found.reaches:
        return _some(found.reaches)
    return f"no result: {found.dropped} drops it" if found.dropped else "no result"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {more:,} more" if more > 0 else "")


def _facts(first: BadValue) -> Iterator[tuple[str, str]]:
    kinds = "infinite" if first.kind == "infinity" else "NaN"
    if not first.count:
        yield "gives", f"{first.type}, some {kinds}"
    elif first.size == 1:
        yield "gives", f"{first.type}, {kinds}"
    else:
        which = "all" if first.count == first.size else f"{first.count:,} of {first.size:,}"
        place = ", ".join(map(str, first.position))
        yield "gives", f"{first.type}, {which} {kinds}, the first at [{place}]"
    if first.devices:
        yield "on", _some(first.devices)
    if first.path:
        yield "in", ", ".join(first.path)
    if first.iteration:
        yield "round", ", ".join(map(str, first.iteration)) + " (counted from 0)"
    if first.times > 1:
        yield "times", f"{first.times:,}"
    if first.scope:
        yield "scope", first.scope
    if first.forward:
        yield "derivative of", first.forward
    if first.leads_to:
        yield "leads to", _some([f"another by {each}" for each in first.leads_to])


def _values(heading: str, values: Sequence[Operand]) -> Table:
    table = new_table(heading)
    table.add_column("value", overflow="fold")
    table.add_column("type", style=theme.TYPE, overflow="fold")
    table.add_column("least", justify="right")
    table.add_column("greatest", justify="right")
    table.add_column("there", justify="right")
    for value in values:
        what = Text(value.argument or value.primitive or "a constant", style=theme.PRIMITIVE)
        what.append(f" {value.source}" if value.source else "", style=theme.BINDER)
        wrong = [(value.nans, "NaN"), (value.infs, "infinite")]
        bad = ", ".join(f"{count:,} {kind}" for count, kind in wrong if count)
        what.append(f" ({bad})" if bad else "", style=theme.COMMENT)
        numbers = map(_number, (value.low, value.high, value.element))
        table.add_row(what, value.type, *numbers)
    return table


def _number(number: object) -> str:
    return "" if number is None else f"{number:.6g}" if isinstance(number, float) else str(number)


def nans_document(found: NanSearch) -> NansDocument:
    """Return the document of what was found: the first, and all others."""
    first = found.first
    return {
        "name": found.name,
        "found": first is not None,
        "primitive": first.primitive if first else "",
        "source": first.source if first else "",
        "path": first.path if first else (),
        "iteration": first.iteration if first else (),
        "operands": first.operands if first else (),
        "all": found.found,
    }
