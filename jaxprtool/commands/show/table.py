"""The summary of a program, its overview, and its statistics, for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group as Parts
from rich.console import OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.commands.cost import table
from jaxprtool.commands.memory import table as memory_table
from jaxprtool.commands.profile import table as profile_table
from jaxprtool.commands.residuals import table as residuals_table
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import in_bytes, plural, shell_word, times
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.notation import (
    BinderToken,
    Comment,
    Heading,
    PrimitiveName,
    SharedName,
)
from jaxprtool.ir.notation.layout import Layout
from jaxprtool.ir.program import (
    Program,
    program_signature,
    size_of_values,
)
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.render import views
from jaxprtool.render.reports import facts, group_size_text, values_table
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.lines import (
    GAP,
    Cell,
    Listing,
    columns,
    cut_line,
    lines_of,
    printable,
)
from jaxprtool.render.terminal.listing import MOST_IN_A_ROW, ShowOptions, SourceComments
from jaxprtool.render.terminal.tables import Rendering, drawn, share_text

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats
    from jaxprtool.commands.cost.estimate import Group
    from jaxprtool.commands.lint.lint import Finding
    from jaxprtool.commands.memory.estimate import Live
    from jaxprtool.commands.profile.lines import TimedLine
    from jaxprtool.commands.residuals.residuals import Residual
    from jaxprtool.commands.show.summary import HeldBody, Overview, Suggestion, Summary

# --- summary --------------------------------------------------------------------------------------
# The summary of a program for the terminal, and its parts for a page.

#: The number of the largest residuals that are shown.
_MOST = 3

#: The heading of suggestions.
NEXT = "what to do next"

#: The gap between columns, and the indentation of a command.
_GAP, _INDENT = 2, "    "


class SummaryRow(NamedTuple):
    """A row of a part: a line, a value or a finding.

    Attributes:
        share: Its share of the whole.
        number: Its number: FLOPs, bytes, a time, or the code of a finding.
        name: The line or the value.
        about: Its code, its type, or the message of a finding.
        source: The line that it is from, to link to.
    """

    share: str
    number: str
    name: str
    about: str
    source: str = ""


class SummaryPart(NamedTuple):
    """A part of a summary: its title, a fact, and rows."""

    title: str
    fact: str
    rows: Sequence[SummaryRow]


def heading(report: Summary) -> str:
    """Return the size and cost of a program: equations, arguments, results and total cost."""
    return "; ".join((*facts(report.facts.stats), table.total_text(report.total)))


def summary_parts(report: Summary) -> Iterator[SummaryPart]:
    """Yield the parts of a summary before the suggestions."""
    if report.measured is not None and (times := report.facts.profile) is not None:
        title = "lines by time"
        yield SummaryPart(
            title, profile_table.time_text(times), [_timed(line) for line in report.measured]
        )
    if report.lines:
        unknown = "; ".join(table.unknown_notes(report.facts.cost))
        yield SummaryPart(
            "lines by FLOPs", unknown, [_costly(report, group) for group in report.lines]
        )
    usage = report.facts.memory
    if isinstance(usage, str):
        yield SummaryPart("peak of memory", usage, ())
    else:
        where = memory_table.point_text(usage.at)
        fact = f"{in_bytes(usage.peak_bytes)}{f' at {where}' if where else ''}"
        if left_out := memory_table.unknown_text(usage.unknown):
            fact = f"{fact}; {left_out}"
        rows = [_live(live, usage.peak_bytes) for live in report.live]
        yield SummaryPart("peak of memory", fact, rows)
    kept = report.facts.residuals
    if not isinstance(kept, str):
        groups = residuals_table.grouped_residuals(kept.residuals)[:_MOST]
        rows = [_kept(count, residual, kept.total_bytes) for count, residual in groups]
        yield SummaryPart("gradient", residuals_table.kept_total_text(kept), rows)
    count = report.finding_count
    more = f", the first {len(report.findings)}" if count > len(report.findings) else ""
    fact = f"{plural(count, 'finding')}{more}" if count else "nothing found"
    yield SummaryPart("lint", fact, list(map(_finding, report.findings)))


def _costly(report: Summary, group: Group) -> SummaryRow:
    share = share_text(table.weight_of(group), table.weight_of(report.total))
    line = group.line
    code = "" if line is None else source_text.line(line.file, line.line)
    return SummaryRow(share, table.number_text(group, "flops") or "0", group.name, code, group.name)


def _timed(line: TimedLine) -> SummaryRow:
    code = "" if line.line is None else source_text.line(line.line.file, line.line.line)
    time = profile_table.timed_text(line)
    return SummaryRow(f"{line.share:.1%}", time, line.name, code, line.name)


def _live(live: Live, peak: int) -> SummaryRow:
    share, size = share_text(live.bytes, peak), in_bytes(live.bytes)
    name = " ".join(filter(None, memory_table.live_texts(live)))
    return SummaryRow(share, size, name, times(live.count, live.type), live.source)


def _kept(count: int, residual: Residual, total: int | None) -> SummaryRow:
    share, size = share_text(residual.bytes, total), residuals_table.size_text(residual.bytes)
    name = " ".join(filter(None, residuals_table.residual_texts(residual)))
    return SummaryRow(share, size, name, times(count, residual.type), residual.source)


def _finding(finding: Finding) -> SummaryRow:
    return SummaryRow(
        "", finding.code, finding.line or "unknown line", finding.message, finding.line
    )


# --- the terminal -----------------------------------------------------------------------------


def summary_table(report: Summary, width: int) -> Rendering:
    """Return the summary of a program: its size, its most expensive parts, and what to do next.

    Args:
        report: The summary.
        width: The width in characters.
    """
    shown = list(summary_parts(report))
    title = Text(f"{report.name}: {heading(report)}", style=tables.HEADING)
    rendered: list[RenderableType] = [title]
    for part in shown:
        rendered += [Text(), _title(part)]
        if part.rows:
            rendered.append(_table(part.rows, shown, width))
    if report.suggestions:
        rendered += [Text(), Text(NEXT, style=tables.HEADING)]
        rendered += [
            line for suggestion in report.suggestions for line in _suggestion(suggestion, width)
        ]
    return Rendering(Parts(*rendered), width)


def _title(part: SummaryPart) -> Text:
    title = Text(part.title, style=tables.HEADING)
    return title.append(f": {part.fact}", style="default") if part.fact else title


def _table(rows: Sequence[SummaryRow], shown: Sequence[SummaryPart], width: int) -> Table:
    """Return rows in columns that are as wide in all parts; code and types are cut."""
    every = [row for part in shown for row in part.rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)][:3]
    widths[2] = min(max(len(row.name) for row in rows), width // 2)
    is_cut = any(row.share for row in rows)
    # The gaps are columns: Rich 14.0 and older reserves padding behind the last column too, cuts
    # others for it, and figures with them.
    table = Table.grid()
    for size in widths[:2]:
        table.add_column(justify="right", width=size, no_wrap=True)
        table.add_column(width=_GAP)
    table.add_column(style=tables.BINDER, width=widths[2], overflow="fold")
    table.add_column(width=_GAP)
    room = width - sum(widths) - 3 * _GAP
    overflow: OverflowMethod = "ellipsis" if is_cut else "fold"
    table.add_column(style=tables.COMMENT, width=room, no_wrap=is_cut, overflow=overflow)
    for row in rows:
        share, number, name, about = map(Text, row[:4])
        table.add_row(share, "", number, "", name, "", about)
    return table


def _suggestion(suggestion: Suggestion, width: int) -> Iterator[Text]:
    """Yield a fact and its command, which is broken where a shell continues a line."""
    yield Text(suggestion.fact)
    yield Text("\n".join(_broken(suggestion.command, width)), style=tables.BINDER)


def _broken(command: str, width: int) -> Iterator[str]:
    line = _INDENT
    for word in map(shell_word, shlex.split(command)):
        if line.strip() and len(line) + len(word) + len(" \\") > width:
            yield f"{line}\\"
            line = _INDENT * 2
        line += f"{word} "
    yield line.rstrip()


# --- overview -------------------------------------------------------------------------------------
# An overview page of a program: size, signature, contents, and as much of the listing as fits.

#: The maximum number of primitives named, and of items of any other kind.
_MOST_PRIMITIVES, _MOST_LISTED = 12, 5

#: The height below which fewer items are shown, and their number.
_SMALL, _MOST_IN_SMALL = 30, 2

#: The minimum number of lines of the listing, also of a small page.
_LEAST, _LEAST_IN_SMALL = 10, 5


def overview_page(
    program: Program | AnyJaxpr, overview: Overview, width: int, height: int
) -> Listing:
    """Return the overview of a program as a page.

    Args:
        program: The program.
        overview: Its overview.
        width: The width of the terminal.
        height: The number of lines of the page; exceeded if very small.
    """
    small = height < _SMALL
    if small:
        overview = replace(overview, bodies=())  # their equations are counted above
    heading = [Heading(overview.stats.name), ": ", "; ".join(map(_unbroken, facts(overview.stats)))]
    tokens = [*columns([[heading]], width), "\n\n", *columns(_primitives(overview), width)]
    frames = frames_now(program_signature(program).roots)
    shown = _facts(overview, width, frames, _MOST_IN_SMALL if small else _MOST_LISTED)
    tokens += "\n", *columns(shown, width), "\n\n"
    used = "".join(tokens).count("\n")
    listed = _listing(
        program, overview, width, max(height - used, _LEAST_IN_SMALL if small else _LEAST)
    )
    return Listing(printable([*tokens, *listed]))


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _primitives(overview: Overview) -> list[list[Cell]]:
    """Return a row of the most frequent primitives."""
    shown = overview.stats.primitives[:_MOST_PRIMITIVES]
    cell: list[str] = []
    for primitive in shown:
        cell += PrimitiveName(primitive.name), f"\N{NO-BREAK SPACE}{primitive.total:,}, "
    if rest := overview.stats.primitives[_MOST_PRIMITIVES:]:
        cell.append(Comment(f"…\N{NO-BREAK SPACE}{len(rest)}\N{NO-BREAK SPACE}more"))
    elif cell:
        cell[-1] = cell[-1].removesuffix(", ")
    return [[_label("primitives"), cell]] if shown else []


def _facts(overview: Overview, width: int, frames: Frames, most: int) -> list[list[Cell]]:
    """Return rows of a label, a name and a description, one per line; at most `most` of a label."""
    arguments, outputs = (
        [(BinderToken(tree.name), [group_size_text(tree)]) for tree in group]
        for group in (overview.arguments, overview.outputs)
    )
    bodies = [(SharedName(body.name), [_held(body)]) for body in overview.bodies]
    rows = [
        *_rows("arguments", arguments, most),
        *_rows("results", outputs, most),
        *_rows("bodies", bodies, most),
        *_rows("lines", _lines(overview, frames), most),
    ]
    names = max((len("".join(name)) for _, name, _ in rows), default=0)
    room = max(width - len(_label("")[0]) - names - 2 * len(GAP), _LEAST)
    return [[label, name, cut_line(text, room)] for label, name, text in rows]


def _rows(
    label: str, named: Sequence[tuple[str, Cell]], most: int
) -> list[tuple[Cell, Cell, Cell]]:
    rows: list[tuple[Cell, Cell, Cell]] = [
        (_label("" if i else label), [name], text) for i, (name, text) in enumerate(named)
    ]
    if len(rows) > most + 1:
        rows[most:] = [(_label(""), [Comment(f"… {len(named) - most:,} more")], [])]
    return rows


def _lines(overview: Overview, frames: Frames) -> list[tuple[str, Cell]]:
    """Return source locations with their numbers of equations and their code."""
    most = max((len(f"{number:,}") for _, number in overview.lines), default=0)
    lines: list[tuple[str, Cell]] = []
    for frame, count in overview.lines:
        code = Comment(" ".join(source_text.line(frame.file, frame.line).split()))
        lines.append((Comment(frames.text(frame)), [f"{count:{most},} equations  ", code]))
    return lines


def _label(text: str) -> Cell:
    return [Comment(f"{text:10}")]


def _held(body: HeldBody) -> str:
    times = "" if body.calls == 1 else f", {body.calls:,} times"
    return f"{plural(body.equations, 'equation')}{times}, of {body.kind}"


def _listing(
    program: Program | AnyJaxpr, overview: Overview, width: int, height: int
) -> Sequence[str]:
    """Return the listing folded to fit, and the option that shows the rest."""
    about = program_signature(program)
    options = ShowOptions(depth=_depth(overview, height), names=True, terse=True)
    notation = options.notation(about)
    many = len(about.arguments) > MOST_IN_A_ROW
    layout = Layout(
        about.jaxpr,
        width,
        True,
        options.selection(),
        SourceComments(options, about.roots).commenter(about.jaxpr),
        notation,
        cut=4,
        arguments=size_of_values("argument", about.arguments) if many else "",
    )
    lines = list(islice(lines_of(layout.tokens(height + 1)), height + 1))
    fits = len(lines) <= height
    shown = [["\n", *cut_line(line, width)] for line in (lines if fits else lines[: height - 1])]
    tokens = list(chain.from_iterable(shown))[1:]
    if not fits:
        more = f"… --full or --pager shows all {overview.stats.equations:,} equations"
        tokens += "\n", *cut_line([Comment(more)], width)
    return tokens


def _depth(overview: Overview, height: int) -> int:
    """Return the depth at which a listing of a program roughly fills `height` lines."""
    total = 0
    for depth, count in enumerate(overview.stats.by_depth):
        if depth and total + count > height and total > height // 3:
            return depth - 1
        total += count
    return len(overview.stats.by_depth)


# --- stats ----------------------------------------------------------------------------------------
# The statistics of a program as tables: equations by primitive and depth, values by name.

#: Greater depths share one column, so that a deep program fits a narrow terminal.
MOST_DEPTHS = 6


def stats_tables(counted: Stats, width: int, top: int | None = tables.ROWS) -> Rendering:
    """Return the tables of a program's `Stats`.

    Args:
        counted: The statistics.
        width: The width in characters.
        top: The number of primitives, and of values of each kind, shown; None for all.
    """
    parts: list[RenderableType] = [_equations(counted, top)]
    values = {
        "argument": counted.arguments,
        "output": counted.outputs,
        "constant": counted.constants,
    }
    for what, named in values.items():
        if named:
            parts += [Text(), values_table(what, named, top=top)]
    return Rendering(Parts(*parts), width)


def _equations(counted: Stats, top: int | None) -> Table:
    depths = len(counted.by_depth)
    most = min(depths, MOST_DEPTHS)
    heading = f"{counted.name}: {plural(counted.equations, 'equation')}"
    columns = [views.Column("primitive", PrimitiveName), views.number_column("in all")]
    for depth in range(most) if depths > 1 else ():
        more = depth == most - 1 and depths > most
        label = f"depth {depth}{'+' if more else ''}" if depth in (0, most - 1) else str(depth)
        columns.append(views.Column(label, Comment, is_number=True))
    rows = [
        [primitive.name, *_counts(primitive.total, primitive.by_depth)]
        for primitive in counted.primitives
    ]
    grid = drawn(views.Table(heading, columns, rows), top)
    grid.add_section()
    grid.add_row("in all", *_counts(counted.equations, counted.by_depth))
    return grid


def _counts(total: int, by_depth: Sequence[int]) -> list[str]:
    shown = [*by_depth[: MOST_DEPTHS - 1], sum(by_depth[MOST_DEPTHS - 1 :])]
    depths = shown[: len(by_depth)] if len(by_depth) > 1 else []
    return [f"{total:,}", *(f"{count:,}" if count else "·" for count in depths)]
