"""Reading of Programs from `.jaxpr` files.

Nothing in a file is run or imported: names are looked up in tables, values are read with `ast`, and
JAX's own type checker checks every equation before the program is returned.
"""

from __future__ import annotations

import os
import re
import warnings
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError
from jaxprtool.files import opened_plain
from jaxprtool.formats.jaxpr import syntax
from jaxprtool.formats.jaxpr.build import FileBuilder
from jaxprtool.formats.jaxpr.constants import Constants
from jaxprtool.formats.jaxpr.header import (
    Header,
    bound_of,
    parsed_jit_options,
    read_header,
    read_stacks,
    source_infos_by_comment,
)
from jaxprtool.formats.jaxpr.syntax import FileText
from jaxprtool.formats.jaxpr.values import TypeReader
from jaxprtool.ir import source_text
from jaxprtool.ir.frames import Root
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program
from jaxprtool.ir.symbols import Bound
from jaxprtool.jaxcompat import DebugInfo
from jaxprtool.jaxcompat.source_locations import is_installed

#: The entry of the header with the JAX release.
_RELEASE = re.compile(r"^jax = '([^']*)'\r?$", re.MULTILINE)

_WIDE_TYPES = ("f64", "i64", "u64", "c128")


def read(path: str | os.PathLike[str], sources: Root | None = None) -> Program:
    """Return the Program in a `.jaxpr` file, or in a StableHLO module, in text or bytecode.

    Large constants of a `.jaxpr` file are in an `.npz` file next to it.

    Args:
        path: The file.
        sources: The folder of the user's source files that equations come from, by default the
            current one. Their lines are shown next to equations if they have not changed.

    Raises:
        ProgramFileError: If the file does not exist, is malformed, or has ill-typed equations; the
            message has the place.
        UnsupportedError: If a module has an operation that cannot be read.
    """
    name = os.fsdecode(path)
    data, version = _contents(name)
    if not is_program(data):
        from jaxprtool.formats.stablehlo import is_stablehlo, read_module_program

        if is_stablehlo(data):
            return read_module_program(data, name)
    while True:
        try:
            return parse_program(data, name, Path(name), sources)
        except ProgramFileError:
            old_version = version
            data, version = _contents(name)
            if version == old_version:
                raise
            # The file was replaced in the meantime, and its constants removed.


def _contents(name: str) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes of a file, and a key that differs for other files of the same name."""
    try:
        with opened_plain(name) as file:
            status = os.fstat(file.fileno())
            return file.read(), (status.st_ino, status.st_mtime_ns)
    except (OSError, ValueError) as error:  # ValueError for an invalid path
        said = getattr(error, "strerror", None) or error
        raise ProgramFileError(
            f"{name!r}: {said}" if "\0" in name else f"{name}: {said}"
        ) from error


def release_of(path: str | os.PathLike[str]) -> str:
    """Return the JAX release that wrote a file; "" if its header does not say.

    Raises:
        ProgramFileError: If the file cannot be read.
    """
    data, _ = _contents(os.fsdecode(path))
    match = _RELEASE.search(data.decode(errors="replace"))
    return match[1] if match else ""


def is_program(data: bytes) -> bool:
    """Return True if these bytes begin like a `.jaxpr` file."""
    return data.removeprefix(b"\xef\xbb\xbf").startswith(b"jaxprtool ")


def parse_program(
    data: str | bytes, name: str, path: Path | None = None, sources: Root | None = None
) -> Program:
    """Return the Program in a file's text.

    Args:
        data: The text.
        name: The file's name in error messages.
        path: The file of the text, if its large constants are next to it.
        sources: As for `read`.

    Raises:
        ProgramFileError: As for `read`.
    """
    text = data if isinstance(data, str) else _decoded(data, name)
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    # Ignore warnings about invalid escapes and unusual parameters.
    with warnings.catch_warnings(action="ignore"), without_collector():
        return _program(FileText(name, text), path, sources)


def _program(source: FileText, path: Path | None, sources: Root | None) -> Program:
    file = syntax.parse_file(source)
    header = read_header(source, file.header)
    files = _files(header, path, sources)
    try:
        stacks = read_stacks(header.stacks, files)
    except ValueError as error:
        raise source.fail(file.header["stacks"].position, str(error)) from None
    infos = source_infos_by_comment((comment for _, comment in source.comments), files, stacks)
    try:
        types = TypeReader(header.meshes, header.symbols, header.mesh, header.foreign)
    except ValueError as error:
        raise source.fail(file.header["foreign"].position, str(error)) from None
    debug_info = DebugInfo("jit", header.name, header.arguments[1], header.results[1])
    _check_counts(source, file, header)
    constants = Constants(_constants_files(path, header.constants))
    with closing(constants), _precision(source), jaxcompat.axes_bound(header.axis_env):
        builder = FileBuilder(file, types, constants, infos, header.modules)
        jaxpr = builder.program(debug_info)
    program = Program(
        name=header.name,
        jaxpr=jaxpr,
        in_tree=header.arguments[0],
        out_tree=header.results[0],
        arg_names=header.arguments[1],
        out_names=header.results[1],
        axis_env=header.axis_env,
        roots=() if sources is None else (sources,),
    )
    if header.bounds:
        program = program.replace(bounds=_bounds(source, file, program, header, types))
    if header.jit is None:
        return program
    try:
        return program.replace(jit=parsed_jit_options(program, header.jit))
    except ValueError as error:
        raise source.fail(file.header["jit"].position, str(error)) from None


def _files(header: Header, path: Path | None, sources: Root | None) -> dict[str, str]:
    """Return the names of source files in frames, by their names in comments.

    The user's files have the names of `source_text.name_read`. Without `sources`, they are looked
    for in the current folder. Libraries keep their paths in the folder of packages.
    """
    files = dict(header.files)
    for name, relative in header.files.items():
        recorded = header.digests.get(name)
        if recorded is None and is_installed(relative):
            continue
        file = os.path.join("" if sources is None else sources.base, relative)
        if recorded is None:  # written before files had digests
            is_same = sources is not None and _is_older(file, path)
        else:
            is_same = recorded != "" and recorded == source_text.source_digest(file)
        files[name] = source_text.name_read(relative, file, recorded or "", is_same)
    return files


def _is_older(file: str, path: Path | None) -> bool:
    try:
        return path is not None and os.stat(file).st_mtime <= path.stat().st_mtime
    except OSError:
        return False


def _constants_files(path: Path | None, name: str | None) -> list[Path]:
    """Return the possible constants files: next to the file, or to the target of its link."""
    if path is None:
        return []
    # Early files did not name their constants file, which was named after them.
    beside = path.with_name(name or f"{path.name}.npz")
    return [beside, path.resolve().with_name(beside.name)]


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        from jaxprtool.formats.lowering import is_exported

        message, hint = f"{name}:{line}:{column}: the text is not valid UTF-8", None
        if is_exported(data):
            message = f"{name} is an artifact of jax.export"
            hint = f"jaxprtool.load('{name}') returns its program"
        raise ProgramFileError(message, hint) from None


def _check_counts(source: FileText, file: syntax.FileSyntax, header: Header) -> None:
    counts = (
        ("arguments", header.arguments[1], file.body.arguments),
        ("results", header.results[1], file.body.results),
    )
    for entry, names, binders in counts:
        if len(names) != len(binders):
            message = f"{len(names)} {entry} are named here, but the program has {len(binders)}"
            raise source.fail(file.header[entry].position, message)


def _bounds(
    source: FileText, file: syntax.FileSyntax, program: Program, header: Header, types: TypeReader
) -> tuple[tuple[str, Bound], ...]:
    avals, bounds = dict(program.arguments), []
    for name, value in header.bounds.items():
        position = file.header["bounds"].position
        if not np.issubdtype(getattr(avals.get(name), "dtype", None), np.integer):
            raise source.fail(position, f"'{name}' is not an argument that is a size")
        try:
            bounds.append((name, bound_of(value, types)))
        except ValueError as error:
            raise source.fail(position, str(error)) from None
    return tuple(bounds)


def _precision(source: FileText) -> AbstractContextManager[object]:
    """Return the setting that enables 64-bit types, if the file has any."""
    wide = any(f"{name}{mark}" in source.text for name in _WIDE_TYPES for mark in "[<")
    return jax.enable_x64(True) if wide else nullcontext()
