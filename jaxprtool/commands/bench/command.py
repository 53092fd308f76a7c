"""`jaxprtool bench`: the times of variants of a function, and their ratios."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.cli import options, output
from jaxprtool.cli.options import RUN, Panel
from jaxprtool.cli.session import (
    FunctionOptions,
    command,
    file_to_save,
    pipeline,
    printed_by_functions,
    require_device,
)
from jaxprtool.errors import CheckError, OutputError
from jaxprtool.ir.documents import duration, in_bytes, plural
from jaxprtool.ir.notation import BinderToken
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn
from jaxprtool.render.views import Column, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.api.targets import TracedTarget
    from jaxprtool.commands.bench.bench import BaselineRatios, Bench, BenchedVariant, Ratio
    from jaxprtool.passes import Pipeline

# --- table ----------------------------------------------------------------------------------------
# Times of variants as text.

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


# --- command --------------------------------------------------------------------------------------
# `jaxprtool bench`: the times of variants of a function, and their ratios.

_BASELINE = Panel("Baseline")


def fraction(text: str) -> float:
    """Return a percentage such as `2%` as a fraction."""
    if not re.fullmatch(r"\d+(\.\d*)?%", text) or not 0 < (percent := float(text[:-1])) < 100:
        raise typer.BadParameter(f"'{text}' is not a percentage such as 2%")
    return percent / 100


_Others = Annotated[
    list[str] | None,
    options.target_argument(
        "[TARGET]…",
        "Other functions or programs that take the same arguments. Append @REVISION for a git "
        "revision: model.py:loss@HEAD~1.",
    ),
]
_Repeat = Annotated[
    int | None,
    RUN.option(
        "--repeat",
        "N",
        "Number of rounds; each times every variant once. With --precision, the maximum. Default: "
        "50, or 2000 with --precision, but at most as many as fit in a minute.",
        min=7,
    ),
]
_Precision = Annotated[
    Any,
    RUN.option(
        "--precision",
        "PERCENT",
        "Repeat until the interval of every ratio is at most plus or minus this: 2%.",
        parser=fraction,
    ),
]
_Isolate = Annotated[bool, RUN.flag("--isolate", "Run each variant in its own process.")]
_Save = Annotated[
    str | None,
    _BASELINE.option(
        "--save-baseline", "FILE.json", "Write the times to FILE, as a baseline of later runs."
    ),
]
_Compare = Annotated[
    str | None,
    _BASELINE.option(
        "--compare-baseline",
        "FILE.json",
        "Also show the ratio of each variant to its time in FILE.",
    ),
]
_FailOver = Annotated[
    float | None,
    _BASELINE.option(
        "--fail-over",
        "RATIO",
        "Exit with code 1 if a variant takes more than RATIO times the baseline: 1.1.",
        min=0,
    ),
]


@command
def bench_command(
    function: FunctionOptions,
    others: _Others = None,
    passes: options.VariantPasses = None,
    plugin: options.Plugin = None,
    backend: options.Backend = None,
    repeat: _Repeat = None,
    precision: _Precision = None,
    isolate: _Isolate = False,
    seed: options.Seed = 0,
    save_baseline: _Save = None,
    compare_baseline: _Compare = None,
    fail_over: _FailOver = None,
    json: options.Json = False,
) -> None:
    """Time variants in turns, with confidence intervals of ratios.

    Variants are all combinations of TARGETs and pipelines. The first is the reference.

    [bold]Examples[/]

      jaxprtool bench samples/transformer.py:loss -p "" -p "-O2"
      jaxprtool bench samples/transformer.py:loss@HEAD~1 samples/transformer.py:loss
      jaxprtool bench samples/layers.py:loss -p grad -p "grad, outline" --precision 2%
      jaxprtool bench samples/rnn.py:loss --save-baseline rnn.json
    """
    output.refuse_stdout("--save-baseline", save_baseline, "bench")
    if fail_over is not None and compare_baseline is None:
        raise OutputError(
            "--fail-over needs --compare-baseline", "add --compare-baseline FILE.json"
        )
    if fail_over is not None and not fail_over > 0:
        raise OutputError("--fail-over takes a positive ratio, such as 1.1")
    function.start(cache=False)
    from jaxprtool.commands.bench.bench import (
        Options,
        RoundLimits,
        benched,
        read_baseline,
        with_baseline,
    )
    from jaxprtool.commands.compare.requested import Axes, planned
    from jaxprtool.execute.running.run import has_effects

    baseline = None if compare_baseline is None else read_baseline(compare_baseline)
    pipelines = [pipeline(text, plugin) for text in passes or [""]]
    targets = [function.target, *(others or ())]
    require_device(function, backend)
    with file_to_save(save_baseline) as file:
        traced = _traced(function, targets, pipelines)
        named = [(name, trace.program) for name, (trace, _) in zip(targets, traced, strict=True)]
        with traced[0][0].mesh_set():
            plan = planned(named, Axes(pipelines, (backend,)), function.on_progress)
        # A program traced in another process has only the types of its arguments.
        values = next((trace for trace, seconds in traced if seconds is not None), traced[0][0])
        times = [seconds for _, seconds in traced]
        for entry in plan:
            if repeat is not None and has_effects(entry.variant.program):
                output.note(f"{entry.variant.name} has effects, which each of its calls repeats")
        measuring = Options(RoundLimits(repeat, precision), isolate, seed)
        with printed_by_functions(json):
            result = benched(plan, values.given_to, times, measuring, function.on_progress)
        if baseline is not None:
            result = with_baseline(result, baseline)
        if file:
            from jaxprtool.render.documents import document_text

            file.write(document_text(result).encode())
    if json:
        output.write_json(result)
    else:
        output.write_rendered(bench_table(result, output.width()))
    _say(result)
    _require_no_slower(result, fail_over)


def _traced(
    function: FunctionOptions, targets: Sequence[str], pipelines: Sequence[Pipeline]
) -> list[tuple[TracedTarget, float | None]]:
    """Return each TARGET as traced, and the seconds of tracing if it was traced here.

    A TARGET at a git revision is traced in another process.
    """
    from jaxprtool.api.targets import find_elsewhere, is_file
    from jaxprtool.loading.remote_target import elsewhere

    first, auto = pipelines[0], any(steps.partitions for steps in pipelines)
    places = [elsewhere(target) for target in targets]
    functions = function.each_of([place.target for place in places])
    for target_function, place in zip(functions, places, strict=True):
        if place.is_here:
            target_function.import_module()
    traced: list[tuple[TracedTarget, float | None]] = []
    for target_function, place in zip(functions, places, strict=True):
        if place.is_here:
            trace = target_function.trace(first, runs=True, symbolic=True, auto=auto)
            traced.append((trace, None if is_file(place.target) else trace.seconds))
        else:
            function.on_progress(f"tracing {place}")
            entry = find_elsewhere(place, target_function.arguments())
            traced.append((target_function.trace_entry(entry, first), None))
    return traced


def _say(result: Bench) -> None:
    """Warn about times that are less precise than wanted, or from another machine."""
    wanted = result.wanted_precision
    if wanted is not None and result.precision > wanted:
        output.warning(
            f"the precision of {100 * wanted:.3g}% was not reached in {result.rounds} rounds: "
            f"it is {100 * result.precision:.3g}%"
        )
    if (then := result.baseline) is not None:
        for mismatch in then.mismatches:
            output.warning(f"{then.file}: {mismatch}")
        for name in then.missing:
            output.note(f"{then.file} has no variant {name}")


def _require_no_slower(result: Bench, most: float | None) -> None:
    """Raise CheckError if a variant is slower than in the baseline by more than a ratio."""
    if result.baseline is None or most is None:
        return
    slower = [ratio for ratio in result.baseline.ratios if ratio.ratio > most and ratio.low > 1]
    if slower:
        details = [
            (
                ratio.of,
                f"{ratio.ratio:.3g} times (95% interval {ratio.low:.3g} to {ratio.high:.3g})",
            )
            for ratio in slower
        ]
        raise CheckError(
            f"{result.name} takes more than {most:g} times the time in {result.baseline.file}",
            details=details,
        )
