"""Lint findings by the user's lines, and problems for GitHub and as SARIF."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxprtool.ir import source_text
from jaxprtool.ir.documents import plural, some
from jaxprtool.ir.notation import Comment, PrimitiveName, SourceLineToken
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.render.documents import Level, Problem
from jaxprtool.render.terminal.lines import Listing, joined_lines, printable, wrapped_cell
from jaxprtool.render.terminal.tables import ROWS, more, split_rows

if TYPE_CHECKING:
    from jaxprtool.commands.lint.lint import Finding, Findings

# --- lint -----------------------------------------------------------------------------------------
# Rendering of lint findings by the user's lines, the worst first.

#: The indentation of the cost of a finding, and of the advice.
_INDENT = "    "

#: The maximum number of programs that are named.
_MOST_PROGRAMS = 3


def findings_by_line(findings: Findings, width: int, top: int | None = ROWS) -> Listing:
    """Return the findings, grouped by line.

    Args:
        findings: The findings, the worst first.
        width: The width in columns.
        top: The number of findings to show; None for all.
    """
    shown, rest = split_rows(findings.findings, top)
    several = findings.programs > 1
    lines = [line for finding in _grouped(shown) for line in _finding(finding, several, width)]
    lines += [[Comment(more(len(rest)))]] if rest else []
    lines.append([Comment(_summary(findings))])
    return Listing(printable(joined_lines(lines)))


def finding_problem(finding: Finding) -> Problem:
    """Return a finding of `lint` as a problem."""
    at = f"{finding.line}: " if finding.line else ""
    details = [f"  costs {finding.cost.text}", f"  hint: {finding.advice}"]
    annotated = UNKNOWN
    if finding.frames:
        number = int(finding.line.rpartition(":")[2]) if finding.line else 0
        lines = (frame for frame in finding.frames if frame.line == number)
        frame = next(lines, finding.frames[0])
        if not source_text.has_changed(frame.file):  # else the line is another one now
            annotated = Place(frame.file, frame.line, frame.function, frame.file)
    level: Level = "error" if finding.kind == "wrong" else "warning"
    message = f"{at}{finding.code} {finding.message}"
    return Problem(finding.code, finding.line, message, details, annotated, level)


def _grouped(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings, each followed by the others of its line."""
    by_line: dict[str, list[Finding]] = {}
    for finding in findings:
        by_line.setdefault(finding.line, []).append(finding)
    for group in by_line.values():
        yield from group


def _finding(finding: Finding, several: bool, width: int) -> Iterator[list[str]]:
    """Yield the lines of a finding; if there are several programs, name those with the finding."""
    place = SourceLineToken(finding.line or "unknown line")
    yield [place, ": ", PrimitiveName(finding.code), f" {finding.message}"]
    cells: list[list[Any]] = [[f"costs {finding.cost.text}"], [Comment(f"hint: {finding.advice}")]]
    if finding.command:
        cells.append([Comment(f"see: {finding.command}")])
    if several:
        cells.append([Comment(f"in {some(finding.programs, _MOST_PROGRAMS)}")])
    for cell in cells:
        for line in wrapped_cell(cell, max(width - len(_INDENT), 20)):
            yield [_INDENT, *line]


def _summary(findings: Findings) -> str:
    count = len(findings.findings)
    place = findings.name if findings.programs == 1 else f"{findings.programs:,} programs"
    text = plural(count, "finding") if count else f"nothing found in {place}"
    if count and findings.programs > 1:
        text = f"{text} in {place}"
    return f"{text}; {findings.silenced} silenced" if findings.silenced else text


# --- problems -------------------------------------------------------------------------------------
# Problems for other programs: annotations of GitHub, and SARIF.
#
# GitHub shows an annotation at its line in a pull request:
# https://docs.github.com/actions/reference/workflow-commands-for-github-actions. SARIF 2.1.0 is
# what code scanning and editors read: https://docs.oasis-
# open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
