"""What a reader of a program needs besides its equations: its name, and its values by name.

The same for a `Program`, which knows its names, and for a bare jaxpr, whose names are those that
JAX kept for debugging.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxprtool import jaxcompat
from jaxprtool.ir.bounds import Bound, LengthsBound, SizeBound, range_of_lengths
from jaxprtool.ir.equations import size_of, type_of
from jaxprtool.ir.program import Program
from jaxprtool.ir.quantities import in_bytes, plural
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr


@dataclass(frozen=True)
class NamedValue:
    """A value at a program's border: its name, its type in JAX's short form, its size if known."""

    name: str
    type: str
    bytes: int | None

    @property
    def described(self) -> str:
        """The type, and what else is known of the value."""
        return self.type


@dataclass(frozen=True)
class NamedSize(NamedValue):
    """An argument that is a size, with its bounds: `i32[] at most 512`, `i32[] from 2 to 512`."""

    at_most: int
    at_least: int

    @property
    def described(self) -> str:
        if self.at_least:
            return f"{self.type} from {self.at_least} to {self.at_most}"
        return f"{self.type} at most {self.at_most}"


@dataclass(frozen=True)
class NamedLengths(NamedValue):
    """An argument that is the lengths of examples: `i32[4] of N rows, each at most 512`."""

    rows: str
    at_most: int | None
    at_least: int

    @property
    def described(self) -> str:
        each = range_of_lengths(self.at_least, self.at_most)
        return f"{self.type} of {self.rows} rows{each}"


def size_of_values(noun: str, values: Sequence[NamedValue]) -> str:
    """Return how many values there are, and their bytes if known: `215 arguments, 2.7 MiB`."""
    size = bytes_of_values(values)
    return plural(len(values), noun) + ("" if size is None else f", {in_bytes(size)}")


def bytes_of_values(values: Sequence[NamedValue]) -> int | None:
    """Return the bytes of values together; None if those of one are not known."""
    known = [value.bytes for value in values if value.bytes is not None]
    return sum(known) if len(known) == len(values) else None


@dataclass(frozen=True)
class ValueGroup:
    """Arguments or results that are parts of one pytree.

    Attributes:
        name: What the user calls the pytree.
        values: How many flat values it has.
        bytes: Their bytes, if known.
        type: The type, if it is one value, and the largest value of a size.
    """

    name: str
    values: int
    bytes: int | None
    type: str | None


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
        bounds = dict(program.bounds)
    else:
        name = debug.func_name
        inputs, results = debug.arg_names, debug.result_paths or ()
        bounds = {}
    return Border(
        name,
        jaxpr,
        _named(inputs, "argument", jaxpr.invars, bounds),
        _named(results, "result", jaxpr.outvars),
        _named((), "constant", jaxpr.constvars),
    )


def _named(
    names: Sequence[str | None],
    otherwise: str,
    atoms: Sequence[Atom],
    bounds: Mapping[str, Bound] = MappingProxyType({}),
) -> tuple[NamedValue, ...]:
    if len(names) != len(atoms):
        names = [None] * len(atoms)
    values = (
        NamedValue(str(name or f"{otherwise}[{i}]"), type_of(atom.aval), size_of(atom.aval))
        for i, (name, atom) in enumerate(zip(names, atoms, strict=True))
    )
    return tuple(_bounded(value, bounds.get(value.name)) for value in values)


def _bounded(value: NamedValue, bound: Bound | None) -> NamedValue:
    own = value.name, value.type, value.bytes
    if isinstance(bound, SizeBound):
        return NamedSize(*own, bound.at_most, bound.at_least)
    if isinstance(bound, LengthsBound):
        return NamedLengths(*own, str(bound.rows), bound.longest, bound.shortest)
    return value


def top_jaxpr(program: Program | AnyJaxpr) -> Jaxpr:
    """Return the open jaxpr of a `Program`, or of a jaxpr, closed or open."""
    return jaxcompat.open_jaxpr(program.jaxpr if isinstance(program, Program) else program)


#: The name that a path begins with, or one step of it.
_STEPS = re.compile(r"\[[^\]]*\]|\.?[^.\[]+")


def path_parts(name: str) -> tuple[str, ...]:
    """Return a path in parts that make it up again: `params`, `['w']`."""
    return tuple(_STEPS.findall(name))


def grouped(values: Sequence[NamedValue], most: int = 6) -> tuple[ValueGroup, ...]:
    """Return the pytrees that values belong to, in order.

    They are told by the first step of their paths; if that is the same in all, by as many as tell
    several apart, unless these would be more than `most`.
    """
    paths = [path_parts(value.name) for value in values]
    steps, longest = 1, max(map(len, paths), default=0)
    while steps < longest and len({path[:steps] for path in paths}) == 1:
        steps += 1
    if len({path[:steps] for path in paths}) > most:
        steps = max(steps - 1, 1)
    groups: dict[str, list[NamedValue]] = {}
    for path, value in zip(paths, values, strict=True):
        groups.setdefault("".join(path[:steps]), []).append(value)
    return tuple(
        ValueGroup(
            name,
            len(group),
            bytes_of_values(group),
            group[0].described if len(group) == 1 else None,
        )
        for name, group in groups.items()
    )


def covering(names: Sequence[str], chosen: Sequence[bool]) -> dict[str, list[int]]:
    """Return the chosen paths; all that begin alike are one, the beginning, if all are chosen.

    Each has the positions of those that it stands for.
    """
    total, wanted = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    paths = list(map(path_parts, names))
    for path, flag in zip(paths, chosen, strict=True):
        for end in range(1, len(path) + 1):
            total[path[:end]] += 1
            wanted[path[:end]] += flag
    found: dict[str, list[int]] = {}
    for i, (path, flag) in enumerate(zip(paths, chosen, strict=True)):
        if flag:
            whole = (path[:end] for end in range(1, len(path) + 1))
            begins = "".join(next((p for p in whole if total[p] == wanted[p]), path))
            found.setdefault(begins, []).append(i)
    return found
