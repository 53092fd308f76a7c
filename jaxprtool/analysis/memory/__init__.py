"""Estimate the memory of a program: its peak, the values live at the peak, and the curve over time.

    found = memory(program)
    found.peak_bytes, found.at.source, found.live[0].type, found.curve

Nothing is compiled. A model of fusion determines which values are written (`analysis.kernels`), a
schedule determines how long they live (`schedule`), and `walk` adds them up. Arguments, constants
and results have memory from start to end, as in XLA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from jaxprtool import jaxcompat
from jaxprtool.analysis.kernels import UnknownSize
from jaxprtool.analysis.memory.curve import Point, curve
from jaxprtool.analysis.memory.live import Kind, Live, LiveValue, LiveValues, grouped, levels
from jaxprtool.analysis.memory.temporary import (
    outlined_memory,
    temporary_memory,
)
from jaxprtool.analysis.memory.walk import Bodies, BodyMemory
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.core.equations import equations, size_of, type_of
from jaxprtool.ir.core.structured import sub_jaxprs
from jaxprtool.ir.dataflow.slicing import live_part
from jaxprtool.ir.equality.value_keys import constant_key
from jaxprtool.ir.programs.auto_sharding import left_to_partitioner
from jaxprtool.ir.programs.donation import UnusedDonation, donations
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import NamedValue, ProgramSignature, program_signature
from jaxprtool.ir.rewriting.array_literals import as_constants
from jaxprtool.ir.rewriting.expansions import expanded
from jaxprtool.ir.shapes.symbols import symbols_of
from jaxprtool.ir.source.frames import Frames, frames_now
from jaxprtool.jaxcompat import AnyJaxpr

__all__ = [
    "Live",
    "Memory",
    "Point",
    "memory",
    "outlined_memory",
    "temporary_memory",
]


@dataclass(frozen=True)
class Memory(Printed):
    """The memory that a program needs.

    Attributes:
        name: The name of the program.
        peak_bytes: The maximum number of bytes needed at once: the sum of the next four, less
            `donated_bytes`.
        argument_bytes: The bytes of its arguments.
        result_bytes: The bytes of its results, which are allocated from the start.
        constant_bytes: The bytes of its constants.
        temporary_bytes: The bytes of all other values, at the peak.
        donated_bytes: The bytes of results that are written to the memory of donated arguments.
        at: The peak.
        live: The values live at the peak, the largest first; they add up to `peak_bytes`.
        curve: The memory needed from the first equation to the last.
        left_to_partitioner: Arguments, results and equations with a sharding over several devices,
            whose arrays are counted at their global size.
        unused_donations: The donated arguments whose memory no result can use.
        unknown: The number of equations of each primitive whose memory is not counted, besides that
            of their operands and results.
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
    left_to_partitioner: tuple[str, ...] = ()
    unused_donations: tuple[UnusedDonation, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)


@without_collector()
def memory(program: Program | AnyJaxpr) -> Memory:
    """Estimate the memory that a program needs once it is compiled.

    Args:
        program: A `Program`, or a jaxpr.

    Raises:
        UnsupportedError: If a size is symbolic.
    """
    about = program_signature(program)
    frames = frames_now(about.roots)
    lent = donations(program)
    given = lent.by_result
    try:
        bodies = Bodies()
        body = bodies.memory(live_part(expanded(about.jaxpr)), donated=given)
    except UnknownSize:
        names = "=…, ".join(symbols_of(about.jaxpr))
        raise UnsupportedError(
            f"the memory of {about.name} needs sizes that are numbers",
            f'write them in --args, or -p "specialize({names}=…)"',
        ) from None
    constant_values = _constants(program, about)
    arguments, results, constants = map(_size, (about.arguments, about.outputs, constant_values))
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
        grouped(_alive(about, constant_values, body, frames, given)),
        points,
        left_to_partitioner(program),
        lent.unused,
        dict(bodies.unknown),
    )


def _size(values: Sequence[NamedValue]) -> int:
    return sum(value.bytes or 0 for value in values)


def _constants(program: Program | AnyJaxpr, about: ProgramSignature) -> list[NamedValue]:
    """Return the different constants of a program and of its bodies: XLA keeps equal ones once."""
    whole = program.jaxpr if isinstance(program, Program) else as_constants(program)
    held = (body for eqn in equations(about.jaxpr) for _, body in sub_jaxprs(eqn))
    found = dict[object, NamedValue]()
    for jaxpr in chain((whole,), held):
        values = getattr(jaxpr, "consts", ())
        for i, var in enumerate(jaxcompat.open_jaxpr(jaxpr).constvars):
            key = constant_key(values[i]) if i < len(values) else var
            name = f"constant[{len(found)}]"
            found.setdefault(key, NamedValue(name, type_of(var.aval), size_of(var.aval)))
    return list(found.values())


def _alive(
    about: ProgramSignature,
    constants: Sequence[NamedValue],
    body: BodyMemory,
    frames: Frames,
    donated: Mapping[int, int],
) -> Iterator[LiveValue]:
    """Yield the values that are live at the peak."""
    for each in about.arguments:
        yield LiveValue("argument", each.type, each.bytes or 0, each.name)
    for each in constants:
        yield LiveValue("constant", each.type, each.bytes or 0, each.name)
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
        if value is None or kernels.defined_by[value] < 0:
            yield LiveValue("result", result.type, size, result.name)
        elif size:
            is_made = not now or made[value] <= now[0].time
            kind: Kind = "result" if is_made else "room"
            primitive, line, calls = values.made(kernels, value)
            yield LiveValue(kind, result.type, size, result.name, primitive, line, frames=calls)
