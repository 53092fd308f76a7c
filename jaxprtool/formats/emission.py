"""The formats of emitted programs, their file names, and writing them.

JAX is not imported before a program is written, since the command line lists the formats in its
help.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from jaxprtool.errors import OutputError, did_you_mean
from jaxprtool.files import STDOUT, file_written_whole, suffix_of

if TYPE_CHECKING:
    from jax import Device

    from jaxprtool.formats.jaxpr.write import OpaqueEquations
    from jaxprtool.formats.lowering import XlaComputation
    from jaxprtool.ir.program import Program


class Format(StrEnum):
    """The formats in which a program can be emitted."""

    python = "python"
    jaxpr = "jaxpr"
    stablehlo = "stablehlo"
    hlo = "hlo"
    hlo_optimized = "hlo-optimized"
    hlo_proto = "hlo-proto"
    dot = "dot"
    model_explorer = "model-explorer"
    exported = "exported"


class GraphKind(StrEnum):
    """The graph of a program that the format `dot` draws."""

    jaxpr = "jaxpr"
    hlo = "hlo"


_ALL = ", ".join(Format)

#: The format of each file suffix, and whether it is the binary variant of the format. The first
#: suffix of a format is used for files in a folder.
SUFFIXES = {
    ".jaxpr": (Format.jaxpr, False),
    ".py": (Format.python, False),
    ".mlir": (Format.stablehlo, False),
    ".mlirbc": (Format.stablehlo, True),
    ".hlo": (Format.hlo, False),
    ".optimized.hlo": (Format.hlo_optimized, False),
    ".optimized.pb": (Format.hlo_optimized, True),
    ".pb": (Format.hlo_proto, False),
    ".dot": (Format.dot, False),
    ".gv": (Format.dot, False),
    ".json": (Format.model_explorer, False),
    ".exported": (Format.exported, False),
}

#: The picture formats of Graphviz.
_PICTURES = ("svg", "png", "pdf")


def format_of(path: str | None, chosen: Format | None = None) -> tuple[Format, bool]:
    """Return the format to write, and whether to write its binary variant.

    Args:
        path: The file to write, whose suffix determines the format; None for stdout.
        chosen: The format, if given by the user.

    Raises:
        OutputError: If `chosen` is None and the suffix is unknown.
    """
    suffix = suffix_of(path)
    matching = [
        SUFFIXES[end] for end in sorted(SUFFIXES, key=len) if (path or "").lower().endswith(end)
    ]
    if chosen is not None:
        return chosen, (chosen, True) in matching
    if matching:
        return matching[-1]
    if suffix[1:] in _PICTURES:
        return Format.dot, False
    if suffix:
        message = f"the extension of '{path}' is not a known format"
        near = did_you_mean(suffix, [*(f".{name}" for name in _PICTURES), *SUFFIXES])
        raise OutputError(message, near or f"--to is one of {_ALL}")
    raise OutputError("--to is missing", f"--to is one of {_ALL}")


@dataclass(frozen=True)
class Emission:
    """A format and its options.

    Attributes:
        format: The format.
        binary: Whether StableHLO is written as bytecode, and optimized HLO as a proto.
        source: Whether to include source locations; by default `.jaxpr` files and Python do, and
            StableHLO text does not.
        graph: The graph to draw; None for the jaxpr's.
        depth: The depth up to which its layers and bodies are open; None for as many as a picture
            can show.
        full: Whether all of them are open.
        platform: The platform to lower for; None is JAX's default.
        platforms: The target platforms of a `jax.export` artifact.
        devices: The devices that `hlo_optimized` is compiled for, one of them unless the program
            has a mesh; none for JAX's default.
        computation: The options of `xla_computation` for `stablehlo`, `hlo` and `hlo_proto`; None
            for the lowering of `jax.jit`.
        callbacks: "refuse" or "stub": how Python functions that the program calls are handled.
        on_opaque: Called with the reason of each equation that is opaque in a `.jaxpr` file because
            it cannot be written; if None, it is refused.
    """

    format: Format
    binary: bool = False
    source: bool | None = None
    graph: GraphKind | None = None
    depth: int | None = None
    full: bool = False
    platform: str | None = None
    platforms: Sequence[str] = ()
    devices: Sequence[Device] = ()
    callbacks: str = "refuse"
    computation: XlaComputation | None = None
    on_opaque: Callable[[str], None] | None = None

    @property
    def suffix(self) -> str:
        """The suffix of files in a folder."""
        return next(s for s, f in SUFFIXES.items() if f == (self.format, self.binary))

    @property
    def is_binary(self) -> bool:
        """Whether the output is bytes rather than text."""
        return self.binary or self.format in (Format.hlo_proto, Format.exported)

    @property
    def _source(self) -> bool:
        """Whether a `.jaxpr` file or Python has source locations."""
        return self.source is not False

    def content(self, program: Program, path: str = "") -> str | bytes:
        """Return a program in the format; the suffix of the path determines the picture format."""
        match self.format:
            case Format.python:
                from jaxprtool.formats.python.emit import to_python

                return to_python(program, callbacks=self.callbacks, source=self._source)
            case Format.jaxpr:
                from jaxprtool.formats.jaxpr import write

                options = self.callbacks, self._source, self._opaque
                text, reasons = write.text_with_opaque(program, *options)
                self._say_opaque(reasons)
                return text
        from jaxprtool.ir.equations import equations
        from jaxprtool.ir.frames import frames_now
        from jaxprtool.jaxcompat import open_jaxpr, source_paths_without

        frames = frames_now(program.roots)
        if self.source or self.format in (Format.hlo, Format.hlo_optimized):
            for eqn in equations(open_jaxpr(program.jaxpr)):
                frames.texts(eqn)  # JAX writes the lines itself; this cites their files
        with source_paths_without(frames.folders()):
            return self._lowered(program, path)

    def parts(self, program: Program) -> Iterable[str | bytes]:
        """Return `content` in parts that need not be in memory together."""
        if self.format is Format.python:
            from jaxprtool.formats.python.emit import python_parts

            return python_parts(program, self.callbacks, self._source)
        return [self.content(program)]

    def _lowered(self, program: Program, path: str) -> str | bytes:
        from jaxprtool.formats import lowering

        if self.computation is not None:
            return self._computation(program, self.computation)
        match self.format:
            case Format.stablehlo if self.binary:
                return lowering.stablehlo_bytecode(program, self.platform)
            case Format.stablehlo:
                return lowering.stablehlo(program, self.platform, bool(self.source))
            case Format.hlo:
                return lowering.hlo(program, self.platform)
            case Format.hlo_optimized:
                return lowering.hlo_optimized(program, self.devices, self.binary)
            case Format.hlo_proto:
                return lowering.hlo_proto(program, self.platform)
            case Format.dot:
                return self._graph(program, path)
            case Format.model_explorer:
                from jaxprtool.formats.pictures import model_explorer

                return model_explorer(program)
            case Format.exported:
                from jaxprtool.formats.lowering import exported

                return exported(program, self.platforms)
        raise AssertionError(f"{self.format} is not a format of a compiler")

    def _computation(self, program: Program, options: XlaComputation) -> str | bytes:
        """Return a program as `xla_computation` made it."""
        from jaxprtool import jaxcompat

        module = options.module(program, self.platform)
        if self.format is Format.stablehlo:
            if self.binary:
                return jaxcompat.portable_artifact(module)
            text: str = module.operation.get_asm(enable_debug_info=bool(self.source))
            return text
        built = options.computation(program, module)
        if self.format is Format.hlo:
            return jaxcompat.hlo_text(built)
        return bytes(built.as_serialized_hlo_module_proto())

    def _graph(self, program: Program, path: str) -> str | bytes:
        from jaxprtool.formats import lowering, pictures
        from jaxprtool.formats.pictures import dot

        if self.graph is GraphKind.hlo:
            graph = lowering.hlo_dot(program, self.platform)
        else:
            graph = dot(program, self.depth, self.full)
        format_name = picture_format(path)
        return pictures.graph_picture(graph, format_name, path) if format_name else graph

    def write(self, programs: Sequence[tuple[str, Program]], out: str) -> list[str]:
        """Write programs and their additional files to `out`: all of them, or none.

        Returns:
            The path of each program.

        Raises:
            OutputError: If several programs would be written to one file, or a file cannot be
                written.
            UnsupportedError: If a program cannot be written in the format.
        """
        new = not os.path.exists(out)
        paths = destinations(programs, out, self.suffix)
        try:
            self._write_all(paths)
        except BaseException:
            if new:
                with suppress(OSError):  # no folder is created for a single file
                    os.rmdir(out)
            raise
        return [path for _, path in paths]

    @property
    def _opaque(self) -> OpaqueEquations:
        from jaxprtool.formats.jaxpr.write import OpaqueEquations

        return OpaqueEquations.none if self.on_opaque is None else OpaqueEquations.unwritable

    def _say_opaque(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            assert self.on_opaque is not None
            self.on_opaque(reason)

    def _write_all(self, paths: list[tuple[Program, str]]) -> None:
        if self.format is Format.python:
            from jaxprtool.formats.python.emit import write_modules

            return write_modules(paths, self.callbacks, self._source)
        if self.format is Format.jaxpr:
            from jaxprtool.formats.jaxpr import write

            reasons = write.write_program_files(paths, self.callbacks, self._source, self._opaque)
            self._say_opaque(reasons)
            return
        with ExitStack() as files:
            for program, path in paths:
                file = files.enter_context(file_written_whole(path))
                content = self.content(program, path)
                file.write(content if isinstance(content, bytes) else content.encode())


def picture_format(path: str | None) -> str | None:
    """Return the picture format of a file name's suffix; None if it is not a picture."""
    format_name = suffix_of(path)[1:]
    return format_name if format_name in _PICTURES else None


def destinations(
    programs: Sequence[tuple[str, Program]], out: str, suffix: str
) -> list[tuple[Program, str]]:
    """Return each program with its destination path, and create the folder `out` if needed.

    Args:
        programs: The programs by name.
        out: A file for one program, or a folder for any number, one file each.
        suffix: The suffix of files in a folder.

    Raises:
        OutputError: If several programs would be written to one file, or the folder cannot be
            created.
    """
    if not out:
        raise OutputError("the path to write to is empty")
    if not (out.endswith(os.sep) or os.path.isdir(out)):
        if len(programs) == 1:
            return [(programs[0][1], out)]
        names = ", ".join(name for name, _ in programs) or "none"
        folder = "DIR" if out == STDOUT else os.path.splitext(out)[0]
        raise OutputError(
            f"'{out}' takes one program, but the passes returned {names}",
            f"write a folder, with one file for each: -o {folder}/",
        )
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as fault:
        raise OutputError(f"cannot create the folder '{out}': {fault.strerror}") from fault
    return [(program, os.path.join(out, name + suffix)) for name, program in programs]
