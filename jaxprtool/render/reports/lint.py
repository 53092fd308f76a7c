"""Rendering of lint findings by the user's lines, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxprtool.ir.basics.quantities import plural, some
from jaxprtool.ir.notation.tokens import Comment, PrimitiveName, SourceLine
from jaxprtool.ir.source import source_text
from jaxprtool.render.documents.problems import Level, Place, Problem
from jaxprtool.render.terminal.lines import joined, printable, wrapped
from jaxprtool.render.terminal.listing import Listing
from jaxprtool.render.terminal.top import more, split

if TYPE_CHECKING:
    from jaxprtool.analysis.lint import Finding, Findings

#: The indentation of the cost of a finding, and of the advice.
_INDENT = "    "

#: The maximum number of programs that are named.
_MOST_PROGRAMS = 3


def findings_by_line(found: Findings, width: int, top: int | None) -> Listing:
    """Return the findings, grouped by line.

    Args:
        found: The findings, the worst first.
        width: The width in columns.
        top: The number of findings to show; None for all.
    """
    shown, rest = split(found.findings, top)
    several = found.programs > 1
    lines = [line for each in _grouped(shown) for line in _finding(each, several, width)]
    lines += [[Comment(more(len(rest)))]] if rest else []
    lines.append([Comment(_summary(found))])
    return Listing(printable(joined(lines)))


def finding_problem(finding: Finding) -> Problem:
    """Return a finding of `lint` as a problem."""
    at = f"{finding.line}: " if finding.line else ""
    details = [f"  costs {finding.cost.text}", f"  hint: {finding.advice}"]
    place = None
    if finding.frames:
        number = int(finding.line.rpartition(":")[2]) if finding.line else 0
        lines = (each for each in finding.frames if each.line == number)
        frame = next(lines, finding.frames[0])
        if not source_text.reason(frame.file):  # else the line is another one now
            place = Place(source_text.path(frame.file), frame.line)
    level: Level = "error" if finding.kind == "wrong" else "warning"
    message = f"{at}{finding.code} {finding.message}"
    return Problem(finding.code, finding.line, message, details, place, level)


def _grouped(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings, each followed by the others of its line."""
    by_line: dict[str, list[Finding]] = {}
    for each in findings:
        by_line.setdefault(each.line, []).append(each)
    for group in by_line.values():
        yield from group


def _finding(found: Finding, several: bool, width: int) -> Iterator[list[str]]:
    """Yield the lines of a finding; if there are several programs, name those with the finding."""
    place = SourceLine(found.line or "unknown line")
    yield [place, ": ", PrimitiveName(found.code), f" {found.message}"]
    cells: list[list[Any]] = [[f"costs {found.cost.text}"], [Comment(f"hint: {found.advice}")]]
    if several:
        cells.append([Comment(f"in {some(found.programs, _MOST_PROGRAMS)}")])
    for cell in cells:
        for line in wrapped(cell, max(width - len(_INDENT), 20)):
            yield [_INDENT, *line]


def _summary(found: Findings) -> str:
    count = len(found.findings)
    place = found.name if found.programs == 1 else f"{found.programs:,} programs"
    text = plural(count, "finding") if count else f"nothing found in {place}"
    if count and found.programs > 1:
        text = f"{text} in {place}"
    return f"{text}; {found.silenced} silenced" if found.silenced else text
