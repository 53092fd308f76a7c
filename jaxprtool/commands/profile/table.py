"""The measured time of a program as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group as Parts
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir import source_text
from jaxprtool.ir.documents import duration, in_bytes, plural, with_prefix
from jaxprtool.ir.frames import BEHIND
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import (
    ALL,
    Rendering,
    add_more,
    new_table,
    number_column,
    split_rows,
    text_column,
)

if TYPE_CHECKING:
    from jaxprtool.commands.profile.lines import (
        By,
        MovedValues,
        OwnWork,
        Profile,
        Timed,
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

#: The minimal width of the names of groups.
_LEAST = 20

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
    table = _operations(width) if by == "op" else _groups(profile, by, width)
    shown = _in_tree(shown) if by == "scope" else shown
    rows = [timed_cells(profile, by, group, width) for group in shown]
    headings = [str(column.header) for column in table.columns[:-1]]
    taken = sum(max(map(len, column)) + 3 for column in zip(headings, *rows, strict=True))
    for group, row in zip(shown, rows, strict=True):
        table.add_row(*row, _named(group, by, max(width - taken, _LEAST)))
    add_more(table, len(rest), *[""] * (len(table.columns) - 1), option=option)
    parts: list[RenderableType] = [Text(title(profile), style=tables.HEADING), table]
    if own_work := [work for work in profile.own if work.share >= _SMALL]:
        parts += [Text(), _own_table(own_work)]
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


def timed_columns(profile: Profile, by: By, width: int) -> list[str]:
    """Return the headings of a table of groups, without that of their names."""
    headings = ["share", "time"]
    if any(line.backward_seconds for line in profile.lines):
        headings.append("backward")
    if by == "line" and profile.moved_bytes is not None:
        headings.append("moved")
    if by == "line" and profile.has_rates:
        headings += ["FLOP/s", "bytes/s"] if width >= _WIDE else ["FLOP/s"]
    return [*headings, "calls"] if width >= _WIDE else headings


def timed_cells(profile: Profile, by: By, group: Any, width: int) -> list[str]:
    """Return the cells of a row, without its name."""
    if by == "op":
        calls = [f"{group.calls:,.0f}"] if width >= _WIDE else []
        return [f"{group.share:.1%}", duration(group.seconds), *calls]
    texts = timed_numbers(group)
    return [texts[name] for name in timed_columns(profile, by, width)]


def timed_numbers(group: Timed) -> dict[str, str]:
    """Return the numbers of a group by the heading of their column."""
    mark = SPLIT if group.is_split else ""
    return {
        "share": f"{group.share:.1%}",
        "time": f"{mark}{duration(group.seconds)}",
        "backward": duration(group.backward_seconds) if group.backward_seconds else "·",
        "moved": in_bytes(group.moved_bytes) if group.moved_bytes else "·",
        "FLOP/s": _rate(group.flops_per_second),
        "bytes/s": _rate(group.bytes_per_second),
        "calls": f"{group.calls:,.0f}",
    }


def _rate(value: float | None) -> str:
    return "" if value is None else with_prefix(round(value)) if value else "·"


def _groups(profile: Profile, by: By, width: int) -> Table:
    return new_table(
        "", *map(number_column, timed_columns(profile, by, width)), text_column(by, tables.BINDER)
    )


def _operations(width: int) -> Table:
    wide = [number_column("calls")] if width >= _WIDE else []
    return new_table(
        "",
        number_column("share"),
        number_column("time"),
        *wide,
        text_column("operation", tables.BINDER),
    )


def _named(group: Any, by: By, width: int) -> Text:
    return _operation(group) if by == "op" else _name(group, by, width)


def _name(group: Timed, by: By, width: int) -> Text:
    if not group.name:
        return Text(_UNNAMED[by], style=tables.COMMENT)
    name = Text("  " * (len(group.path) - 1) + (group.path[-1] if group.path else group.name))
    if group.library:
        name.append(f"{BEHIND}{group.library}", style=tables.COMMENT)
    if group.line is not None and (code := source_text.line(*group.line[:2])):
        below = Text(f"\n{code}", style=tables.COMMENT)
        below.truncate(width, overflow="ellipsis")
        name.append(below)
    if group.own_seconds > _NOTED * group.seconds:
        name.append(f"\n{duration(group.own_seconds)} is XLA's own work", style=tables.COMMENT)
    if group.moved:
        name.append(f"\n{moved_text(group.moved)}", style=tables.COMMENT)
    return name


def moved_text(moved: Sequence[MovedValues]) -> str:
    """Return the kinds of collectives, and how many values they move: `8 all-gathers`."""
    return ", ".join(plural(round(collective.count), collective.kind) for collective in moved)


def _operation(operation: TimedOperation) -> Text:
    name = Text(operation.name).append(
        f" {operation.own or operation.opcode}", style=tables.COMMENT
    )
    if operation.lines:
        name.append(f"\n{', '.join(operation.lines)}", style=tables.COMMENT)
    return name


def _own_table(own_work: Sequence[OwnWork]) -> Table:
    table = new_table(
        "",
        number_column("share"),
        number_column("time"),
        text_column("XLA's own work, and idle time"),
    )
    for work in own_work:
        what = Text(work.kind)
        if work.lines:
            what.append(f"  {', '.join(work.lines)}", style=tables.COMMENT)
        table.add_row(f"{work.share:.1%}", duration(work.seconds), what)
    return table


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
    """Return the cells of the measured time of a line and its share, for a page."""
    percent = 100 * line.share
    return [
        views.Cell(timed_numbers(line)["time"], line.seconds),
        views.Cell(f"{percent:.1f}%", percent, percent=percent),
    ]
