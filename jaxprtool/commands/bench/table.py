"""Times of variants as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.ir.documents import duration, in_bytes, plural
from jaxprtool.ir.notation.tokens import BinderToken
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn
from jaxprtool.render.views import Column, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.commands.bench.turns import BaselineRatios, Bench, BenchedVariant, Ratio


_VARIANT = Column("variant", BinderToken)


def bench_table(bench: Bench, width: int) -> Rendering:
    """Return the time of a call of each variant, and the one-time costs such as compilation."""
    parts: list[RenderableType] = [
        Text(heading(bench), style=tables.HEADING),
        Text(),
        drawn(_calls(bench)),
        *map(Text, _notes(bench)),
        Text(),
        drawn(_once(bench, _STEPS, duration)),
        Text(),
        drawn(_once(bench, _BYTES, in_bytes)),
    ]
    if bench.baseline is not None:
        parts += [Text(), drawn(_baseline(bench.baseline))]
    return Rendering(Group(*parts), width)


def heading(bench: Bench) -> str:
    """Return the program, its inputs and the number of rounds, on one line."""
    turns = "in turns, each in its own process" if bench.isolated else "in turns"
    how = turns if len(bench.variants) > 1 else "in its own process" if bench.isolated else ""
    rounds = f"{plural(bench.rounds, 'round')} {how}".strip()
    return f"{bench.name} on {', '.join(bench.devices[:4])}: {bench.inputs}; {rounds}"


def _calls(bench: Bench) -> Table:
    headings = ["a call", "±", *(("ratio", "95% interval") if bench.ratios else ())]
    columns = [_VARIANT, *map(number_column, headings), *([Column("")] if bench.ratios else ())]
    ratios = {ratio.of: _ratio(ratio) for ratio in bench.ratios}
    rows = []
    for variant in bench.variants:
        times = duration(variant.median_seconds), f"{variant.interval.precision:.1%}"
        rows.append([variant.name, *times, *ratios.get(variant.name, ())])
    return Table("", columns, rows)


#: The share of the machine's CPUs that other programs keep busy on a busy machine.
_BUSY = 0.1


def _notes(bench: Bench) -> Iterator[str]:
    """Yield what intervals say, and if other programs have disturbed the measurement."""
    intervals = "the intervals are" if len(bench.variants) > 1 else "± is"
    yield f"{intervals} of this run: another run may differ by more"
    others, cpus = bench.other_cpus, os.cpu_count() or 1
    if others is not None and others > _BUSY * cpus:
        yield (
            f"the machine was busy: other programs used {others:.1f} of {plural(cpus, 'CPU')} "
            "during the rounds, so times are longer and vary more"
        )


def _ratio(ratio: Ratio) -> tuple[str, str, str]:
    number, low, high = (
        f"{value:.3f}" if value < 10 else f"{value:,.1f}"
        for value in (ratio.ratio, ratio.low, ratio.high)
    )
    return number, f"{low}-{high}", ratio_verdict(ratio)


def ratio_verdict(ratio: Ratio) -> str:
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
    "trace": lambda variant: variant.trace_seconds,
    "passes": lambda variant: variant.passes_seconds or None,
    "lower": lambda variant: variant.lower_seconds,
    "compile": lambda variant: variant.compile_seconds,
    "first call": lambda variant: variant.first_call_seconds,
}
_BYTES: _Numbers = {
    "arguments": lambda variant: variant.memory.arguments if variant.memory else None,
    "results": lambda variant: variant.memory.outputs if variant.memory else None,
    "temporary": lambda variant: variant.memory.temporary if variant.memory else None,
    "estimate": lambda variant: variant.estimated_temporary_bytes,
}


def _once(bench: Bench, numbers: _Numbers, shown: Callable[[float], str]) -> Table:
    rows = []
    for variant in bench.variants:
        values = [of(variant) for of in numbers.values()]
        rows.append([variant.name, *("" if value is None else shown(value) for value in values)])
    return Table("", [_VARIANT, *map(number_column, numbers)], rows)


def _baseline(baseline: BaselineRatios) -> Table:
    columns = [_VARIANT, *map(number_column, ("ratio", "95% interval"))]
    rows = [[ratio.of, *_ratio(ratio)[:2]] for ratio in baseline.ratios]
    return Table(f"compared with {baseline.file}", columns, rows)
