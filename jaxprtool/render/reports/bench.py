"""Times of variants as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.listing import Rendering
from jaxprtool.render.terminal.tables import new_table, text

if TYPE_CHECKING:
    from rich.table import Table

    from jaxprtool.execute.bench import BaselineRatios, Bench, BenchedVariant, Ratio


def table(found: Bench, width: int) -> Rendering:
    """Return the time of a call of each variant, and the one-time costs such as compilation."""
    parts: list[RenderableType] = [
        Text(heading(found), style=tables.HEADING),
        Text(),
        _calls(found),
        Text(),
        _once(found, _STEPS, duration),
        Text(),
        _once(found, _BYTES, in_bytes),
    ]
    if found.baseline is not None:
        parts += [Text(), _baseline(found.baseline)]
    return Rendering(Group(*parts), width)


def heading(found: Bench) -> str:
    """Return the program, its inputs and the number of rounds, on one line."""
    turns = "in turns, each in its own process" if found.isolated else "in turns"
    how = turns if len(found.variants) > 1 else "in its own process" if found.isolated else ""
    rounds = f"{plural(found.rounds, 'round')} {how}".strip()
    return f"{found.name} on {', '.join(found.devices[:4])}: {found.inputs}; {rounds}"


def _calls(found: Bench) -> Table:
    columns = [text("variant", tables.BINDER), *map(_number, ("a call", "±"))]
    if found.ratios:
        columns += [*map(_number, ("ratio", "95% interval")), text("")]
    made = new_table("", *columns)
    ratios = {each.of: each for each in found.ratios}
    for each in found.variants:
        cells = [each.name, duration(each.median_seconds), f"{each.interval.precision:.1%}"]
        made.add_row(*cells, *(_ratio(ratios[each.name]) if each.name in ratios else ()))
    return made


def _ratio(ratio: Ratio) -> tuple[str, str, str]:
    number, low, high = (
        f"{each:.3f}" if each < 10 else f"{each:,.1f}"
        for each in (ratio.ratio, ratio.low, ratio.high)
    )
    return number, f"{low}-{high}", verdict(ratio)


def verdict(ratio: Ratio) -> str:
    """Return the verdict of a ratio: faster, slower, or no difference."""
    if not ratio.differs:
        return "no difference seen"
    if ratio.ratio < 1:
        return f"{_times(1 / ratio.ratio)} times faster"
    return f"{_times(ratio.ratio)} times slower"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}" if ratio >= 1.02 else f"{ratio:.3f}"


_Numbers = Mapping[str, Callable[["BenchedVariant"], float | None]]

#: The one-time measurements, by their headings.
_STEPS: _Numbers = {
    "trace": lambda each: each.trace_seconds,
    "passes": lambda each: each.passes_seconds or None,
    "lower": lambda each: each.lower_seconds,
    "compile": lambda each: each.compile_seconds,
    "first call": lambda each: each.first_call_seconds,
}
_BYTES: _Numbers = {
    "arguments": lambda each: each.memory.arguments if each.memory else None,
    "results": lambda each: each.memory.outputs if each.memory else None,
    "temporary": lambda each: each.memory.temporary if each.memory else None,
    "estimate": lambda each: each.estimated_temporary_bytes,
}


def _once(found: Bench, numbers: _Numbers, shown: Callable[[float], str]) -> Table:
    made = new_table("", text("variant", tables.BINDER), *map(_number, numbers))
    for variant in found.variants:
        values = [of(variant) for of in numbers.values()]
        made.add_row(variant.name, *("" if each is None else shown(each) for each in values))
    return made


def _baseline(baseline: BaselineRatios) -> RenderableType:
    columns = text("variant", tables.BINDER), *map(_number, ("ratio", "95% interval"))
    made = new_table(f"compared with {baseline.file}", *columns)
    for each in baseline.ratios:
        made.add_row(each.of, *_ratio(each)[:2])
    return made


def _number(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)
