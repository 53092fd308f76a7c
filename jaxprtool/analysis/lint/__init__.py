"""Find what costs memory or time for nothing in a program, or makes its results wrong.

    for finding in lint(program):
        finding.code, finding.line, finding.message, finding.cost.bytes

Each rule has a code that never changes, and is in a table that plug-ins add to (`table`). Rules
look for patterns in a graph of the program in which calls are opened (`graph`), and state what a
finding costs. Comments in the source silence findings (`sources`).
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxprtool.analysis.lint.findings import Finding, FindingCost, Findings, Found
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import LintRule, all_rules, chosen_rules, lint_rule
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.quantities import in_bytes, with_prefix
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.jaxcompat.source_locations import UserFrame

__all__ = [
    "Finding",
    "FindingCost",
    "Findings",
    "Found",
    "LintRule",
    "LintedProgram",
    "all_rules",
    "lint",
    "lint_rule",
]


@without_collector()
def lint(
    program: Program | AnyJaxpr,
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
) -> Findings:
    """Find what costs memory or time for nothing in a program, or makes its results wrong.

    Args:
        program: A `Program`, or a jaxpr.
        select: The codes of the rules to run, or their beginnings (`JT1`), or a text of them with
            commas; all if empty.
        ignore: The codes of rules not to run, likewise.

    Returns:
        The findings, the worst first. Those of a rule on the same line are one.

    Raises:
        ArgumentsError: If there is no rule with a given code.
        PluginError: If a plug-in with rules cannot be imported.
    """
    rules = chosen_rules(select, ignore)
    linted = LintedProgram(program)
    found, silenced = list[Finding](), 0
    for rule in rules:
        by_place: dict[object, list[tuple[UserFrame | None, Found]]] = {}
        for each in rule.check(linted):
            frame = each.where if isinstance(each.where, UserFrame) else linted.frame_of(each.path)
            # Findings of the function itself are about different arguments.
            about = each.message if each.where is None else ""
            line = None if frame is None else (frame.file, frame.line)
            by_place.setdefault((line, about), []).append((frame, each))
        for group in by_place.values():
            frame = group[0][0]
            if frame is not None and linted.sources.is_silenced(frame, rule.code):
                silenced += len(group)
            else:
                found.append(_finding(linted, rule, frame, [each for _, each in group]))
    found.sort(key=lambda each: (each.kind != "wrong", -each.cost.weight, each.line, each.code))
    return Findings(linted.about.name, tuple(found), silenced)


def _finding(
    linted: LintedProgram, rule: LintRule, frame: UserFrame | None, group: list[Found]
) -> Finding:
    """Return the findings of a rule on one line as one, with the sum of their costs."""
    worst = max(group, key=lambda each: each.flops + 100 * each.bytes)
    sizes, flops = sum(each.bytes for each in group), sum(each.flops for each in group)
    text = worst.cost.format(bytes=in_bytes(sizes), flops=with_prefix(flops, "FLOPs"))
    more = f" ({len(group)} times)" if len(group) > 1 else ""
    frames = (frame,) if not worst.path and frame is not None else ()
    return Finding(
        rule.code,
        "" if frame is None else linted.frames.text(frame),
        worst.message + more,
        FindingCost(sizes, flops, text),
        worst.advice,
        rule.kind,
        linted.frames.stack(worst.path) if worst.path else frames,
    )
