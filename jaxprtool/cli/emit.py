"""`jaxprtool emit`: a program in another language, Python's or a compiler's, or as a picture."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import completion, options, output
from jaxprtool.cli.places import STDOUT, places
from jaxprtool.errors import OutputError, did_you_mean
from jaxprtool.files import file_written_whole

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program

_EMITTED = "What is emitted"


class Format(StrEnum):
    """What a program can be emitted as."""

    python = "python"
    jaxpr = "jaxpr"
    stablehlo = "stablehlo"
    hlo = "hlo"
    hlo_optimized = "hlo-optimized"
    hlo_proto = "hlo-proto"
    dot = "dot"
    exported = "exported"


class Graph(StrEnum):
    """Which graph of a program `--to dot` draws."""

    jaxpr = "jaxpr"
    hlo = "hlo"


_ALL = ", ".join(Format)
_BINARY = (Format.hlo_proto, Format.exported)
_LOWERED = (Format.stablehlo, Format.hlo, Format.hlo_optimized, Format.hlo_proto, Format.dot)

#: The format that the end of a file's name stands for, and whether it is binary where there is a
#: choice. The first of each is how files in a folder end.
SUFFIXES = {
    ".py": (Format.python, False),
    ".jaxpr": (Format.jaxpr, False),
    ".mlir": (Format.stablehlo, False),
    ".mlirbc": (Format.stablehlo, True),
    ".hlo": (Format.hlo, False),
    ".optimized.hlo": (Format.hlo_optimized, False),
    ".pb": (Format.hlo_proto, False),
    ".dot": (Format.dot, False),
    ".gv": (Format.dot, False),
    ".exported": (Format.exported, False),
}
#: Kinds of picture that Graphviz makes of a graph.
_PICTURES = ("svg", "png", "pdf")

_To = Annotated[
    Format | None,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="python, jaxpr, stablehlo, hlo (as XLA is given it), hlo-optimized, hlo-proto, dot, "
        "exported (for jax.export). Else what the name after -o says.",
        rich_help_panel=_EMITTED,
    ),
]
_Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Lower for cpu, cuda, rocm or tpu, there or not; hlo-optimized needs it there.",
        rich_help_panel=_EMITTED,
        autocompletion=completion.complete_backend,
    ),
]
_Platforms = Annotated[
    Any,
    typer.Option(
        "--platforms",
        metavar="NAME,…",
        parser=options.names,
        help="What exported is to run on: cpu,cuda",
        rich_help_panel=_EMITTED,
    ),
]
_Binary = Annotated[
    bool,
    typer.Option("--binary", metavar="", help="stablehlo as bytecode.", rich_help_panel=_EMITTED),
]
_Source = Annotated[
    bool,
    typer.Option(
        "--source",
        metavar="",
        help="stablehlo with each operation's file and line.",
        rich_help_panel=_EMITTED,
    ),
]
_Graph = Annotated[
    Graph | None,
    typer.Option(
        "--graph",
        help="What dot draws: the jaxpr, or the HLO as XLA does.",
        rich_help_panel=_EMITTED,
    ),
]
_Out = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE|DIR/|-",
        help="Write a file, or several into a folder; picture.svg, .png, .pdf need Graphviz.",
        rich_help_panel="Output",
    ),
]


def emit(
    target: options.Target,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    to: _To = None,
    backend: _Backend = None,
    platforms: _Platforms = None,
    binary: _Binary = False,
    source: _Source = False,
    graph: _Graph = None,
    out: _Out = None,
    callbacks: options.Callbacks = options.CallbackChoice.refuse,
    traceback: options.Traceback = False,
) -> None:
    """Write a function as Python source, StableHLO, HLO, a graph or a jax.export artifact.

    [bold]Examples[/]

      jaxprtool emit samples/rnn.py:loss --to stablehlo -p dce
      jaxprtool emit samples/rnn.py:loss --to hlo-optimized --backend cpu
      jaxprtool emit samples/transformer.py:grad_loss --to python
      jaxprtool emit samples/branches.py:nested -o nested.dot
    """
    to, named_binary = _format(to, out)
    binary = binary or named_binary
    wanted = _Wanted(to, out, backend, platforms or (), binary, source, graph, callbacks)
    _check(wanted)
    options.start_jax(x64)
    _require_platforms(wanted)
    pipeline = options.pipeline(passes, plugin)
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    programs = options.each(pipeline(options.trace(entry, pipeline)))
    if out in (None, STDOUT):
        _print(programs, wanted)
        return
    _write(places(programs, out, wanted.suffix), wanted)


@dataclass(frozen=True)
class _Wanted:
    """What the options ask for."""

    to: Format
    out: str | None
    backend: str | None
    platforms: tuple[str, ...]
    binary: bool
    source: bool
    graph: Graph | None
    callbacks: options.CallbackChoice

    @property
    def suffix(self) -> str:
        """The end of the names of files in a folder."""
        return next(s for s, f in SUFFIXES.items() if f == (self.to, self.binary))

    @property
    def picture(self) -> str | None:
        """The kind of picture to draw, or None if it is the graph's text that is wanted."""
        kind = _suffix(self.out)[1:]
        return kind if self.to is Format.dot and kind in _PICTURES else None


# --- what is asked for ------------------------------------------------------------------------


def _suffix(out: str | None) -> str:
    return os.path.splitext(out or "")[1].lower()


def _format(to: Format | None, out: str | None) -> tuple[Format, bool]:
    """The format of --to, or else that which the name after -o says; whether the name says binary.

    Raises OutputError.
    """
    name, suffix = (out or "").lower(), _suffix(out)
    told = [SUFFIXES[end] for end in sorted(SUFFIXES, key=len) if name.endswith(end)]
    if to is not None:
        return to, (to, True) in told
    if told:
        return told[-1]
    if suffix[1:] in _PICTURES:
        return Format.dot, False
    if suffix:
        message = f"the name '{out}' says nothing about a format"
        near = did_you_mean(suffix, [*(f".{kind}" for kind in _PICTURES), *SUFFIXES])
        raise OutputError(message, near or f"--to takes {_ALL}")
    raise OutputError("--to is missing, which says what to emit", f"it takes {_ALL}")


def _check(wanted: _Wanted) -> None:
    """Refuse options that do not go together. Raises OutputError."""
    takes = {
        "--binary": (wanted.binary, (Format.stablehlo,)),
        "--source": (wanted.source, (Format.stablehlo,)),
        "--graph": (wanted.graph, (Format.dot,)),
        "--platforms": (wanted.platforms, (Format.exported,)),
        "--backend": (wanted.backend, _LOWERED),
        "--callbacks stub": (
            wanted.callbacks is options.CallbackChoice.stub,
            (Format.python, Format.jaxpr),
        ),
    }
    for option, (given, formats) in takes.items():
        if given and wanted.to not in formats:
            hint = f"write --platforms {wanted.backend}" if wanted.to is Format.exported else None
            raise OutputError(f"{option} goes with {', '.join(formats)}, not {wanted.to}", hint)
    if wanted.backend and wanted.to is Format.dot and wanted.graph is not Graph.hlo:
        raise OutputError("--backend goes with --graph hlo; the graph of a jaxpr has none")
    if wanted.source and wanted.binary:
        raise OutputError("--source goes with text; bytecode has its source lines anyway")
    to_stdout = wanted.out in (None, STDOUT)
    if (wanted.binary or wanted.to in _BINARY) and to_stdout and sys.stdout.isatty():
        what = "bytecode" if wanted.binary else f"{wanted.to}"
        raise OutputError(f"{what} is binary, and stdout a terminal", "write a file: -o FILE")
    if wanted.picture:
        from jaxprtool.formats.picture import require_graphviz

        require_graphviz(wanted.out or "")


def _require_platforms(wanted: _Wanted) -> None:
    """Refuse platforms that are not to be had, before anything else is done."""
    from jaxprtool.formats.lowering import platform_names

    if wanted.to is Format.hlo_optimized:
        _device(wanted)
    else:
        platform_names([wanted.backend] if wanted.backend else wanted.platforms)


def _device(wanted: _Wanted) -> Any:
    from jaxprtool.execute import backends

    return backends.device(wanted.backend) if wanted.backend else None


# --- what comes out ---------------------------------------------------------------------------


def _print(programs: list[tuple[str, Program]], wanted: _Wanted) -> None:
    """Write programs to stdout; several have their names above them, as comments."""
    if len(programs) > 1 and (wanted.binary or wanted.to in _BINARY):
        names = ", ".join(name for name, _ in programs)
        raise OutputError(
            f"{wanted.to} is binary and takes one program, and the passes gave {names}",
            "write a folder, with one file for each: -o DIR/",
        )
    mark = "#" if wanted.to in (Format.python, Format.jaxpr) else "//"
    for i, (name, program) in enumerate(programs):
        content = _content(program, wanted)
        if isinstance(content, bytes):
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            continue
        title = f"{mark} {name}\n" if len(programs) > 1 else ""
        output.write(("\n" if i else "") + title + content)


def _write(programs: list[tuple[Program, str]], wanted: _Wanted) -> None:
    """Write programs to files, and what they need beside them: all, or none if one cannot be."""
    if wanted.to is Format.python:
        from jaxprtool.formats.python import emit

        emit.write_all(programs, wanted.callbacks)
    elif wanted.to is Format.jaxpr:
        from jaxprtool.formats.jaxpr import write

        write.write_all(programs, wanted.callbacks)
    else:
        with ExitStack() as files:
            for program, path in programs:
                file = files.enter_context(file_written_whole(path))
                content = _content(program, wanted)
                file.write(content if isinstance(content, bytes) else content.encode())


def _content(program: Program, wanted: _Wanted) -> str | bytes:
    """A program in the format that is wanted, all of it."""
    from jaxprtool.formats import lowering

    match wanted.to:
        case Format.python:
            from jaxprtool.formats.python.emit import to_python

            return to_python(program, callbacks=wanted.callbacks)
        case Format.jaxpr:
            from jaxprtool.formats.jaxpr import write

            return write.text(program, wanted.callbacks)
        case Format.stablehlo if wanted.binary:
            return lowering.stablehlo_bytecode(program, wanted.backend)
        case Format.stablehlo:
            return lowering.stablehlo(program, wanted.backend, wanted.source)
        case Format.hlo:
            return lowering.hlo(program, wanted.backend)
        case Format.hlo_optimized:
            return lowering.hlo_optimized(program, _device(wanted))
        case Format.hlo_proto:
            return lowering.hlo_proto(program, wanted.backend)
        case Format.dot:
            return _graph(program, wanted)
        case Format.exported:
            from jaxprtool.formats.exported import exported

            return exported(program, wanted.platforms)


def _graph(program: Program, wanted: _Wanted) -> str | bytes:
    from jaxprtool.formats import lowering, picture
    from jaxprtool.formats.dot import dot

    hlo = wanted.graph is Graph.hlo
    graph = lowering.hlo_dot(program, wanted.backend) if hlo else dot(program)
    return picture.picture(graph, wanted.picture, wanted.out or "") if wanted.picture else graph
