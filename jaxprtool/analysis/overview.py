"""Summarize a program: its signature in the user's names, its bodies and its source lines.

Equations are counted as in `stats`: where they run, with the body of a jit at each call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jaxprtool.analysis.stats import Stats, count_equations, stats
from jaxprtool.ir.core.equations import holders, inner_jaxprs, outer_first
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import ValueGroup, grouped, program_signature
from jaxprtool.ir.source.frames import Frames, frames_now
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr
from jaxprtool.jaxcompat.source_locations import UserFrame


@dataclass(frozen=True)
class HeldBody:
    """A body in a program.

    Attributes:
        kind: The primitive of the equations that hold it.
        name: The name of the function, or of the parameter that the body is.
        calls: The number of times that it is held, over all copies of its holders.
        equations: The number of its equations, at every depth.
    """

    kind: str
    name: str
    calls: int
    equations: int


@dataclass(frozen=True)
class Overview:
    """A summary of a program. The largest parts come first.

    Attributes:
        stats: Its size.
        arguments: Its arguments, grouped by the user's names, in order.
        outputs: Its results likewise.
        bodies: The bodies of more than one equation.
        lines: The number of equations by line of the user's own source.
    """

    stats: Stats
    arguments: tuple[ValueGroup, ...]
    outputs: tuple[ValueGroup, ...]
    bodies: tuple[HeldBody, ...]
    lines: tuple[tuple[UserFrame, int], ...]


def overview(program: Program | AnyJaxpr) -> Overview:
    """Return the summary of a program."""
    counted, about = stats(program), program_signature(program)
    runs = _runs(about.jaxpr)
    return Overview(
        counted,
        grouped(counted.arguments),
        grouped(counted.outputs),
        tuple(_bodies(runs)),
        tuple(_lines(runs, frames_now(about.roots))),
    )


def _runs(top: Jaxpr) -> dict[Jaxpr, int]:
    """Return how often each body occurs in a program, callers before callees."""
    runs = dict.fromkeys(outer_first(top), 0)
    runs[top] = 1
    for jaxpr, number in runs.items():
        for body in inner_jaxprs(jaxpr):
            runs[body] += number
    return runs


def _bodies(runs: dict[Jaxpr, int]) -> list[HeldBody]:
    """Return the bodies of several equations, sorted by the equations in all their copies."""
    found: dict[Jaxpr, HeldBody] = {}
    for jaxpr in runs:
        for eqn, held in holders(jaxpr):
            for path, body in held:
                if body not in found and len(body.eqns) > 1:
                    named = str(eqn.params.get("name") or path)
                    size = count_equations(body)
                    found[body] = HeldBody(eqn.primitive.name, named, runs[body], size)
    return sorted(found.values(), key=lambda body: -body.calls * body.equations)


def _lines(runs: dict[Jaxpr, int], reader: Frames) -> list[tuple[UserFrame, int]]:
    """Return the lines that equations come from, each with its number of equations."""
    counts: Counter[tuple[str, int]] = Counter()
    frames: dict[tuple[str, int], UserFrame] = {}
    for jaxpr, number in runs.items():
        copies = Counter(eqn.source_info.traceback for eqn in jaxpr.eqns)
        for traceback, eqn in {eqn.source_info.traceback: eqn for eqn in jaxpr.eqns}.items():
            if (location := reader.location(eqn)) is not None:
                frame = location.frame
                counts[frame.file, frame.line] += number * copies[traceback]
                frames[frame.file, frame.line] = frame
    return [(frames[line], number) for line, number in counts.most_common()]
