"""The user's files with the cost of each line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Group as Parts
from rich.text import Text

from jaxprtool.commands.cost.table import (
    RANGE,
    bound_note,
    bytes_text,
    number_text,
    total_text,
    unknown_notes,
    weight_of,
)
from jaxprtool.commands.profile import table
from jaxprtool.ir.documents import duration, in_bytes, plural, some
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.lines import GAP
from jaxprtool.render.terminal.tables import Rendering, Sources, share_text

if TYPE_CHECKING:
    from jaxprtool.analysis.devices import DeviceSpec
    from jaxprtool.commands.cost.estimate import Group
    from jaxprtool.commands.profile.lines import Profile
    from jaxprtool.commands.source.lines import Source, SourceFile, SourceLine

#: The maximum number of arguments of the gradient in a note.
_MOST_NAMES = 4

#: The minimum share of the work, the bytes, the residuals or the time of a line that is shown.
_SHARE = 0.01

#: The number of context lines around it.
_AROUND = 1

#: The minimal width of the source, and the width below which columns of numbers are dropped.
_LEAST, _WANTED = 20, 36

#: The length at which symbolic numbers are cut.
_LONGEST = 24

_ELLIPSIS = "…"


def source_text(
    source: Source, width: int, full: bool = False, device: DeviceSpec | None = None
) -> Rendering:
    """Return the relevant lines of a user's files, each preceded by its cost.

    Args:
        source: The costs of the lines.
        width: The width in characters.
        full: Whether to show whole files.
        device: The device of the estimated times, if the lines have times.
    """
    total = total_text(source.total, _is_whole(source))
    if source.kept is not None:
        total += f", keeps {in_bytes(source.kept.total)}"
    if source.sent_bytes is not None:
        total += f", each of {source.devices} devices sends {in_bytes(source.sent_bytes)}"
    if source.profile is not None:
        total += f", measured {table.time_text(source.profile)}"
    parts = [Text(f"{source.name}: {total}", style=tables.HEADING)]
    matter = _Relevance(source)
    sources = Sources()
    hidden = 0
    for file in source.files:
        wanted = [line.number for line in file.lines if full or matter(line)]
        numbered = _AnnotatedFile(source, file, sources)
        numbers = numbered.numbers(wanted, full)
        hidden += sum(line.number not in numbers for line in file.lines)
        if wanted:
            parts += [Text(), *numbered.text(numbers, width)]
    notes = list(_notes(source, hidden, device))
    parts += [Text(), *(Text(note, style=tables.COMMENT) for note in notes)] if notes else []
    return Rendering(Parts(*parts), width)


def _is_whole(source: Source) -> bool:
    """Return True if whole arrays are counted, next to the communication of each device."""
    return source.devices is not None and bool(source.left_to_partitioner)


class _Relevance:
    """Decides whether a line has a relevant share; all lines have if shares are unknown."""

    def __init__(self, source: Source):
        work = source.total.work
        self._work = weight_of(source.total)
        self._bytes = work.bytes if type(work.bytes) is int else None
        self._kept = 0 if source.kept is None else source.kept.total
        self._sent = source.sent_bytes or 0

    def __call__(self, line: SourceLine) -> bool:
        if self._work is None or self._bytes is None:
            return True
        return (
            _is_part(weight_of(line.total), self._work)
            or _is_part(line.total.work.bytes, self._bytes)
            or _is_part(line.kept or 0, self._kept)
            or _is_part(line.sent_bytes or 0, self._sent)
            or (line.measured is not None and line.measured.share >= _SHARE)
            or not (self._work or self._bytes)
        )


def _is_part(number: Any, whole: float) -> bool:
    return bool(whole) and number >= _SHARE * whole


# --- columns ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NumberColumn:
    """A column of numbers: its heading, and the format of a line's number."""

    heading: str
    cell: Callable[[SourceLine], str]


def _columns(source: Source) -> list[_NumberColumn]:
    whole = weight_of(source.total)
    columns = [] if source.profile is None else [_NumberColumn("measured", _measured)]
    if source.sent_bytes is not None:
        columns.append(_NumberColumn("sent", lambda e: _bytes(e.sent_bytes or 0)))
    columns.append(_NumberColumn("share", lambda e: share_text(weight_of(e.total) or None, whole)))
    if source.total.seconds is not None:
        columns.append(_NumberColumn("min time", lambda e: duration(e.total.seconds or 0.0)))
    if source.has_backward:
        columns.append(_NumberColumn("forward", lambda e: _flops(e.forward)))
        columns.append(_NumberColumn("backward", lambda e: _flops(e.backward)))
    else:
        columns.append(_NumberColumn("FLOPs", lambda e: _flops(e.total)))
    columns.append(_NumberColumn("bytes", lambda e: _cut(_bytes(e.total.work.bytes))))
    if source.kept is not None:
        columns.append(_NumberColumn("kept", lambda e: _bytes(e.kept or 0)))
    return [*columns, _NumberColumn("equations", lambda e: f"{e.equations:,}")]


def _measured(line: SourceLine) -> str:
    """Return the time of a line and its share: `~3.87 ms  55%`."""
    if line.measured is None:
        return ""
    return f"{table.timed_text(line.measured)} {line.measured.share:>4.0%}"


def _flops(group: Group) -> str:
    """Return the FLOPs of a group, at most for branches: `≤ 1.5 M`."""
    text = number_text(group, "flops")
    return _cut(f"≤ {text.partition(RANGE)[2]}" if RANGE in text else text)


def _bytes(number: Any) -> str:
    return "" if type(number) is int and not number else bytes_text(number)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + _ELLIPSIS


# --- files ------------------------------------------------------------------------------------


class _AnnotatedFile:
    """A file and the numbers before its lines."""

    def __init__(self, source: Source, file: SourceFile, sources: Sources):
        self._file = file
        self._columns = _columns(source)
        self._missing = sources.fault(file.file)
        self._code = sources.lines(file.file)

    def text(self, numbers: Collection[int], width: int) -> Iterator[Text]:
        """Yield the path, the headings, and some lines of the file."""
        shown = [line for line in self._file.lines if line.number in numbers]
        cells = {line.number: [column.cell(line) for column in self._columns] for line in shown}
        headings = [column.heading for column in self._columns]
        widths = [max(map(len, column)) for column in zip(headings, *cells.values(), strict=True)]
        digits = len(str(max(len(self._code), shown[-1].number)))
        while len(widths) > 2 and self._room(width, widths, digits) < _WANTED:
            widths.pop()  # drop the equations first
        room = max(self._room(width, widths, digits), _LEAST)
        yield Text(f"{self._file.path}{self._fault(shown)}", style=tables.BINDER)
        yield Text(_row(headings, widths), style=tables.COMMENT)
        last = 0
        for number in sorted(numbers):
            if number != last + 1 and last:
                yield Text(f"{_row((), widths)}{GAP}{_ELLIPSIS:>{digits}}", style=tables.COMMENT)
            last = number
            row = Text(_row(cells.get(number, ()), widths))
            row.append(f"{GAP}{number:>{digits}}{GAP}", style=tables.COMMENT)
            if number <= len(self._code):
                code = self._code[number - 1].copy()
                code.truncate(room, overflow="ellipsis")
                if number not in cells:
                    code.stylize(tables.COMMENT)
                row.append_text(code)
            row.rstrip()
            yield row

    def _room(self, width: int, widths: Sequence[int], digits: int) -> int:
        return width - sum(widths) - digits - len(GAP) * (len(widths) + 1)

    def _fault(self, shown: Sequence[SourceLine]) -> str:
        """Return the fault of the file's text, or ""."""
        if not self._code:
            return f" (source {self._missing})"
        for line in shown:
            code = self._code[line.number - 1].plain if line.number <= len(self._code) else ""
            if not code.strip() or code.lstrip().startswith("#"):
                return f" (changed since: line {line.number} has no code now)"
        return ""

    def numbers(self, wanted: Sequence[int], full: bool) -> set[int]:
        """Return the lines to show: the wanted ones, their context, and enclosing definitions."""
        end = len(self._code)
        if full and end:
            return set(range(1, max(end, *wanted, 1) + 1))
        shown = set(wanted)
        for number in wanted if end else ():
            near = range(max(number - _AROUND, 1), min(number + _AROUND, end) + 1)
            shown.update(neighbor for neighbor in near if self._belongs(neighbor, number))
            shown.update(self._around(number))
        shown.update([n for n in range(2, end) if {n - 1, n + 1} <= shown])
        return shown

    def _belongs(self, near: int, number: int) -> bool:
        """Return True if a line near another belongs to the same block."""
        depth = self._depth(near)
        is_inside = number <= len(self._code) and depth >= self._depth(number)
        return (
            depth > 0 and bool(self._code[near - 1].plain.strip()) and (near < number or is_inside)
        )

    def _around(self, number: int) -> Iterator[int]:
        """Yield the first lines of the functions and classes around a line."""
        depth = self._depth(min(number, len(self._code)))
        for outer in range(min(number, len(self._code)) - 1, 0, -1):
            code = self._code[outer - 1].plain.strip()
            if depth and code and self._depth(outer) < depth:
                depth = self._depth(outer)
                if code.startswith(("def ", "async def ", "class ")):
                    yield outer

    def _depth(self, number: int) -> int:
        code = self._code[number - 1].plain
        return len(code) - len(code.lstrip())


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return cells in columns of numbers, or blanks without cells."""
    cells = [*cells, *[""] * len(widths)]
    return GAP.join(f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=False))


# --- notes ------------------------------------------------------------------------------------


def _notes(source: Source, hidden: int, device: DeviceSpec | None) -> Iterator[str]:
    if source.package:
        yield f"no lines are in your own files; these are from {source.package}"
    if hidden:
        yield f"… {plural(hidden, 'line')} below {_SHARE:.0%}; --full shows them"
    if source.elsewhere:
        yield f"{plural(source.elsewhere, 'equation')} not from your lines"
    kept = source.kept
    if kept is not None:
        names = some(kept.with_respect_to, _MOST_NAMES)
        arguments = f"; {in_bytes(kept.arguments)} are arguments" if kept.arguments else ""
        yield f"residuals are of the gradient with respect to {names}{arguments}"
    if kept is not None and kept.elsewhere:
        yield f"{in_bytes(kept.elsewhere)} of the residuals do not come from your lines"
    if source.sent_bytes is not None:
        here = sum(line.sent_bytes or 0 for file in source.files for line in file.lines)
        if here < source.sent_bytes:
            yield f"{in_bytes(source.sent_bytes - here)} of communication is not from your lines"
    if source.why_not_kept:
        yield f"residuals unknown: {source.why_not_kept}"
    if device is not None:
        yield bound_note(source.total, device, _is_whole(source))
    if source.profile is not None:
        yield from _time_notes(source, source.profile)
    yield from unknown_notes(source)


def _time_notes(source: Source, times: Profile) -> Iterator[str]:
    of_lines = sum(
        line.measured.seconds
        for file in source.files
        for line in file.lines
        if line.measured is not None
    )
    rest = times.explained * times.wall_seconds - of_lines
    if rest >= _SHARE * times.wall_seconds:
        yield f"{duration(rest)} ({rest / times.wall_seconds:.0%}) is not in these lines"
    yield from table.profile_notes(times)


class SourceDocument(NamedTuple):
    """`source`."""

    programs: Annotated[Sequence[Source], "Each program."]
