"""What a reader of a program needs besides its equations: its name, and its values by name.

The same for a `Program`, which knows its names, and for a bare jaxpr, whose names are those that
JAX kept for debugging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.program import Program
from jaxprtool.ir.structured import sub_jaxprs
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn


@dataclass(frozen=True)
class NamedValue:
    """A value at a program's border: its name, its type in JAX's short form, its size if known."""

    name: str
    type: str
    bytes: int | None


@dataclass(frozen=True)
class Outline:
    """A program's name, its open jaxpr, and its arguments, results and constants in order."""

    name: str
    jaxpr: Jaxpr
    arguments: tuple[NamedValue, ...]
    outputs: tuple[NamedValue, ...]
    constants: tuple[NamedValue, ...]


def outline(program: Any) -> Outline:
    """The outline of a `Program`, or of a jaxpr, closed or open."""
    jaxpr = top_jaxpr(program)
    debug = jaxpr.debug_info
    if isinstance(program, Program):
        name, inputs, results = program.name, program.arg_names, program.out_names
    else:
        name = debug.func_name
        inputs, results = debug.arg_names, debug.result_paths or ()
    return Outline(
        name,
        jaxpr,
        _named(inputs, "argument", jaxpr.invars),
        _named(results, "result", jaxpr.outvars),
        _named((), "constant", jaxpr.constvars),
    )


def _named(names: Sequence[Any], otherwise: str, atoms: Sequence[Any]) -> tuple[NamedValue, ...]:
    if len(names) != len(atoms):
        names = [None] * len(atoms)
    return tuple(
        NamedValue(str(name or f"{otherwise}[{i}]"), type_of(atom.aval), size_of(atom.aval))
        for i, (name, atom) in enumerate(zip(names, atoms, strict=True))
    )


def type_of(aval: Any) -> str:
    """A type in JAX's short form: `f32[3]`."""
    return aval.str_short(short_dtypes=True)


def size_of(aval: Any) -> int | None:
    """The bytes of a value of this type; None where they depend on a symbolic dimension."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None or not all(isinstance(n, int) for n in shape):
        return None
    size = itemsize(dtype)
    for n in shape:
        size *= n
    return int(size)


def top_jaxpr(program: Any) -> Jaxpr:
    """The open jaxpr of a `Program`, or of a jaxpr, closed or open."""
    return jaxcompat.open_jaxpr(program.jaxpr if isinstance(program, Program) else program)


def bodies(eqn: JaxprEqn) -> list[tuple[str, Jaxpr]]:
    """The open jaxprs of an equation, each with the path of the parameter that holds it."""
    return [(path, jaxcompat.open_jaxpr(body)) for path, body in sub_jaxprs(eqn)]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of an open jaxpr, at any depth; those of a shared body once."""
    seen = {jaxpr}
    todo = [jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            yield eqn
            new = [body for _, body in bodies(eqn) if body not in seen]
            seen.update(new)
            todo += new


def named(eqn: JaxprEqn) -> str:
    """An equation for a message: its primitive and its source line, `psum at model.py:12`."""
    frame = jaxcompat.user_frame(eqn)
    return eqn.primitive.name + (f" at {frame[0]}:{frame[1]}" if frame else "")
