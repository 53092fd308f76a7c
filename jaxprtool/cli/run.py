"""`jaxprtool run`: what a function gives on a device, and how long each step takes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import completion, options, output, reports
from jaxprtool.errors import OutputError, PipelineError
from jaxprtool.files import file_written_whole

if TYPE_CHECKING:
    from jaxprtool.execute.run import RunReport
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.pipeline import Pipeline

_RUN = "How it runs"


Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="cpu, gpu, tpu, cuda, rocm, or a PJRT plug-in's; else JAX's default.",
        rich_help_panel=_RUN,
        autocompletion=completion.complete_backend,
    ),
]
_Device = Annotated[
    int | None,
    typer.Option(
        "--device",
        metavar="N",
        help="Number of the backend's device. A program with a mesh runs on all of it.",
        rich_help_panel=_RUN,
    ),
]
_Repeat = Annotated[
    int | None,
    typer.Option(
        "--repeat",
        metavar="N",
        min=0,
        help="Calls to time after the first: 10, or none if the function has effects.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        help="Of the random values for arguments given by type alone.",
        rich_help_panel=_RUN,
    ),
]
_Save = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar="FILE.npz",
        help="Write the results, by name; bfloat16 and such as float32, exactly.",
        rich_help_panel="Output",
    ),
]


def run(
    target: options.Target,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    backend: Backend = None,
    device: _Device = None,
    repeat: _Repeat = None,
    seed: Seed = 0,
    save: _Save = None,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Compile a function, run it, and show its results and times.

    [bold]Examples[/]

      jaxprtool run samples/transformer.py:loss --backend cpu
      jaxprtool run samples/transformer.py:loss -p dce --repeat 100
      jaxprtool run samples/batching.py:loss -p "batch((None, 0), axis_size=32)"
      jaxprtool run jax.numpy:sort --args "normal(f32[8], seed=1)" --save out.npz
    """
    options.start_jax(x64)
    from jaxprtool.execute.fill import fill, refitted

    if save == "-":
        raise OutputError("--save takes a file: what run prints goes to stdout")
    pipeline = options.pipeline(passes, plugin)
    require_device(backend, device)
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    with file_written_whole(save) if save else contextlib.nullcontext() as file:
        start = time.perf_counter()
        traced = options.trace(entry, pipeline)
        trace_time = time.perf_counter() - start
        program = _only_program(pipeline, traced)
        given = dict(zip(traced.arg_names, entry.arguments(), strict=True))
        given, aside = refitted(program, given)
        filled = fill(program, given, seed)
        report = execute(program, filled.arguments, (backend, device), repeat, json)
        if file:
            save_arrays({out.name: out.value for out in report.outputs}, file)
    note_random(filled.random, seed, aside)
    if json:
        output.write_json(reports.document(report, trace_time, filled.random))
        return
    reports.write_outputs(report)
    output.write("")
    for name, text in reports.steps(report, trace_time).items():
        output.write(f"{name:<12} {text}")


def require_device(backend: str | None, index: int | None = None) -> None:
    """Refuse a backend or device that is not there, before anything else is done."""
    from jaxprtool.execute import backends

    if backend is not None or index is not None:
        backends.device(backend, index or 0)


def _only_program(pipeline: Pipeline, traced: Program) -> Program:
    programs = options.each(pipeline(traced))
    if len(programs) != 1:
        names = ", ".join(name for name, _ in programs)
        hint = "`jaxprtool unzip --run` runs init and apply" if names == "init, apply" else None
        raise PipelineError(f"run takes one program, and the passes gave {names or 'none'}", hint)
    return programs[0][1]


def execute(
    program: Program,
    arguments: Sequence[Any],
    where: tuple[str | None, int | None],
    repeat: int | None,
    json: bool,
) -> RunReport:
    """Run a program on flat arguments, on a backend's device if `where` says one."""
    from jaxprtool.execute import run

    device = run.choose_device(program, *where)
    # What the function prints is the user's to see, and no part of a JSON document.
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        return run.run(program, arguments, device, repeat)


def save_arrays(arrays: Mapping[str, Any], file: Any) -> None:
    """Write arrays by name as `--save` does."""
    from jaxprtool.execute.summary import plain
    from jaxprtool.formats.npz import write_npz

    write_npz(file, {name: plain(array) for name, array in arrays.items()})


def note_random(names: Sequence[str], seed: int, aside: Sequence[str] = ()) -> None:
    """Say which arguments have random values, and of which of them those given are left aside."""
    if names:
        output.note(f"{reports.some(names)} filled with random values (--seed {seed})")
    if aside:
        given, do = ("values", "do") if len(aside) > 1 else ("value", "does")
        output.note(f"the {given} given for {reports.some(aside)} {do} not fit after the passes")
