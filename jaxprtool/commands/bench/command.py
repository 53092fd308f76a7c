"""`jaxprtool bench`: the times of variants of a function, and their ratios."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import RUN, Panel
from jaxprtool.cli.running import file_to_save, printed_by_functions, require_device
from jaxprtool.cli.session import FunctionOptions, command, pipeline
from jaxprtool.errors import CheckError, OutputError

if TYPE_CHECKING:
    from jaxprtool.api.targets import TracedTarget
    from jaxprtool.commands.bench.turns import Bench
    from jaxprtool.passes.framework import Pipeline

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
    from jaxprtool.commands.bench import table as render
    from jaxprtool.commands.bench.bench import Options, benched
    from jaxprtool.commands.bench.turns import RoundLimits, read_baseline, with_baseline
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
        output.write_rendered(render.bench_table(result, output.width()))
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
