"""The list of passes and named pipelines, as `jaxprtool explain` without a name shows it."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from jaxprtool.cli import output
from jaxprtool.errors import PluginError

if TYPE_CHECKING:
    from jaxprtool.render.documents.passes import PassSummary

#: The groups of built-in passes, in listing order; plug-ins may add others.
_GROUPS = "clean up", "transform", "split", "schedule and compile"


def write_passes(json: bool) -> None:
    """Write the passes by group, and the named pipelines."""
    from jaxprtool.passes.framework import registry
    from jaxprtool.passes.framework.base import summary
    from jaxprtool.passes.framework.levels import levels
    from jaxprtool.render.documents.passes import PassesDocument, PassSummary

    pipelines = {f"-{name}": str(level) for name, level in levels.items()}
    found = []
    for source in registry.available().values():
        try:
            cls = source.load()
        except PluginError as error:
            output.warning(error.message)
            continue
        found.append(PassSummary(source.name, summary(cls), cls.group, source.origin))
    if json:
        output.write_json(PassesDocument(found, pipelines))
        return
    _write_groups({**_grouped(found), "pipelines": list(pipelines.items())})


def _grouped(passes: list[PassSummary]) -> dict[str, list[tuple[str, str]]]:
    """Return names and help of passes by group, with ungrouped passes last."""
    groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _GROUPS}
    for each in sorted(passes, key=lambda each: not each.group):
        title = each.group or f"from {each.origin}"
        origin = f" ({each.origin})" if each.group and each.origin != "jaxprtool" else ""
        groups.setdefault(title, []).append((each.name, each.help + origin))
    return groups


def _write_groups(groups: dict[str, list[tuple[str, str]]]) -> None:
    """Write each group with its title; on a terminal, a pass has one line."""
    names = max(len(name) for rows in groups.values() for name, _ in rows)
    room = output.width() - names - 4 if sys.stdout.isatty() else None
    for i, (title, rows) in enumerate(groups.items()):
        output.write(("\n" if i else "") + title)
        for name, text in rows:
            lines = textwrap.wrap(text, room) if room else [text]
            if room and len(lines) > 1 and not name.startswith("-"):
                lines = [textwrap.shorten(text, room, placeholder=" …")]
            output.write(f"  {name:<{names}}  " + f"\n{'':<{names + 4}}".join(lines))
