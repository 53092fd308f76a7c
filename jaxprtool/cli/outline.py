"""`jaxprtool outline`: what a function repeats, and what outlining it saves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from jaxprtool.cli import options, output
from jaxprtool.cli.options import RUN, Panel
from jaxprtool.cli.progress import Told
from jaxprtool.cli.run import note_random, printed_by_functions, require_device
from jaxprtool.cli.start import start_jax
from jaxprtool.errors import OutputError, PipelineError

if TYPE_CHECKING:
    from jaxprtool.analysis.repetition import Repetition
    from jaxprtool.execute.fill import Filled
    from jaxprtool.execute.run import RunReport
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.outline import Outline
    from jaxprtool.render.documents.found import OutlineDocument

_OUTLINED = Panel("What is outlined")


class Mark(StrEnum):
    """How the calls of repeated bodies are marked for XLA."""

    unit = "unit"
    call = "call"
    plain = "plain"


_Copies = Annotated[
    int | None, _OUTLINED.option("--copies", "N", "The least number of copies of a body.", min=2)
]
_Equations = Annotated[
    int | None,
    _OUTLINED.option(
        "--equations",
        "N",
        "Take bodies of so many equations; unless given, those that save more than they cost.",
        min=1,
    ),
]
_Mark = Annotated[
    Mark | None,
    _OUTLINED.option(
        "--mark",
        "<unit|call|plain>",
        "XLA compiles each body once (unit, the default), keeps the calls of it (call), or "
        "inlines them (plain).",
    ),
]
_Compile = Annotated[
    bool,
    RUN.flag("--compile", "Compile and run both, as traced and outlined: times and memory."),
]


@options.command
def outline(
    function: options.Function,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    copies: _Copies = None,
    equations: _Equations = None,
    mark: _Mark = None,
    compile: _Compile = False,
    backend: options.Backend = None,
    seed: options.Seed = 0,
    json: options.Json = False,
    *,
    told: Told,
) -> None:
    """Show what a function repeats: why it is slow to compile, and what outlining it saves.

    [bold]Examples[/]

      jaxprtool outline samples/layers.py:loss -p value_and_grad
      jaxprtool outline samples/layers.py:loss --compile
      jaxprtool opt samples/layers.py:loss -p outline -o loss.jaxpr
    """
    if backend is not None and not compile:
        hint = "add --compile"
        raise OutputError("--backend goes with --compile, without which nothing runs", hint)
    start_jax(told, function.x64)
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.passes.outline import Outline
    from jaxprtool.render import repetition as render

    given = {"copies": copies, "equations": equations, "mark": mark and mark.value}
    outlining = Outline(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    pipeline = options.pipeline(passes, plugin)
    entry = function.find(told, runs=compile)
    require_device(backend)
    start = time.perf_counter()
    traced = function.trace(entry, pipeline, told)
    programs = options.each(pipeline_steps.run(pipeline, traced, told))
    trace_time = time.perf_counter() - start
    told("outlining")
    outlined = [_outlined(outlining, program) for _, program in programs]
    to_run = None
    if compile:
        values = dict(zip(traced.arg_names, entry.arguments(), strict=True))
        to_run = _filled(programs, values, seed)
    found = [
        _found(outlining, old, new) for (_, old), (new, _) in zip(programs, outlined, strict=True)
    ]
    document: OutlineDocument = {"programs": found}
    output.say_if_partitioned((each for _, each in programs), json)
    if not json:
        for i, each in enumerate(found):
            if i:
                output.write("")
            output.write_rendered(render.repetition_table(each, output.width()))
    if to_run is not None:
        ((_, before),), ((after, outline_time),) = programs, outlined
        with printed_by_functions(json):
            reports = _run(before, after, to_run.arguments, backend, told)
        times = trace_time, outline_time
        document["measured"] = render.measured_document(reports, to_run.random, *times)
        if not json:
            rows = render.measured_rows(reports, *times, found[0].memory)
            titles = ("", "as traced", "outlined", "")[: 2 if after is before else 4]
            output.write("")
            output.write_table(titles, rows, titles[1:3])
    if json:
        output.write_json(document)


def _found(outlining: Outline, before: Program, after: Program) -> Repetition:
    """Return what a program repeats, also if that gains too little to be outlined."""
    from jaxprtool.analysis.repetition import repetition
    from jaxprtool.passes.outline import LEAST

    found = repetition(after, before)
    if found.bodies or outlining.equations is not None:
        return found
    small, _ = _outlined(replace(outlining, equations=LEAST), before)
    return replace(found, small=repetition(small, before).bodies)


def _outlined(outlining: Outline, program: Program) -> tuple[Program, float]:
    """Return a program outlined, and how many seconds that took."""
    from jaxprtool.cli.pipeline_steps import Watcher
    from jaxprtool.passes.pipeline import Pipeline, Step

    watcher = Watcher(before_all=False, after_all=False, after=frozenset())
    ((_, result),) = options.each(Pipeline((Step(outlining),)).run(program, watcher))
    return result, watcher.rows[0].seconds


def _filled(
    programs: Sequence[tuple[str, Program]], values: Mapping[str, Any], seed: int
) -> Filled:
    """Return the arguments that the one program there is runs on. Raises PipelineError."""
    from jaxprtool.execute.fill import fill, refitted
    from jaxprtool.ir.ref_contents import with_contents

    if len(programs) != 1:
        names = ", ".join(name for name, _ in programs) or "none"
        raise PipelineError(f"--compile takes one program, and the passes gave {names}")
    program = with_contents(programs[0][1])
    fitting, aside = refitted(program, values)
    filled = fill(program, fitting, seed)
    note_random(filled, seed, aside)
    return filled


def _run(
    before: Program, after: Program, arguments: Sequence[Any], backend: str | None, told: Told
) -> list[RunReport]:
    """Compile and run a program as traced and, if it is another one, outlined."""
    from jaxprtool.execute import run
    from jaxprtool.execute.compile_cache import compiled_afresh
    from jaxprtool.ir.ref_contents import with_contents

    device = run.choose_device(before, backend, None)
    programs = {"as traced": before} | ({} if after is before else {"outlined": after})
    reports = []
    with compiled_afresh():
        for which, program in programs.items():
            tell = partial(_tell, told, which)
            reports.append(run.run(with_contents(program), arguments, device, told=tell))
    return reports


def _tell(told: Told, which: str, doing: str) -> None:
    told(f"{doing} {which}")
