"""The signature of a program: its name, and the names and types of its arguments and results.

A `Program` has these names; for a bare jaxpr they are those in JAX's debug info.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.quantities import in_bytes, plural
from jaxprtool.ir.core.equations import size_of, type_of
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.array_literals import as_constants
from jaxprtool.ir.shapes.bounds import Bound, LengthsBound, SizeBound, range_of_lengths
from jaxprtool.ir.source.frames import Root
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr


@dataclass(frozen=True)
class NamedValue:
    """An argument, result or constant of a program.

    Attributes:
        name: Its name, which is a path: `params['w']`.
        type: Its type in JAX's short form: `f32[3,4]`.
        bytes: Its size in bytes; None if unknown.
    """

    name: str
    type: str
    bytes: int | None

    @property
    def described(self) -> str:
        """The type, with the bounds of the value if it has any."""
        return self.type


@dataclass(frozen=True)
class NamedSize(NamedValue):
    """An argument that is a size, with bounds: `i32[] at most 512`, `i32[] from 2 to 512`.

    Attributes:
        at_most: For a size, its largest value.
        at_least: For a size, its least value.
    """

    at_most: int
    at_least: int

    @property
    def described(self) -> str:
        if self.at_least:
            return f"{self.type} from {self.at_least} to {self.at_most}"
        return f"{self.type} at most {self.at_most}"


@dataclass(frozen=True)
class NamedLengths(NamedValue):
    """An argument with the lengths of examples: `i32[4] of N rows, each at most 512`.

    Attributes:
        rows: For lengths of examples, the number of rows of all examples.
        at_most: For lengths of examples, the largest; None if unknown.
        at_least: For lengths of examples, the least.
    """

    rows: str
    at_most: int | None
    at_least: int

    @property
    def described(self) -> str:
        each = range_of_lengths(self.at_least, self.at_most)
        return f"{self.type} of {self.rows} rows{each}"


def size_of_values(noun: str, values: Sequence[NamedValue]) -> str:
    """Describe the number of values, and their bytes if known: `215 arguments, 2.7 MiB`."""
    size = bytes_of_values(values)
    return plural(len(values), noun) + ("" if size is None else f", {in_bytes(size)}")


def bytes_of_values(values: Sequence[NamedValue]) -> int | None:
    """Return the total bytes of values, or None if the size of one is unknown."""
    known = [value.bytes for value in values if value.bytes is not None]
    return sum(known) if len(known) == len(values) else None


@dataclass(frozen=True)
class ValueGroup:
    """Arguments or results that are leaves of one pytree.

    Attributes:
        name: The path of the pytree: `params`.
        values: The number of leaves.
        bytes: Their total bytes; None if unknown.
        type: The type and bounds of the value, if there is only one; otherwise None.
    """

    name: str
    values: int
    bytes: int | None
    type: str | None


@dataclass(frozen=True)
class ProgramSignature:
    """A program's name, its open jaxpr, and its arguments, results and constants in order.

    Attributes:
        name: The name of the program.
        jaxpr: Its open jaxpr.
        arguments: The arguments.
        outputs: The results.
        constants: The constants.
        roots: The folders of the user's files, as a `Program` has them.
    """

    name: str
    jaxpr: Jaxpr
    arguments: tuple[NamedValue, ...]
    outputs: tuple[NamedValue, ...]
    constants: tuple[NamedValue, ...]
    roots: tuple[Root, ...] = ()


def program_signature(program: Program | AnyJaxpr) -> ProgramSignature:
    """Return the signature of a `Program`, or of a jaxpr, closed or open."""
    jaxpr = top_jaxpr(program)
    debug = jaxpr.debug_info
    if isinstance(program, Program):
        name, inputs, results = program.name, program.arg_names, program.out_names
        bounds = dict(program.bounds)
    else:
        name = debug.func_name
        inputs, results = debug.arg_names or (), debug.result_paths or ()
        bounds = {}
    return ProgramSignature(
        name,
        jaxpr,
        _named(inputs, "argument", jaxpr.invars, bounds),
        _named(results, "result", jaxpr.outvars),
        _named((), "constant", jaxpr.constvars),
        program.roots if isinstance(program, Program) else (),
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
    jaxpr = program.jaxpr if isinstance(program, Program) else as_constants(program)
    return jaxcompat.open_jaxpr(jaxpr)


#: The name that a path begins with, or one step of it.
_STEPS = re.compile(r"\[[^\]]*\]|\.?[^.\[]+")


def path_parts(name: str) -> tuple[str, ...]:
    """Split a path into its steps, which joined give the path: `params`, `['w']`."""
    return tuple(_STEPS.findall(name))


def grouped(values: Sequence[NamedValue], most: int = 6) -> tuple[ValueGroup, ...]:
    """Group values by the pytrees that they belong to, in order.

    Values are grouped by the first step of their paths. If that yields only one group, more steps
    are used until there are several groups, unless these would be more than `most`.

    Args:
        values: The arguments or results of a program.
        most: The maximum number of groups to split a single one into.
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
    """Return the shortest paths that cover the chosen names and no others.

    A pytree whose leaves are all chosen is one path.

    Args:
        names: The paths of all leaves.
        chosen: For each name, whether it is chosen.

    Returns:
        The positions of the names that each path covers, by path.
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
