"""`jaxprtool outline`: repeated code in a function, and what outlining saves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from jaxprtool.cli import options, output
from jaxprtool.cli.options import RUN, Panel
from jaxprtool.cli.output import OnProgress, silent
from jaxprtool.cli.session import (
    Ready,
    Session,
    command,
    only_program,
    printed_by_functions,
    ready,
    require_device,
)
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.api.targets import TracedTarget
    from jaxprtool.cli.session import Named
    from jaxprtool.commands.outline.compile_time import CompileProfile, CompileWay
    from jaxprtool.execute.running.run import RunReport
    from jaxprtool.ir.program import Program
    from jaxprtool.ir.repetition import Repetition
    from jaxprtool.passes.loops.outline import Outline


_OUTLINED = Panel("Outlining")


#: The XLA marks of calls of repeated bodies.
Mark = Literal["unit", "call", "plain"]

_Copies = Annotated[
    int | None, _OUTLINED.option("--copies", "N", "The minimum number of copies of a body.", min=2)
]
_Equations = Annotated[
    int | None,
    _OUTLINED.option(
        "--equations",
        "N",
        "The minimum number of equations of a body. Default: outline bodies that save more than "
        "they cost.",
        min=1,
    ),
]
_Mark = Annotated[
    Mark | None,
    _OUTLINED.choice(
        "--mark",
        Mark,
        "XLA compiles each body once (unit, the default), keeps calls to it (call), or inlines "
        "it (plain).",
    ),
]
_Compile = Annotated[
    bool,
    RUN.flag(
        "--compile",
        "Compile and run the program as traced and outlined, and show times and memory.",
    ),
]


_CompileProfile = Annotated[
    bool,
    RUN.flag(
        "--compile-profile",
        "Compile the program, and show the times of tracing, lowering and XLA's passes, and the "
        "bodies that take longest, by source line. Also compile the variants that are faster.",
    ),
]


@command
def outline_command(
    session: Session,
    copies: _Copies = None,
    equations: _Equations = None,
    mark: _Mark = None,
    compile: _Compile = False,
    compile_profile: _CompileProfile = False,
    backend: options.Backend = None,
    seed: options.Seed = 0,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Show code that repeats, and what shortens compilation.

    [bold]Examples[/]

      jaxprtool outline samples/layers.py:loss -p value_and_grad
      jaxprtool outline samples/layers.py:loss --compile
      jaxprtool outline samples/layers.py:loss -p grad --compile-profile
      jaxprtool opt samples/layers.py:loss -p outline -o loss.jaxpr
    """
    most = options.row_limit(top, all)
    compiles = compile or compile_profile
    if backend is not None and not compiles:
        raise OutputError("--backend needs --compile or --compile-profile")
    session.start()
    from jaxprtool.commands.outline import table as render
    from jaxprtool.commands.outline.compile_time import unrolled_loops
    from jaxprtool.commands.outline.table import unrolled_lines
    from jaxprtool.passes.loops.outline import Outline

    settings = {"copies": copies, "equations": equations, "mark": mark}
    outlining = Outline(**{name: value for name, value in settings.items() if value is not None})  # type: ignore[arg-type]
    require_device(session.function, backend)
    traced = session.traced(runs=compiles)
    start = time.perf_counter()
    programs = session.programs(traced)
    trace_time = traced.seconds + time.perf_counter() - start
    session.on_progress("outlining")
    outlined = [_outlined(outlining, program) for _, program in programs]
    to_run = None
    if compiles:
        option = "--compile" if compile else "--compile-profile"
        program = only_program(f"{option} takes", programs)
        to_run = ready(traced.given_to(program), seed, backend)
        to_run.note_random()
    repetitions = [
        _found(outlining, old, new) for (_, old), (new, _) in zip(programs, outlined, strict=True)
    ]
    ways = _ways(session, traced, programs, outlining, outlined[0][0])
    loops = [loop for _, program in programs for loop in unrolled_loops(program)]
    measured = profile = rolled = None
    if to_run is not None and compile_profile:
        profile, ways = _profiled(to_run, trace_time, ways, session.on_progress)
        rolled = _without_unroll(to_run, session.on_progress) if loops else None
    output.say_if_partitioned((program for _, program in programs), json)
    if not json:
        _write(repetitions, [way for way, _ in ways], profile, most)
        if loops:
            seconds = (profile.compile_cpu, rolled) if profile and rolled is not None else None
            output.write_text("")
            output.write_rendered(unrolled_lines(loops, seconds, output.width()))
    if to_run is not None and compile:
        ((_, before),), ((after, outline_time),) = programs, outlined
        with printed_by_functions(json):
            reports = _run(before, after, to_run, session.on_progress)
        times = trace_time, outline_time
        measured = render.measured_document(reports, to_run.filled.random, *times)
        if not json:
            rows = render.measured_rows(reports, *times, repetitions[0].memory)
            titles = ("", "as traced", "outlined", "")[: 2 if after is before else 4]
            output.write_text("")
            output.write_table(titles, rows, titles[1:3])
    for advice in _recompile_advice(session.target):
        output.note(advice)
    if json:
        from jaxprtool.commands.outline.table import OutlineDocument

        shown = [way for way, _ in ways]
        output.write_json(OutlineDocument(repetitions, measured, shown, loops, profile))


def _write(
    repetitions: Sequence[Repetition],
    ways: Sequence[CompileWay],
    profile: CompileProfile | None,
    top: int | None,
) -> None:
    """Write the repetition in programs, the ways to compile faster, and the compile profile."""
    from jaxprtool.commands.outline import table

    width = output.width()
    tables = [table.repetition_table(repetition, width, top) for repetition in repetitions]
    if shown := table.compile_ways_table(ways, repetitions[0], width):
        tables.append(shown)
    if profile is not None:
        tables.append(table.profile_tables(profile, repetitions[0].roots, width))
    output.write_each(tables)


def _recompile_advice(target: str) -> list[str]:
    """Return how to compile a function of a recorded run less often; empty for other targets."""
    from jaxprtool.recording.folder import run_and_program
    from jaxprtool.recording.read import read_run
    from jaxprtool.recording.reasons import recompile_advice

    run, name = run_and_program(target) or ("", "")
    functions = read_run(run).functions if run else ()
    program = name.rpartition("/")[2].removesuffix("@1")
    return recompile_advice(
        function
        for function in functions
        if any(compilation.name == program for compilation in function.compilations)
    )


def _ways(
    session: Session,
    traced: TracedTarget,
    programs: Named,
    outlining: Outline,
    outlined: Program,
) -> list[tuple[CompileWay, Program]]:
    """Return the given pipeline and those that shorten compilation; empty for several programs."""
    from jaxprtool.commands.outline.compile_time import compile_ways

    if len(programs) != 1:
        return []
    session.on_progress("trying roll and outline")
    return compile_ways(traced.program, session.pipeline, programs[0][1], outlining, outlined)


def _profiled(
    prepared: Ready,
    trace_time: float,
    ways: Sequence[tuple[CompileWay, Program]],
    on_progress: OnProgress,
) -> tuple[CompileProfile, list[tuple[CompileWay, Program]]]:
    """Return the compile profile of a program, and the times of the ways to compile it faster."""
    from jaxprtool.commands.outline.compile_time import compile_profile, compile_seconds

    arguments, device = prepared.filled.arguments, prepared.device
    on_progress(f"compiling {prepared.program.name}")
    profile = compile_profile(prepared.program, arguments, device, trace_time)
    measured = []
    for number, (way, program) in enumerate(ways):
        seconds = profile.compile_cpu
        if number:
            on_progress(f"compiling with {way.pipeline}")
            seconds = compile_seconds(program, arguments, device)
        measured.append((replace(way, cpu_seconds=seconds), program))
    return profile, measured


def _without_unroll(prepared: Ready, on_progress: OnProgress) -> float:
    """Return the CPU time of XLA to compile a program whose loops are not unrolled, in seconds."""
    from jaxprtool.commands.outline.compile_time import compile_seconds, without_unroll

    on_progress(f"compiling {prepared.program.name} without unroll")
    program = without_unroll(prepared.program)
    return compile_seconds(program, prepared.filled.arguments, prepared.device)


def _found(outlining: Outline, before: Program, after: Program) -> Repetition:
    """Return the repetition in a program, including bodies that gain too little."""
    from jaxprtool.commands.memory.estimate import outlined_memory
    from jaxprtool.ir.repetition import repetition
    from jaxprtool.passes.loops.outline import LEAST, SHORTEST

    repeats = repetition(after, before)
    if repeats.bodies:
        return replace(repeats, memory=outlined_memory(after))
    if outlining.equations is not None:
        return repeats
    for least in (LEAST, SHORTEST):
        small, _ = _outlined(replace(outlining, equations=least), before)
        bodies = [body for body in repetition(small, before).bodies if body.copies > 1]
        if bodies:
            return replace(repeats, small=tuple(bodies))
    return repeats


def _outlined(outlining: Outline, program: Program) -> tuple[Program, float]:
    """Return the outlined program, and the seconds that outlining took."""
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.commands.opt import steps
    from jaxprtool.passes import Pipeline, Step

    watcher = steps.Watcher()
    pipeline = Pipeline((Step(outlining),))
    ((_, result),) = pipeline_steps.run_pipeline(pipeline, program, silent, watcher)
    return result, watcher.rows[0].seconds


def _run(
    before: Program, after: Program, prepared: Ready, on_progress: OnProgress
) -> list[RunReport]:
    """Compile and run a program as traced and, if it differs, outlined."""
    from jaxprtool.execute.running import run
    from jaxprtool.execute.running.backends import compiled_afresh
    from jaxprtool.ir.conversions import with_contents

    programs = {"as traced": before} | ({} if after is before else {"outlined": after})
    reports = []
    with compiled_afresh():
        for which, program in programs.items():
            report_progress = partial(_report_progress, on_progress, which)
            arguments = prepared.filled.arguments
            reports.append(
                run.run(
                    with_contents(program), arguments, prepared.device, on_progress=report_progress
                )
            )
    return reports


def _report_progress(on_progress: OnProgress, which: str, doing: str) -> None:
    on_progress(f"{doing} {which}")
