"""`jaxprtool unzip`: a function that declares variables, split into init and apply."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, RUN, Panel
from jaxprtool.cli.session import (
    FunctionOptions,
    command,
    file_to_save,
    note_random,
    pipeline,
    printed_by_functions,
    require_device,
    save_arrays,
)
from jaxprtool.commands.show.command import write_pages_or_listings
from jaxprtool.errors import ArgumentsError, OutputError
from jaxprtool.files import STDOUT
from jaxprtool.formats.emission import Emission, Format

if TYPE_CHECKING:
    from jaxprtool.commands.unzip.table import UnzipDocument
    from jaxprtool.execute.running.run import InitApplyReport
    from jaxprtool.ir.frames import Frames
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.unzip import VariableLeaf


_SPLIT = Panel("Splitting")


def _key_args(text: str) -> tuple[int, ...]:
    return () if text.strip() == "none" else options.parsed_numbers(text)


_KeyArgs = Annotated[
    Any,
    _SPLIT.option(
        "--key-args",
        "N,…|none",
        "Positions of the arguments that are keys. Default: 0; with --auto, all arguments of a "
        "key type.",
        parser=_key_args,
    ),
]
_Tag = Annotated[
    str | None,
    _SPLIT.option("--tag", "NAME", "The tag of the variables. Default: 'variable'."),
]
_Auto = Annotated[
    bool,
    _SPLIT.flag(
        "--auto", "Choose the variables: the fewest bytes that separate the keys from the results."
    ),
]
_Known = Annotated[
    Any,
    _SPLIT.option(
        "--known",
        "N,…",
        "Positions of the arguments of init, instead of keys. init computes, once, all values that "
        "depend on these arguments alone.",
        parser=options.parsed_numbers,
    ),
]
_Passes = Annotated[
    str | None,
    options.passes_option('Passes to run afterwards on both programs, or on one: "apply.dce".'),
]
_Run = Annotated[
    bool, RUN.flag("--run", "Run init, then run apply on its results and the other arguments.")
]
_Out = Annotated[
    str | None, options.out_option("Write init.jaxpr and apply.jaxpr into a folder.", "DIR/")
]
_Save = Annotated[
    str | None,
    OUTPUT.option(
        "--save",
        "FILE.npz",
        "With --run, write the variables, by name, for load('FILE.npz') in --args.",
    ),
]


@command
def unzip_command(
    function: FunctionOptions,
    key_args: _KeyArgs = None,
    tag: _Tag = None,
    auto: _Auto = False,
    known: _Known = None,
    passes: _Passes = None,
    plugin: options.Plugin = None,
    run: _Run = False,
    backend: options.Backend = None,
    seed: options.Seed = 0,
    no_cache: options.NoCache = False,
    out: _Out = None,
    callbacks: options.Callbacks = "refuse",
    save: _Save = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
    full: options.Full = False,
    pager: options.Pager = False,
    source: options.Source = None,
) -> None:
    """Split a function into init and apply, by its variables.

    init returns the variables, and apply takes them as its first argument.

    [bold]Examples[/]

      jaxprtool unzip samples/mlp_variables.py:net
      jaxprtool unzip samples/mlp_variables.py:net -o net/
      jaxprtool unzip samples/mlp_variables.py:net --run --save params.npz
      jaxprtool unzip samples/random_numbers.py:dropout --auto
      jaxprtool unzip samples/transformer.py:loss --known 0
    """
    rows = options.row_limit(top, all)
    _check_split(known is not None, auto, key_args is not None, tag)
    _check_output(run, backend, no_cache, save, out)
    function.start(not no_cache if run else None)
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.execute.running.run import run_init_apply
    from jaxprtool.ir.program import Programs
    from jaxprtool.passes.unzip import UnzipRequest

    steps = pipeline(passes, plugin)
    require_device(function, backend)
    with file_to_save(save) as file:
        traced = function.trace(steps, runs=run)
        start = time.perf_counter()
        program = traced.program
        function.on_progress(f"splitting {program.name}")
        parts = UnzipRequest(key_args, tag, auto, known).split(program, traced.position)
        split_time = traced.seconds + time.perf_counter() - start
        unzipped = Programs({"init": parts.init, "apply": parts.apply})
        with traced.mesh_set():
            programs = pipeline_steps.run_pipeline(steps, unzipped, function.on_progress)
        variables, ran = parts.leaves(), None
        if run:
            with printed_by_functions(json):
                values = list(traced.values.values())
                ran = run_init_apply(
                    program, dict(programs), values, seed, backend, function.on_progress
                )
        if out is not None:
            emission = Emission(
                Format.jaxpr, callbacks=callbacks, source=source, on_opaque=output.note
            )
            output.say_written(emission.write(programs, out))
        if file and ran:
            save_arrays(ran.variables, file)
    function.on_progress("rendering")
    if ran:
        note_random(ran.filled, seed)
    if json:
        from jaxprtool.ir.frames import frames_now

        frames = frames_now(program.roots)
        output.write_json(_document(variables, programs, ran, split_time, frames))
        return
    if variables:
        from jaxprtool.commands.unzip.table import variables_table

        output.write_rendered(variables_table(variables, output.width(), program.roots, rows))
    else:
        output.write_text("no variables")
    if ran:
        _write_run(ran, split_time, rows)
    elif out is None:
        output.write_text("")
        write_pages_or_listings(programs, full, pager, **function.listed(source))


# --- checks of options ------------------------------------------------------------------------


def _check_split(known: bool, auto: bool, has_keys: bool, tag: str | None) -> None:
    """Raise ArgumentsError for options that cannot be combined."""
    finds, says = "chooses the variables", "names the arguments of init"
    for first, other, is_set, why in (
        ("--known", "--auto", known and auto, finds),
        ("--known", "--key-args", known and has_keys, says),
        ("--known" if known else "--auto", "--tag", (known or auto) and tag is not None, finds),
    ):
        if is_set:
            hint = f"{first} {why}: omit {other}"
            raise ArgumentsError(f"{first} and {other} cannot be combined", hint)


def _check_output(
    run: bool, backend: str | None, no_cache: bool, save: str | None, out: str | None
) -> None:
    """Raise OutputError for unsuitable destinations, and for options that require --run."""
    wanted = {"--save": save is not None, "--backend": backend is not None, "--no-cache": no_cache}
    for name, is_set in wanted.items():
        if is_set and not run:
            raise OutputError(f"{name} needs --run", "add --run")
    if out is not None and not (out.endswith(os.sep) or os.path.isdir(out)):
        folder = "DIR/" if out in (STDOUT, "") else f"{os.path.splitext(out)[0]}/"
        raise OutputError(
            f"unzip writes two files, and '{out}' is not a folder", f"write -o {folder}"
        )


# --- messages ---------------------------------------------------------------------------------


def _write_run(ran: InitApplyReport, split_time: float, top: int | None) -> None:
    from jaxprtool.commands.run import table as runs

    output.write_text("")
    output.write_text(runs.outputs(ran.apply, output.width(), top))
    output.write_text("")
    init, apply = runs.steps(ran.init, split_time), runs.steps(ran.apply)
    rows = [(step, init.get(step, ""), apply.get(step, "")) for step in init | apply]
    output.write_table(("step", "init", "apply"), rows)


def _document(
    variables: list[VariableLeaf],
    programs: list[tuple[str, Program]],
    ran: InitApplyReport | None,
    split_time: float,
    frames: Frames,
) -> UnzipDocument:
    from jaxprtool.commands.run import table as runs
    from jaxprtool.commands.unzip.table import UnzipDocument, variable_document
    from jaxprtool.render.reports import program_document

    reports = () if ran is None else (ran.init, ran.apply)
    random = () if ran is None else ran.filled.random
    return UnzipDocument(
        [variable_document(variable, frames) for variable in variables],
        [program_document(program) for _, program in programs],
        [runs.run_document(report, split_time, random) for report in reports] or None,
    )
