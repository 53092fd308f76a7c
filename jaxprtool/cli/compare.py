"""`jaxprtool compare`: variants of a function on the same inputs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.options import OUTPUT, PASSES, RUN, Panel, names
from jaxprtool.cli.running import printed_by_functions
from jaxprtool.cli.session import Function, command, pipeline

_VARIANTS = Panel("Variants")
_TOLERANCE = Panel("What is tolerated")

_Others = Annotated[
    list[str] | None,
    options.target_argument("[TARGET]…", "Other functions or programs of the same arguments."),
]
_Passes = Annotated[
    list[str] | None,
    PASSES.option(
        "-p, --passes",
        "PIPELINE",
        'Passes to run first: a variant for each -p. -p "" is the function as it is traced.',
        autocompletion=completion.complete_passes,
    ),
]
_Backends = Annotated[
    Any,
    _VARIANTS.option(
        "--backends",
        "NAME,…",
        "A variant for each backend: cpu,gpu.",
        parser=names,
        autocompletion=completion.complete_backends,
    ),
]
_Precision = Annotated[
    Any,
    _VARIANTS.option(
        "--precision",
        "NAME,…",
        "A variant for each precision of matrix products that name none: default,highest.",
        parser=names,
    ),
]
_OpByOp = Annotated[
    bool,
    _VARIANTS.flag("--op-by-op", "Each variant also one equation at a time, so nothing is fused."),
]
_Rtol = Annotated[
    float | None,
    _TOLERANCE.option(
        "--rtol",
        "ERROR",
        "Relative error; else what JAX's tests tolerate of the dtype: 1e-6 of f32, 1e-2 of bf16.",
        min=0,
    ),
]
_Atol = Annotated[
    float | None, _TOLERANCE.option("--atol", "ERROR", "Absolute error; else the same.", min=0)
]
_Isolate = Annotated[
    bool,
    RUN.flag("--isolate", "Each variant in a process of its own: one that crashes is told of."),
]
_Trials = Annotated[
    int,
    RUN.option(
        "--trials",
        "N",
        "Try N random inputs; the first for which a variant differs is made as small as it can be.",
        min=1,
    ),
]
_Html = Annotated[
    str | None,
    OUTPUT.option("--html", "FILE.html", "Write a page of all results, and of where they part."),
]
_Bisect = Annotated[
    bool,
    Panel("Where they part").flag(
        "--bisect", "Find the pass and the first equation at which variants part."
    ),
]


@command
def compare(
    function: Function,
    others: _Others = None,
    types: options.Types = None,
    passes: _Passes = None,
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
    html: _Html = None,
    json: options.Json = False,
) -> None:
    """Run variants of a function on the same inputs, and say how far their results are apart.

    Variants are all of TARGETs x pipelines x precisions x backends. The first is the reference.
    Exit code 1 if a result is not within tolerance of its own.

    [bold]Examples[/]

      jaxprtool compare samples/transformer.py:loss -p "" -p "-O2"
      jaxprtool compare samples/transformer.py:loss --op-by-op --rtol 1e-5
      jaxprtool compare samples/transformer.py:loss -p grad -p "grad, -O2" --bisect
      jaxprtool compare samples/transformer.py:loss -p "" -p "-O2" --html compare.html
    """
    output.refuse_stdout("--html", html, "compare")
    function.start(cache=True)
    from jaxprtool.api.investigate.compare import Checks, comparison
    from jaxprtool.api.investigate.variants import Axes, planned
    from jaxprtool.execute.compare.measures import Tolerance
    from jaxprtool.passes.patterns import NamedRewrites
    from jaxprtool.render.reports import compare as render

    users = NamedRewrites(rewrite or ())
    pipelines = [pipeline(text, plugin) for text in passes or [""]]
    if rewrite and not passes:
        pipelines.append(users.before(pipelines[0]))
    axes = Axes(pipelines, backends or (None,), precision or (None,), op_by_op)
    targets = function.each_of([function.target, *(others or ())])
    for target in targets:
        target.import_module()
    axes.require_backends()
    traced = [each.trace(pipelines[0], runs=True, types=types, symbolic=True) for each in targets]
    named = [(each.target, made.program) for each, made in zip(targets, traced, strict=True)]
    plan = planned(named, axes, function.on_progress)
    checks = Checks(seed, trials, bisect, isolate)
    with printed_by_functions(json):
        found = comparison(
            plan, traced[0].given_to, Tolerance(rtol, atol), checks, function.on_progress
        )
    if html is not None:
        from jaxprtool.render.page.comparison import comparison_page

        output.write_page(comparison_page(found), html)
    if json:
        output.write_json(found)
    else:
        output.write_rendered(render.comparison(found, output.width()))
    for each in found.unproven:
        given = "--args gives others" if found.random else "other values in --args would prove more"
        output.warning(f"{each}, on {found.inputs}; {given}")
    if not found.within or (strict and found.unproven):
        raise typer.Exit(1)
