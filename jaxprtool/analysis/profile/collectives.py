"""The bytes that collectives move, by source line, from the compiled modules of a trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from jaxprtool.analysis.cost.groupings import Line
from jaxprtool.analysis.profile.origins import Origins
from jaxprtool.ir.hlo.collectives import collectives, moved_values
from jaxprtool.ir.hlo.module import Module
from jaxprtool.ir.hlo.trace import Trace


@dataclass(frozen=True)
class MovedValues:
    """The values that collectives of one kind move for a line, in a call.

    Attributes:
        kind: The kind: `all-reduce`.
        bytes: The bytes of their results on one device.
        count: The number of values.
    """

    kind: str
    bytes: int
    count: float


@dataclass(frozen=True)
class MovedByLine:
    """The values that the collectives of a trace move.

    Attributes:
        devices: The number of devices, the largest if programs differ.
        lines: The moved values by line, the kind with the most bytes first.
    """

    devices: int
    lines: Mapping[Line | None, tuple[MovedValues, ...]]


def moved_by_line(
    trace: Trace, steps: Sequence[tuple[float, float]], origins: Mapping[str, Origins]
) -> MovedByLine | None:
    """Return the values that collectives move to each device in a call; None if there are none.

    The trip count of a loop is the one that the module states, or else is measured.

    Args:
        trace: The trace.
        steps: The start and end of each call.
        origins: The origins of the operations of each module.
    """
    found = {program: list(collectives(known.module)) for program, known in origins.items()}
    if not any(found.values()):
        return None
    ran = _runs(trace, steps)
    sizes = defaultdict[Line | None, Counter[str]](Counter)
    counts = defaultdict[tuple[Line | None, str], float](float)
    for program, listed in found.items():
        known, module = origins[program], origins[program].module
        whole = _module_runs(module, ran[program])
        for each in listed:
            here = ran[program][each.instruction.name]
            runs = (here if each.count is None else whole * each.count) / module.devices
            for value, shape in moved_values(module, each.instruction):
                line = known.origin(value).line
                sizes[line][each.kind] += round(shape.bytes * runs / len(steps))
                counts[line, each.kind] += runs / len(steps)
    lines = {
        line: tuple(
            MovedValues(kind, size, counts[line, kind]) for kind, size in kinds.most_common()
        )
        for line, kinds in sizes.items()
    }
    devices = max(origins[program].module.devices for program, listed in found.items() if listed)
    return MovedByLine(devices, lines)


def _runs(trace: Trace, steps: Sequence[tuple[float, float]]) -> dict[str, Counter[str]]:
    """Return how often each operation began in the steps, on all devices, by module."""
    found = defaultdict[str, Counter[str]](Counter)
    for event in trace.events:
        if any(start <= event.start <= end for start, end in steps):
            found[event.program][event.name] += 1
    return found


def _module_runs(module: Module, ran: Counter[str]) -> int:
    """Return how often a module ran on all devices.

    It is the most frequent count among the operations of its entry computation, since some devices
    run an operation as several kernels.
    """
    counts = [ran[each.name] for each in module.entry.instructions if ran[each.name]]
    return median_low(counts) if counts else 0
