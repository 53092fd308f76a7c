"""A recorded run as HTML: a page with a timeline of its compilations, and a notebook cell.

The page holds the compilations of each function, and the listings of programs, compressed, since
most are never viewed. It has the listings of the slowest programs, up to a total number of
equations, and says how to show the others.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from jaxprtool.commands.cost.table import cost_icicles, cost_view
from jaxprtool.commands.memory.table import memory_icicle, memory_view
from jaxprtool.commands.record.table import (
    command_text,
    count_text,
    has_failed,
    one_line,
    reason_text,
    recompiled,
    run_facts,
    run_notes,
    step_text,
    times_of,
    warnings,
)
from jaxprtool.ir.documents import duration, in_bytes, listed
from jaxprtool.ir.frames import Root
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.ir.source_text import UNKNOWN
from jaxprtool.ir.trees import unique
from jaxprtool.render.page import (
    PageSources,
    ProgramRows,
    SourceLink,
    compressed,
    environment,
    hash_of,
    linked_view,
    page_table,
    program_rows,
    static_files,
)
from jaxprtool.render.reports import facts as size_facts
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.terminal.tables import share_text
from jaxprtool.render.views import (
    Cell,
    Column,
    FramePath,
    Icicle,
    PageView,
    Table,
    icicle,
    number_column,
)

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats
    from jaxprtool.commands.cost.estimate import Cost, FrameCost
    from jaxprtool.commands.cost.rules import Work
    from jaxprtool.commands.memory.estimate import Memory
    from jaxprtool.recording.recorded_run import (
        Argument,
        Compilation,
        Function,
        Reason,
        Run,
        Transfer,
    )

#: The maximum total number of equations in the listings on a page.
MOST_EQUATIONS = 10_000

#: The maximum numbers of rows of a table, compilations of a function, and lanes of the timeline.
_MOST_ROWS, _MOST_COMPILATIONS, _MOST_LANES = 500, 200, 8

#: The maximum number of rows of a notebook cell.
_MOST_IN_CELL = 20

#: A compilation that takes less than this part of a run is drawn in one color.
_TINY = 300

#: The length at which a value or a name on a page is cut.
_LONGEST = 300

_SHOWN = ShowOptions(names=True, terse=True, source=True)


class Details(NamedTuple):
    """The facts about a program for a page, besides its compilation.

    Attributes:
        program: The program.
        size: Its size.
        works: The costs of its equations, at every depth, by `id`.
        cost: Its cost by line; None to leave it out.
        memory: Its memory, or why it is unknown; None to leave it out.
        frames: Its cost by scope and line.
    """

    program: Program
    size: Stats
    works: Mapping[int, Work] = MappingProxyType({})
    cost: Cost | None = None
    memory: Memory | str | None = None
    frames: Sequence[FrameCost] = ()


def with_listing(run: Run, most: int = MOST_EQUATIONS) -> list[Compilation]:
    """Return the compilations whose listings belong on a page: the slowest ones.

    Args:
        run: The run.
        most: The maximum total number of equations.
    """
    chosen: list[Compilation] = []
    for compilation in sorted(run.compilations, key=lambda compilation: -compilation.seconds):
        if compilation.file and compilation.equations <= most:
            chosen.append(compilation)
            most -= compilation.equations
    return chosen


def run_page(
    run: Run,
    details: Mapping[str, Details] = MappingProxyType({}),
    files: Mapping[str, str] = MappingProxyType({}),
    trace: str = "",
    differences: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the page of a run.

    Args:
        run: The run.
        details: The facts about programs, by the `file` of the compilation: those of
            `with_listing` that can be read.
        files: The text of the user's files, by the path in the lines of the run.
        trace: The path of the run's trace for Perfetto, from the page's folder.
        differences: How programs of the same name differ between processes, by name.
    """
    return _Page(run, details, files).render(differences, trace)


def record_cell(run: Run, link: str = "", whole: str = "") -> str:
    """Return a run as an HTML fragment for a notebook.

    Args:
        run: The run.
        link: The path of the run's page, for a link.
        whole: The HTML of the run's page, to open inside the cell.
    """
    shown = run.functions[:_MOST_IN_CELL]
    return (
        environment()
        .get_template("record_cell.html")
        .render(
            run=run,
            functions=[(function, times_of(function.compilations)) for function in shown],
            more=len(run.functions) - len(shown),
            share=lambda function: share_text(function.seconds, run.compile_seconds),
            again=recompiled(run.functions)[:_MOST_IN_CELL],
            command=command_text(run.command, _LONGEST),
            facts=list(run_facts(run)),
            notes=list(run_notes(run)),
            count=count_text,
            reason=reason_text,
            step=step_text,
            css=static_files("listing.css", "record_cell.css"),
            link=link,
            whole=whole,
        )
    )


# --- the parts of the page --------------------------------------------------------------------


class _Bar(NamedTuple):
    """A compilation in the timeline.

    Attributes:
        function: The number of its function.
        name: Its name.
        title: Its times and reasons.
        kinds: Its CSS classes.
        start: Its start, in seconds.
        trace: The time of tracing, in seconds.
        lower: The time of lowering, in seconds.
        whole: The total time, in seconds.
    """

    function: int
    name: str
    title: str
    kinds: str
    start: float
    trace: float
    lower: float
    whole: float


class _Lane(NamedTuple):
    """A row of the timeline: the compilations of a process."""

    label: str
    bars: Sequence[_Bar]


@dataclass(frozen=True)
class _FunctionRow:
    """A row of the table of functions.

    Attributes:
        function: The function.
        number: Its number on the page.
        cells: Its numbers: the text, the sort key, and the share of the whole in percent.
        bars: Its compilations in the timeline.
        searched: More words by which a search finds it.
    """

    function: Function
    number: int
    cells: Sequence[Cell]
    bars: Sequence[_Bar]
    searched: str


class _ArgumentRow(NamedTuple):
    """A row of the arguments of a compilation.

    Attributes:
        argument: The argument.
        type: Its type in the nearest earlier compilation, if that differs.
        sharding: Its sharding there, if that differs.
        differs: Whether it differs, or is new.
    """

    argument: Argument
    type: str = ""
    sharding: str = ""
    differs: bool = False


@dataclass(frozen=True)
class _CompilationPart:
    """A compilation below its function.

    Attributes:
        compilation: The compilation.
        target: The TARGET of its program: `run/step@2`.
        facts: Its times and its line.
        arguments: Its arguments, or those that differ from the nearest earlier compilation.
        left_out: The number of arguments left out.
        compared: Whether the arguments left out equal those of the nearest earlier compilation.
        number: The number of the packed listing, if it is on the page.
        why: Its first reason.
    """

    compilation: Compilation
    target: str
    facts: Sequence[str]
    arguments: Sequence[_ArgumentRow]
    left_out: int
    compared: bool
    number: int | None
    why: str


class _ShownProgram(NamedTuple):
    """The data of a program for the listing template; `at` is the prefix of its element ids."""

    at: str
    name: str
    facts: Sequence[str]
    primitives: Sequence[str]
    listing: ProgramRows


class _Page:
    """The page of a run."""

    def __init__(self, run: Run, details: Mapping[str, Details], files: Mapping[str, str]):
        self._run, self._details = run, details
        programs = (detail.program for detail in details.values())
        roots: list[Root] = list(
            dict.fromkeys(root for program in programs for root in program.roots)
        )
        self._sources = PageSources(_SHOWN, True, roots, files)
        # Making the listings adds files to `PageSources`, so lines are looked up afterwards.
        self._listings = dict(self._packed_listings())
        self._line_of = cache(self._sources.line_of)
        ends = (compilation.start + compilation.seconds for compilation in run.compilations)
        self._end = max(run.seconds, *ends, 1e-3)
        self._numbers = {file: i for i, file in enumerate(self._listings)}

    def render(self, differences: Mapping[str, str], trace: str) -> str:
        run, script = self._run, static_files("shared.js", "pointing.js", "record.js", "icicle.js")
        rows = [self._row(i, function) for i, function in enumerate(run.functions)]
        return (
            environment()
            .get_template("record.html")
            .render(
                run=run,
                command=command_text(run.command, _LONGEST),
                facts=list(run_facts(run)),
                notes=list(warnings(run)),
                end=self._end,
                lanes=self._lanes(rows),
                columns=self._columns(),
                rows=rows,
                parts=[self._part(function) for function in run.functions],
                listings=list(self._listings.values()),
                icicles=list(filter(None, [self._compile_icicle()])),
                steps=self._steps_table(),
                reasons=self._reasons_table(),
                tables=list(self._tables()),
                left_out=len(run.compilations) - len(self._listings),
                most=MOST_EQUATIONS,
                files=self._sources.files(),
                linked=self._mentioned(),
                counts=self._weights(),
                place=self._link,
                differences=differences,
                trace=trace,
                css=static_files("listing.css", "page.css", "icicle.css", "record.css"),
                script=script,
                script_hash=hash_of(script),
            )
        )

    # --- functions ------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        calls = ["calls"] if any(function.calls for function in self._run.functions) else []
        return ["programs", "trace", "lower", "compile", "total", *calls]

    def _row(self, number: int, function: Function) -> _FunctionRow:
        times, whole = times_of(function.compilations), self._run.compile_seconds
        share = 100 * function.seconds / whole if whole else 0.0
        cells = [
            Cell(f"{len(function.compilations):,}", len(function.compilations)),
            _seconds(times.trace),
            _seconds(times.lower),
            _seconds(times.compile),
            Cell(duration(function.seconds), function.seconds, percent=share),
        ]
        if len(self._columns()) > len(cells):
            calls = function.calls
            below = _seconds(calls.seconds if calls else None)
            cells.append(
                Cell(f"{calls.count:,}", calls.count, below=below) if calls else Cell("", -1)
            )
        bars = [
            _bar(number, compilation, self._end)
            for compilation in function.compilations[:_MOST_ROWS]
        ]
        lines = dict.fromkeys(
            line
            for compilation in function.compilations
            for line in (
                compilation.line,
                compilation.library,
                *(reason.line for reason in compilation.reasons),
            )
        )
        kinds = dict.fromkeys(
            r.kind for compilation in function.compilations for r in compilation.reasons
        )
        words = [
            function.jit_line,
            *lines,
            *kinds,
            *(compilation.name for compilation in function.compilations),
        ]
        searched = " ".join(one_line(word, _LONGEST) for word in words[:_MOST_ROWS] if word)
        return _FunctionRow(function, number, cells, bars, searched)

    def _lanes(self, rows: Sequence[_FunctionRow]) -> list[_Lane]:
        """Return the lanes of the timeline, one for each of the first processes."""
        lanes: defaultdict[int, list[_Bar]] = defaultdict(list)
        for row in rows:
            for compilation, bar in zip(row.function.compilations, row.bars, strict=False):
                lanes[compilation.process].append(bar)
        for several_bars in lanes.values():  # short ones on top of long ones
            several_bars.sort(key=lambda bar: -bar.whole)
        several = len(lanes) > 1
        timeline = [
            _Lane(f"process {number}" if several else "", lanes[number])
            for number in sorted(lanes)[:_MOST_LANES]
        ]
        if others := sorted(lanes)[_MOST_LANES:]:
            bars = [bar for number in others for bar in lanes[number]]
            timeline.append(_Lane(f"{len(others):,} more", bars))
        return timeline

    def _part(self, function: Function) -> str:
        """Return the packed HTML that opens below the row of a function."""
        earlier = {
            (compilation.process, compilation.name): compilation
            for compilation in function.compilations
        }
        shown = function.compilations[:_MOST_COMPILATIONS]
        template = environment().get_template("record_function.html")
        html = template.render(
            function=function,
            parts=[
                self._compilation(
                    compilation, earlier.get((compilation.process, compilation.nearest))
                )
                for compilation in shown
            ],
            more=len(function.compilations) - len(shown),
            counted=self._run.calls_counted,
            count=count_text(function.compilations),
            reason=lambda reason: reason_text(reason, _LONGEST),
            place=self._link,
        )
        return compressed(html)

    def _compilation(
        self, compilation: Compilation, nearest: Compilation | None
    ) -> _CompilationPart:
        arguments = list(map(_ArgumentRow, compilation.arguments))
        if nearest is not None:
            earlier = {argument.path: argument for argument in nearest.arguments}
            compared = (
                _compared(value, earlier.get(value.path)) for value in compilation.arguments
            )
            arguments = [argument for argument in compared if argument.differs]
        name, folder = compilation.name, self._run.folder.rstrip("/")
        if len(self._run.processes) > 1 and compilation.file:
            name = compilation.file.removesuffix(".jaxpr")
        target = shlex.quote(f"{folder}/{name}" if folder else name)
        return _CompilationPart(
            compilation,
            one_line(target, _LONGEST),
            list(_facts(compilation, len(self._run.processes) > 1)),
            arguments[:_MOST_ROWS],
            len(compilation.arguments) - len(arguments[:_MOST_ROWS]),
            nearest is not None and len(arguments) <= _MOST_ROWS,
            self._numbers.get(compilation.file),
            next((_without_line(reason) for reason in compilation.reasons), ""),
        )

    # --- listings -------------------------------------------------------------------------------

    def _packed_listings(self) -> Iterator[tuple[str, str]]:
        """Yield the file of each program shown, and its cost, memory and listing, packed."""
        template = environment().get_template("record_program.html")
        none = (0, "")
        for number, (file, detail) in enumerate(self._details.items()):
            at, about = f"p{number}-", program_signature(detail.program)
            rows = program_rows(about, _SHOWN, self._sources, at, works=detail.works)
            name = one_line(detail.program.name, _LONGEST)
            shown = _ShownProgram(at, name, size_facts(detail.size), (), rows)
            html = template.render(
                programs=[shown],
                icicles=list(filter(None, self._icicles(detail))),
                views=list(self._views(detail)),
                titles=False,
                at=at,
                added=none,
                removed=none,
            )
            yield file, compressed(html)

    def _views(self, detail: Details) -> Iterator[PageView]:
        if detail.cost is not None:
            yield linked_view(cost_view([detail.cost]), self._sources.line_of)
        if detail.memory is not None:
            yield linked_view(memory_view([detail.memory]), self._sources.line_of)

    # --- flame graphs ---------------------------------------------------------------------------

    def _icicles(self, detail: Details) -> Iterator[Icicle | None]:
        """Yield the flame graphs of a program."""
        if detail.cost is not None:
            yield from cost_icicles(detail.cost, detail.frames, self._sources.line_of)
        if detail.memory is not None and not isinstance(detail.memory, str):
            yield memory_icicle(detail.memory, detail.program.roots, self._sources.line_of)

    def _compile_icicle(self) -> Icicle | None:
        """Return the compile time by function, the line that called it, program and stage."""
        seconds = defaultdict[FramePath, float](float)
        functions = self._run.functions
        names = unique([one_line(function.name, _LONGEST) for function in functions])
        places = {name: SourceLink(name, "", f"fn{i}") for i, name in enumerate(names)}
        for name, function in zip(names, functions, strict=True):
            for compilation in function.compilations:
                path = name, one_line(compilation.line, _LONGEST), one_line(compilation.name)
                times = times_of([compilation])
                seconds[*path, "trace"] += times.trace
                seconds[*path, "lower"] += times.lower
                seconds[*path, "compile"] += times.compile or 0.0
        for computation in self._run.outside_jit:
            seconds["outside of jit", one_line(computation.line, _LONGEST)] += computation.seconds
        return icicle(
            "compile time",
            "this run",
            seconds,
            duration,
            lambda name: places.get(name) or self._line_of(name),
        )

    # --- other tables ---------------------------------------------------------------------------

    def _reasons_table(self) -> Table | None:
        """Return a row for each reason of each function that was compiled more than once."""
        numbers = {id(function): number for number, function in enumerate(self._run.functions)}
        rows = []
        for again in recompiled(self._run.functions):
            name = one_line(again.function.name, _LONGEST)
            link = SourceLink(name, "", f"fn{numbers[id(again.function)]}")
            compiled = Cell(count_text(again.function.compilations))
            for i, (reason, count) in enumerate(again.reasons):
                rows.append(
                    [
                        Cell(name, link=link, below=None if i else compiled),
                        Cell(
                            _without_line(reason),
                            below=Cell(one_line(reason.advice, 2 * _LONGEST)),
                        ),
                        Cell(f"{count:,}", count),
                        self._line(reason.line),
                    ]
                )
        columns = *map(Column, ("function", "what differs")), number_column("times"), Column("line")
        return self._table("Compiled more than once, and why", columns, rows) if rows else None

    def _steps_table(self) -> Table | None:
        """Return what to do, with links to the lines and to the functions of the programs."""
        numbers = {
            compilation.file.removesuffix(".jaxpr").removeprefix("process-0/"): number
            for number, function in enumerate(self._run.functions)
            for compilation in function.compilations
        }
        columns = tuple(map(Column, ("finding", "program", "command")))
        rows = []
        for step in self._run.next_steps:
            number = numbers.get(step.program)
            link = None if number is None else SourceLink(step.program, "", f"fn{number}")
            place = self._line(step.line) if step.line else None
            rows.append(
                [
                    Cell(one_line(step.text, 2 * _LONGEST), below=place),
                    Cell(one_line(step.program, _LONGEST), link=link),
                    Cell(one_line(step.command, 1000)),
                ]
            )
        return self._table("What to do", columns, rows) if rows else None

    def _tables(self) -> Iterator[Table]:
        run = self._run
        if run.outside_jit:
            numbers = map(number_column, ("programs", "total"))
            rows = [
                [
                    self._line(computation.line),
                    Cell(f"{computation.count:,}", computation.count),
                    _seconds(computation.seconds),
                    Cell(listed(_counts(computation.names), 12)),
                ]
                for computation in run.outside_jit
            ]
            columns = Column("line"), *numbers, Column("operations")
            yield self._table("Small computations compiled outside of jit", columns, rows)
        if run.transfers:
            numbers = map(number_column, ("times", "bytes", "waited"))
            rows = [
                [
                    self._line(transfer.line),
                    Cell(
                        "Python waited for values from the device"
                        if transfer.kind == "to_host"
                        else "copied to the device at each call",
                        below=Cell(_copied(transfer)),
                    ),
                    Cell(f"{transfer.count:,}", transfer.count),
                    Cell(in_bytes(transfer.bytes), transfer.bytes),
                    _seconds(transfer.seconds or None),
                ]
                for transfer in run.transfers
            ]
            columns = Column("line"), Column("what"), *numbers
            yield self._table("Transfers and waits", columns, rows)
        if run.processes:
            rows = [
                [
                    Cell(f"{process.number:,}", process.number, below=Cell(f"pid {process.pid}")),
                    Cell(command_text(process.command, _LONGEST)),
                    _seconds(process.start),
                    _seconds(process.seconds),
                    Cell(" ".join(filter(None, (process.jax, process.backend))) or "not imported"),
                    Cell(one_line(process.ending, _LONGEST)),
                ]
                for process in run.processes
            ]
            times = map(number_column, ("start", "time"))
            columns = number_column("process"), Column("command"), *times
            yield self._table("Processes", (*columns, Column("JAX"), Column("ended")), rows)

    # --- the user's lines -----------------------------------------------------------------------

    def _link(self, line: str) -> SourceLink:
        """Return a line, linked to the source if its file is shown."""
        name = one_line(line, _LONGEST)
        return self._line_of(name) or SourceLink(name, "")

    def _line(self, line: str) -> Cell:
        name = one_line(line, _LONGEST)
        return Cell(name or "unknown line", link=name)

    def _table(
        self, caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]
    ) -> Table:
        return page_table(Table(caption, columns, rows), self._line_of)

    def _mentioned(self) -> set[str]:
        return {self._link(line).line for line, _ in _lines(self._run)}

    def _weights(self) -> defaultdict[str, str]:
        """Return the compile time caused by each line, as text, by its id."""
        weights: defaultdict[str, float] = defaultdict(float)
        for line, seconds in _lines(self._run):
            weights[self._link(line).line] += seconds
        return defaultdict(
            str, {id: duration(seconds) for id, seconds in weights.items() if seconds}
        )


def _lines(run: Run) -> Iterator[tuple[str, float]]:
    """Yield the lines in a run, with the compile time caused by each."""
    for function in run.functions:
        yield from ((function.line, 0.0), (function.jit_line, 0.0))
        for compilation in function.compilations:
            yield compilation.line, compilation.seconds
            yield from ((reason.line, 0.0) for reason in compilation.reasons)
    yield from ((computation.line, computation.seconds) for computation in run.outside_jit)
    yield from ((transfer.line, 0.0) for transfer in run.transfers)
    yield from ((step.line, 0.0) for step in run.next_steps)


def _seconds(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell("", -1)
    return Cell(duration(seconds) if seconds else "0 s", seconds)


def _compared(argument: Argument, earlier: Argument | None) -> _ArgumentRow:
    """Return an argument, compared with the earlier one."""
    if earlier is None or earlier == argument:
        return _ArgumentRow(argument, differs=earlier is None)
    type = earlier.type if earlier.type != argument.type else ""
    moved = earlier.sharding != argument.sharding
    return _ArgumentRow(argument, type, earlier.sharding or "none" if moved else "", True)


def _without_line(reason: Reason) -> str:
    return reason_text(replace(reason, line=UNKNOWN), _LONGEST)


def _copied(transfer: Transfer) -> str:
    """Return what is copied at each call: `step: batch, 1.0 MiB`."""
    size = in_bytes(transfer.bytes // (transfer.count or 1)) if transfer.kind == "to_device" else ""
    return ", ".join(filter(None, (one_line(transfer.path, _LONGEST), size)))


def _counts(names: Mapping[str, int]) -> Iterable[str]:
    ordered = sorted(names.items(), key=lambda item: -item[1])
    return (f"{one_line(name)} ({count:,})" for name, count in ordered)


def _bar(function: int, compilation: Compilation, end: float) -> _Bar:
    kinds = ["failed"] if has_failed(compilation) else ["again"] if compilation.reasons else []
    kinds += ["cached"] if compilation.cached else []
    if compilation.seconds < end / _TINY:  # drawn in one color
        phases = {
            "trace": compilation.trace_seconds,
            "lower": compilation.lower_seconds,
            "compile": compilation.compile_seconds or compilation.unfinished_seconds or 0.0,
        }
        kinds += ["tiny", max(phases, key=phases.__getitem__)]
    title = [
        one_line(compilation.name),
        *_facts(compilation, False),
        *map(reason_text, compilation.reasons[:3]),
    ]
    times = (
        compilation.start,
        compilation.trace_seconds,
        compilation.lower_seconds,
        max(compilation.seconds, 1e-6),
    )
    return _Bar(function, one_line(compilation.name), "\n".join(title), " ".join(kinds), *times)


def _facts(compilation: Compilation, several: bool) -> Iterator[str]:
    """Yield the times of a compilation, and its size."""
    yield f"at {duration(compilation.start)}"
    yield f"traced {duration(compilation.trace_seconds)}"
    yield f"lowered {duration(compilation.lower_seconds)}"
    if compilation.compile_seconds is not None:
        cached = " from the persistent cache" if compilation.cached else ""
        yield f"compiled {duration(compilation.compile_seconds)}{cached}"
    elif compilation.unfinished_seconds is not None:
        yield f"compiling for {duration(compilation.unfinished_seconds)}, not finished"
    else:
        yield "not compiled"
    yield f"CPU {duration(compilation.cpu_seconds)}"
    yield f"{compilation.equations:,} equation{'' if compilation.equations == 1 else 's'}"
    if several:
        yield f"process {compilation.process}"
