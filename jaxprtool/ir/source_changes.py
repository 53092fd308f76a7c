"""Notes on source files that have changed since their program was recorded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from jaxprtool.ir import source_text
from jaxprtool.ir.documents import plural

#: The number of changed files that a note names, if there are two or more others.
_NAMED = 3


def changed_notes(files: Mapping[str, str]) -> list[str]:
    """Return that files have changed, and what that means for their lines: a note for each run.

    Args:
        files: The displayed path of each file, as `citations` yields them.
    """
    by_run: dict[str, dict[str, int | None]] = {}
    notes: dict[str, None] = {}
    for file, path in files.items():
        if run := source_text.recorded_in(file):
            by_run.setdefault(run, {}).setdefault(path, _changed_lines(file))
        else:
            notes[source_text.citation_note(path)] = None
    return [*(_run_note(run, changed) for run, changed in by_run.items()), *notes]


def _run_note(run: str, changed: Mapping[str, int | None]) -> str:
    """Return that files have changed since a run was recorded, from the numbers of lines."""
    end = f"since {run}/ was recorded"
    counts = {path: "" if n is None else f" ({plural(n, 'line')})" for path, n in changed.items()}
    if len(counts) == 1:
        [(path, count)] = counts.items()
        return f"{path} has changed {end}{count}; record it again"
    texts = [f"{path}{count}" for path, count in counts.items()]
    more = len(texts) - _NAMED
    last = f"{plural(more, 'more file')}" if more > 1 else texts.pop()
    return f"{', '.join(texts[:_NAMED])} and {last} have changed {end}; record it again"


def _changed_lines(file: str) -> int | None:
    """Return the number of lines of a recorded file that differ now; None if it is not known."""
    data = source_text.text_since(source_text.current_file(file))
    if data is None:
        return None
    recorded = source_text.file_text(file).splitlines()
    matcher = difflib.SequenceMatcher(None, recorded, data.decode(errors="replace").splitlines())
    return sum(
        max(old_end - old_start, new_end - new_start)
        for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes()
        if tag != "equal"
    )
