"""Repetition in a program, and ways to shorten its compile time, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.console import Group
from rich.text import Text

from jaxprtool.commands.memory.table import memory_line, multiple_text
from jaxprtool.ir.documents import document, duration, in_bytes, plural
from jaxprtool.ir.frames import frames_now, short_paths
from jaxprtool.ir.notation import Comment, SharedName
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn
from jaxprtool.render.views import Cell, Column, Row, Table, number_column, share

if TYPE_CHECKING:
    from jaxprtool.commands.outline.compile_time import CompileProfile, CompileWay, UnrolledLoop
    from jaxprtool.execute.running.run import RunReport
    from jaxprtool.ir.frames import Root
    from jaxprtool.ir.repetition import RepeatedBody, Repetition, SourceRange, TemporaryMemory

# --- repetition -----------------------------------------------------------------------------------
# Repetition in a program, and measurements as traced and outlined, as tables.


def repetition_table(repetition: Repetition, width: int, top: int | None) -> Rendering:
    """Return a row for each repeated body, followed by those that it calls, and the remainder.

    Args:
        repetition: The repeated bodies.
        width: The width in characters.
        top: The number of bodies shown; None for all.
    """
    path = frames_now(repetition.roots).path
    shown = _rendering(repetition, width, path, top)
    if max(map(len, replace(shown, width=1000).plain().splitlines())) > width:
        bodies = (body for _, body in _nested([*repetition.bodies, *repetition.small]))
        files = [*dict.fromkeys(path(body.source.file) for body in bodies if body.source)]
        short = dict(zip(files, short_paths(files), strict=True))
        return _rendering(repetition, width, lambda file: short[path(file)], top)
    return shown


def _rendering(
    repetition: Repetition, width: int, path: Callable[[str], str], top: int | None
) -> Rendering:
    size = plural(repetition.equations, "equation")
    heading = f"{repetition.name}: {size}"
    if repetition.written != repetition.equations:
        written = plural(repetition.written, "equation")
        heading = f"{repetition.name}: {written}, {repetition.equations:,} with calls inlined"
    if repetition.bodies:
        table = drawn(_table(heading, [*_nested(repetition.bodies)], path), top)
        rest = f"{repetition.rest:,}", f"{repetition.rest / repetition.equations:.1%}"
        table.add_row(Text("the rest", style=tables.COMMENT), "", *rest, "")
        total = f"{size} inlined, {repetition.compiled:,} after outlining"
        if saved := _change(repetition.equations, repetition.compiled, less="fewer"):
            total += f": {saved} equations"
        if repetition.memory is not None:
            total += f"\ntemporary memory: {memory_line(repetition.memory)}"
    elif repetition.small:
        small = [(0, body) for body in repetition.small]
        table = drawn(_table(f"{heading}, too little repetition to outline", small, path), top)
        total = "--equations N outlines bodies of at least N equations anyway"
    else:
        return Rendering(Text(f"{heading}, no repetition"), width)
    return Rendering(Group(table, Text(), Text(total)), width)


def _table(
    heading: str,
    bodies: Sequence[tuple[int, RepeatedBody]],
    path: Callable[[str], str],
) -> Table:
    counts = map(number_column, ("copies", "equations", "share"))
    columns = Column("repeated body", SharedName), *counts, Column("source", Comment)
    rows: list[Row] = [
        [
            Cell(body.name, indent=depth),
            f"{body.copies:,}",
            f"{body.equations:,}",
            f"{body.share:.1%}",
            source_range_text(body.source, path),
        ]
        for depth, body in bodies
    ]
    return Table(heading, columns, rows)


def _nested(bodies: Sequence[RepeatedBody], depth: int = 0) -> Iterator[tuple[int, RepeatedBody]]:
    for body in bodies:
        yield depth, body
        yield from _nested(body.bodies, depth + 1)


def source_range_text(source: SourceRange | None, path: Callable[[str], str]) -> str:
    """Return source lines as text, `layers.py:59-61`; "" if they are unknown."""
    if source is None:
        return ""
    last = f"-{source.last}" if source.last > source.first else ""
    return f"{path(source.file)}:{source.first}{last}"


_Number = Callable[["RunReport"], float | None]

_TEMPORARY = "temporary memory"

#: The measured quantities: name, number, and its format.
_MEASURED: tuple[tuple[str, _Number, Callable[[float], str]], ...] = (
    ("lower", lambda ran: ran.times.lower, duration),
    ("compile", lambda ran: ran.times.compile, duration),
    ("compile, CPU time", lambda ran: ran.times.compile_cpu, duration),
    ("first call", lambda ran: ran.times.first_call, duration),
    ("later calls", lambda ran: ran.times.repeat, duration),
    (_TEMPORARY, lambda ran: ran.memory.temporary if ran.memory else None, in_bytes),
    ("arguments", lambda ran: ran.memory.arguments if ran.memory else None, in_bytes),
    ("results", lambda ran: ran.memory.outputs if ran.memory else None, in_bytes),
)


def measured_rows(
    reports: Sequence[RunReport],
    trace_time: float,
    outline_time: float,
    estimated: TemporaryMemory | None,
) -> Iterator[tuple[str, ...]]:
    """Yield a row per measurement: its name, as traced, outlined, and the change.

    Args:
        reports: The run of a program as traced, and as outlined if that differs.
        trace_time: The seconds of tracing.
        outline_time: The seconds of outlining.
        estimated: The estimate for the row of temporary memory.
    """
    several = len(reports) > 1
    yield "trace", *[duration(trace_time)] * len(reports), *[""] * several
    if several:
        yield "outline", "", duration(outline_time), ""
    for name, of, shown in _MEASURED:
        numbers = [number for ran in reports if (number := of(ran)) is not None]
        if numbers:
            yield name, *map(shown, numbers), *([_change(*numbers)] if several else [])
        if name == _TEMPORARY and several and estimated is not None:
            sizes = estimated.as_traced, estimated.outlined
            yield "  estimate", *map(in_bytes, sizes), _change(*sizes)


def _change(old: float, new: float, *, less: str = "less") -> str:
    if not old or not new:
        return ""
    times = max(old / new, new / old)
    if times < 1.05:
        return ""
    return f"{multiple_text(times)} times {less if new < old else 'more'}"


def measured_document(
    reports: Sequence[RunReport], random: Sequence[str], trace_time: float, outline_time: float
) -> Measurements:
    """Return the document of `measured_rows`; the arguments `random` had random values."""
    devices, outlined = list(map(str, reports[0].devices)), reports[1] if reports[1:] else None
    return Measurements(devices, random, trace_time, outline_time, reports[0], outlined)


# --- compile ways ---------------------------------------------------------------------------------
# The compile time of a program, and the pipelines that shorten it, as tables.

#: A measured ratio below this is noise.
_CLEARLY = 1.1

#: The name of the stage with XLA's passes.
_WHOLE_PROGRAM = "passes on the whole program"

#: Passes that take a smaller share of the whole time are not shown.
_SHOWN = 0.01

#: Programs that compile faster than this, in seconds of CPU time, need no advice.
_LEAST_SECONDS = 0.3


def compile_ways_table(
    ways: Sequence[CompileWay], repetition: Repetition, width: int
) -> Rendering | None:
    """Return the given pipeline and those that compile faster, or a line that none does.

    Returns None if there is nothing to shorten: a program that compiles fast or repeats nothing.
    """
    if not ways or (len(ways) == 1 and not (repetition.bodies or repetition.small)):
        return None
    current = ways[0].estimate
    if len(ways) == 1:
        if current.seconds is None or current.seconds < _LEAST_SECONDS:
            return None
        return Rendering(Text(_nothing_helps(ways[0])), width)
    measured = any(way.cpu_seconds is not None for way in ways)
    compared = current.seconds is not None
    titles = ("kernels", "different", *["compile"] * compared, *["measured"] * measured, "memory")
    rows = []
    for way in ways:
        estimate = way.estimate
        cells = [f"{estimate.kernels:,}", f"{estimate.different:,}"]
        if compared:
            cells.append("" if estimate.seconds is None else duration(estimate.seconds))
        if measured:
            cells.append("" if way.cpu_seconds is None else duration(way.cpu_seconds))
        cells.append("" if way.memory is None else in_bytes(way.memory))
        rows.append([way.pipeline or "as traced", *cells])
    table = Table("", [Column("passes", SharedName), *map(number_column, titles)], rows)
    return Rendering(Group(drawn(table), Text(), Text(_best(ways))), width)


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
    rows = [("trace", profile.trace, 0), ("lower", profile.lower, 0), ("XLA", profile.compile, 0)]
    for stage in profile.stages:
        rows.append((stage.name, stage.seconds, 1))
        for xla_pass in profile.passes if stage.name == _WHOLE_PROGRAM else ():
            if xla_pass.seconds > _SHOWN * whole:
                rows.append((xla_pass.name, xla_pass.seconds, 2))
    columns = Column("stage"), *map(number_column, ("time", "share"))
    cells: list[Row] = [
        [Cell(name, indent=depth), duration(seconds), share(seconds, whole)]
        for name, seconds, depth in rows
    ]
    stages = drawn(Table("", columns, cells))
    cpu = Text(f"XLA took {duration(profile.compile_cpu)} of CPU time")
    if not profile.bodies:
        return Rendering(Group(stages, Text(), cpu), width)
    path = frames_now(roots).path
    counts = map(number_column, ("kernels", "time", "share"))
    columns = Column("compiled body", SharedName), *counts, Column("source")
    bodies = [
        [
            body.name or "XLA's own",
            f"{body.kernels:,}",
            duration(body.seconds),
            f"{body.share:.1%}",
            source_range_text(body.source, path),
        ]
        for body in profile.bodies
    ]
    return Rendering(Group(stages, Text(), cpu, Text(), drawn(Table("", columns, bodies))), width)


def _best(ways: Sequence[CompileWay]) -> str:
    """Return a line that names the fastest pipeline, as measured if known, else as estimated."""
    current, *others = ways
    if current.cpu_seconds is None:
        was, new = current.estimate, others[0].estimate
        if was.seconds is None or new.seconds is None:
            return (
                f'-p "{others[0].pipeline}" leaves {new.kernels:,} of {was.kernels:,} kernels; '
                "how long XLA takes is not known for a program like this: measure with "
                "--compile-profile"
            )
        times = was.seconds / new.seconds
        return f'-p "{others[0].pipeline}" compiles about {times:.1f} times faster, as estimated'
    seconds, best = min((way.cpu_seconds, way.pipeline) for way in others if way.cpu_seconds)
    times = current.cpu_seconds / seconds
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


class Measurements(NamedTuple):
    """A program measured as traced, and outlined."""

    devices: Annotated[Sequence[str], "The devices that both ran on: `cpu:0`."]
    random: Annotated[Sequence[str], "The arguments that were filled with random values."]
    trace: Annotated[float, "The time of tracing and the passes before, in seconds."]
    outline: Annotated[float, "The time of `outline`, in seconds."]
    as_traced: Annotated[RunReport, "The program as it was traced."]
    outlined: Annotated[RunReport | None, "The program outlined; null if nothing repeats."]


@document(optional=("measured", "profile"))
class OutlineDocument(NamedTuple):
    """`outline`."""

    programs: Annotated[
        Sequence[Repetition], "The repetition in each program; several if a pass returned several."
    ]
    measured: Annotated[Measurements | None, "With `--compile`: the time and memory of both."] = (
        None
    )
    ways: Annotated[
        Sequence[CompileWay],
        "The given pipeline, then those that compile faster; empty if the program has symbolic "
        "sizes, or there are several.",
    ] = ()
    unrolled: Annotated[
        Sequence[UnrolledLoop], "The loops that `unroll` makes XLA compile several times."
    ] = ()
    profile: Annotated[
        CompileProfile | None, "With `--compile-profile`: the compile time by stage, pass and body."
    ] = None
