"""Ways to group equations: by line, scope, primitive, dtype, argument, or collective.

Each class is a `Grouping` (`tallies`). If a body does not determine the group of an equation, as
for a library body without a line of user code, it is the group of the enclosing equation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxprtool.analysis.cost.bodies import CostedBody, Item
from jaxprtool.analysis.cost.tallies import Key
from jaxprtool.analysis.kernels import Node
from jaxprtool.ir.core.equations import all_jaxprs
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.source.frames import Frames, Root
from jaxprtool.ir.source.scopes import ScopePaths, is_backward
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.identity import identity
from jaxprtool.jaxcompat.source_locations import UserFrame


class Whole:
    """One group of all equations."""

    def key(self, item: Item, body: CostedBody) -> str:
        return ""

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        return key


class ByUse:
    """Groups by whether a result or an effect of the program depends on the equation.

    Args:
        members: The equations of the live part, by `id`.
    """

    def __init__(self, members: Collection[int]) -> None:
        self._members = members

    def key(self, item: Item, body: CostedBody) -> bool:
        return self._is_live(item)

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> bool:
        return key and self._is_live(item)

    def _is_live(self, item: Item) -> bool:
        return all(id(eqn) in self._members for eqn in (*item.node.calls, item.eqn))


class ByName:
    """Groups that depend on the equation alone, such as its primitive.

    Args:
        name: A function that returns the group of an equation.
    """

    def __init__(self, name: Callable[[JaxprEqn], str | None]) -> None:
        self._name = name

    def key(self, item: Item, body: CostedBody) -> str:
        return self._name(item.eqn) or ""

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        return key


def primitive_name(eqn: JaxprEqn) -> str:
    """Return the name of an equation's primitive."""
    return str(eqn.primitive.name)


def dtypes_of(eqn: JaxprEqn) -> str:
    """Return the dtype of an equation's result; for a product, also those of its operands."""
    result, *of = [
        str(v.aval.str_short(short_dtypes=True)).partition("[")[0]
        for v in (*eqn.outvars[:1], *eqn.invars)
        if hasattr(v.aval, "dtype")
    ] or ["no array"]
    given = list(dict.fromkeys(of))
    if traits(eqn).expensive and given != [result]:
        return f"{', '.join(given)} → {result}"
    return result


def collective_of(eqn: JaxprEqn) -> str | None:
    """Return the name of a collective and its mesh axes, or None if it is not a collective."""
    if not traits(eqn).collective:
        return None
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = [str(axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))]
    return f"{eqn.primitive.name} over {', '.join(names) or 'no axis'}"


# --- lines ----------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A source line.

    Attributes:
        file: The path of the file.
        line: The number of the line, from 1.
        own: Whether it is the user's and not a library's.
        behind: The file and line of each frame of libraries that it calls, the outermost first, if
            lines are distinguished by these.
    """

    file: str
    line: int
    own: bool
    behind: tuple[tuple[str, int], ...] = ()


class LineReader:
    """Reads the line of equations: the nearest line of user code, or else of a library.

    Args:
        frames: Reads frames, and decides which files are the user's.
        by_library: Whether lines are distinguished by the library frames behind them.
    """

    def __init__(self, frames: Frames, by_library: bool = False) -> None:
        self._frames, self._by_library = frames, by_library
        # By the traceback, which many equations have in common.
        self._known: dict[int, Line | None] = {}
        #: The frames of libraries that each line calls.
        self.behind: defaultdict[Line, dict[UserFrame | None, None]] = defaultdict(dict)

    def line(self, eqn: JaxprEqn) -> Line | None:
        """Return the line of an equation; None if it is unknown."""
        at = identity(eqn.source_info.traceback)
        if at not in self._known:
            location, line = self._frames.location(eqn), None
            if location is not None:
                file, number = location.frame[:2]
                behind = tuple(frame[:2] for frame in location.behind) if self._by_library else ()
                line = Line(file, number, self._frames.is_users(file), behind)
                if line.own:
                    self.behind[line][location.library] = None
            self._known[at] = line
        return self._known[at]

    def line_around(self, inner: Line | None, line: Line | None) -> Line | None:
        """Return the line of an equation in a body: its own, or that of the body's equation."""
        if inner is None:
            return line
        if inner.own or line is None or not line.own:
            return inner
        return line._replace(behind=(*line.behind, inner[:2])) if self._by_library else line


class ByLine:
    """Groups by line.

    Args:
        lines: Reads the lines.
    """

    def __init__(self, lines: LineReader) -> None:
        self._lines = lines

    def key(self, item: Item, body: CostedBody) -> Line | None:
        found = None
        for eqn in (item.eqn, *reversed(item.node.calls)):
            found = self._lines.line_around(found, self._lines.line(eqn))
            if found is not None and found.own:
                break
        return found

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        if key is not None and key.own:
            return key
        return self._lines.line_around(key, self.key(item, body))


class BySide:
    """Groups by line and by whether the equation is in a backward pass.

    Args:
        frames: Reads frames, and decides which files are the user's.
    """

    def __init__(self, frames: Frames) -> None:
        self._lines = ByLine(LineReader(frames))
        # By the traceback and the name stack, which many equations have in common.
        self._known: dict[tuple[int, int], tuple[Line | None, bool]] = {}

    def key(self, item: Item, body: CostedBody) -> tuple[Line | None, bool]:
        info, calls = item.eqn.source_info, item.node.calls
        if calls:
            return self._lines.key(item, body), any(map(is_backward, (*calls, item.eqn)))
        at = identity(info.traceback), identity(info.name_stack)
        found = self._known.get(at)
        if found is None:
            found = self._known[at] = self._lines.key(item, body), is_backward(item.eqn)
        return found

    def lifted(
        self, key: Key, item: Item, body: CostedBody, number: int
    ) -> tuple[Line | None, bool]:
        line, backward = key
        line = self._lines.lifted(line, item, body, number)
        return line, backward or any(map(is_backward, (*item.node.calls, item.eqn)))


# --- scopes ---------------------------------------------------------------------------------------


class ByScope:
    """Groups by the path of scopes and functions around an equation.

    Args:
        top: The open jaxpr of the program.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, top: Jaxpr, roots: Sequence[Root]) -> None:
        self._paths = ScopePaths(all_jaxprs(top), roots)

    def key(self, item: Item, body: CostedBody) -> tuple[str, ...]:
        return self._paths.of((*item.node.calls, item.eqn))

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        return self.key(item, body) + key


# --- arguments ------------------------------------------------------------------------------------

#: The positions of the arguments of a body whose elements a value holds.
_Origins = frozenset[int]

_NONE: _Origins = frozenset()


@dataclass
class ByArgument:
    """Groups by the arguments that an equation reads, also through casts, layouts and slices."""

    def __post_init__(self) -> None:
        self._known: dict[int, list[_Origins]] = {}

    def key(self, item: Item, body: CostedBody) -> _Origins:
        origins = self._origins(body)
        return _NONE.union(*(origins[value] for value in _operands(item.node)))

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        if item.held is None:
            return _NONE
        origins, region = self._origins(body), item.held.regions[number]
        constants = len(item.held.jaxprs[number].constvars)
        values = item.node.places
        outer = [values[region.ins[i - constants]] for i in key if i >= constants]
        return _NONE.union(*(origins[value] for value in outer if value is not None))

    def _origins(self, body: CostedBody) -> list[_Origins]:
        """Return the origins of each value of a body."""
        if id(body) not in self._known:
            count = len(body.kernels.arguments)
            origins = [frozenset({i}) for i in range(count)]
            for node in body.kernels.nodes:
                if node.kind != "equation":  # each result is an operand, or a copy of it
                    origins += [origins[value] for value in node.reads]
                    continue
                kept = _NONE
                if traits(node.eqn).gives:
                    kept = _NONE.union(*(origins[value] for value in _operands(node)[:1]))
                origins += [kept] * len(node.makes)
            self._known[id(body)] = origins
        return self._known[id(body)]


def _operands(node: Node) -> list[int]:
    return [value for value in node.places if value is not None]


def argument_names(names: Iterable[str], constants: int) -> Callable[[Any], str]:
    """Return a function that names the groups of `ByArgument` at the top level.

    Args:
        names: The names of the program's arguments.
        constants: The number of the program's constants.
    """
    known = list(names)

    def name(origins: _Origins) -> str:
        return ", ".join(known[i - constants] for i in sorted(origins) if i >= constants)

    return name
