"""`jaxprtool emit`: programs in other formats."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from jaxprtool.cli import options, output
from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, command
from jaxprtool.errors import OutputError
from jaxprtool.files import STDOUT
from jaxprtool.formats.emission import Emission, Format, GraphKind, format_of, picture_format
from jaxprtool.ir.documents import document

if TYPE_CHECKING:
    from jaxprtool.api.targets import TracedTarget
    from jaxprtool.formats.lowering import XlaComputation
    from jaxprtool.ir.program import Program


_EMITTED = Panel("Format")
_COMPUTATION = Panel("As jax.xla_computation: stablehlo, hlo and hlo-proto")
_LOWERED = (Format.stablehlo, Format.hlo, Format.hlo_optimized, Format.hlo_proto, Format.dot)

_COMPUTED = (Format.stablehlo, Format.hlo, Format.hlo_proto)
_WITH_SOURCE = (Format.python, Format.jaxpr, Format.stablehlo)

_To = Annotated[
    Format | None,
    _EMITTED.option(
        "--to",
        "FORMAT",
        "python, jaxpr, stablehlo, hlo (the input of XLA), hlo-optimized, hlo-proto, dot, "
        "model-explorer, exported (for jax.export). Default: by the extension of -o.",
    ),
]
_Backend = Annotated[
    str | None,
    options.backend_option(
        "Lower for cpu, cuda, rocm or tpu, which this machine may lack. hlo-optimized needs the "
        "device, or for a TPU the package libtpu: tpu:v5e:2x2.",
        _EMITTED,
    ),
]
_Platforms = Annotated[
    Any,
    _EMITTED.option(
        "--platforms",
        "NAME,…",
        "Platforms of --to exported: cpu,cuda",
        parser=options.names,
    ),
]
_Binary = Annotated[
    bool, _EMITTED.flag("--binary", "Write stablehlo as bytecode, and hlo-optimized as a proto.")
]
_Source = Annotated[
    bool | None,
    _EMITTED.option(
        "--source/--no-source",
        "",
        "Include source lines, or not. Default: Python and .jaxpr files do, stablehlo does not.",
    ),
]
_Graph = Annotated[
    GraphKind | None,
    _EMITTED.option("--graph", "<jaxpr|hlo>", "The graph that dot draws: the jaxpr, or XLA's HLO."),
]
_Depth = Annotated[
    int | None,
    _EMITTED.option(
        "--depth", "N", "Open layers and bodies to this depth in dot. Default: as fits.", min=0
    ),
]
_Full = Annotated[bool, _EMITTED.flag("--full", "Open all layers and bodies in dot.")]
_InParts = Annotated[
    str | None,
    _COMPUTATION.option(
        "--in-parts",
        "PARTS",
        'Parts per dimension of each argument, None for replicated: "(P(2, 1), None)".',
    ),
]
_OutParts = Annotated[
    str | None,
    _COMPUTATION.option("--out-parts", "PARTS", 'The same for the results: "P(2, 1)".'),
]
_TupleArgs = Annotated[
    bool,
    _COMPUTATION.flag("--tuple-args", "Take all arguments as one tuple, in HLO."),
]
_Donate = Annotated[
    Any,
    _COMPUTATION.option(
        "--donate",
        "N,…",
        "Positions of arguments whose memory results may reuse.",
        parser=options.parsed_numbers,
    ),
]
_ReturnShape = Annotated[
    bool,
    _COMPUTATION.flag("--return-shape", "Print the tree of result types on stderr."),
]
_Out = Annotated[
    str | None,
    options.out_option(
        "Write a file, or several into a folder. picture.svg, .png and .pdf need Graphviz."
    ),
]


@command
def emit_command(
    session: Session,
    axis_env: options.AxisEnv = None,
    to: _To = None,
    backend: _Backend = None,
    platforms: _Platforms = None,
    binary: _Binary = False,
    source: _Source = None,
    graph: _Graph = None,
    depth: _Depth = None,
    full: _Full = False,
    in_parts: _InParts = None,
    out_parts: _OutParts = None,
    tuple_args: _TupleArgs = False,
    donate: _Donate = None,
    return_shape: _ReturnShape = False,
    out: _Out = None,
    callbacks: options.Callbacks = "refuse",
    json: options.Json = False,
) -> None:
    """Export to Python, StableHLO, HLO, a graph or jax.export.

    [bold]Examples[/]

      jaxprtool emit samples/rnn.py:loss --to stablehlo -p dce
      jaxprtool emit samples/rnn.py:loss --to hlo-optimized --backend cpu
      jaxprtool emit samples/transformer.py:grad_loss --to python
      jaxprtool emit samples/layers.py:loss --to hlo --donate 0 --return-shape
      jaxprtool emit samples/transformer.py:loss -o loss.svg
      jaxprtool emit samples/transformer.py:grad_loss --to model-explorer -o grad.json
    """
    if to is None and output.is_page(out):
        raise OutputError("emit does not write HTML pages", f"use `jaxprtool show TARGET -o {out}`")
    if json and out == STDOUT:
        raise OutputError("--json and -o - cannot both write to stdout", "omit -o, or name a file")
    to, named_binary = format_of(out, to)
    binary = binary or named_binary
    emission = Emission(
        to,
        binary,
        source,
        graph,
        depth,
        full,
        platform=backend,
        platforms=platforms or (),
        callbacks=callbacks,
        on_opaque=output.note,
    )
    if json and emission.is_binary and out is None:
        raise OutputError(f"{to} is binary, and JSON is text", "write a file: -o FILE")
    _check(emission, out)
    parts = {"--in-parts": in_parts, "--out-parts": out_parts}
    asked = {**parts, "--tuple-args": tuple_args, "--donate": donate}
    _check_computation(to, {**asked, "--return-shape": return_shape})
    session.start()
    session.function.import_module()
    emission = _on_platforms(emission)
    traced = session.traced(axis_env=axis_env)
    programs = session.programs(traced)
    if any(asked.values()) or donate:
        emission = replace(emission, computation=_computation(parts, tuple_args, donate, traced))
    if return_shape:
        _say_result_types(programs)
    session.on_progress(f"emitting {to}")
    if out in (None, STDOUT) and not json:
        _print(programs, emission)
        return
    emitted = _emitted(programs, emission, out)
    if json:
        output.write_json(EmitDocument(to, emitted))


def _check(emission: Emission, out: str | None) -> None:
    """Raise OutputError for options that cannot be combined."""
    to = emission.format
    takes = {
        "--binary": (emission.binary, (Format.stablehlo, Format.hlo_optimized)),
        "--source": (emission.source, _WITH_SOURCE),
        "--no-source": (emission.source is False, _WITH_SOURCE),
        "--graph": (emission.graph, (Format.dot,)),
        "--depth": (emission.depth is not None, (Format.dot,)),
        "--full": (emission.full, (Format.dot,)),
        "--platforms": (emission.platforms, (Format.exported,)),
        "--backend": (emission.platform, _LOWERED),
        "--callbacks stub": (emission.callbacks == "stub", (Format.python, Format.jaxpr)),
    }
    for name, (is_set, formats) in takes.items():
        if is_set and to not in formats:
            hint = f"write --platforms {emission.platform}" if to is Format.exported else None
            raise OutputError(f"{name} applies to {', '.join(formats)}, not to {to}", hint)
    if emission.platform and to is Format.dot and emission.graph is not GraphKind.hlo:
        raise OutputError("--backend applies to --graph hlo; the graph of a jaxpr has no backend")
    if emission.graph is GraphKind.hlo and (emission.full or emission.depth is not None):
        raise OutputError("--depth and --full apply to the graph of a jaxpr, not of HLO")
    if emission.full and emission.depth is not None:
        raise OutputError("--depth and --full cannot be combined")
    if emission.source and emission.binary:
        raise OutputError("--source applies to text; bytecode always has source lines")
    if emission.is_binary and out in (None, STDOUT) and sys.stdout.isatty():
        what = "bytecode" if emission.binary else f"{to}"
        raise OutputError(f"{what} is binary, but stdout is a terminal", "write a file: -o FILE")
    if to is Format.dot and picture_format(out):
        from jaxprtool.formats.pictures import require_graphviz

        require_graphviz(out or "")


def _check_computation(to: Format, settings: dict[str, Any]) -> None:
    """Raise OutputError for options of `xla_computation` that do not apply to the format."""
    for name, value in settings.items():
        if value and to not in _COMPUTED:
            raise OutputError(f"{name} applies to {', '.join(_COMPUTED)}, not to {to}")
    if settings["--tuple-args"] and to is Format.stablehlo:
        raise OutputError(
            "--tuple-args applies to hlo and hlo-proto: StableHLO functions take separate arguments"
        )


def _computation(
    parts: dict[str, str | None],
    tuple_args: bool,
    donate: Sequence[int] | None,
    traced: TracedTarget,
) -> XlaComputation:
    from jaxprtool.formats.lowering import OptionNames, XlaComputation, read_parts

    ins, outs = (text and read_parts(text, option) for option, text in parts.items())
    donated = tuple(map(traced.position, donate or ()))
    names = OptionNames("--in-parts", "--out-parts", "--donate")
    return XlaComputation(ins, outs, tuple_args, donated, names)


def _say_result_types(programs: Sequence[tuple[str, Program]]) -> None:
    from jaxprtool.formats.lowering import result_types

    for name, program in programs:
        output.note(f"{name} returns {result_types(program)}")


def _on_platforms(emission: Emission) -> Emission:
    """Find the devices to compile for, and raise BackendError for unavailable platforms."""
    wanted = [emission.platform] if emission.platform else emission.platforms
    if not wanted:
        return emission
    if emission.platform and emission.format is Format.hlo_optimized:
        from jaxprtool.execute.running import backends

        return replace(emission, devices=backends.devices_to_compile_for(emission.platform))
    from jaxprtool.formats.lowering import platform_names

    platform_names(wanted)
    return emission


def _emitted(
    programs: Sequence[tuple[str, Program]], emission: Emission, out: str | None
) -> list[EmittedProgram]:
    """Write programs to the files of -o; without it, return their texts."""
    if out is None:
        texts = [(name, str(emission.content(program))) for name, program in programs]
        return [EmittedProgram(name, text, None, None) for name, text in texts]
    paths = emission.write(programs, out)
    output.say_written(paths)
    named = zip(programs, paths, strict=True)
    return [EmittedProgram(name, None, path, os.path.getsize(path)) for (name, _), path in named]


def _print(programs: list[tuple[str, Program]], emission: Emission) -> None:
    """Write programs to stdout; several are preceded by their names as comments."""
    if len(programs) > 1 and (emission.is_binary or emission.format is Format.model_explorer):
        names = ", ".join(name for name, _ in programs)
        reason = "is binary and" if emission.is_binary else "is one document and"
        raise OutputError(
            f"{emission.format} {reason} takes one program, but the passes returned {names}",
            "write a folder, with one file for each: -o DIR/",
        )
    mark = "#" if emission.format in (Format.python, Format.jaxpr) else "//"
    for i, (name, program) in enumerate(programs):
        parts = emission.parts(program)
        if len(programs) > 1:
            output.write_exactly(("\n" if i else "") + f"{mark} {name}\n")
        for part in parts:
            if isinstance(part, bytes):
                sys.stdout.flush()
                sys.stdout.buffer.write(part)
            else:
                output.write_exactly(part)


@document(optional=("text", "path", "bytes"))
class EmittedProgram(NamedTuple):
    """A program in another format.

    Attributes:
        name: The name of the program.
        text: The program in this format; None if it was written to a file.
        path: Its file; None without -o.
        bytes: The size of the file, in bytes; None without -o.
    """

    name: str
    text: str | None
    path: str | None
    bytes: int | None


class EmitDocument(NamedTuple):
    """Programs in another format.

    Attributes:
        format: The format, as --to names it.
        programs: The programs.
    """

    format: str
    programs: Sequence[EmittedProgram]
