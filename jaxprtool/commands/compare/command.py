"""`jaxprtool compare`: variants of a function on the same inputs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.options import RUN, Panel, names
from jaxprtool.cli.session import FunctionOptions, command, pipeline, printed_by_functions

_VARIANTS = Panel("Variants")
_TOLERANCE = Panel("Tolerances")

_Others = Annotated[
    list[str] | None,
    options.target_argument(
        "[TARGET]…", "Other functions or programs that take the same arguments."
    ),
]
_Backends = Annotated[
    Any,
    _VARIANTS.option(
        "--backends",
        "NAME,…",
        "Add a variant for each backend: cpu,gpu.",
        parser=names,
        autocompletion=completion.complete_backends,
    ),
]
_Precision = Annotated[
    Any,
    _VARIANTS.option(
        "--precision",
        "NAME,…",
        "Add a variant for each default precision of matrix products: default,highest.",
        parser=names,
    ),
]
_OpByOp = Annotated[
    bool,
    _VARIANTS.flag("--op-by-op", "Also run each variant one equation at a time, without fusion."),
]
_Rtol = Annotated[
    float | None,
    _TOLERANCE.option(
        "--rtol",
        "ERROR",
        "Relative tolerance, also without --atol. Default: the errors that rounding explains.",
        min=0,
    ),
]
_Atol = Annotated[
    float | None,
    _TOLERANCE.option(
        "--atol", "ERROR", "Absolute tolerance, also without --rtol. Default: as for --rtol.", min=0
    ),
]
_Isolate = Annotated[
    bool,
    RUN.flag("--isolate", "Run each variant in its own process, and report one that crashes."),
]
_Trials = Annotated[
    int,
    RUN.option(
        "--trials",
        "N",
        "Try N random inputs, and minimize the first one for which a variant differs.",
        min=1,
    ),
]
_Out = Annotated[
    str | None,
    options.out_option(
        "Write an HTML page with all results and the first difference.", "FILE.html"
    ),
]
_Bisect = Annotated[
    bool,
    Panel("First difference").flag(
        "--bisect", "Find the pass and the first equation at which variants differ."
    ),
]


@command
def compare_command(
    function: FunctionOptions,
    others: _Others = None,
    types: options.Types = None,
    passes: options.VariantPasses = None,
    plugin: options.Plugin = None,
    rewrite: options.Rewrite = None,
    backends: _Backends = None,
    precision: _Precision = None,
    op_by_op: _OpByOp = False,
    rtol: _Rtol = None,
    atol: _Atol = None,
    isolate: _Isolate = False,
    strict: options.Strict = False,
    seed: options.Seed = 0,
    trials: _Trials = 1,
    bisect: _Bisect = False,
    out: _Out = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Measure how the results of variants of a function differ.

    Variants are all combinations of TARGETs, pipelines, precisions and backends. The first is the
    reference. If a function differs with and without jit, --op-by-op --bisect names the equation.
    Exit code 1 if a result of another variant is out of tolerance.

    [bold]Examples[/]

      jaxprtool compare samples/transformer.py:loss -p "" -p "-O2"
      jaxprtool compare samples/transformer.py:loss --op-by-op --rtol 1e-5
      jaxprtool compare samples/transformer.py:loss -p grad -p "grad, -O2" --bisect
      jaxprtool compare samples/transformer.py:loss -p "" -p "-O2" -o compare.html
    """
    rows = options.row_limit(top, all)
    output.refuse_stdout("-o", out, "compare")
    output.check_out("compare", out, json, (), "jaxprtool emit TARGET", page=True)
    function.start(cache=True)
    from jaxprtool.commands.compare import table as render
    from jaxprtool.commands.compare.compare import Checks, compare_planned
    from jaxprtool.commands.compare.requested import Axes, planned
    from jaxprtool.commands.compare.variants import Tolerance
    from jaxprtool.passes.patterns import NamedRewrites

    users = NamedRewrites(rewrite or ())
    pipelines = [pipeline(text, plugin) for text in passes or [""]]
    if rewrite and not passes:
        pipelines.append(users.before(pipelines[0]))
    axes = Axes(pipelines, backends or (None,), precision or (None,), op_by_op)
    targets = function.each_of([function.target, *(others or ())])
    for target in targets:
        target.import_module()
    axes.require_backends()
    auto = any(steps.partitions for steps in pipelines)
    traced = [
        target.trace(pipelines[0], runs=True, types=types, symbolic=True, auto=auto)
        for target in targets
    ]
    named = [(target.target, trace.program) for target, trace in zip(targets, traced, strict=True)]
    with traced[0].mesh_set():
        plan = planned(named, axes, function.on_progress)
    checks = Checks(seed, trials, bisect, isolate)
    with printed_by_functions(json):
        result = compare_planned(
            plan, traced[0].given_to, Tolerance(rtol, atol), checks, function.on_progress
        )
    if out is not None:
        from jaxprtool.commands.compare.table import comparison_page

        output.write_page(comparison_page(result), out)
    if json:
        output.write_json(result)
    else:
        output.write_rendered(render.comparison_tables(result, output.width(), rows))
        if text := render.how_to_bisect(result, bisect):
            output.note(text)
    for message in result.unproven:
        advice = (
            "pass other values in --args"
            if result.random
            else "other values in --args would be a stronger check"
        )
        output.warning(f"{message}, on {result.inputs}; {advice}")
    if not result.within or (strict and result.unproven):
        raise typer.Exit(1)
