"""The summary of a program for the terminal, and its parts for a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group as Parts
from rich.console import OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.basics.quantities import in_bytes, plural, times
from jaxprtool.ir.source import source_text
from jaxprtool.render.reports import cost, memory, profile, residuals
from jaxprtool.render.reports.overview import facts
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.tables import share_text

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import Group
    from jaxprtool.analysis.lint import Finding
    from jaxprtool.analysis.memory import Live
    from jaxprtool.analysis.profile import TimedLine
    from jaxprtool.analysis.residuals import Residual
    from jaxprtool.analysis.summary import Suggestion, Summary

#: The number of the largest residuals that are shown.
_MOST = 3

#: The heading of suggestions.
NEXT = "what to do next"

#: The gap between columns, and the indentation of a command.
_GAP, _INDENT = 2, "    "


class Row(NamedTuple):
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


class Part(NamedTuple):
    """A part of a summary: its title, a fact, and rows."""

    title: str
    fact: str
    rows: Sequence[Row]


def heading(found: Summary) -> str:
    """Return the size and cost of a program: equations, arguments, results and total cost."""
    return "; ".join((*facts(found.facts.stats), cost.total_text(found.total)))


def parts(found: Summary) -> Iterator[Part]:
    """Yield the parts of a summary before the suggestions."""
    if found.measured is not None and (times := found.facts.profile) is not None:
        title = "lines by time"
        yield Part(title, profile.time_text(times), [_timed(each) for each in found.measured])
    if found.lines:
        unknown = "; ".join(cost.unknown_notes(found.facts.cost))
        yield Part("lines by FLOPs", unknown, [_costly(found, each) for each in found.lines])
    known = found.facts.memory
    if isinstance(known, str):
        yield Part("peak of memory", known, ())
    else:
        where = memory.place_text(known.at)
        fact = f"{in_bytes(known.peak_bytes)}{f' at {where}' if where else ''}"
        if left_out := memory.unknown_text(known.unknown):
            fact = f"{fact}; {left_out}"
        rows = [_live(each, known.peak_bytes) for each in found.live]
        yield Part("peak of memory", fact, rows)
    kept = found.facts.residuals
    if not isinstance(kept, str):
        groups = residuals.grouped(kept.residuals)[:_MOST]
        rows = [_kept(count, each, kept.total_bytes) for count, each in groups]
        yield Part("gradient", residuals.total_text(kept), rows)
    count = found.finding_count
    more = f", the first {len(found.findings)}" if count > len(found.findings) else ""
    fact = f"{plural(count, 'finding')}{more}" if count else "nothing found"
    yield Part("lint", fact, list(map(_finding, found.findings)))


def _costly(found: Summary, group: Group) -> Row:
    share = share_text(cost.weight_of(group), cost.weight_of(found.total))
    line = group.line
    code = "" if line is None else source_text.line(line.file, line.line)
    return Row(share, cost.number_text(group, "flops") or "0", group.name, code, group.name)


def _timed(line: TimedLine) -> Row:
    code = "" if line.line is None else source_text.line(line.line.file, line.line.line)
    time = profile.numbers(line)["time"]
    return Row(f"{line.share:.1%}", time, line.name, code, line.name)


def _live(live: Live, peak: int) -> Row:
    share, size = share_text(live.bytes, peak), in_bytes(live.bytes)
    name = " ".join(filter(None, memory.what_texts(live)))
    return Row(share, size, name, times(live.count, live.type), live.source)


def _kept(count: int, each: Residual, total: int | None) -> Row:
    share, size = share_text(each.bytes, total), residuals.size_text(each.bytes)
    name = " ".join(filter(None, residuals.what_texts(each)))
    return Row(share, size, name, times(count, each.type), each.source)


def _finding(found: Finding) -> Row:
    return Row("", found.code, found.line or "unknown line", found.message, found.line)


# --- the terminal -----------------------------------------------------------------------------


def summary(found: Summary, width: int) -> Rendering:
    """Return the summary of a program: its size, its most expensive parts, and what to do next.

    Args:
        found: The summary.
        width: The width in characters.
    """
    shown = list(parts(found))
    title = Text(f"{found.name}: {heading(found)}", style=theme.HEADING)
    rendered: list[RenderableType] = [title]
    for part in shown:
        rendered += [Text(), _title(part)]
        if part.rows:
            rendered.append(_table(part.rows, shown, width))
    if found.suggestions:
        rendered += [Text(), Text(NEXT, style=theme.HEADING)]
        rendered += [each for one in found.suggestions for each in _suggestion(one, width)]
    return Rendering(Parts(*rendered), width)


def _title(part: Part) -> Text:
    title = Text(part.title, style=theme.HEADING)
    return title.append(f": {part.fact}", style="default") if part.fact else title


def _table(rows: Sequence[Row], shown: Sequence[Part], width: int) -> Table:
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
    table.add_column(style=theme.BINDER, width=widths[2], overflow="fold")
    table.add_column(width=_GAP)
    room = width - sum(widths) - 3 * _GAP
    overflow: OverflowMethod = "ellipsis" if is_cut else "fold"
    table.add_column(style=theme.COMMENT, width=room, no_wrap=is_cut, overflow=overflow)
    for row in rows:
        share, number, name, about = map(Text, row[:4])
        table.add_row(share, "", number, "", name, "", about)
    return table


def _suggestion(found: Suggestion, width: int) -> Iterator[Text]:
    """Yield a fact and its command, which is broken where a shell continues a line."""
    yield Text(found.fact)
    yield Text("\n".join(_broken(found.command, width)), style=theme.BINDER)


def _broken(command: str, width: int) -> Iterator[str]:
    line = _INDENT
    for word in map(shlex.quote, shlex.split(command)):
        if line.strip() and len(line) + len(word) + len(" \\") > width:
            yield f"{line}\\"
            line = _INDENT * 2
        line += f"{word} "
    yield line.rstrip()
