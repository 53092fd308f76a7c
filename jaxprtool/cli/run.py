"""`jaxprtool run`: what a function gives on a device, and how long each step takes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.options import OUTPUT, RUN
from jaxprtool.cli.progress import Told
from jaxprtool.cli.reproducer import Reproducer, ReproducerOption
from jaxprtool.cli.start import start_jax, use_cache
from jaxprtool.errors import CheckError, OutputError
from jaxprtool.files import file_written_whole

if TYPE_CHECKING:
    from jaxprtool.execute.fill import Filled
    from jaxprtool.execute.run import RunReport

Device = Annotated[
    int | None,
    RUN.option(
        "--device", "N", "Number of the backend's device. A program with a mesh runs on all of it."
    ),
]
_Repeat = Annotated[
    int | None,
    RUN.option(
        "--repeat",
        "N",
        "Calls to time after the first: 10, or none if the function has effects.",
        min=0,
    ),
]
_Save = Annotated[
    str | None,
    OUTPUT.option(
        "--save", "FILE.npz", "Write the results, by name; bfloat16 and such as float32, exactly."
    ),
]


_Check = Annotated[
    Any,
    RUN.option(
        "--check",
        "NAME,…",
        "Check every value on the way: nan, inf, subnormal, overflow-f16, underflow-f8_e4m3fn, …",
        parser=options.names,
        autocompletion=completion.complete_checks,
    ),
]


@options.command
def run(
    function: options.Function,
    types: options.Types = None,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    backend: options.Backend = None,
    device: Device = None,
    repeat: _Repeat = None,
    check: _Check = None,
    seed: options.Seed = 0,
    no_cache: options.NoCache = False,
    save: _Save = None,
    reproducer: ReproducerOption = None,
    json: options.Json = False,
    *,
    told: Told,
) -> None:
    """Compile a function, run it, and show its results and times.

    [bold]Examples[/]

      jaxprtool run samples/transformer.py:loss --backend cpu
      jaxprtool run samples/transformer.py:loss -p dce --repeat 100
      jaxprtool run samples/batching.py:loss -p "batch((None, 0), axis_size=32)"
      jaxprtool run samples/solver.py:kepler --check nan,inf,overflow-f16
      jaxprtool run jax.numpy:sort --args "normal(f32[8], seed=1)" --save out.npz
    """
    start_jax(told, function.x64)
    use_cache(not no_cache)
    from jaxprtool.api.targets import given_to
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.execute import checked, run
    from jaxprtool.execute.fill import fill
    from jaxprtool.render import runs

    if save == "-":
        raise OutputError("--save takes a file: what run prints goes to stdout")
    checked.require_checks(check or ())
    pipeline = options.pipeline(passes, plugin)
    writer = Reproducer(reproducer, plugin or ()) if reproducer else None
    entry = function.find(told, True, types, pipeline)
    require_device(backend, device)
    with file_written_whole(save) if save else contextlib.nullcontext() as file:
        start = time.perf_counter()
        traced = function.trace(entry, pipeline, told)
        trace_time = time.perf_counter() - start
        start = time.perf_counter()
        program = options.only_program(
            "run takes", options.each(pipeline_steps.run(pipeline, traced, told, reproducer=writer))
        )
        pass_time = time.perf_counter() - start
        given = given_to(program, entry, traced)
        filled = fill(given.program, given.values, seed)
        chosen = run.choose_device(given.program, backend, device)
        compiling = writer.compiler(given.program) if writer else contextlib.nullcontext()
        with printed_by_functions(json):
            with compiling:
                report = run.run(given.program, filled.arguments, chosen, repeat, told)
            found = []
            if check:
                told(f"checking the values of {report.name}")
                found = checked.findings(given.program, filled.arguments, check, chosen)
        if file:
            save_arrays({out.name: out.value for out in report.outputs}, file)
    note_random(filled, seed, given.aside)
    if json:
        document = runs.document(report, trace_time, filled.random, pass_time)
        if check:
            document["found"] = found
        output.write_json(document)
    else:
        _write_report(report, runs.steps(report, trace_time, pass_time if passes else None))
    if found:
        failed = ", ".join(dict.fromkeys(each.check for each in found))
        raise CheckError(
            f"{report.name} fails --check {failed}",
            "`jaxprtool nans` says where a NaN comes from, `jaxprtool watch` shows all values",
            runs.finding_lines(found),
        )


def _write_report(report: RunReport, steps: Mapping[str, str]) -> None:
    """Write the results and the times: on a terminal, times come first."""
    from jaxprtool.render import runs

    times = "".join(f"{name:<12} {text}\n" for name, text in steps.items())
    if not sys.stdout.isatty():
        output.write(runs.outputs(report, output.width()) + "\n\n" + times)
        return
    output.write(times + "\n")
    if len(report.outputs) > 1:
        output.write_rendered(runs.results_table(report, output.width()))
    else:
        output.write(runs.outputs(report, output.width()))


def require_device(backend: str | None, index: int | None = None) -> None:
    """Refuse a backend or device that is not there, before anything is traced.

    This starts backends: call it after the user's module is imported, which may set their options.
    """
    from jaxprtool.execute import backends

    if backend is not None or index is not None:
        backends.device(backend, index or 0)


@contextlib.contextmanager
def printed_by_functions(json: bool) -> Iterator[None]:
    """Leave what a running function prints on stdout, but where `json` wants a document there."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield


def save_arrays(arrays: Mapping[str, object], file: BinaryIO) -> None:
    """Write arrays by name as `--save` does."""
    from jaxprtool.execute.summary import plain
    from jaxprtool.formats.npz import write_npz

    write_npz(file, {name: plain(array) for name, array in arrays.items()})


def note_random(filled: Filled, seed: int, aside: Sequence[str] = ()) -> None:
    """Say which arguments have random values, and of which of them those given are left aside."""
    if filled.random:
        names, within = output.some(filled.random), filled.said_within()
        output.note(f"{names} filled with random values (--seed {seed}){within}")
    if aside:
        given, do = ("values", "do") if len(aside) > 1 else ("value", "does")
        output.note(f"the {given} given for {output.some(aside)} {do} not fit after the passes")
