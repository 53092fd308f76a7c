"""Rendering of lint findings by the user's lines, the worst first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxprtool.ir.basics.quantities import plural
from jaxprtool.ir.notation.tokens import Comment, PrimitiveName, SourceLine
from jaxprtool.render.terminal.lines import joined, printable, wrapped
from jaxprtool.render.terminal.listing import Listing

if TYPE_CHECKING:
    from jaxprtool.analysis.lint import Finding, Findings

#: The indentation of what a finding costs, and of what to do.
_INDENT = "    "


def findings_by_line(found: Findings, width: int, top: int | None = None) -> Listing:
    """Return the findings, those of a line together.

    Args:
        found: The findings, the worst first.
        width: The width in columns.
        top: The number of findings to show; None for all.
    """
    shown = found.findings[:top]
    lines = [line for each in _grouped(shown) for line in _finding(each, width)]
    lines.append([Comment(_summary(found, len(shown)))])
    return Listing(printable(joined(lines)))


def _grouped(findings: tuple[Finding, ...]) -> Iterator[Finding]:
    """Yield findings, each followed by the others of its line."""
    by_line: dict[str, list[Finding]] = {}
    for each in findings:
        by_line.setdefault(each.line, []).append(each)
    for group in by_line.values():
        yield from group


def _finding(found: Finding, width: int) -> Iterator[list[str]]:
    place = SourceLine(found.line or "unknown line")
    yield [place, ": ", PrimitiveName(found.code), f" {found.message}"]
    for cell in ([f"costs {found.cost.text}"], [Comment(f"hint: {found.advice}")]):
        for line in wrapped(cell, max(width - len(_INDENT), 20)):
            yield [_INDENT, *line]


def _summary(found: Findings, shown: int) -> str:
    count = len(found.findings)
    text = plural(count, "finding") if count else f"nothing found in {found.name}"
    if shown < count:
        text = f"{text}, of which {shown} {'is' if shown == 1 else 'are'} shown"
    return f"{text}; {found.silenced} silenced" if found.silenced else text
