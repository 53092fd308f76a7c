"""`jaxprtool vmap`: a function of one example as a program of many."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool import expressions
from jaxprtool.cli import completion, options, output, reports
from jaxprtool.cli.emit import SUFFIXES
from jaxprtool.cli.places import STDOUT, places, write_jaxprs
from jaxprtool.errors import ArgumentsError, OutputError

if TYPE_CHECKING:
    from jaxprtool.cli.watch import Row
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.batch import Batch

_MAPPED = "How it is mapped"


def _in_axes(text: str) -> Any:
    return _literal(text, "--in-axes")


def _out_axes(text: str) -> Any:
    return _literal(text, "--out-axes")


def _literal(text: str, option: str) -> Any:
    """The value that a Python literal spells. Raises ArgumentsError."""
    source = expressions.read(text, option, ArgumentsError)
    if len(source.args) != 1 or source.keywords:
        hint = "an entry for each argument is written in parentheses: (None, 0)"
        raise ArgumentsError(f"{option} takes one value, and '{text}' is none", hint)
    return source.literal(source.args[0])


_InAxes = Annotated[
    Any,
    typer.Option(
        "--in-axes",
        metavar="EXPR",
        parser=_in_axes,
        help="The mapped axis of each argument: an integer, None where all lanes share it, or "
        'a tuple with an entry for each positional argument that is traced: "(None, 0)".',
        rich_help_panel=_MAPPED,
    ),
]
_OutAxes = Annotated[
    Any,
    typer.Option(
        "--out-axes",
        metavar="EXPR",
        parser=_out_axes,
        help="Where results are mapped; None where they are the same in all lanes.",
        rich_help_panel=_MAPPED,
    ),
]
_AxisSize = Annotated[
    int,
    typer.Option(
        "--axis-size",
        metavar="N",
        min=0,
        help="The size of the mapped axis: how many lanes.",
        rich_help_panel=_MAPPED,
        show_default=False,
    ),
]
_AxisName = Annotated[
    str | None,
    typer.Option(
        "--axis-name",
        metavar="NAME",
        help="What collectives call the axis: psum(x, 'NAME').",
        rich_help_panel=_MAPPED,
    ),
]
_SpmdAxisName = Annotated[
    Any,
    typer.Option(
        "--spmd-axis-name",
        metavar="NAME,…",
        parser=options.names,
        help="The mesh axes that lanes are spread over.",
        rich_help_panel=_MAPPED,
    ),
]
_Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        metavar="K",
        min=1,
        help="So many lanes at a time, in a scan, so that memory is bounded.",
        rich_help_panel=_MAPPED,
    ),
]
_Passes = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--passes",
        metavar="PIPELINE",
        help='Passes to run afterwards: "dce".',
        rich_help_panel="Passes",
        autocompletion=completion.complete_passes,
    ),
]
_Out = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE|DIR/|-",
        help="Write a .jaxpr file, or Python if it is called .py; - is stdout.",
        rich_help_panel="Output",
    ),
]


def vmap(
    target: options.Target,
    axis_size: _AxisSize,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    in_axes: _InAxes = "0",
    out_axes: _OutAxes = "0",
    axis_name: _AxisName = None,
    spmd_axis_name: _SpmdAxisName = None,
    chunk: _Chunk = None,
    passes: _Passes = None,
    plugin: options.Plugin = None,
    out: _Out = None,
    callbacks: options.Callbacks = options.CallbackChoice.refuse,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Map a function over an axis, as jax.vmap does; --args are those of one lane.

    [bold]Examples[/]

      jaxprtool vmap samples/batching.py:loss --in-axes "(None, 0)" --axis-size 32
      jaxprtool vmap samples/batching.py:pull --axis-size 1000 --chunk 64
      jaxprtool vmap samples/rnn.py:loss --in-axes "(None, 1)" --axis-size 4 -o -
    """
    _check_output(out, json)
    options.start_jax(x64)
    from jaxprtool.cli.watch import Watcher
    from jaxprtool.passes.batch import Batch
    from jaxprtool.passes.pipeline import Pipeline, Step

    batch = Batch(in_axes, out_axes, axis_size, axis_name, spmd_axis_name or None, chunk)
    pipeline = Pipeline((Step(batch), *options.pipeline(passes, plugin).steps))
    watcher = Watcher(before_all=False, after_all=False, after=frozenset())
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    program = options.trace(entry, pipeline)
    programs = options.each(pipeline.run(program, watcher))
    row = watcher.rows[0]
    if out is not None:
        _write(programs, out, callbacks)
    if json:
        output.write_json(_document(batch, program, row, programs))
    elif out != STDOUT:
        output.write(_summary(batch, program, row))
    if out is None and not json:
        output.write("")
        output.write_listings(programs)


# --- where it goes ----------------------------------------------------------------------------


def _check_output(out: str | None, json: bool) -> None:
    """Refuse files of other formats, and two documents on stdout. Raises OutputError."""
    if json and out == STDOUT:
        raise OutputError("--json and -o - both want stdout", "write the program to a file")
    suffix = os.path.splitext(out or "")[1]
    if suffix in SUFFIXES and suffix not in (".jaxpr", ".py"):
        hint = f'`jaxprtool emit TARGET -p "batch(...)" -o {out}` writes what its name says'
        raise OutputError(f"vmap writes .jaxpr and .py files, and '{out}' is named otherwise", hint)


def _write(programs: Sequence[tuple[str, Program]], out: str, callbacks: str) -> None:
    if not out.endswith(".py"):
        write_jaxprs(programs, out, callbacks)
        return
    from jaxprtool.formats.python import emit

    emit.write_all(places(programs, out, ".py"), callbacks)


# --- what is said of it -----------------------------------------------------------------------


def _mapped(batch: Batch, program: Program) -> list[tuple[str, int | None]]:
    """Each flat argument with the axis along which it is mapped."""
    from jaxprtool.passes.batch.axes import program_axes

    dims, _ = program_axes(program, batch.in_axes, batch.axis_size)
    return list(zip(program.arg_names, dims, strict=True))


def _summary(batch: Batch, program: Program, row: Row) -> str:
    """What is mapped and where, in one line: `32 lanes: x at axis 0, w unmapped; ...`."""
    dims: dict[str, set[int | None]] = {}
    mapped = _mapped(batch, program)
    for name, dim in mapped:
        dims.setdefault(_root(name), set()).add(dim)
    names: dict[int | None, dict[str, None]] = {}
    for name, dim in mapped:
        root = _root(name)
        names.setdefault(dim, {})[root if len(dims[root]) == 1 else name] = None
    parts = [
        f"{reports.some(list(each))} {'unmapped' if dim is None else f'at axis {dim}'}"
        for dim, each in sorted(names.items(), key=lambda item: (item[0] is None, item[0]))
    ]
    lanes = "1 lane" if batch.axis_size == 1 else f"{batch.axis_size} lanes"
    if batch.axis_name is not None:
        lanes += f" of axis '{batch.axis_name}'"
    if batch.chunk is not None:
        lanes += f", {batch.chunk} at a time"
    return f"{lanes}: {', '.join(parts) or 'no arguments'}; {row.before} -> {row.after} equations"


def _root(name: str) -> str:
    """The argument that a leaf's path begins with: `params` of `params['w']`."""
    return re.split(r"[.\[]", name)[0]


def _document(
    batch: Batch, program: Program, row: Row, programs: Sequence[tuple[str, Program]]
) -> dict[str, Any]:
    from jaxprtool.render.as_json import program_document

    return {
        "axis_size": batch.axis_size,
        "axis_name": batch.axis_name,
        "chunk": batch.chunk,
        "arguments": [{"name": name, "axis": dim} for name, dim in _mapped(batch, program)],
        "equations_before": row.before,
        "equations_after": row.after,
        "programs": [program_document(each) for _, each in programs],
    }
