"""The measured time of a program as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group as Parts
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir import source_text
from jaxprtool.ir.documents import in_bytes, plural, with_prefix
from jaxprtool.ir.frames import BEHIND
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.listing import Rendering
from jaxprtool.render.terminal.tables import ALL, add_more, new_table, number, split, text

if TYPE_CHECKING:
    from jaxprtool.analysis.profile import By, MovedValues, OwnWork, Profile, Timed, TimedOperation

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
    found: Profile, width: int, by: By = "line", top: int | None = tables.ROWS, option: str = ALL
) -> Rendering:
    """Return the measured time by groups, the time of XLA's own work, and notes.

    Args:
        found: The profile.
        by: The criterion of the groups.
        width: The width in characters.
        top: The number of groups shown; None for all.
        option: The option or command that shows all.
    """
    shown, rest = split(found.by(by), top)
    table = _operations(width) if by == "op" else _groups(found, by, width)
    shown = _in_tree(shown) if by == "scope" else shown
    rows = [cells(found, by, each, width) for each in shown]
    headings = [str(column.header) for column in table.columns[:-1]]
    taken = sum(max(map(len, column)) + 3 for column in zip(headings, *rows, strict=True))
    for each, row in zip(shown, rows, strict=True):
        table.add_row(*row, _named(each, by, max(width - taken, _LEAST)))
    add_more(table, len(rest), *[""] * (len(table.columns) - 1), option=option)
    parts: list[RenderableType] = [Text(title(found), style=tables.HEADING), table]
    if own := [each for each in found.own if each.share >= _SMALL]:
        parts += [Text(), _own_table(own)]
    parts += [Text(), *map(Text, notes(found))]
    return Rendering(Parts(*parts), width)


def title(found: Profile) -> str:
    """Return `loss: 23.7 ms a call on 8 devices, 98% explained`."""
    on = "" if found.devices is None else f" on {plural(found.devices, 'device')}"
    return f"{found.name}: {time_text(found)}{on}, {found.explained:.0%} explained"


def time_text(found: Profile) -> str:
    """Return `23.7 ms a call`."""
    each = "" if found.calls == 1 else " a call"
    return f"{duration(found.wall_seconds)}{each}"


def columns(found: Profile, by: By, width: int) -> list[str]:
    """Return the headings of a table of groups, without that of their names."""
    headings = ["share", "time"]
    if any(each.backward_seconds for each in found.lines):
        headings.append("backward")
    if by == "line" and found.moved_bytes is not None:
        headings.append("moved")
    if by == "line" and found.flops_per_second is not None:
        headings += ["FLOP/s", "bytes/s"] if width >= _WIDE else ["FLOP/s"]
    return [*headings, "calls"] if width >= _WIDE else headings


def cells(found: Profile, by: By, each: Any, width: int) -> list[str]:
    """Return the cells of a row, without its name."""
    if by == "op":
        calls = [f"{each.calls:,.0f}"] if width >= _WIDE else []
        return [f"{each.share:.1%}", duration(each.seconds), *calls]
    known = numbers(each)
    return [known[name] for name in columns(found, by, width)]


def numbers(each: Timed) -> dict[str, str]:
    """Return the numbers of a group by the heading of their column."""
    mark = SPLIT if each.is_split else ""
    return {
        "share": f"{each.share:.1%}",
        "time": f"{mark}{duration(each.seconds)}",
        "backward": duration(each.backward_seconds) if each.backward_seconds else "·",
        "moved": in_bytes(each.moved_bytes) if each.moved_bytes else "·",
        "FLOP/s": _rate(each.flops_per_second),
        "bytes/s": _rate(each.bytes_per_second),
        "calls": f"{each.calls:,.0f}",
    }


def _rate(value: float | None) -> str:
    return "" if value is None else with_prefix(round(value)) if value else "·"


def _groups(found: Profile, by: By, width: int) -> Table:
    return new_table("", *map(number, columns(found, by, width)), text(by, tables.BINDER))


def _operations(width: int) -> Table:
    wide = [number("calls")] if width >= _WIDE else []
    return new_table("", number("share"), number("time"), *wide, text("operation", tables.BINDER))


def _named(each: Any, by: By, width: int) -> Text:
    return _operation(each) if by == "op" else _name(each, by, width)


def _name(each: Timed, by: By, width: int) -> Text:
    if not each.name:
        return Text(_UNNAMED[by], style=tables.COMMENT)
    name = Text("  " * (len(each.path) - 1) + (each.path[-1] if each.path else each.name))
    if each.library:
        name.append(f"{BEHIND}{each.library}", style=tables.COMMENT)
    if each.line is not None and (code := source_text.line(*each.line[:2])):
        below = Text(f"\n{code}", style=tables.COMMENT)
        below.truncate(width, overflow="ellipsis")
        name.append(below)
    if each.own_seconds > _NOTED * each.seconds:
        name.append(f"\n{duration(each.own_seconds)} is XLA's own work", style=tables.COMMENT)
    if each.moved:
        name.append(f"\n{moved_text(each.moved)}", style=tables.COMMENT)
    return name


def moved_text(moved: Sequence[MovedValues]) -> str:
    """Return the kinds of collectives, and how many values they move: `8 all-gathers`."""
    return ", ".join(plural(round(each.count), each.kind) for each in moved)


def _operation(each: TimedOperation) -> Text:
    name = Text(each.name).append(f" {each.own or each.opcode}", style=tables.COMMENT)
    if each.lines:
        name.append(f"\n{', '.join(each.lines)}", style=tables.COMMENT)
    return name


def _own_table(own: Sequence[OwnWork]) -> Table:
    table = new_table("", number("share"), number("time"), text("XLA's own work, and idle time"))
    for each in own:
        what = Text(each.kind)
        if each.lines:
            what.append(f"  {', '.join(each.lines)}", style=tables.COMMENT)
        table.add_row(f"{each.share:.1%}", duration(each.seconds), what)
    return table


def _in_tree(groups: Sequence[Timed]) -> tuple[Timed, ...]:
    """Return scopes as a tree, with the most expensive first in each."""
    places = {group.path: i for i, group in enumerate(groups)}

    def key(group: Timed) -> list[int]:
        return [places.get(group.path[:end], len(groups)) for end in range(1, len(group.path) + 1)]

    return tuple(sorted(groups, key=key))


def notes(found: Profile) -> Iterator[str]:
    """Yield the notes below the table."""
    if found.calls > 1:
        yield f"the mean of {found.calls} calls"
    if found.plain_seconds is not None:
        plain = duration(found.plain_seconds)
        yield f"{plain} a call without the profiler, both from the fastest quarter of calls"
        if found.wall_seconds > _SLOWED * found.plain_seconds:
            yield (
                "the profiler slows this program: it takes about a microsecond for each operation, "
                "so small operations appear slower than they are"
            )
    if found.flops_per_second is not None:
        rate = with_prefix(round(found.flops_per_second), "FLOP/s")
        if (peaks := found.peaks) is not None:
            most = with_prefix(round(peaks.flops_per_second), "FLOP/s")
            size = with_prefix(round(peaks.bytes_per_second), "B/s")
            rate += f" of {most}; memory: {size} ({peaks.source})"
        yield rate
    if found.moved_bytes is not None:
        each = "" if found.calls == 1 else " a call"
        yield f"collectives move {in_bytes(found.moved_bytes)}{each} to each device"
    if any(each.is_split for each in found.lines):
        yield f"{SPLIT} includes parts of fusions of several lines, split by estimated work"
    if found.without_module:
        share = found.without_module / found.wall_seconds
        yield (
            f"{share:.1%} is in programs whose module is not in the profile, such as programs from "
            "JAX's compilation cache (set JAX_ENABLE_COMPILATION_CACHE=false)"
        )
    if found.is_cut and found.trace is not None:
        read = f"{len(found.trace.events):,}"
        yield f"the profile is too long: only {read} of its operations are read"
