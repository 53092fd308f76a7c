"""`jaxprtool diff`: show the differences between two programs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.options import FUNCTION, OUTPUT, PASSES, Panel
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import (
    FunctionOptions,
    SourceLines,
    Tracing,
    command,
    only_program,
    pipeline,
    require_device,
)
from jaxprtool.commands.profile.command import Measure, measured_profile, require_measure
from jaxprtool.errors import OutputError, TargetError

if TYPE_CHECKING:
    from jaxprtool.api.targets import TracedTarget
    from jaxprtool.formats.hlo import StoredModule
    from jaxprtool.ir.program import Program

_OTHER = Panel("Other releases of JAX")


@dataclass(frozen=True, kw_only=True)
class Two:
    """The group of options that name two programs: the TARGETs and their arguments."""

    target: Annotated[
        str,
        options.target_argument(
            "A",
            "A function, package.module:function or path/file.py:function, or a program, "
            "file.jaxpr or run/step. Append @REVISION for a git revision: model.py:loss@HEAD~1.",
        ),
    ]
    other: Annotated[
        str | None,
        options.target_argument(
            "[B]", "The other program. Default: A, with other passes, arguments or JAX."
        ),
    ] = None
    args: Annotated[
        list[str] | None,
        FUNCTION.option(
            "--args",
            "EXPR",
            "The arguments of both: \"{'w': f32[3,4]}, f32[8,3]\". Given twice: of A, then of B.",
        ),
    ] = None
    tracing: Tracing
    lines: SourceLines
    on_progress: OnProgress  # not an option: set by `command`

    @property
    def first(self) -> FunctionOptions:
        """A, without its arguments."""
        return FunctionOptions(self.target, None, self.tracing, self.lines, self.on_progress)

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Apply --frames and --mine in a `with` block; see `FunctionOptions.applied`."""
        return self.first.applied()

    def each(self) -> tuple[FunctionOptions, FunctionOptions]:
        """Return the options of A and of B."""
        args = both("--args", self.args)
        a, b = self.first.each_of([self.target, self.other or self.target])
        return replace(a, args=args[0]), replace(b, args=args[1])


def both(option: str, values: Sequence[str] | None) -> tuple[str | None, str | None]:
    """Return the values of an option for A and for B. A single value applies to both.

    Raises:
        typer.BadParameter: If there are more than two values.
    """
    if len(values or ()) > 2:
        count = len(values or ())
        raise typer.BadParameter(f"{option} is given {count} times, but there are two programs")
    listed = list(values or ())
    return (listed[0], listed[-1]) if listed else (None, None)


_Passes = Annotated[
    list[str] | None,
    PASSES.option(
        "-p, --passes",
        "PIPELINE",
        'Passes to run on both first. Given twice: on A, then on B: -p "" -p dce. Without B, '
        "compare A before and after the passes.",
        autocompletion=completion.complete_passes,
    ),
]
_Stat = Annotated[bool, OUTPUT.flag("--stat", "Show the number of differing equations, by line.")]


_Kernels = Annotated[
    bool,
    OUTPUT.flag("--kernels", "Of two HLO modules, show which kernels differ, and not which lines."),
]

_Compiled = Annotated[
    bool,
    OUTPUT.flag("--compiled", "Compile both for --backend, and compare XLA's modules by line."),
]

_WRITE_HLO = "write them with `jaxprtool emit TARGET --to hlo-optimized -o FILE.hlo`"

_JaxA = Annotated[
    str | None,
    _OTHER.option("--jax-a", "PYTHON", "Trace A with the Python of another environment."),
]
_JaxB = Annotated[
    str | None,
    _OTHER.option(
        "--jax-b",
        "PYTHON",
        "Trace B with the Python of another environment. jaxprtool must be installed there.",
    ),
]


@command
def diff_command(
    two: Two,
    passes: _Passes = None,
    plugin: options.Plugin = None,
    jax_a: _JaxA = None,
    jax_b: _JaxB = None,
    measure: Measure = False,
    backend: options.Backend = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    stat: _Stat = False,
    compiled: _Compiled = False,
    kernels: _Kernels = False,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
    pager: options.Pager = False,
) -> None:
    """Show by line which equations differ between two programs.

    Programs are matched as graphs: names, lines, and the order of independent equations are
    ignored. The exit code is 1 if they differ. With --measure, the differences are shown with the
    measured time of their lines in both programs, the largest change first. Of two HLO modules, it
    shows by line how kernels, bytes and memory differ, and what XLA does of its own.

    [bold]Examples[/]

      jaxprtool diff samples/transformer.py:loss@HEAD samples/transformer.py:loss
      jaxprtool diff samples/transformer.py:loss -p -O2
      jaxprtool opt samples/rnn.py:loss -o - | jaxprtool diff - samples/rnn.py:loss
      jaxprtool diff samples/rnn.py:loss -p grad -p "grad, dce" --stat
      jaxprtool diff samples/transformer.py:loss -p grad -p "grad, -O2" --measure
      jaxprtool diff samples/transformer.py:train_step -p -O2 --compiled
      jaxprtool diff old/jit_step new/jit_step --kernels
    """
    rows = options.row_limit(top, all, None if pager else options.ROWS)
    require_measure(measure, None if compiled else backend, device)
    two.first.start(True if measure else None)
    modules = [function.module() for function in two.each()]
    if any(modules):
        if measure or passes or jax_a or jax_b or stat or compiled:
            raise OutputError("an HLO module is not run: --kernels, --top, --all and --json apply")
        _write_modules(modules, rows, kernels, json)
        return
    if kernels and not compiled:
        raise TargetError("--kernels compares two HLO modules", "add --compiled")
    from jaxprtool.commands.diff import table as render
    from jaxprtool.commands.diff.diff import diff as compare

    if not compiled:
        require_device(two.first, backend, device)
    pairs = _programs(two, (jax_a, jax_b), passes, plugin, measure)
    if compiled:
        _write_modules(_compiled(pairs, backend, two.on_progress), rows, kernels, json)
        return
    differences = compare(*(program for _, program in pairs))
    if measure:
        from jaxprtool.commands.diff.diff import with_measured_times

        where = seed, backend, device, json, two.on_progress
        profiles = [
            measured_profile(traced.given_to(program), function.target, *where)
            for function, (traced, program) in zip(two.each(), pairs, strict=True)
        ]
        differences = with_measured_times(differences, *profiles)
    two.on_progress("rendering")
    if json:
        output.write_json(render.diff_document(differences))
    else:
        shown = render.diff_stat if stat else render.diff_text
        with output.paged(pager):
            output.write_rendered(shown(differences, output.width(), rows))
    if not differences.is_equivalent:
        raise typer.Exit(1)


def _compiled(
    pairs: Sequence[tuple[TracedTarget, Program]], backend: str | None, on_progress: OnProgress
) -> list[StoredModule]:
    """Return the modules of programs, compiled for a backend, or a TPU that this machine lacks."""
    from jaxprtool.commands.memory.compiled import compiled_for

    stored = []
    for traced, program in pairs:
        on_progress(f"compiling {program.name}")
        inputs = traced.given_to(program)
        arguments = [inputs.values.get(name) for name in inputs.program.arg_names]
        stored.append(compiled_for(inputs.program, arguments, backend))
    return stored


def _write_modules(
    stored: Sequence[StoredModule | None], rows: int | None, kernels: bool, json: bool
) -> None:
    """Write the differences of two HLO modules. Exit with 1 if there are any."""
    from jaxprtool.commands.diff.modules import diff_modules
    from jaxprtool.commands.diff.table import module_diff_table

    before, after = stored
    if before is None or after is None:
        raise TargetError("an HLO module is compared with another one", _WRITE_HLO)
    found = diff_modules(before, after)
    if json:
        output.write_json(found)
    else:
        output.write_rendered(module_diff_table(found, output.width(), rows, kernels))
    if not found.is_same:
        raise typer.Exit(1)


def _programs(
    two: Two,
    pythons: tuple[str | None, str | None],
    passes: list[str] | None,
    plugin: list[str] | None,
    runs: bool,
) -> list[tuple[TracedTarget, Program]]:
    """Find the two programs, trace them, and run the passes on them; `runs` as for `trace`."""
    from jaxprtool.api.targets import find_elsewhere
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.loading.remote_target import elsewhere

    if two.other is None and len(passes or ()) == 1:
        passes = ["", *(passes or ())]
    several = [len(values or ()) > 1 for values in (passes, two.args)]
    if two.other is None and not any((*several, pythons[0] != pythons[1])):
        raise TargetError(
            f"{two.target} has no other program to be compared with",
            "name a second program, or passes: -p dce",
        )
    places = [
        elsewhere(function.target, python)
        for function, python in zip(two.each(), pythons, strict=True)
    ]
    for function, place in zip(two.each(), places, strict=True):
        if place.is_here:
            function.import_module()
    programs = []
    pipelines = [pipeline(text, plugin) for text in both("-p", passes)]
    auto = any(steps.partitions for steps in pipelines)
    for function, steps, place in zip(two.each(), pipelines, places, strict=True):
        if place.is_here:
            traced = function.trace(steps, runs=runs, symbolic=True, auto=auto)
        else:
            two.on_progress(f"tracing {place}")
            traced = function.trace_entry(find_elsewhere(place, function.arguments()), steps)
        with traced.mesh_set():
            named = pipeline_steps.run_pipeline(steps, traced.program, two.on_progress)
        programs.append((traced, only_program("diff takes", named)))
    return programs
