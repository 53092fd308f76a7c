"""The HTML page of a profile: tables of measured times, and the source with its hot lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxprtool.ir import source_text
from jaxprtool.render.page import Sources, environment, hash_of, static
from jaxprtool.render.page.report import Cell, Lines, Table
from jaxprtool.render.reports.profile import moved_text, notes, numbers, title
from jaxprtool.render.reports.runs import duration
from jaxprtool.render.terminal.listing import ShowOptions

if TYPE_CHECKING:
    from jaxprtool.analysis.profile import By, Profile, Timed

#: The maximum number of rows of a table.
_MOST = 500

#: The criteria of the tables.
_SHOWN: tuple[By, ...] = ("line", "scope", "function", "primitive")


def profile_page(found: Profile) -> str:
    """Return a page of the tables of a profile, beside the user's files."""
    files: dict[str, str] = {}
    for each in found.lines:
        if each.line is not None and each.line.own:
            files.setdefault(each.name.rpartition(":")[0], each.line.file)
    texts = {path: code for path, file in files.items() if (code := source_text.text(file))}
    changed = [path for path, file in files.items() if source_text.reason(file)]
    sources = Sources(ShowOptions(), True, (), texts)
    script = static("shared.js")
    tables = [_groups(found, by, sources.line_of) for by in _SHOWN]
    return (
        environment()
        .get_template("profile.html")
        .render(
            title=title(found),
            notes=[*notes(found), *map(source_text.citation_note, changed)],
            tables=[*tables, _operations(found, sources.line_of), _own(found, sources.line_of)],
            files=sources.files(),
            times={each.name: each for each in found.lines},
            css=static("listing.css", "page.css"),
            script=script,
            script_hash=hash_of(script),
        )
    )


def _table(caption: str, columns: Sequence[tuple[str, bool]], rows: list[list[Cell]]) -> Table:
    return Table(caption, columns, rows[:_MOST], max(len(rows) - _MOST, 0))


def _groups(found: Profile, by: By, line_of: Lines) -> Table:
    backward = any(each.backward_seconds for each in found.lines)
    rated = by == "line" and found.flops_per_second is not None
    names = ["time", *(["backward"] if backward else []), "calls"]
    names += ["moved"] if by == "line" and found.devices is not None else []
    names += ["FLOP/s", "bytes/s"] if rated else []
    columns = [("share", True), *((name, True) for name in names), (by, False)]
    rows = [[_share(each), *_numbers(each, names), _name(each, line_of)] for each in found.by(by)]
    return _table(f"by {by}", columns, rows)


def _numbers(each: Timed, names: Sequence[str]) -> list[Cell]:
    values = {
        "time": each.seconds,
        "backward": each.backward_seconds,
        "calls": each.calls,
        "moved": each.moved_bytes,
        "FLOP/s": each.flops_per_second,
        "bytes/s": each.bytes_per_second,
    }
    texts = numbers(each)
    return [Cell(texts[name], values[name]) for name in names]


def _name(each: Timed, line_of: Lines) -> Cell:
    name = each.path[-1] if each.path else each.name
    link = line_of(each.name) if each.line is not None else None
    text = f"{name} ← {each.library}" if each.library else name
    below = Cell(moved_text(each.moved)) if each.moved else None
    return Cell(text or "unknown", link=link, indent=max(len(each.path) - 1, 0), below=below)


def _operations(found: Profile, line_of: Lines) -> Table:
    columns = (("share", True), ("time", True), ("calls", True), ("operation and lines", False))
    rows = [
        [
            _share(each),
            Cell(duration(each.seconds), each.seconds),
            Cell(f"{each.calls:,.0f}", each.calls),
            Cell(
                f"{each.name} {each.own or each.opcode}",
                below=Cell(", ".join(each.lines), link=line_of(each.lines[0]))
                if each.lines
                else None,
            ),
        ]
        for each in found.operations
    ]
    return _table("by compiled operation", columns, rows)


def _own(found: Profile, line_of: Lines) -> Table:
    columns = (("share", True), ("time", True), ("work", False))
    rows = [
        [
            _share(each),
            Cell(duration(each.seconds), each.seconds),
            Cell(
                each.kind,
                below=Cell(", ".join(each.lines), link=line_of(each.lines[0]))
                if each.lines
                else None,
            ),
        ]
        for each in found.own
    ]
    return _table("XLA's own work, and idle time", columns, rows)


def _share(each: Any) -> Cell:
    percent = 100 * each.share
    return Cell(f"{percent:.1f}%", percent, percent=percent)
