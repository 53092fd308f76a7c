"""`jaxprtool run`: what a function gives on a device, and how long each step takes."""

from __future__ import annotations

import contextlib
import sys
import time
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.errors import PipelineError
from jaxprtool.files import file_written_whole

if TYPE_CHECKING:
    from jaxprtool.execute.run import Output, RunReport
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.pipeline import Pipeline

_RUN = "How it runs"


_Backend = Annotated[
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
_Seed = Annotated[
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
    backend: _Backend = None,
    device: _Device = None,
    repeat: _Repeat = None,
    seed: _Seed = 0,
    save: _Save = None,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Compile a function, run it, and show its results and times.

    [bold]Examples[/]

      jaxprtool run samples/transformer.py:loss --backend cpu
      jaxprtool run samples/transformer.py:loss -p dce --repeat 100
      jaxprtool run jax.numpy:sort --args "normal(f32[8], seed=1)" --save out.npz
    """
    options.start_jax(x64)
    pipeline = options.pipeline(passes, plugin)
    if backend is not None or device is not None:
        _require_device(backend, device)
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    with file_written_whole(save) if save else contextlib.nullcontext() as file:
        start = time.perf_counter()
        traced = options.trace(entry)
        trace_time = time.perf_counter() - start
        program = _only_program(pipeline, traced)
        arguments = dict(zip(traced.arg_names, entry.arguments(), strict=True))
        report, random = _run(program, arguments, seed, (backend, device), repeat, json)
        if file:
            _save(report, file)
    if random:
        output.note(f"{_some(random)} filled with random values (--seed {seed})")
    if json:
        output.write_json(_as_json(report, trace_time, random))
    else:
        _write(report, trace_time)


def _require_device(backend: str | None, index: int | None) -> None:
    """Refuse a backend or device that is not there, before anything else is done."""
    from jaxprtool.execute import backends

    backends.device(backend, index or 0)


def _only_program(pipeline: Pipeline, traced: Program) -> Program:
    programs = options.each(pipeline(traced))
    if len(programs) != 1:
        names = ", ".join(name for name, _ in programs)
        raise PipelineError(f"run takes one program, and the passes gave {names or 'none'}")
    return programs[0][1]


def _run(
    program: Program,
    arguments: dict[str, Any],
    seed: int,
    where: tuple[str | None, int | None],
    repeat: int | None,
    json: bool,
) -> tuple[RunReport, tuple[str, ...]]:
    from jaxprtool.execute import run as execute
    from jaxprtool.execute.fill import fill

    device = execute.choose_device(program, *where)
    filled = fill(program, arguments, seed)
    # What the function prints is the user's to see, and no part of a JSON document.
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        return execute.run(program, filled.arguments, device, repeat), filled.random


def _save(report: RunReport, file: Any) -> None:
    import numpy as np

    from jaxprtool.execute.summary import plain

    arrays: dict[str, Any] = {out.name: plain(out.value) for out in report.outputs}
    np.savez(file, **arrays)


def _some(names: tuple[str, ...]) -> str:
    return f"{len(names)} arguments" if len(names) > 4 else ", ".join(names)


# --- the report -------------------------------------------------------------------------------


def _write(report: RunReport, trace_time: float) -> None:
    for out in report.outputs:
        head, text = f"{out.name}: {out.type}", _described(out)
        fits = "\n" not in text and len(head) + 1 + len(text) <= output.width()
        output.write(f"{head} {text}" if fits else f"{head}\n{indent(text, '  ')}")
    if not report.outputs:
        output.write("no results")
    output.write("")
    times = report.times
    rows = {
        "device": _few(report.devices),
        "trace": _duration(trace_time),
        "lower": _duration(times.lower),
        "compile": _duration(times.compile),
        "first call": _duration(times.first_call),
    }
    if times.repeat is not None:
        rows["later calls"] = f"{_duration(times.repeat)} (median of {times.repeats})"
    for name, text in rows.items():
        output.write(f"{name:<12} {text}")


def _few(devices: tuple[Any, ...]) -> str:
    if len(devices) <= 4:
        return ", ".join(map(str, devices))
    return f"{len(devices)} devices, {devices[0]} to {devices[-1]}"


def _described(out: Output) -> str:
    """A result's value when it is small, else its statistics."""
    import numpy as np

    from jaxprtool.execute.summary import summarize

    summary = summarize(out.value)
    if summary.value is not None:
        columns = output.width() - 2
        return np.array2string(summary.value, separator=", ", max_line_width=columns)
    return ", ".join(f"{k} {_number(v)}" for k, v in summary.statistics.items())


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) or value is None else f"{value:.6g}"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _as_json(report: RunReport, trace_time: float, random: tuple[str, ...]) -> dict[str, Any]:
    from jaxprtool.execute.summary import summarize

    outputs: list[dict[str, Any]] = []
    for out in report.outputs:
        summary = summarize(out.value)
        described = (
            {"statistics": summary.statistics}
            if summary.value is None
            else {"value": summary.value.tolist()}
        )
        outputs.append({"name": out.name, "type": out.type, **described})
    times = report.times
    return {
        "name": report.name,
        "devices": [str(d) for d in report.devices],
        "random": list(random),
        "times": {
            "trace": trace_time,
            "lower": times.lower,
            "compile": times.compile,
            "first_call": times.first_call,
            "repeat": times.repeat,
            "repeats": times.repeats,
        },
        "outputs": outputs,
    }
