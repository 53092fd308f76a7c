"""The measured time of a program, as a table and as a page with the hot lines of the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group as Parts
from rich.console import RenderableType
from rich.text import Text

from jaxprtool.commands.memory.table import COPIED, copy_cells, is_of_array
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import duration, in_bytes, plural, with_prefix
from jaxprtool.ir.notation import BinderToken, Comment
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import ALL, Rendering, drawn, split_rows
from jaxprtool.render.views import Icicle, Lines, icicle

if TYPE_CHECKING:
    from jaxprtool.commands.profile.lines import (
        By,
        MovedValues,
        OwnWork,
        Profile,
        Timed,
        TimedCopy,
        TimedLine,
        TimedOperation,
    )

#: The width from which all columns are shown.
_WIDE = 110

#: The mark of a time that is an estimated part of fusions that compute several groups.
SPLIT = "~"

#: The share of the time below which XLA's own work is not shown.
_SMALL = 0.0005

#: The minimum share of a line's time for a note on XLA's own work in it.
_NOTED = 0.1

#: The minimum slowdown by the profiler for a note on it.
_SLOWED = 1.5

#: The title of the table of XLA's own work.
OWN_WORK = "XLA's own work, and idle time"

_UNNAMED = {
    "line": "unknown line",
    "scope": "outside all scopes",
    "function": "unknown function",
    "primitive": "",
}


def profile_table(
    profile: Profile, width: int, by: By = "line", top: int | None = tables.ROWS, option: str = ALL
) -> Rendering:
    """Return the measured time by groups, the time of XLA's own work, and notes.

    Args:
        profile: The profile.
        by: The criterion of the groups.
        width: The width in characters.
        top: The number of groups shown; None for all.
        option: The option or command that shows all.
    """
    shown, rest = split_rows(profile.by(by), top)
    shown = _in_tree(shown) if by == "scope" else shown
    table = timed_table(profile, by, shown, width >= _WIDE)._replace(more=len(rest))
    heading = Text(title(profile), style=tables.HEADING)
    parts: list[RenderableType] = [heading, drawn(table, option=option)]
    if own_work := [work for work in profile.own if work.share >= _SMALL]:
        parts += [Text(), drawn(own_table(own_work, heading=OWN_WORK))]
    if copies := list(filter(_is_shown, profile.copies)):
        parts += [Text(), drawn(_copies_table(copies), top, option)]
    parts += [Text(), *map(Text, profile_notes(profile))]
    return Rendering(Parts(*parts), width)


def title(profile: Profile) -> str:
    """Return `loss: 23.7 ms a call on 8 devices, 98% explained`."""
    on = "" if profile.devices is None else f" on {plural(profile.devices, 'device')}"
    return f"{profile.name}: {time_text(profile)}{on}, {profile.explained:.0%} explained"


def time_text(profile: Profile) -> str:
    """Return `23.7 ms a call`."""
    per_call = "" if profile.calls == 1 else " a call"
    return f"{duration(profile.wall_seconds)}{per_call}"


def timed_table(
    profile: Profile, by: By, groups: Sequence[Any], is_wide: bool = True
) -> views.Table:
    """Return a table of groups of a profile; a narrow one has fewer columns."""
    names = ["share", "time"]
    if by != "op" and any(line.backward_seconds for line in profile.lines):
        names.append("backward")
    if by == "line" and profile.moved_bytes is not None:
        names.append("moved")
    if by == "line" and profile.has_rates:
        names += ["FLOP/s", "bytes/s"] if is_wide else ["FLOP/s"]
    names += ["calls"] if is_wide else []
    heading = "operation" if by == "op" else by
    columns = [*map(views.number_column, names), views.Column(heading, BinderToken)]
    return views.Table("", columns, [_row(group, by, names) for group in groups])


def _row(group: Any, by: By, names: Sequence[str]) -> list[views.Cell]:
    numbers = _operation_numbers(group) if by == "op" else _timed_numbers(group)
    name = _operation(group) if by == "op" else _name(group, by)
    return [*(numbers[heading] for heading in names), name]


def _operation_numbers(group: Timed | TimedOperation) -> dict[str, views.Cell]:
    return {
        "share": views.share(group.share, 1),
        "time": views.Cell(duration(group.seconds), group.seconds),
        "calls": views.Cell(f"{group.calls:,.0f}", group.calls),
    }


def _timed_numbers(group: Timed) -> dict[str, views.Cell]:
    """Return the numbers of a group by the heading of their column."""
    backward, moved = group.backward_seconds, group.moved_bytes
    return {
        **_operation_numbers(group),
        "time": views.Cell(timed_text(group), group.seconds),
        "backward": views.Cell(duration(backward) if backward else "·", backward),
        "moved": views.Cell(in_bytes(moved) if moved else "·", moved),
        "FLOP/s": views.Cell(_rate(group.flops_per_second), group.flops_per_second),
        "bytes/s": views.Cell(_rate(group.bytes_per_second), group.bytes_per_second),
    }


def timed_text(group: Timed) -> str:
    """Return the time of a group, with a mark if it is an estimate: `~3.87 ms`."""
    return f"{SPLIT if group.is_split else ''}{duration(group.seconds)}"


def _rate(value: float | None) -> str:
    return "" if value is None else with_prefix(round(value)) if value else "·"


def _name(group: Timed, by: By) -> views.Cell:
    name, line = group.path[-1] if group.path else group.name, group.line
    behind = f"{BEHIND}{group.library}" if group.library else ""
    code = "" if line is None else source_text.line(*line[:2])
    notes = []
    if name and group.own_seconds > _NOTED * group.seconds:
        notes.append(f"{duration(group.own_seconds)} is XLA's own work")
    if group.moved:
        notes.append(_moved_text(group.moved))
    return views.Cell(
        [name, Comment(behind if name else _UNNAMED[by])],
        link=None if line is None else group.name,
        indent=max(len(group.path) - 1, 0),
        code=code,
        below=views.Cell("\n".join(notes)),
    )


def _moved_text(moved: Sequence[MovedValues]) -> str:
    """Return the kinds of collectives, and how many values they move: `8 all-gathers`."""
    return ", ".join(plural(round(collective.count), collective.kind) for collective in moved)


def _operation(operation: TimedOperation) -> views.Cell:
    return views.Cell(
        [operation.name, Comment(f" {operation.own or operation.opcode}")],
        below=_lines_cell(operation.lines),
    )


def _lines_cell(lines: Sequence[str]) -> views.Cell | None:
    return views.Cell(", ".join(lines), link=lines[0]) if lines else None


def own_table(own_work: Sequence[OwnWork], caption: str = "", heading: str = "work") -> views.Table:
    """Return a table of XLA's own work."""
    columns = *map(views.number_column, ("share", "time")), views.Column(heading)
    rows = [
        [
            views.share(work.share, 1),
            views.Cell(duration(work.seconds), work.seconds),
            views.Cell([work.kind, Comment(f"  {', '.join(work.lines)}")], link=work.lines[0])
            if work.lines
            else work.kind,
        ]
        for work in own_work
    ]
    return views.Table(caption, columns, rows)


def _is_shown(timed: TimedCopy) -> bool:
    """Return True for copies of arrays that take time, as far as it is known."""
    is_slow = timed.share is None or timed.share >= _SMALL
    return is_slow and is_of_array(timed.copy)


def _copies_table(copies: Sequence[TimedCopy]) -> views.Table:
    columns = *map(views.number_column, ("share", "time", "copies")), views.Column(COPIED)
    rows = [
        [
            views.share(timed.share, 1),
            views.Cell("·" if timed.seconds is None else duration(timed.seconds), timed.seconds),
            *copy_cells(timed.copy),
        ]
        for timed in copies
    ]
    return views.Table("", columns, rows)


def _in_tree(groups: Sequence[Timed]) -> tuple[Timed, ...]:
    """Return scopes as a tree, with the most expensive first in each."""
    places = {group.path: i for i, group in enumerate(groups)}

    def key(group: Timed) -> list[int]:
        return [places.get(group.path[:end], len(groups)) for end in range(1, len(group.path) + 1)]

    return tuple(sorted(groups, key=key))


def profile_notes(profile: Profile) -> Iterator[str]:
    """Yield the notes below the table."""
    if profile.calls > 1:
        yield f"the mean of {profile.calls} calls"
    if profile.plain_seconds is not None:
        plain = duration(profile.plain_seconds)
        yield f"{plain} a call without the profiler, both from the fastest quarter of calls"
        if profile.wall_seconds > _SLOWED * profile.plain_seconds:
            yield (
                "the profiler slows this program: it takes about a microsecond for each operation, "
                "so small operations appear slower than they are"
            )
    if profile.has_rates:
        achieved, peaks = profile.flops_per_second, profile.peaks
        rate = "" if achieved is None else with_prefix(round(achieved), "FLOP/s")
        if peaks is not None:
            most = with_prefix(round(peaks.flops_per_second), "FLOP/s")
            size = with_prefix(round(peaks.bytes_per_second), "B/s")
            rate = f"{rate} of {most}" if rate else f"peak: {most}"
            rate += f"; memory: {size} ({peaks.source})"
        yield rate
    if profile.is_above_peak:
        yield (
            "no FLOP/s where the work that `cost` estimates would take longer at the peak rate: "
            "XLA does less work, the time is an estimated part of a fusion, or the machine was "
            "busy while the peak was measured"
        )
    if profile.moved_bytes is not None:
        per_call = "" if profile.calls == 1 else " a call"
        yield f"collectives move {in_bytes(profile.moved_bytes)}{per_call} to each device"
    if any(line.is_split for line in profile.lines):
        yield f"{SPLIT} includes parts of fusions of several lines, split by estimated work"
    if profile.without_module:
        share = profile.without_module / profile.wall_seconds
        yield (
            f"{share:.1%} is in programs whose module is not in the profile, such as programs from "
            "JAX's compilation cache (set JAX_ENABLE_COMPILATION_CACHE=false)"
        )
    if profile.is_cut and profile.trace is not None:
        read = f"{len(profile.trace.events):,}"
        yield f"the profile is too long: only {read} of its operations are read"


def time_cells(line: TimedLine) -> list[views.Cell]:
    """Return the cells of the share and the measured time of a line, for a page."""
    numbers = _timed_numbers(line)
    return [numbers["share"], numbers["time"]]


# --- page -----------------------------------------------------------------------------------------
# The HTML page of a profile: tables of measured times, and the source with its hot lines.

#: The criteria of the tables.
_SHOWN: tuple[By, ...] = ("line", "scope", "function", "primitive", "op")


def profile_page(profile: Profile) -> str:
    """Return a page of the tables of a profile, beside the user's files."""
    from jaxprtool.render.page import PageSources, environment, hash_of, page_table, static_files
    from jaxprtool.render.terminal.listing import ShowOptions

    files: dict[str, str] = {}
    for line in profile.lines:
        if line.line is not None and line.line.own:
            files.setdefault(line.name.rpartition(":")[0], line.line.file)
    texts = {path: code for path, file in files.items() if (code := source_text.file_text(file))}
    changed = [path for path, file in files.items() if source_text.reason(file)]
    sources = PageSources(ShowOptions(), True, (), texts)
    script = static_files("shared.js", "icicle.js")
    tables = [
        timed_table(profile, by, profile.by(by))._replace(
            caption="by compiled operation" if by == "op" else f"by {by}"
        )
        for by in _SHOWN
    ]
    tables.append(own_table(profile.own, OWN_WORK))
    return (
        environment()
        .get_template("profile.html")
        .render(
            title=title(profile),
            notes=[*profile_notes(profile), *map(source_text.citation_note, changed)],
            icicles=[graph] if (graph := time_icicle(profile, sources.line_of)) else [],
            tables=[page_table(table, sources.line_of) for table in tables],
            files=sources.files(),
            times={line.name: line for line in profile.lines},
            css=static_files("listing.css", "page.css", "icicle.css"),
            script=script,
            script_hash=hash_of(script),
        )
    )


def time_icicle(profile: Profile, line_of: Lines) -> Icicle | None:
    """Return the flame graph of the time of a call, by scope and line."""
    note = "the parts of fusions are estimated" if any(t.is_split for t in profile.lines) else ""
    name, seconds = profile.name, profile.frames
    return icicle("measured time", name, seconds, duration, line_of, note)
