"""`jaxprtool run`: the results of a function on a device, and the time of each step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from jaxprtool.cli import completion, launch, options, output
from jaxprtool.cli.options import OUTPUT, RUN, Reproducer, ReproducerOption
from jaxprtool.cli.session import (
    Session,
    command,
    only_program,
    printed_by_functions,
    ready,
    require_device,
    results_file,
    save_results,
)
from jaxprtool.commands.memory.command import buffers_shown
from jaxprtool.errors import CheckError

if TYPE_CHECKING:
    from jaxprtool.execute.running.run import RunReport
    from jaxprtool.ir.program import Program

_Repeat = Annotated[
    int | None,
    RUN.option(
        "--repeat",
        "N",
        "Number of timed calls after the first. Default: 10, or none if the function has effects.",
        min=0,
    ),
]
_Save = Annotated[
    str | None,
    OUTPUT.option(
        "--save",
        "PATH",
        "Write the results by name to FILE.npz, with bfloat16 and similar types as float32. A PATH "
        "of another name becomes a folder if results are sharded (needs orbax-checkpoint).",
    ),
]


_Check = Annotated[
    Any,
    RUN.option(
        "--check",
        "NAME,…",
        "Check every intermediate value: nan, inf, subnormal, overflow-f16, underflow-f8_e4m3fn, …",
        parser=options.names,
        autocompletion=completion.complete_checks,
    ),
]


@command
def run_command(
    session: Session,
    types: options.Types = None,
    backend: options.Backend = None,
    device: options.Device = None,
    repeat: _Repeat = None,
    check: _Check = None,
    seed: options.Seed = 0,
    no_cache: options.NoCache = False,
    save: _Save = None,
    reproducer: ReproducerOption = None,
    launch_count: launch.Launch = None,
    coordinator: launch.Coordinator = None,
    num_processes: launch.NumProcesses = None,
    process_id: launch.ProcessId = None,
    timeout: launch.Timeout = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Compile a function, run it, and show its results and times.

    [bold]Examples[/]

      jaxprtool run samples/transformer.py:loss --backend cpu
      jaxprtool run samples/transformer.py:loss -p dce --repeat 100
      jaxprtool run samples/batching.py:loss -p "batch((None, 0), axis_size=32)"
      jaxprtool run samples/solver.py:kepler --check nan,inf,overflow-f16
      jaxprtool run jax.numpy:sort --args "normal(f32[8], seed=1)" --save out.npz
    """
    rows = options.row_limit(top, all)
    output.refuse_stdout("--save", save, "run")
    place = launch.place_of(coordinator, num_processes, process_id)
    launch.supervise(launch_count, place, timeout, save)
    session.start(not no_cache)
    shows = launch.join_cluster(place, session.function)
    from jaxprtool.commands.run import checked
    from jaxprtool.commands.run import table as runs
    from jaxprtool.execute.running import backends, run

    checked.require_checks(check or ())
    writer = Reproducer(reproducer, session.plugin or ()) if reproducer else None
    require_device(session.function, backend, device)
    with results_file(save, shows) as file:
        traced = session.traced(runs=True, types=types, symbolic=True)
        start = time.perf_counter()
        programs = session.programs(traced, reproducer=writer)
        program = only_program("run takes", programs)
        output.say_unused_donations([program])
        pass_time = time.perf_counter() - start
        inputs = traced.given_to(program)
        with buffers_shown(inputs, session.on_progress):
            prepared = ready(inputs, seed, backend, device)
        program, arguments = prepared.program, prepared.filled.arguments
        compiling = writer.compiler(program) if writer else contextlib.nullcontext()
        require_same(program)
        with printed_by_functions(json or launch.is_supervised()):
            with compiling, buffers_shown(inputs, session.on_progress):
                report = run.run(program, arguments, prepared.device, repeat, session.on_progress)
            findings = []
            if check:
                session.on_progress(f"checking the values of {report.name}")
                findings = checked.findings(program, arguments, check, prepared.device)
        backends.wait_for_all()  # a run that fails in another process has no results
        if save:
            save_results({out.name: out.value for out in report.outputs}, save, file, shows)
    prepared.note_random(session.target)
    if json:
        document = runs.run_document(report, traced.seconds, prepared.filled.random, pass_time)
        if check:
            document = document._replace(found=findings)
        output.write_json(document)
    else:
        steps = runs.steps(report, traced.seconds, pass_time if session.passes else None)
        _write_report(report, steps, rows)
    if findings:
        failed = ", ".join(dict.fromkeys(finding.check for finding in findings))
        raise CheckError(
            f"{report.name} fails --check {failed}",
            "`jaxprtool nans` finds where a NaN comes from; `jaxprtool watch` shows all values",
            runs.finding_lines(findings),
        )


def _write_report(report: RunReport, steps: Mapping[str, str], top: int | None) -> None:
    """Write the results and the times: on a terminal, times come first."""
    from jaxprtool.commands.run import table as runs

    times = "".join(f"{name:<12} {text}\n" for name, text in steps.items())
    if not sys.stdout.isatty():
        output.write_text(runs.outputs(report, output.width(), top) + "\n\n" + times)
        return
    output.write_text(times + "\n")
    if len(report.outputs) > 1:
        output.write_rendered(runs.results_table(report, output.width(), top))
    else:
        output.write_text(runs.outputs(report, output.width(), top))


def require_same(program: Program) -> None:
    """Raise CheckError, and show the differences, if processes of the cluster differ in a program.

    They would otherwise wait for each other's collectives without end.
    """
    from jaxprtool.commands.determinism.determinism import differing
    from jaxprtool.commands.diff.table import diff_text
    from jaxprtool.execute.running.backends import exchanged

    difference = differing(program)
    if difference is None:
        return
    if difference.first and difference.diff is not None:
        output.write_rendered(
            diff_text(difference.diff, output.width(sys.stderr), None), sys.stderr
        )
    exchanged(b"")  # the end of any process ends the others, and the first still writes
    raise CheckError(
        f"processes {difference.pair[0]} and {difference.pair[1]} do not run the same program: "
        f"{difference.why}",
        "a program must not depend on jax.process_index(), the time or the machine",
    )
