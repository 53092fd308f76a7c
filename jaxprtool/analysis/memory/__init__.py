"""What fills the memory: the peak of a program, the values alive there, and the curve to it.

    found = memory(program)
    found.peak_bytes, found.at.source, found.live[0].type, found.curve

Nothing is compiled. Which values are written is what `analysis.kernels` says, how long they lie
there is what `schedule` says, and `walk` adds them up. Arguments, constants and the room of results
count from the start to the end, as they do where XLA runs a program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxprtool.analysis.kernels import UnknownSize
from jaxprtool.analysis.memory.curve import Point, curve
from jaxprtool.analysis.memory.live import Kind, Live, LiveValues, Value, grouped, levels
from jaxprtool.analysis.memory.temporary import (
    TemporaryMemory,
    outlined_memory,
    temporary_memory,
)
from jaxprtool.analysis.memory.walk import Bodies, BodyMemory
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.border import Border, NamedValue, border
from jaxprtool.ir.collector import without_collector
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.program import Program
from jaxprtool.ir.symbols import symbols_of
from jaxprtool.jaxcompat import AnyJaxpr

__all__ = [
    "Live",
    "Memory",
    "Point",
    "TemporaryMemory",
    "memory",
    "outlined_memory",
    "temporary_memory",
]


@dataclass(frozen=True)
class Memory:
    """The memory that a program needs.

    Attributes:
        name: The program.
        peak_bytes: The bytes that it needs: those of the four that follow, less `donated_bytes`.
        argument_bytes: Those of its arguments.
        result_bytes: Those of its results, which have room from the start.
        constant_bytes: Those of its constants.
        temporary_bytes: Those of all else, where that is most.
        donated_bytes: Those of results that are written where an argument was that is donated.
        at: Where it needs most.
        live: What is alive there, the largest first; they add up to `peak_bytes`.
        curve: What it needs from the first equation to the last.
    """

    name: str
    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    constant_bytes: int
    temporary_bytes: int
    donated_bytes: int
    at: Point
    live: tuple[Live, ...]
    curve: tuple[Point, ...]


@without_collector()
def memory(program: Program | AnyJaxpr) -> Memory:
    """Return the memory that a program needs once it is compiled, estimated.

    Args:
        program: A `Program`, or a jaxpr.

    Raises:
        UnsupportedError: If a size is symbolic.
    """
    about, frames = border(program), frames_now()
    given = _donated(program, about)
    try:
        body = Bodies().memory(about.jaxpr, donated=given)
    except UnknownSize:
        names = "=…, ".join(symbols_of(about.jaxpr))
        raise UnsupportedError(
            f"the memory of {about.name} needs sizes that are numbers",
            f'write them in --args, or -p "specialize({names}=…)"',
        ) from None
    arguments, results, constants = map(_size, (about.arguments, about.outputs, about.constants))
    donated = _size([about.outputs[position] for position in given])
    base = arguments + results + constants - donated
    points = curve(body, base, frames)
    return Memory(
        about.name,
        base + body.peak,
        arguments,
        results,
        constants,
        body.peak,
        donated,
        max(points, key=lambda point: point.bytes),
        grouped(_alive(about, body, frames, given)),
        points,
    )


def _size(values: Sequence[NamedValue]) -> int:
    return sum(value.bytes or 0 for value in values)


def _donated(program: Program | AnyJaxpr, about: Border) -> dict[int, int]:
    """Return the results that are written where a donated argument was, each with that argument.

    As JAX pairs them: in order, if type and shape are the same.
    """
    told = program.jit if isinstance(program, Program) else None
    if told is None:
        return {}
    free = defaultdict[str, list[int]](list)
    arguments = zip(about.jaxpr.invars, about.arguments, strict=True)
    asked = told.of_arguments([(value.name, var.aval) for var, value in arguments])
    for position, (argument, option) in enumerate(zip(about.arguments, asked, strict=True)):
        if option.donated:
            free[argument.type].append(position)
    return {
        position: free[result.type].pop(0)
        for position, result in enumerate(about.outputs)
        if free[result.type]
    }


def _alive(
    about: Border, body: BodyMemory, frames: Frames, donated: Mapping[int, int]
) -> Iterator[Value]:
    """Yield what is alive where a program needs most."""
    for each in about.arguments:
        yield Value("argument", each.type, each.bytes or 0, each.name)
    for each in about.constants:
        yield Value("constant", each.type, each.bytes or 0, each.name)
    names = [each.name for each in (*about.constants, *about.arguments)]
    values, now = LiveValues(frames, names), levels(body)
    yield from values.of(now)
    held = values.held_in_rooms(now)
    kernels = body.schedule.kernels
    made = {buffer.value: buffer.start for buffer in body.schedule.results}
    for position, result in enumerate(about.outputs):
        if position in donated:
            continue
        value = kernels.given[position]
        size = (result.bytes or 0) - held.pop(value, 0)
        if value is None or kernels.maker[value] < 0:
            yield Value("result", result.type, size, result.name)
        elif size:
            is_made = not now or made[value] <= now[0].time
            kind: Kind = "result" if is_made else "room"
            primitive, line, calls = values.made(kernels, value)
            yield Value(kind, result.type, size, result.name, primitive, line, frames=calls)
