"""`jaxprtool vmap`: map a function over an axis, as `jax.vmap` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import FunctionOptions, command, pipeline
from jaxprtool.commands.show.command import write_pages_or_listings
from jaxprtool.errors import ArgumentsError
from jaxprtool.files import STDOUT
from jaxprtool.formats.emission import Emission, Format
from jaxprtool.ir.notation import expressions

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.mapping.batch import Batch
    from jaxprtool.render.documents import programs as documents
    from jaxprtool.render.documents.programs import PassRun


_MAPPED = Panel("Mapping")


def _in_axes(text: str) -> object:
    return _literal(text, "--in-axes")


def _out_axes(text: str) -> object:
    return _literal(text, "--out-axes")


def _literal(text: str, option: str) -> object:
    """Return the value of a Python literal. Raises ArgumentsError."""
    source = expressions.parse_arguments(text, option, ArgumentsError)
    if len(source.args) != 1 or source.keywords:
        hint = "write an entry for each argument in parentheses: (None, 0)"
        raise ArgumentsError(f"{option} takes one value, not '{text}'", hint)
    return source.literal(source.args[0])


_InAxes = Annotated[
    object,
    _MAPPED.option(
        "--in-axes",
        "EXPR",
        "The mapped axis of each argument: an integer, None for an argument that is not mapped, "
        'or a tuple with an entry for each traced positional argument: "(None, 0)".',
        parser=_in_axes,
    ),
]
_OutAxes = Annotated[
    object,
    _MAPPED.option(
        "--out-axes",
        "EXPR",
        "The mapped axis of results; None for results that are the same for all batch elements.",
        parser=_out_axes,
    ),
]
_AxisSize = Annotated[
    int,
    _MAPPED.option("--axis-size", "N", "The size of the mapped axis.", min=0),
]
_AxisName = Annotated[
    str | None,
    _MAPPED.option("--axis-name", "NAME", "The name of the axis for collectives: psum(x, 'NAME')."),
]
_SpmdAxisName = Annotated[
    Any,
    _MAPPED.option(
        "--spmd-axis-name",
        "NAME,…",
        "The mesh axes over which batch elements are sharded.",
        parser=options.names,
    ),
]
_Chunk = Annotated[
    int | None,
    _MAPPED.option(
        "--chunk", "K", "Compute K batch elements at a time, in a scan, to bound memory.", min=1
    ),
]
_SumMatch = Annotated[
    bool,
    _MAPPED.flag(
        "--sum-match", "Sum results that differ between batch elements where --out-axes is None."
    ),
]
_Passes = Annotated[str | None, options.passes_option('Passes to run afterwards: "dce".')]
_Out = Annotated[
    str | None,
    options.out_option("Write a .jaxpr file, or Python if the name ends in .py; - is stdout."),
]


@command
def vmap_command(
    function: FunctionOptions,
    axis_size: _AxisSize,
    in_axes: _InAxes = "0",
    out_axes: _OutAxes = "0",
    axis_name: _AxisName = None,
    spmd_axis_name: _SpmdAxisName = None,
    chunk: _Chunk = None,
    sum_match: _SumMatch = False,
    passes: _Passes = None,
    plugin: options.Plugin = None,
    out: _Out = None,
    callbacks: options.Callbacks = "refuse",
    json: options.Json = False,
    full: options.Full = False,
    pager: options.Pager = False,
    source: options.Source = None,
) -> None:
    """Map a function over an axis, as jax.vmap does.

    The types in --args are those of one batch element.

    [bold]Examples[/]

      jaxprtool vmap samples/batching.py:loss --in-axes "(None, 0)" --axis-size 32
      jaxprtool vmap samples/batching.py:pull --axis-size 1000 --chunk 64
      jaxprtool vmap samples/rnn.py:loss --in-axes "(None, 1)" --axis-size 4 -o -
    """
    written = (Format.jaxpr, Format.python)
    output.check_out("vmap", out, json, written, 'jaxprtool emit TARGET -p "batch(...)"')
    function.start()
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.commands.opt import steps as watched_steps
    from jaxprtool.passes import Pipeline, Step
    from jaxprtool.passes.mapping.batch import Batch

    batch = Batch(in_axes, out_axes, axis_size, axis_name, spmd_axis_name or None, chunk, sum_match)
    steps = Pipeline((Step(batch), *pipeline(passes, plugin).steps))
    watcher = watched_steps.Watcher()
    traced = function.trace(steps)
    program = traced.program
    with traced.mesh_set():
        programs = pipeline_steps.run_pipeline(steps, program, function.on_progress, watcher)
    row = watcher.rows[0]
    function.on_progress("rendering")
    if out is not None:
        format = Format.python if out.endswith(".py") else Format.jaxpr
        emission = Emission(format, callbacks=callbacks, source=source, on_opaque=output.note)
        output.write_files(programs, emission, out)
    if json:
        output.write_json(_document(batch, program, row, programs))
    elif out != STDOUT:
        output.write_text(_summary(batch, program, row))
    if out is None and not json:
        output.write_text("")
        write_pages_or_listings(programs, full, pager, **function.listed(source))


def _summary(batch: Batch, program: Program, row: PassRun) -> str:
    """Return a one-line summary: `32 batch elements: x at axis 0, w unmapped; ...`."""
    from jaxprtool.passes.mapping.batch import mapped_arguments, names_by_axis

    summary = "1 batch element" if batch.axis_size == 1 else f"{batch.axis_size} batch elements"
    if batch.axis_name is not None:
        summary += f" of axis '{batch.axis_name}'"
    if batch.chunk is not None:
        summary += f", {batch.chunk} at a time"
    mapped = ", ".join(
        f"{output.names_text(names)} {'unmapped' if dim is None else f'at axis {dim}'}"
        for dim, names in names_by_axis(mapped_arguments(batch, program)).items()
    )
    before, after = row.equations_before, row.equations_after
    return f"{summary}: {mapped or 'no arguments'}; {before} -> {after} equations"


def _document(
    batch: Batch, program: Program, row: PassRun, programs: Sequence[tuple[str, Program]]
) -> VmapDocument:
    from jaxprtool.passes.mapping.batch import mapped_arguments
    from jaxprtool.render.reports import program_document

    assert batch.axis_size is not None and isinstance(batch.axis_name, str | None)
    return VmapDocument(
        batch.axis_size,
        batch.axis_name,
        batch.chunk,
        [MappedArgument(*fields) for fields in mapped_arguments(batch, program)],
        row.equations_before,
        row.equations_after,
        [program_document(result) for _, result in programs],
    )


class MappedArgument(NamedTuple):
    """An argument of a program that is mapped."""

    name: Annotated[str, "Its readable path."]
    axis: Annotated[int | None, "The axis along which it is mapped; null if unmapped."]


class VmapDocument(NamedTuple):
    """`vmap`."""

    axis_size: Annotated[int, "The number of batch elements."]
    axis_name: Annotated[str | None, "The name by which collectives call the axis, or null."]
    chunk: Annotated[int | None, "The number of batch elements computed at a time; null for all."]
    arguments: Annotated[Sequence[MappedArgument], "The mapped axis of each argument."]
    equations_before: Annotated[int, "The number of equations of the program of one batch element."]
    equations_after: Annotated[int, "The number of equations of the mapped program."]
    programs: Annotated[list[documents.Program], "The mapped program, after the passes."]
