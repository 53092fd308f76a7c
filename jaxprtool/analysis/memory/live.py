"""Describe the values live at the peak, and the user's lines that compute and read them."""

from __future__ import annotations

import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jaxprtool.analysis.kernels import Kernels, Node
from jaxprtool.analysis.memory.schedule import Buffer
from jaxprtool.analysis.memory.walk import BodyMemory
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.paths import common_path, without_numbers
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.dataflow.defining_equations import DefiningEquations
from jaxprtool.ir.source.frames import Frames
from jaxprtool.jaxcompat import Aval, Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The kinds of live values. A "room" is the memory of a result that is computed later, a "value" is
#: computed by an equation, a "row" is a slice of an array that a loop scans over, and a "workspace"
#: is memory that a kernel needs besides its operands and results.
Kind: TypeAlias = typing.Literal[
    "argument", "constant", "result", "room", "value", "row", "workspace"
]


@document(without=("frames",))
@dataclass(frozen=True)
class Live:
    """Live values with the same kind, type, and source lines.

    Attributes:
        kind: The kind: "argument", "constant", "result", "room" (memory of a result that is
            computed later), "value" (computed by an equation), "row" (a slice of an array that a
            loop scans over) or "workspace" (of an equation, besides its operands and results).
        count: The number of values.
        type: Their type.
        bytes: Their total bytes.
        name: The path of an argument or result, with `*` for numbers that differ. For a row of
            an argument, the path of the argument.
        primitive: The primitive that computes them; "" for arguments and constants.
        source: The user's line that computes them, followed by the library's; "" if unknown.
        reader: The primitive that reads them last; "" if they live to the end of the body.
        reader_source: The line of the reader.
        frames: The frames of the first of them, the innermost first.
    """

    kind: Kind
    count: int
    type: str
    bytes: int
    name: str
    primitive: str
    source: str
    reader: str
    reader_source: str
    frames: tuple[UserFrame, ...]


class LiveValue(NamedTuple):
    """A live value. The fields are those of `Live`."""

    kind: Kind
    type: str
    bytes: int
    name: str = ""
    primitive: str = ""
    source: str = ""
    reader: str = ""
    reader_source: str = ""
    frames: tuple[UserFrame, ...] = ()


class Made(NamedTuple):
    """The primitive that computes a value, the user's line, and the frames, the innermost first."""

    primitive: str = ""
    line: str = ""
    frames: tuple[UserFrame, ...] = ()


class Level(NamedTuple):
    """A body that is running, and the time in it.

    Attributes:
        memory: The body.
        time: The time in the body's schedule.
        number: The number of the body in the equation around it.
    """

    memory: BodyMemory
    time: int
    number: int = 0

    @property
    def kernels(self) -> Kernels:
        """The kernels of the body."""
        return self.memory.schedule.kernels

    @property
    def node(self) -> Node:
        """The node that runs."""
        return self.memory.node(self.time)


def levels(memory: BodyMemory) -> tuple[Level, ...]:
    """Return the bodies that run at the peak, the outermost first."""
    found = list[Level]()
    body, number = memory, 0
    while body.at is not None:
        found.append(Level(body, body.at, number))
        inner = body.inner.get(body.at)
        if inner is None:
            break
        body, number = inner.memory, inner.number
    return tuple(found)


def grouped(values: Iterable[LiveValue]) -> tuple[Live, ...]:
    """Merge equal values, and sort the groups by their total bytes, the largest first."""
    groups = defaultdict[tuple[object, ...], list[LiveValue]](list)
    for value in values:
        same = without_numbers(value.name), value.kind, value.type, *value[4:-1]
        groups[same].append(value)
    found = (
        Live(
            group[0].kind,
            len(group),
            group[0].type,
            sum(value.bytes for value in group),
            common_path([value.name for value in group]),
            *group[0][4:],
        )
        for group in groups.values()
    )
    return tuple(sorted(found, key=lambda each: -each.bytes))


class LiveValues:
    """Finds the live values of running bodies.

    Args:
        frames: Reads source lines.
        names: The names of the program's constants and then of its arguments.
    """

    def __init__(self, frames: Frames, names: Sequence[str]) -> None:
        self._frames = frames
        self._names = names
        self._defining_equations: dict[Jaxpr, DefiningEquations] = {}
        self._variables: dict[Jaxpr, DefUse] = {}

    def of(self, levels: Sequence[Level]) -> Iterator[LiveValue]:
        """Yield the live values at a moment, except those of the program's arguments and results.

        Args:
            levels: The bodies that run, the outermost first.
        """
        for depth, level in enumerate(levels):
            around = _around(levels[:depth])
            for buffer in _alive(level):
                yield self._value(buffer, level, levels[:depth], around)
            if size := level.memory.workspaces.get(level.time):
                eqns = (*around, *level.node.calls, level.node.eqn)
                made = eqns[-1].primitive.name, self._frames.line_of(eqns)
                stack = self._frames.stack(eqns)
                yield LiveValue("workspace", "", size, "", *made, frames=stack)
        if levels:
            for each in levels[0].memory.in_rooms:
                if _is_alive(each.buffer, levels[0].time):
                    yield self._value(each.buffer, levels[0], (), ())

    def held_in_rooms(self, levels: Sequence[Level]) -> dict[int | None, int]:
        """Return the bytes of other values in the memory of each result, by the result's value."""
        in_rooms = levels[0].memory.in_rooms if levels else ()
        return {
            each.result.value: each.buffer.size
            for each in in_rooms
            if _is_alive(each.buffer, levels[0].time)
        }

    def made(self, kernels: Kernels, value: int, around: Sequence[JaxprEqn] = ()) -> Made:
        """Return the equation that computes a value of a body.

        Args:
            kernels: The kernels of the body.
            value: The number of the value.
            around: The equations around the body, the outermost first.
        """
        node = kernels.nodes[kernels.defined_by[value]]
        var = node.eqn.outvars[node.makes.index(value)]
        jaxpr = _home(kernels, node)
        if jaxpr not in self._defining_equations:
            self._defining_equations[jaxpr] = DefiningEquations(jaxpr)
        definition = self._defining_equations[jaxpr].of(var)
        eqns = (*around, *node.calls, *definition.around, definition.eqn)
        line = self._frames.line_of(eqns)
        return Made(definition.eqn.primitive.name, line, self._frames.stack(eqns))

    def _value(
        self, buffer: Buffer, level: Level, outer: Sequence[Level], around: Sequence[JaxprEqn]
    ) -> LiveValue:
        kernels = level.kernels
        reader, place = self._reader(buffer, kernels, around)
        aval = _aval(kernels, buffer.value)
        is_made = kernels.defined_by[buffer.value] >= 0
        if is_made:
            name, made = "", self.made(kernels, buffer.value, around)
        else:
            name, made = self._origin(buffer.value, level, outer)
        kind: Kind = "value" if is_made else "row"
        primitive, line, frames = made
        return LiveValue(
            kind, type_of(aval), buffer.size, name, primitive, line, reader, place, frames
        )

    def _reader(
        self, buffer: Buffer, kernels: Kernels, around: Sequence[JaxprEqn]
    ) -> tuple[str, str]:
        """Return the primitive that reads a value last, at any depth, and its line."""
        if buffer.last is None:
            return "", ""
        node = kernels.nodes[buffer.last]
        eqns, held = [*around, *node.calls, node.eqn], node.held
        position = node.places.index(buffer.value) if held and buffer.value in node.places else None
        while held is not None and position is not None:
            eqn, position = self._last_inside(held, position)
            if eqn is None:
                break
            eqns.append(eqn)
            held = regions(eqn)
        return eqns[-1].primitive.name, self._frames.line_of(eqns)

    def _last_inside(self, held: Regions, operand: int) -> tuple[JaxprEqn | None, int | None]:
        """Return the last reader of an operand in the bodies, and the position of its operand."""
        for number, value in held.arguments_by_operand[operand]:
            body = held.jaxprs[number]
            variables = self._variables.setdefault(body, DefUse(body.eqns))
            if readers := variables.readers(value):
                eqn = body.eqns[readers[-1]]
                return eqn, list(eqn.invars).index(value)
        return None, None

    def _origin(self, value: int, level: Level, outer: Sequence[Level]) -> tuple[str, Made]:
        """Return the name, or else the equation, of the outer value that an argument comes from."""
        while outer and level.kernels.defined_by[value] < 0:
            *outer, around = outer
            held = around.node.held
            assert held is not None
            position = value - len(level.kernels.jaxpr.constvars)
            operand = around.node.places[held.regions[level.number].ins[position]]
            if operand is None:
                return "", Made()
            value, level = operand, around
        if level.kernels.defined_by[value] < 0:
            return self._names[value], Made()
        return "", self.made(level.kernels, value, _around(outer))


def _home(kernels: Kernels, node: Node) -> Jaxpr:
    """Return the jaxpr that an equation is in: that of the opened call around it, or the body."""
    held = regions(node.calls[-1]) if node.calls else None
    return kernels.jaxpr if held is None else held.jaxprs[0]


def _around(levels: Sequence[Level]) -> tuple[JaxprEqn, ...]:
    """Return the equations that are running, the outermost first."""
    return tuple(eqn for level in levels for eqn in (*level.node.calls, level.node.eqn))


def _aval(kernels: Kernels, value: int) -> Aval:
    if kernels.defined_by[value] < 0:
        return (*kernels.jaxpr.constvars, *kernels.jaxpr.invars)[value].aval
    node = kernels.nodes[kernels.defined_by[value]]
    return node.eqn.outvars[node.makes.index(value)].aval


def _is_alive(buffer: Buffer, time: int) -> bool:
    return buffer.start <= time <= buffer.end


def _alive(level: Level) -> list[Buffer]:
    """Return the live values of a body that have memory of their own.

    If a kernel writes in place, its result is returned and the operand that it replaces is not.
    """
    memory, time = level.memory, level.time
    alive = [each for each in memory.outside if each.size and _is_alive(each, time)]
    replaced = memory.replaced.get(time)
    if replaced is not None:
        last = (i for i, each in enumerate(alive) if each.end == time and each.size == replaced)
        del alive[next(i for i in last if alive[i].start < time)]
    return alive
