"""Find the point of a program that a user names: an argument, a result, a line or a variable.

    params['w']             an argument; params means all arguments below it
    result['loss'], loss    a result; [0] is result[0]
    model.py:30             the equations that come from a line
    b, hidden               a variable of the listing, by its letter or its name in the source
    constant[0]             a constant, by its name in the tables of constants
    qkv.kernel              the only argument or result whose path ends so

Arguments and results come before variables of the same name, since a listing uses all letters. A
prefix selects the kind: `variable:b`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Literal, TypeAlias, get_args

from jaxprtool.analysis.stats import constants_of
from jaxprtool.errors import PointError, did_you_mean
from jaxprtool.ir.dataflow import DataFlow, Start, Value
from jaxprtool.ir.documents import listed
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.notation.layout import Naming
from jaxprtool.ir.notation.signatures import Notation, UserNames
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.ir.trees import named_by_end, parts_of_paths
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn
from jaxprtool.jaxcompat import Literal as LiteralValue
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The kinds of points.
Kind = Literal["argument", "result", "line", "variable"]

_KINDS: tuple[Kind, ...] = get_args(Kind)

_LINE = re.compile(r"(.+):(\d+)")

_CONSTANT = re.compile(r"constant\[(\d+)\]")

#: The `id`s of the equations in each jaxpr, by file and line.
_Lines: TypeAlias = dict[str, dict[int, dict[Jaxpr, set[int]]]]

#: The number of near lines that an error suggests.
_OFFERED = 3


@dataclass(frozen=True)
class NamedPoint:
    """A point of a program that a user has named.

    Attributes:
        kind: The kind of the point.
        name: Its full name.
        ends: The names of the arguments or results that it refers to.
        start: The values and equations where a slice from it begins.
    """

    kind: Kind
    name: str
    ends: tuple[str, ...]
    start: Start


def point(program: Program | AnyJaxpr, what: str) -> NamedPoint:
    """Find the point of a program that a name refers to.

    Args:
        program: A `Program`, or a jaxpr.
        what: The name, as described in this module's docstring.

    Raises:
        PointError: If the program has no such point, or several.
    """
    return _Points(program).find(what)


class _Points:
    """The points of a program."""

    def __init__(self, program: Program | AnyJaxpr):
        self._about = program_signature(program)
        self._top = self._about.jaxpr
        self._frames = frames_now(self._about.roots)

    def find(self, what: str) -> NamedPoint:
        word, colon, rest = what.partition(":")
        kinds = _KINDS
        if colon and word in _KINDS:
            kinds, what = (word,), rest
        what = what.strip()
        if not what:
            raise PointError("the name of an argument, a result, a line or a variable is empty")
        ends = [getattr(self, f"_{kind}")(what) for kind in kinds if kind in ("argument", "result")]
        if len(ends) == 2 and None not in ends:
            hint = f"write 'argument:{what}' or 'result:{what}'"
            raise PointError(
                f"'{what}' is both an argument and a result of {self._about.name}", hint
            )
        found: NamedPoint | None = next((end for end in ends if end is not None), None)
        if found is None:
            found = self._variable_or_end(kinds, what)
        if found is None:
            raise self._missing(kinds, what)
        return found

    def _variable_or_end(self, kinds: Iterable[Kind], what: str) -> NamedPoint | None:
        """Return the line, the variable, or the argument or result whose path ends so.

        A result comes before a variable: the source often has a name for it too.
        """
        ends = self._ending(kinds, what)
        if [kind for kind, _ in ends] == ["result"]:
            return self._result(ends[0][1])
        for kind in kinds:
            if kind in ("line", "variable") and (found := getattr(self, f"_{kind}")(what)):
                return found  # type: ignore[no-any-return]
        if len(ends) > 1:
            names = _some(name for _, name in ends)
            message = f"'{what}' is the end of {len(ends)} names of {self._about.name}: {names}"
            raise PointError(message, "write more of the path")
        return self._argument(ends[0][1]) if ends else None

    def _ending(self, kinds: Iterable[Kind], what: str) -> list[tuple[Kind, str]]:
        """Return the arguments and results whose paths end so, or the parts of paths that do."""
        values = {"argument": self._about.arguments, "result": self._about.outputs}
        return [
            (kind, name)
            for kind in kinds
            for name in named_by_end((value.name for value in values.get(kind, ())), what)
        ]

    def _argument(self, what: str) -> NamedPoint | None:
        names = [argument.name for argument in self._about.arguments]
        chosen = _below(names, what)
        if not chosen:
            return None
        values = [(self._top, self._top.invars[i]) for i in chosen]
        ends = tuple(names[i] for i in chosen)
        return NamedPoint("argument", _single_quoted(what), ends, Start(values))

    def _result(self, what: str) -> NamedPoint | None:
        names = [output.name for output in self._about.outputs]
        for path in (what, f"result{what}", f"result['{what}']", f"result.{what}"):
            if chosen := _below(names, path):
                atoms = [self._top.outvars[i] for i in chosen]
                values = [(self._top, v) for v in atoms if not isinstance(v, LiteralValue)]
                ends = tuple(names[i] for i in chosen)
                return NamedPoint("result", _single_quoted(path), ends, Start(values))
        return None

    # --- lines ------------------------------------------------------------------------------------

    def _line(self, what: str) -> NamedPoint | None:
        match = _LINE.fullmatch(what)
        if match is None:
            return None
        name, number = match[1], int(match[2])
        for lines in (self._lines, self._outer_lines):
            files = [file for file in self._files_called(name, lines) if number in lines[file]]
            if len(files) > 1:
                paths = ", ".join(sorted(map(self._frames.path, files)))
                raise PointError(f"'{what}' is in several files: {paths}", "add more of the path")
            if files:
                equations = lines[files[0]][number]
                start = Start((), {jaxpr: frozenset(ids) for jaxpr, ids in equations.items()})
                return NamedPoint("line", f"{self._frames.path(files[0])}:{number}", (), start)
        return None

    def _files_called(self, name: str, lines: _Lines) -> list[str]:
        """Return the files that a name refers to: a path, or the end of one."""
        exact = [file for file in lines if name in (file, self._frames.path(file))]
        return exact or [file for file in lines if file.endswith(f"/{name}")]

    @cached_property
    def _lines(self) -> _Lines:
        """The lines of equations: the user's nearest line, and the library lines that it calls."""

        def frames(eqn: JaxprEqn) -> Iterable[UserFrame]:
            location = self._frames.location(eqn)
            return () if location is None else (location.frame, *location.behind)

        return self._read(frames)

    @cached_property
    def _outer_lines(self) -> _Lines:
        """The lines of all frames of equations, callers included."""
        return self._read(self._frames.of)

    def _read(self, frames: Callable[[JaxprEqn], Iterable[UserFrame]]) -> _Lines:
        by_file: _Lines = defaultdict(dict)
        for jaxpr in DataFlow(self._top).holders:
            by_traceback: dict[object, list[set[int]]] = {}
            for eqn in jaxpr.eqns:
                traceback = eqn.source_info.traceback
                if traceback not in by_traceback:
                    lines = {frame[:2] for frame in frames(eqn)}
                    by_traceback[traceback] = [
                        by_file[file].setdefault(line, {}).setdefault(jaxpr, set())
                        for file, line in lines
                    ]
                for ids in by_traceback[traceback]:
                    ids.add(id(eqn))
        return by_file

    # --- variables --------------------------------------------------------------------------------

    def _variable(self, what: str) -> NamedPoint | None:
        if (match := _CONSTANT.fullmatch(what)) is not None:
            constants = constants_of(self._top)
            number = int(match[1])
            if number >= len(constants):
                return None
            return NamedPoint("variable", what, (), Start([constants[number]]))
        if not re.fullmatch(r"[^\W\d]\w*", what) or what == "_":
            return None
        # An argument of a body may have the same name as in the caller, which comes first.
        values = self._named(Notation()).get(what, [])[:1] or self._of_user(what)
        return NamedPoint("variable", what, (), Start(values)) if values else None

    def _of_user(self, name: str) -> list[Value]:
        """Return the variable that has a name in the user's source."""
        notation, paths = Notation(), [argument.name for argument in self._about.arguments]
        notation.variable_names = lambda root, taken: UserNames(
            root, taken, paths, self._about.roots
        )
        values = self._named(notation).get(name, [])
        if len(values) < 2:
            return values
        letters = [letter for letter, of in self._named(Notation()).items() if of[0] in values]
        raise PointError(
            f"{len(values)} variables of {self._about.name} are called '{name}'",
            f"use the letter that `show` prints for one: {_some(letters)}",
        )

    def _named(self, notation: Notation) -> dict[str, list[Value]]:
        """Return the variables by name, those of callers first."""
        naming = Naming(self._top, notation)
        naming.name_all()
        by_name: dict[str, list[Value]] = defaultdict(list)
        for jaxpr in DataFlow(self._top).holders:
            bound = chain(jaxpr.constvars, jaxpr.invars, *(eqn.outvars for eqn in jaxpr.eqns))
            for var in dict.fromkeys(bound):
                if name := naming.variables.get(var):
                    by_name[name].append((jaxpr, var))
        return by_name

    # --- errors -----------------------------------------------------------------------------------

    def _missing(self, kinds: Iterable[Kind], what: str) -> PointError:
        if (match := _LINE.fullmatch(what)) is not None:
            return self._missing_line(what, match[1], int(match[2]))
        name = self._about.name
        arguments = [argument.name for argument in self._about.arguments]
        outputs = [output.name for output in self._about.outputs]
        paths = dict.fromkeys(parts_of_paths([*arguments, *outputs]))
        hint = did_you_mean(_single_quoted(what), paths) or self._border_hint(arguments, outputs)
        kinds = tuple(kinds)
        said = f"no {kinds[0]}" if len(kinds) == 1 else "no argument, result, line or variable"
        return PointError(f"{name} has {said} '{what}'", hint)

    def _border_hint(self, arguments: list[str], outputs: list[str]) -> str:
        roots = dict.fromkeys(argument.name.partition("[")[0] for argument in self._about.arguments)
        return (
            f"arguments: {_some(roots)}; results: {_some(outputs)}; lines as model.py:30; "
            "variables as `show` prints them"
        )

    def _missing_line(self, what: str, name: str, number: int) -> PointError:
        program = self._about.name
        if not self._lines:
            return PointError(f"the equations of {program} have no known lines")
        files = self._files_called(name, self._lines)
        if not files:
            paths = [self._frames.path(file) for file in self._lines]
            user_paths = [
                self._frames.path(file) for file in self._lines if self._frames.is_users(file)
            ]
            hint = did_you_mean(name, paths, 0.4) or f"they come from {_some(user_paths or paths)}"
            return PointError(f"no equation of {program} comes from a file '{name}'", hint)
        near: list[tuple[int, str]] = []
        for file in files:
            path = self._frames.path(file)
            near += [(abs(line - number), f"{path}:{line}") for line in self._lines[file]]
        near.sort()
        nearest = ", ".join(line for _, line in near[:_OFFERED])
        return PointError(f"no equation of {program} comes from {what}", f"near it: {nearest}")


def _single_quoted(path: str) -> str:
    """Return a path with single quotes, as Python writes it."""
    return path.replace('"', "'")


def _below(names: list[str], what: str) -> list[int]:
    """Return the position of the name, or else of all names below it."""
    what = _single_quoted(what)
    if what in names:
        return [names.index(what)]
    return [i for i, name in enumerate(names) if name.startswith((f"{what}[", f"{what}."))]


_some = partial(listed, most=5)
