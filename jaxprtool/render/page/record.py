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

from jaxprtool.ir.documents import in_bytes, listed
from jaxprtool.ir.frames import Root
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.render.page import (
    Listing,
    SourceLink,
    Sources,
    environment,
    hash_of,
    listing,
    packed,
    static,
)
from jaxprtool.render.page.report import Cell, Table, View, cost_view, memory_view
from jaxprtool.render.reports import summary
from jaxprtool.render.reports.record import (
    command_text,
    count_text,
    facts,
    has_failed,
    notes,
    one_line,
    reason_text,
    recompiled,
    times_of,
    warnings,
)
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.terminal.tables import share_text

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import Cost
    from jaxprtool.analysis.cost.rules import Work
    from jaxprtool.analysis.memory import Memory
    from jaxprtool.analysis.recorded_run import (
        Argument,
        Compilation,
        Function,
        Reason,
        Run,
        Transfer,
    )
    from jaxprtool.analysis.stats import Stats

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
    """

    program: Program
    size: Stats
    works: Mapping[int, Work] = MappingProxyType({})
    cost: Cost | None = None
    memory: Memory | str | None = None


def with_listing(run: Run, most: int = MOST_EQUATIONS) -> list[Compilation]:
    """Return the compilations whose listings belong on a page: the slowest ones.

    Args:
        run: The run.
        most: The maximum total number of equations.
    """
    chosen: list[Compilation] = []
    for each in sorted(run.compilations, key=lambda each: -each.seconds):
        if each.file and each.equations <= most:
            chosen.append(each)
            most -= each.equations
    return chosen


def page(
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
            functions=[(each, times_of(each.compilations)) for each in shown],
            more=len(run.functions) - len(shown),
            share=lambda each: share_text(each.seconds, run.compile_seconds),
            again=recompiled(run.functions)[:_MOST_IN_CELL],
            command=command_text(run.command, _LONGEST),
            facts=list(facts(run)),
            notes=list(notes(run)),
            count=count_text,
            reason=reason_text,
            css=static("listing.css", "record_cell.css"),
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


class _Argument(NamedTuple):
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
    arguments: Sequence[_Argument]
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
    listing: Listing


class _Page:
    """The page of a run."""

    def __init__(self, run: Run, details: Mapping[str, Details], files: Mapping[str, str]):
        self._run, self._details = run, details
        programs = (each.program for each in details.values())
        roots: list[Root] = list(dict.fromkeys(root for each in programs for root in each.roots))
        self._sources = Sources(_SHOWN, True, roots, files)
        # Making the listings adds files to `Sources`, so lines are looked up afterwards.
        self._listings = dict(self._packed_listings())
        self._line_of = cache(self._sources.line_of)
        ends = (each.start + each.seconds for each in run.compilations)
        self._end = max(run.seconds, *ends, 1e-3)
        self._numbers = {each: i for i, each in enumerate(self._listings)}

    def render(self, differences: Mapping[str, str], trace: str) -> str:
        run, script = self._run, static("shared.js", "pointing.js", "record.js")
        rows = [self._row(i, each) for i, each in enumerate(run.functions)]
        return (
            environment()
            .get_template("record.html")
            .render(
                run=run,
                command=command_text(run.command, _LONGEST),
                facts=list(facts(run)),
                notes=list(warnings(run)),
                end=self._end,
                lanes=self._lanes(rows),
                columns=self._columns(),
                rows=rows,
                parts=[self._part(each) for each in run.functions],
                listings=list(self._listings.values()),
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
                css=static("listing.css", "page.css", "record.css"),
                script=script,
                script_hash=hash_of(script),
            )
        )

    # --- functions ------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        calls = ["calls"] if any(each.calls for each in self._run.functions) else []
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
        bars = [_bar(number, each, self._end) for each in function.compilations[:_MOST_ROWS]]
        lines = dict.fromkeys(
            line
            for each in function.compilations
            for line in (each.line, each.library, *(reason.line for reason in each.reasons))
        )
        kinds = dict.fromkeys(r.kind for each in function.compilations for r in each.reasons)
        found = [function.jit_line, *lines, *kinds, *(each.name for each in function.compilations)]
        searched = " ".join(one_line(each, _LONGEST) for each in found[:_MOST_ROWS] if each)
        return _FunctionRow(function, number, cells, bars, searched)

    def _lanes(self, rows: Sequence[_FunctionRow]) -> list[_Lane]:
        """Return the lanes of the timeline, one for each of the first processes."""
        lanes: defaultdict[int, list[_Bar]] = defaultdict(list)
        for row in rows:
            for each, bar in zip(row.function.compilations, row.bars, strict=False):
                lanes[each.process].append(bar)
        for several_bars in lanes.values():  # short ones on top of long ones
            several_bars.sort(key=lambda bar: -bar.whole)
        several = len(lanes) > 1
        found = [
            _Lane(f"process {number}" if several else "", lanes[number])
            for number in sorted(lanes)[:_MOST_LANES]
        ]
        if others := sorted(lanes)[_MOST_LANES:]:
            bars = [bar for number in others for bar in lanes[number]]
            found.append(_Lane(f"{len(others):,} more", bars))
        return found

    def _part(self, function: Function) -> str:
        """Return the packed HTML that opens below the row of a function."""
        earlier = {(each.process, each.name): each for each in function.compilations}
        shown = function.compilations[:_MOST_COMPILATIONS]
        template = environment().get_template("record_function.html")
        html = template.render(
            function=function,
            parts=[
                self._compilation(each, earlier.get((each.process, each.nearest))) for each in shown
            ],
            more=len(function.compilations) - len(shown),
            counted=self._run.calls_counted,
            count=count_text(function.compilations),
            reason=lambda each: reason_text(each, _LONGEST),
            place=self._link,
        )
        return packed(html)

    def _compilation(self, each: Compilation, nearest: Compilation | None) -> _CompilationPart:
        arguments = list(map(_Argument, each.arguments))
        if nearest is not None:
            before = {argument.path: argument for argument in nearest.arguments}
            compared = (_compared(value, before.get(value.path)) for value in each.arguments)
            arguments = [argument for argument in compared if argument.differs]
        name, folder = each.name, self._run.folder.rstrip("/")
        if len(self._run.processes) > 1 and each.file:
            name = each.file.removesuffix(".jaxpr")
        target = shlex.quote(f"{folder}/{name}" if folder else name)
        return _CompilationPart(
            each,
            one_line(target, _LONGEST),
            list(_facts(each, len(self._run.processes) > 1)),
            arguments[:_MOST_ROWS],
            len(each.arguments) - len(arguments[:_MOST_ROWS]),
            nearest is not None and len(arguments) <= _MOST_ROWS,
            self._numbers.get(each.file),
            next((_without_line(reason) for reason in each.reasons), ""),
        )

    # --- listings -------------------------------------------------------------------------------

    def _packed_listings(self) -> Iterator[tuple[str, str]]:
        """Yield the file of each program shown, and its cost, memory and listing, packed."""
        template = environment().get_template("record_program.html")
        none = (0, "")
        for number, (file, each) in enumerate(self._details.items()):
            at, about = f"p{number}-", program_signature(each.program)
            rows = listing(about, _SHOWN, self._sources, at, works=each.works)
            name = one_line(each.program.name, _LONGEST)
            shown = _ShownProgram(at, name, summary.facts(each.size), (), rows)
            html = template.render(
                programs=[shown],
                views=list(self._views(each)),
                titles=False,
                at=at,
                added=none,
                removed=none,
            )
            yield file, packed(html)

    def _views(self, each: Details) -> Iterator[View]:
        if each.cost is not None:
            yield cost_view([each.cost], self._sources.line_of)
        if each.memory is not None:
            yield memory_view([each.memory], self._sources.line_of)

    # --- other tables ---------------------------------------------------------------------------

    def _reasons_table(self) -> Table | None:
        """Return a row for each reason of each function that was compiled more than once."""
        numbers = {id(each): number for number, each in enumerate(self._run.functions)}
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
        columns = (("function", False), ("what differs", False), ("times", True), ("line", False))
        return _table("Compiled more than once, and why", columns, rows) if rows else None

    def _tables(self) -> Iterator[Table]:
        run = self._run
        if run.outside_jit:
            columns = ("line", False), ("programs", True), ("total", True), ("operations", False)
            rows = [
                [
                    self._line(each.line),
                    Cell(f"{each.count:,}", each.count),
                    _seconds(each.seconds),
                    Cell(listed(_counts(each.names), 12)),
                ]
                for each in run.outside_jit
            ]
            yield _table("Small computations compiled outside of jit", columns, rows)
        if run.transfers:
            columns = ("line", False), ("what", False), ("times", True), ("bytes", True)
            rows = [
                [
                    self._line(each.line),
                    Cell(
                        "Python waited for values from the device"
                        if each.kind == "to_host"
                        else "copied to the device at each call",
                        below=Cell(_copied(each)),
                    ),
                    Cell(f"{each.count:,}", each.count),
                    Cell(in_bytes(each.bytes), each.bytes),
                    _seconds(each.seconds or None),
                ]
                for each in run.transfers
            ]
            yield _table("Transfers and waits", (*columns, ("waited", True)), rows)
        if run.processes:
            columns = ("process", True), ("command", False), ("start", True), ("time", True)
            rows = [
                [
                    Cell(f"{each.number:,}", each.number, below=Cell(f"pid {each.pid}")),
                    Cell(command_text(each.command, _LONGEST)),
                    _seconds(each.start),
                    _seconds(each.seconds),
                    Cell(" ".join(filter(None, (each.jax, each.backend))) or "not imported"),
                    Cell(one_line(each.ending, _LONGEST)),
                ]
                for each in run.processes
            ]
            yield _table("Processes", (*columns, ("JAX", False), ("ended", False)), rows)

    # --- the user's lines -----------------------------------------------------------------------

    def _link(self, line: str) -> SourceLink:
        """Return a line, linked to the source if its file is shown."""
        name = one_line(line, _LONGEST)
        return self._line_of(name) or SourceLink(name, "")

    def _line(self, line: str) -> Cell:
        place = self._link(line)
        return Cell(place.text or "unknown line", link=place if place.line else None)

    def _mentioned(self) -> set[str]:
        return {self._link(line).line for line, _ in _lines(self._run)}

    def _weights(self) -> defaultdict[str, str]:
        """Return the compile time caused by each line, as text, by its id."""
        found: defaultdict[str, float] = defaultdict(float)
        for line, seconds in _lines(self._run):
            found[self._link(line).line] += seconds
        return defaultdict(str, {id: duration(each) for id, each in found.items() if each})


def _lines(run: Run) -> Iterator[tuple[str, float]]:
    """Yield the lines in a run, with the compile time caused by each."""
    for function in run.functions:
        yield from ((function.line, 0.0), (function.jit_line, 0.0))
        for each in function.compilations:
            yield each.line, each.seconds
            yield from ((reason.line, 0.0) for reason in each.reasons)
    yield from ((each.line, each.seconds) for each in run.outside_jit)
    yield from ((each.line, 0.0) for each in run.transfers)


def _seconds(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell("", -1)
    return Cell(duration(seconds) if seconds else "0 s", seconds)


def _compared(argument: Argument, before: Argument | None) -> _Argument:
    """Return an argument, compared with the earlier one."""
    if before is None or before == argument:
        return _Argument(argument, differs=before is None)
    type = before.type if before.type != argument.type else ""
    moved = before.sharding != argument.sharding
    return _Argument(argument, type, before.sharding or "none" if moved else "", True)


def _without_line(reason: Reason) -> str:
    return reason_text(replace(reason, line=""), _LONGEST)


def _copied(each: Transfer) -> str:
    """Return what is copied at each call: `step: batch, 1.0 MiB`."""
    size = in_bytes(each.bytes // (each.count or 1)) if each.kind == "to_device" else ""
    return ", ".join(filter(None, (one_line(each.path, _LONGEST), size)))


def _counts(names: Mapping[str, int]) -> Iterable[str]:
    ordered = sorted(names.items(), key=lambda item: -item[1])
    return (f"{one_line(name)} ({count:,})" for name, count in ordered)


def _table(
    caption: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[Cell]]
) -> Table:
    return Table(caption, columns, rows[:_MOST_ROWS], max(len(rows) - _MOST_ROWS, 0))


def _bar(function: int, each: Compilation, end: float) -> _Bar:
    kinds = ["failed"] if has_failed(each) else ["again"] if each.reasons else []
    kinds += ["cached"] if each.cached else []
    if each.seconds < end / _TINY:  # drawn in one color
        phases = {
            "trace": each.trace_seconds,
            "lower": each.lower_seconds,
            "compile": each.compile_seconds or each.unfinished_seconds or 0.0,
        }
        kinds += ["tiny", max(phases, key=phases.__getitem__)]
    title = [one_line(each.name), *_facts(each, False), *map(reason_text, each.reasons[:3])]
    times = (each.start, each.trace_seconds, each.lower_seconds, max(each.seconds, 1e-6))
    return _Bar(function, one_line(each.name), "\n".join(title), " ".join(kinds), *times)


def _facts(each: Compilation, several: bool) -> Iterator[str]:
    """Yield the times of a compilation, and its size."""
    yield f"at {duration(each.start)}"
    yield f"traced {duration(each.trace_seconds)}"
    yield f"lowered {duration(each.lower_seconds)}"
    if each.compile_seconds is not None:
        cached = " from the persistent cache" if each.cached else ""
        yield f"compiled {duration(each.compile_seconds)}{cached}"
    elif each.unfinished_seconds is not None:
        yield f"compiling for {duration(each.unfinished_seconds)}, not finished"
    else:
        yield "not compiled"
    yield f"CPU {duration(each.cpu_seconds)}"
    yield f"{each.equations:,} equation{'' if each.equations == 1 else 's'}"
    if several:
        yield f"process {each.process}"
