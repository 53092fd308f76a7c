"""What a reader of a program needs besides its equations: its name, and its values by name.

The same for a `Program`, which knows its names, and for a bare jaxpr, whose names are those that
JAX kept for debugging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import size_of, type_of
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr


@dataclass(frozen=True)
class NamedValue:
    """A value at a program's border: its name, its type in JAX's short form, its size if known."""

    name: str
    type: str
    bytes: int | None


@dataclass(frozen=True)
class Border:
    """A program's name, its open jaxpr, and its arguments, results and constants in order."""

    name: str
    jaxpr: Jaxpr
    arguments: tuple[NamedValue, ...]
    outputs: tuple[NamedValue, ...]
    constants: tuple[NamedValue, ...]


def border(program: Program | AnyJaxpr) -> Border:
    """Return the border of a `Program`, or of a jaxpr, closed or open."""
    jaxpr = top_jaxpr(program)
    debug = jaxpr.debug_info
    if isinstance(program, Program):
        name, inputs, results = program.name, program.arg_names, program.out_names
    else:
        name = debug.func_name
        inputs, results = debug.arg_names, debug.result_paths or ()
    return Border(
        name,
        jaxpr,
        _named(inputs, "argument", jaxpr.invars),
        _named(results, "result", jaxpr.outvars),
        _named((), "constant", jaxpr.constvars),
    )


def _named(
    names: Sequence[str | None], otherwise: str, atoms: Sequence[Atom]
) -> tuple[NamedValue, ...]:
    if len(names) != len(atoms):
        names = [None] * len(atoms)
    return tuple(
        NamedValue(str(name or f"{otherwise}[{i}]"), type_of(atom.aval), size_of(atom.aval))
        for i, (name, atom) in enumerate(zip(names, atoms, strict=True))
    )


def top_jaxpr(program: Program | AnyJaxpr) -> Jaxpr:
    """Return the open jaxpr of a `Program`, or of a jaxpr, closed or open."""
    return jaxcompat.open_jaxpr(program.jaxpr if isinstance(program, Program) else program)
