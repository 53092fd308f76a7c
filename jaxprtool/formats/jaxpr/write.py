"""Writing of Programs to `.jaxpr` files: a header, and the listing in exact notation.

    jaxprtool 1
    jax = '0.10.2'
    name = 'loss'
    arguments = (({'b': "params['b']", 'w': "params['w']"}, 'x'), {})
    results = 'result'
    files = {'layers.py': 'net/layers.py'}

    { lambda a:f32[3]=[1.0, 2.0, 3.0]; b:f32[4] c:f32[3,4] d:f32[8,3]. let
        e:f32[8,4] = dot_general[...] d c         # layers.py:12:8 (loss) in layer/dense
      in (e,) }

The first line has the version of the format. The next entries are the JAX release that wrote it,
the program's name, and the structures of arguments and results with each value's name in its place.
Optional entries: `constants`, the name of the file with the large constants; `axis_env`, the free
named axes with their sizes; `bounds`, the largest values of arguments that are sizes, and the
largest sums of lengths; `jit`, the options of `jax.jit`; `mesh`, the mesh in which the program is
traced; `meshes`, by their names in types; `symbols`, the constraints on symbolic dimensions;
`foreign`, the dtypes and memory spaces that JAX does not have; `modules`, those of primitives that
`import jax` does not define; `files`, by their names in comments; `digests`, of the user's files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.files import check_path, is_stream
from jaxprtool.formats.jaxpr.header import header_text
from jaxprtool.formats.jaxpr.notation import FileNotation, Opaque, unsupported
from jaxprtool.formats.jaxpr.source import MAX_DEPTH
from jaxprtool.formats.jaxpr.source_comments import SourceComments
from jaxprtool.formats.jaxpr.syntax import VERSION
from jaxprtool.formats.jaxpr.values import Unwritable
from jaxprtool.formats.with_constants import Text, constants_file, write_texts
from jaxprtool.ir.core.equations import bodies, equations
from jaxprtool.ir.core.structured import sub_jaxprs
from jaxprtool.ir.notation.layout import Layout
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.callbacks import are_stubs
from jaxprtool.ir.rewriting.custom_rules import rules_followed
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, context_settings

#: The width of a listing in a pipe.
WIDTH = 80


def write(
    program: Program,
    path: str | os.PathLike[str],
    *,
    callbacks: str = "refuse",
    source: bool = True,
) -> None:
    """Write a program to a file, and its large constants to an `.npz` file next to it.

    The constants are part of the text if it goes to a device or a pipe. An existing program is
    replaced atomically with its constants: concurrent readers get the old or the new one.

    Args:
        program: The program to write.
        path: The file to write.
        callbacks: How to handle Python functions that the program calls: "refuse" raises an error,
            "stub" writes each as a stub of the same type that raises when called.
        source: Whether comments include source locations. Name scopes are always written.

    Raises:
        UnsupportedError: With the equation and its source line, if the program contains Python
            functions or other live objects.
        OutputError: If a file cannot be written.
    """
    write_all([(program, path)], callbacks, source)


def write_all(
    programs: Iterable[tuple[Program, str | os.PathLike[str]]],
    callbacks: str = "refuse",
    source: bool = True,
    opaque: Opaque = Opaque.none,
) -> list[str]:
    """Write programs with `write`: all of them, or none if one cannot be written.

    Args:
        programs: The programs, each with its file.
        callbacks: As for `write`.
        source: As for `write`.
        opaque: The equations that are written as opaque ones.

    Returns:
        For each equation that is opaque because it cannot be written, the reason.
    """
    texts, stubs = [], are_stubs(callbacks)
    reasons: dict[str, None] = {}
    for program, path in programs:
        name = check_path(path)
        beside = None if is_stream(name) else name
        content, arrays, opaque_here = _rendered(program, beside, stubs, source, opaque)
        texts.append(Text(name, content, arrays))
        reasons |= opaque_here
    write_texts(texts)
    return [*reasons]


def text(program: Program, callbacks: str = "refuse", source: bool = True) -> str:
    """Return a program as the text of a file without a constants file. Raises UnsupportedError."""
    return _rendered(program, None, are_stubs(callbacks), source)[0]


def text_with_opaque(
    program: Program, callbacks: str, source: bool, opaque: Opaque
) -> tuple[str, list[str]]:
    """Return what `text` does, with opaque equations, and the reasons as `write_all` does."""
    content, _, reasons = _rendered(program, None, are_stubs(callbacks), source, opaque)
    return content, [*reasons]


def rendered(
    program: Program,
    beside: str,
    stubs: bool = False,
    opaque: Opaque = Opaque.none,
    since: float | None = None,
) -> tuple[str, dict[str, np.ndarray]]:
    """Return the text of a program's file, and the arrays of its constants file by digest.

    Args:
        program: The program.
        beside: The name that the constants file begins with, as `constants_file` makes it.
        stubs: Whether Python functions are written as stubs of the same type.
        opaque: The equations that are written as opaque ones.
        since: The time at which the user's files were read; they may have been edited later.

    Raises:
        UnsupportedError: As for `write`.
    """
    return _rendered(program, beside, stubs, opaque=opaque, since=since)[:2]


def require_writable(program: Program, callbacks: str = "refuse") -> None:
    """Raise UnsupportedError for a program that cannot be written to a file."""
    _rendered(program, "", are_stubs(callbacks), opaque=Opaque.unwritable)


@rules_followed()
def _rendered(
    program: Program,
    path: str | None,
    stubs: bool,
    source: bool = True,
    opaque: Opaque = Opaque.none,
    since: float | None = None,
    quoted: frozenset[str] = frozenset(),
) -> tuple[str, dict[str, np.ndarray], dict[str, None]]:
    """Return the text of a program's file, and its stored arrays: none without a path.

    The last value has the reasons why equations are opaque.
    """
    _require_shallow(program)
    notation = FileNotation(path is None, quoted, stubs, opaque)
    comments = SourceComments(jaxcompat.open_jaxpr(program.jaxpr), source, program.roots)
    try:
        root = notation.hold(program.jaxpr)
        if root.eqns:
            notation.usual_mesh = context_settings(root.eqns[0].ctx)["cur_abstract_mesh"]
        layout = Layout(root, WIDTH, True, Selection(), comments.comment, notation)
        # A word without quotes is read as a text unless it is the name of a jaxpr.
        clashes = notation.words.intersection(layout.shared.values()) - quoted
        if clashes:
            return _rendered(program, path, stubs, source, opaque, since, frozenset(clashes))
        body = "".join(layout.tokens())
        arrays = notation.constants.stored
        beside = constants_file(path, arrays) if path and arrays else None
        tables = {
            "foreign": notation.types.foreign,
            "modules": notation.modules,
            "files": comments.files,
            "digests": comments.digests(since),
            "stacks": comments.stacks,
        }
        header = header_text(program, beside, tables, notation.types, notation.usual_mesh)
    except Unwritable as error:
        culprit = _culprit(jaxcompat.open_jaxpr(program.jaxpr), notation)
        message = f"{program.name} cannot be written to a file: it holds {error}"
        raise culprit or UnsupportedError(message) from error
    reasons = _reasons(root, notation.reasons)
    return f"jaxprtool {VERSION}\n{header}\n{body}\n", arrays, reasons


def _reasons(root: Jaxpr, opaque: Sequence[tuple[JaxprEqn, str]]) -> dict[str, None]:
    """Return messages that name equations by the user's lines, from equations with reasons."""
    if not opaque:
        return {}
    around = {id(eqn): outer for outer, eqn in _nested(root)}
    return {
        f"{frames_now().named([*around.get(id(eqn), ()), eqn])} is opaque in the file, which "
        f"cannot be run: {reason}": None
        for eqn, reason in opaque
    }


def _nested(root: Jaxpr) -> Iterator[tuple[tuple[JaxprEqn, ...], JaxprEqn]]:
    """Yield each equation, those of a shared body once, after the equations around it."""
    seen = {root}
    stack: list[tuple[tuple[JaxprEqn, ...], Jaxpr]] = [((), root)]
    while stack:
        outer, jaxpr = stack.pop()
        for eqn in jaxpr.eqns:
            yield outer, eqn
            for _, body in bodies(eqn):
                if body not in seen:
                    seen.add(body)
                    stack.append(((*outer, eqn), body))


def _require_shallow(program: Program) -> None:
    """Raise UnsupportedError if jaxprs are nested more deeply than a reader accepts."""
    level, depth = [jaxcompat.open_jaxpr(program.jaxpr)], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            message = (
                f"{program.name} cannot be written to a file: its jaxprs are nested more than "
                f"{MAX_DEPTH} "
            )
            raise UnsupportedError(f"{message}deep", "inline calls with -p inline")
        inner = (jaxcompat.open_jaxpr(b) for j in level for e in j.eqns for _, b in sub_jaxprs(e))
        level = list({id(body): body for body in inner}.values())


def _culprit(jaxpr: Jaxpr, notation: FileNotation) -> UnsupportedError | None:
    """Return the error for the first equation whose types cannot be written."""
    for eqn in equations(jaxpr):
        try:
            for atom in (*eqn.invars, *eqn.outvars):
                notation.type_of(atom.aval)
        except Unwritable as error:
            return unsupported(eqn, error)
    return None
