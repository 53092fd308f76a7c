"""The compile time of a program, and the pipelines that shorten it, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from jaxprtool.ir.basics.quantities import in_bytes, plural
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.render.reports.repetition import lines
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.tables import new_table, number, share_text, text

if TYPE_CHECKING:
    from jaxprtool.analysis.compile_time import CompileWay, UnrolledLoop
    from jaxprtool.execute.running.compile_profile import CompileProfile
    from jaxprtool.ir.programs.repetition import Repetition
    from jaxprtool.ir.source.frames import Root

#: A measured ratio below this is noise.
_CLEARLY = 1.1

#: The name of the stage with XLA's passes.
_WHOLE_PROGRAM = "passes on the whole program"

#: Passes that take a smaller share of the whole time are not shown.
_SHOWN = 0.01

#: Programs that compile faster than this, in seconds of CPU time, need no advice.
_LEAST_SECONDS = 0.2


def table(ways: Sequence[CompileWay], found: Repetition, width: int) -> Rendering | None:
    """Return the given pipeline and those that compile faster, or a line that none does.

    Returns None if there is nothing to shorten: a program that compiles fast or repeats nothing.
    """
    if not ways or (len(ways) == 1 and not (found.bodies or found.small)):
        return None
    given = ways[0].estimate
    if len(ways) == 1:
        if given.seconds is None or given.seconds < _LEAST_SECONDS:
            return None
        return Rendering(Text(_nothing_helps(ways[0])), width)
    measured = any(way.cpu_seconds is not None for way in ways)
    compared = given.seconds is not None
    titles = ("kernels", "different", *["compile"] * compared, *["measured"] * measured, "memory")
    rows = new_table("", text("passes", theme.SHARED_NAME), *map(number, titles))
    for way in ways:
        estimate = way.estimate
        cells = [f"{estimate.kernels:,}", f"{estimate.different:,}"]
        if compared:
            cells.append("" if estimate.seconds is None else duration(estimate.seconds))
        if measured:
            cells.append("" if way.cpu_seconds is None else duration(way.cpu_seconds))
        cells.append("" if way.memory is None else in_bytes(way.memory))
        rows.add_row(way.pipeline or "as traced", *cells)
    return Rendering(Group(rows, Text(), Text(_best(ways))), width)


def unrolled_lines(
    loops: Sequence[UnrolledLoop], seconds: tuple[float, float] | None, width: int
) -> Rendering:
    """Return a line for each loop that `unroll` makes XLA compile several times.

    Args:
        loops: The loops.
        seconds: The measured CPU seconds of XLA, and those without `unroll`.
        width: The width in characters.
    """
    lines = []
    for loop in loops:
        place = f" at {loop.source}" if loop.source else ""
        total = plural(loop.copies * loop.equations, "equation")
        lines.append(
            f"XLA compiles the body of the loop{place} {loop.copies:,} times because of "
            f"unroll={loop.unroll}: {total}, {loop.equations:,} without unroll"
        )
    if seconds is None:
        lines.append("what that costs: --compile-profile")
    else:
        lines.append("without unroll, XLA takes {1} instead of {0}".format(*map(duration, seconds)))
    return Rendering(Text("\n".join(lines)), width)


def profile_tables(profile: CompileProfile, roots: Sequence[Root], width: int) -> Rendering:
    """Return the compile time by stage, pass of XLA, and body."""
    whole = profile.trace + profile.lower + profile.compile
    stages = new_table("", text("stage"), number("time"), number("share"))

    def add(name: str, seconds: float) -> None:
        stages.add_row(name, duration(seconds), share_text(seconds, whole))

    add("trace", profile.trace)
    add("lower", profile.lower)
    add("XLA", profile.compile)
    for stage in profile.stages:
        add(f"  {stage.name}", stage.seconds)
        for each in profile.passes if stage.name == _WHOLE_PROGRAM else ():
            if each.seconds > _SHOWN * whole:
                add(f"    {each.name}", each.seconds)
    cpu = Text(f"XLA took {duration(profile.compile_cpu)} of CPU time")
    if not profile.bodies:
        return Rendering(Group(stages, Text(), cpu), width)
    path = frames_now(roots).path
    counts = map(number, ("kernels", "time", "share"))
    bodies = new_table("", text("compiled body", theme.SHARED_NAME), *counts, text("source"))
    for body in profile.bodies:
        cells = f"{body.kernels:,}", duration(body.seconds), f"{body.share:.1%}"
        bodies.add_row(body.name or "XLA's own", *cells, lines(body.source, path))
    return Rendering(Group(stages, Text(), cpu, Text(), bodies), width)


def _best(ways: Sequence[CompileWay]) -> str:
    """Return a line that names the fastest pipeline, as measured if known, else as estimated."""
    given, *others = ways
    if given.cpu_seconds is None:
        was, new = given.estimate, others[0].estimate
        if was.seconds is None or new.seconds is None:
            return (
                f'-p "{others[0].pipeline}" leaves {new.kernels:,} of {was.kernels:,} kernels; '
                "how long XLA takes is not known for a program like this: measure with "
                "--compile-profile"
            )
        times = was.seconds / new.seconds
        return f'-p "{others[0].pipeline}" compiles about {times:.1f} times faster, as estimated'
    seconds, best = min((way.cpu_seconds, way.pipeline) for way in others if way.cpu_seconds)
    times = given.cpu_seconds / seconds
    if times < _CLEARLY:
        return "as measured, none of these compiles faster"
    return f'-p "{best}" compiles {times:.1f} times faster, as measured'


def _nothing_helps(way: CompileWay) -> str:
    estimate = way.estimate
    return (
        "neither outline nor roll shortens compilation by a fifth, as estimated: "
        f"{estimate.different:,} of {estimate.kernels:,} kernels are different, and XLA compiles "
        "equal ones once"
    )
