"""The HTML page of a profile: tables of measured times, and the source with its hot lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxprtool.commands.profile.table import moved_text, profile_notes, timed_numbers, title
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import duration
from jaxprtool.render.page import PageSources, environment, hash_of, static_files
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.views import Cell, Icicle, Lines, Table, icicle, page_table

if TYPE_CHECKING:
    from jaxprtool.commands.profile.lines import By, Profile, Timed

#: The criteria of the tables.
_SHOWN: tuple[By, ...] = ("line", "scope", "function", "primitive")


def profile_page(profile: Profile) -> str:
    """Return a page of the tables of a profile, beside the user's files."""
    files: dict[str, str] = {}
    for line in profile.lines:
        if line.line is not None and line.line.own:
            files.setdefault(line.name.rpartition(":")[0], line.line.file)
    texts = {path: code for path, file in files.items() if (code := source_text.file_text(file))}
    changed = [path for path, file in files.items() if source_text.reason(file)]
    sources = PageSources(ShowOptions(), True, (), texts)
    script = static_files("shared.js", "icicle.js")
    tables = [_groups(profile, by, sources.line_of) for by in _SHOWN]
    return (
        environment()
        .get_template("profile.html")
        .render(
            title=title(profile),
            notes=[*profile_notes(profile), *map(source_text.citation_note, changed)],
            icicles=[graph] if (graph := time_icicle(profile, sources.line_of)) else [],
            tables=[*tables, _operations(profile, sources.line_of), _own(profile, sources.line_of)],
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


def _groups(profile: Profile, by: By, line_of: Lines) -> Table:
    backward = any(line.backward_seconds for line in profile.lines)
    rated = by == "line" and profile.has_rates
    names = ["time", *(["backward"] if backward else []), "calls"]
    names += ["moved"] if by == "line" and profile.devices is not None else []
    names += ["FLOP/s", "bytes/s"] if rated else []
    columns = [("share", True), *((name, True) for name in names), (by, False)]
    rows = [
        [_share(group), *_numbers(group, names), _name(group, line_of)] for group in profile.by(by)
    ]
    return page_table(f"by {by}", columns, rows)


def _numbers(group: Timed, names: Sequence[str]) -> list[Cell]:
    values = {
        "time": group.seconds,
        "backward": group.backward_seconds,
        "calls": group.calls,
        "moved": group.moved_bytes,
        "FLOP/s": group.flops_per_second,
        "bytes/s": group.bytes_per_second,
    }
    texts = timed_numbers(group)
    return [Cell(texts[name], values[name]) for name in names]


def _name(group: Timed, line_of: Lines) -> Cell:
    name = group.path[-1] if group.path else group.name
    link = line_of(group.name) if group.line is not None else None
    text = f"{name} ← {group.library}" if group.library else name
    below = Cell(moved_text(group.moved)) if group.moved else None
    return Cell(text or "unknown", link=link, indent=max(len(group.path) - 1, 0), below=below)


def _operations(profile: Profile, line_of: Lines) -> Table:
    columns = (("share", True), ("time", True), ("calls", True), ("operation and lines", False))
    rows = [
        [
            _share(operation),
            Cell(duration(operation.seconds), operation.seconds),
            Cell(f"{operation.calls:,.0f}", operation.calls),
            Cell(
                f"{operation.name} {operation.own or operation.opcode}",
                below=Cell(", ".join(operation.lines), link=line_of(operation.lines[0]))
                if operation.lines
                else None,
            ),
        ]
        for operation in profile.operations
    ]
    return page_table("by compiled operation", columns, rows)


def _own(profile: Profile, line_of: Lines) -> Table:
    columns = (("share", True), ("time", True), ("work", False))
    rows = [
        [
            _share(work),
            Cell(duration(work.seconds), work.seconds),
            Cell(
                work.kind,
                below=Cell(", ".join(work.lines), link=line_of(work.lines[0]))
                if work.lines
                else None,
            ),
        ]
        for work in profile.own
    ]
    return page_table("XLA's own work, and idle time", columns, rows)


def _share(row: Any) -> Cell:
    percent = 100 * row.share
    return Cell(f"{percent:.1f}%", percent, percent=percent)
