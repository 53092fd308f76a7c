"""The HTML page of a profile: tables of measured times, and the source with its hot lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.commands.profile.table import OWN_WORK, own_table, profile_notes, timed_table, title
from jaxprtool.ir import source_text
from jaxprtool.render.page import PageSources, environment, hash_of, page_table, static_files
from jaxprtool.render.terminal.listing import ShowOptions

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
    script = static_files("shared.js")
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
            tables=[page_table(table, sources.line_of) for table in tables],
            files=sources.files(),
            times={line.name: line for line in profile.lines},
            css=static_files("listing.css", "page.css"),
            script=script,
            script_hash=hash_of(script),
        )
    )
