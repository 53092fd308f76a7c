"""The values that are alive at a moment, by what they are and the user's line that makes them."""

from __future__ import annotations

import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.analysis.kernels import Kernels, Node
from jaxprtool.analysis.memory.schedule import Buffer
from jaxprtool.analysis.memory.walk import BodyMemory
from jaxprtool.ir.equations import size_of, type_of
from jaxprtool.ir.frames import Frames
from jaxprtool.ir.makers import Makers
from jaxprtool.ir.paths import common_path, without_numbers
from jaxprtool.ir.regions import Regions, regions
from jaxprtool.jaxcompat import Aval, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.places import UserFrame

#: What a value is: an argument, a constant, a result, the room for one that is made later, a value
#: that an equation makes, or a row of what a loop goes over.
Kind: TypeAlias = typing.Literal[
    "argument", "constant", "result", "room", "value", "row", "broadcast"
]


@dataclass(frozen=True)
class Live:
    """Values that are alive together, and equal in type, in line and in what they are.

    Attributes:
        kind: What they are.
        count: How many there are.
        type: Their type.
        bytes: The bytes of all of them together.
        name: The path of an argument or result, with `*` for numbers that differ; of a row, that of
            what the loop goes over, and of what is broadcast, its own, if it is an argument.
        primitive: What makes them; "" of arguments and constants.
        source: The user's line that makes them, with the library's behind; "" if not known.
        reader: The primitive that reads them last; "" if they live to the end, or a round's.
        reader_source: Its line.
        frames: The calls that the first of them comes from, the innermost first.
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


class Value(NamedTuple):
    """A value that is alive; the fields are those of `Live`."""

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
    """What makes a value: the primitive, the user's line, and the calls, the innermost first."""

    primitive: str = ""
    line: str = ""
    frames: tuple[UserFrame, ...] = ()


class Level(NamedTuple):
    """A body that runs, and when in it.

    Attributes:
        memory: The body.
        time: The time in it.
        number: Which of the bodies of the equation around it that is.
    """

    memory: BodyMemory
    time: int
    number: int = 0

    @property
    def kernels(self) -> Kernels:
        """The equations of the body."""
        return self.memory.schedule.kernels

    @property
    def node(self) -> Node:
        """The equation that runs."""
        return self.memory.node(self.time)


def levels(memory: BodyMemory) -> tuple[Level, ...]:
    """Return the bodies that run when a program needs most, the outermost first."""
    found = list[Level]()
    body, number = memory, 0
    while body.at is not None:
        found.append(Level(body, body.at, number))
        inner = body.inner.get(body.at)
        if inner is None:
            break
        body, number = inner.memory, inner.number
    return tuple(found)


def grouped(values: Iterable[Value]) -> tuple[Live, ...]:
    """Return equal values as one, the largest together first."""
    groups = defaultdict[tuple[object, ...], list[Value]](list)
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
    """The values that bodies hold while they run.

    Args:
        frames: Which lines are the user's.
        names: The names of the program's arguments, its constants first; "" of a constant.
    """

    def __init__(self, frames: Frames, names: Sequence[str]) -> None:
        self._frames = frames
        self._names = names
        self._makers: dict[Jaxpr, Makers] = {}
        self._last_readers: dict[Jaxpr, dict[Var, JaxprEqn]] = {}

    def of(self, levels: Sequence[Level]) -> Iterator[Value]:
        """Yield the values that lie in no room of a result, at a moment."""
        for depth, level in enumerate(levels):
            around = _around(levels[:depth])
            for buffer in _alive(level):
                yield self._value(buffer, level, levels[:depth], around)
        if levels:
            for lodger in levels[0].memory.lodgers:
                if _is_alive(lodger.buffer, levels[0].time):
                    yield self._value(lodger.buffer, levels[0], (), ())

    def held_in_rooms(self, levels: Sequence[Level]) -> dict[int | None, int]:
        """Return how many bytes of the rooms of results are taken by other values, at a moment."""
        lodgers = levels[0].memory.lodgers if levels else ()
        return {
            lodger.result.value: lodger.buffer.size
            for lodger in lodgers
            if _is_alive(lodger.buffer, levels[0].time)
        }

    def made(self, kernels: Kernels, value: int, around: Sequence[JaxprEqn] = ()) -> Made:
        """Return what makes a value of a body."""
        node = kernels.nodes[kernels.maker[value]]
        var = node.eqn.outvars[node.makes.index(value)]
        jaxpr = _home(kernels, node)
        if jaxpr not in self._makers:
            self._makers[jaxpr] = Makers(jaxpr)
        maker = self._makers[jaxpr].of(var)
        eqns = (*around, *node.calls, *maker.around, maker.eqn)
        line = self._frames.line_of(eqns)
        return Made(maker.eqn.primitive.name, line, self._frames.stack(eqns))

    def _value(
        self, buffer: Buffer, level: Level, outer: Sequence[Level], around: Sequence[JaxprEqn]
    ) -> Value:
        kernels = level.kernels
        reader, place = self._reader(buffer, kernels, around)
        aval = _aval(kernels, buffer.value)
        is_made = kernels.maker[buffer.value] >= 0
        if is_made:
            name, made = "", self.made(kernels, buffer.value, around)
        else:
            name, made = self._origin(buffer.value, level, outer)
        kind: Kind = "value" if is_made else "row"
        if buffer.last is not None and size_of(aval) != buffer.size:
            # It is broadcast for a reduction, to what that is of.
            kind, aval = "broadcast", kernels.nodes[buffer.last].eqn.invars[0].aval
        primitive, line, frames = made
        return Value(kind, type_of(aval), buffer.size, name, primitive, line, reader, place, frames)

    def _reader(
        self, buffer: Buffer, kernels: Kernels, around: Sequence[JaxprEqn]
    ) -> tuple[str, str]:
        """Return what reads a value last, inside of a loop or branch too, and its line."""
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
        """Return what reads an operand last in bodies, and which of its own operands that is."""
        for region, closed in zip(held.regions, held.bodies, strict=True):
            if operand not in region.ins:
                continue
            body = jaxcompat.open_jaxpr(closed)
            if body not in self._last_readers:
                self._last_readers[body] = {
                    v: e for e in body.eqns for v in e.invars if type(v) is not Literal
                }
            value = body.invars[region.ins.index(operand)]
            eqn = self._last_readers[body].get(value)
            if eqn is not None:
                return eqn, list(eqn.invars).index(value)
        return None, None

    def _origin(self, value: int, level: Level, outer: Sequence[Level]) -> tuple[str, Made]:
        """Return of what an argument of a body is a row: its name, or what makes it."""
        while outer and level.kernels.maker[value] < 0:
            *outer, around = outer
            held = around.node.held
            assert held is not None
            position = value - len(level.kernels.jaxpr.constvars)
            operand = around.node.places[held.regions[level.number].ins[position]]
            if operand is None:
                return "", Made()
            value, level = operand, around
        if level.kernels.maker[value] < 0:
            return self._names[value], Made()
        return "", self.made(level.kernels, value, _around(outer))


def _home(kernels: Kernels, node: Node) -> Jaxpr:
    """Return the body that an equation stands in: that of a call that was opened, or the whole."""
    held = regions(node.calls[-1]) if node.calls else None
    return kernels.jaxpr if held is None else jaxcompat.open_jaxpr(held.bodies[0])


def _around(levels: Sequence[Level]) -> tuple[JaxprEqn, ...]:
    """Return the equations whose bodies run, the outermost first."""
    return tuple(eqn for level in levels for eqn in (*level.node.calls, level.node.eqn))


def _aval(kernels: Kernels, value: int) -> Aval:
    if kernels.maker[value] < 0:
        return (*kernels.jaxpr.constvars, *kernels.jaxpr.invars)[value].aval
    node = kernels.nodes[kernels.maker[value]]
    return node.eqn.outvars[node.makes.index(value)].aval


def _is_alive(buffer: Buffer, time: int) -> bool:
    return buffer.start <= time <= buffer.end


def _alive(level: Level) -> list[Buffer]:
    """Return the values of a body in no room of a result; of one written in place, that alone."""
    memory, time = level.memory, level.time
    alive = [each for each in memory.outside if each.size and _is_alive(each, time)]
    replaced = memory.replaced.get(time)
    if replaced is not None:
        last = (i for i, each in enumerate(alive) if each.end == time and each.size == replaced)
        del alive[next(i for i in last if alive[i].start < time)]
    return alive
