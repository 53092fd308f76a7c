"""The HTML page of a profile: tables of measured times, and the source with its hot lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.commands.profile.table import OWN_WORK, own_table, profile_notes, timed_table, title
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import duration
from jaxprtool.render.page import PageSources, environment, hash_of, page_table, static_files
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.views import Icicle, Lines, icicle

if TYPE_CHECKING:
    from jaxprtool.commands.profile.lines import By, Profile

#: The criteria of the tables.
_SHOWN: tuple[By, ...] = ("line", "scope", "function", "primitive", "op")


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
