"""Find what wastes memory or time in a program, or makes its results wrong.

    for finding in lint(program):
        finding.code, finding.line, finding.message, finding.cost.bytes

Each rule has a code that never changes, and is in a table that plug-ins add to (`table`). Rules
look for patterns in a graph of the program in which calls are inlined (`graph`), and state what a
finding costs. Comments in the source silence findings (`sources`). Findings of a rule on the same
line of several programs, such as those of a recorded run, are merged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from jaxprtool.commands.lint.findings import (
    Finding,
    FindingCost,
    Findings,
    Found,
    LintRule,
    all_rules,
    chosen_rules,
    lint_rule,
)
from jaxprtool.commands.lint.graph import LintedProgram, SourceReader
from jaxprtool.ir.documents import in_bytes, plural, with_prefix
from jaxprtool.ir.places import UNKNOWN
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program
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
    "lint_programs",
    "lint_rule",
]

#: A rule, the file and the number of a line, and the argument that is found there.
_Place: TypeAlias = tuple[str, tuple[str, int], str]


def lint(
    program: Program | AnyJaxpr | Mapping[str, Program],
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
) -> Findings:
    """Find what wastes memory or time in a program, or makes its results wrong.

    Args:
        program: A `Program`, a jaxpr, or programs by name, such as those of a recorded run.
        select: The codes of the rules to run, or their beginnings (`JT1`), or a text of them with
            commas; all if empty.
        ignore: The codes of rules not to run, likewise.

    Returns:
        The findings, the worst first. Findings of a rule on the same line are merged.

    Raises:
        ArgumentsError: If there is no rule with a given code.
        PluginError: If a plug-in with rules cannot be imported.
    """
    if isinstance(program, Mapping):
        name = plural(len(program), "program")
        return lint_programs(name, program.items(), select, ignore)
    linted = LintedProgram(program)
    collected = _Collected()
    collected.add(linted.about.name, linted, chosen_rules(select, ignore))
    return collected.findings(linted.about.name)


def lint_programs(
    name: str,
    programs: Iterable[tuple[str, Program]],
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
) -> Findings:
    """Run `lint` on several programs, and merge the findings of a rule on the same line.

    Args:
        name: A name for all of them.
        programs: Pairs of a name and a program. Only one program is in memory at a time.
        select: The codes of the rules to run; see `lint`.
        ignore: The codes of rules not to run.

    Returns:
        The findings, the worst first, with the names of the programs that they are in. The message
        and the cost of a finding are those of the program in which it costs most.

    Raises:
        ArgumentsError: If there is no rule with a given code.
        PluginError: If a plug-in with rules cannot be imported.
    """
    rules, sources = chosen_rules(select, ignore), SourceReader()
    collected = _Collected()
    for program_name, program in programs:
        collected.add(program_name, LintedProgram(program, sources), rules)
    return collected.findings(name)


class _Collected:
    """Collects the findings of programs by their places."""

    def __init__(self) -> None:
        self._found: dict[_Place, Finding] = {}
        self._silenced: set[_Place] = set()
        self._programs = 0

    @without_collector()
    def add(self, name: str, linted: LintedProgram, rules: Iterable[LintRule]) -> None:
        """Add the findings of rules in a program."""
        self._programs += 1
        for rule in rules:
            groups = defaultdict[_Place, list[tuple[UserFrame | None, Found]]](list)
            for finding in rule.check(linted):
                frame = (
                    finding.where
                    if isinstance(finding.where, UserFrame)
                    else linted.frame_of(finding.path)
                )
                # Findings without a line are distinguished by the name of the function.
                line = (linted.about.name, 0) if frame is None else (frame.file, frame.line)
                groups[rule.code, line, finding.argument].append((frame, finding))
            for place, group in groups.items():
                frame = group[0][0]
                if frame is not None and linted.sources.is_silenced(frame, rule.code):
                    self._silenced.add(place)
                else:
                    findings = [finding for _, finding in group]
                    self._add(place, _finding(name, linted, rule, frame, findings))

    def _add(self, place: _Place, finding: Finding) -> None:
        """Add a finding; of those at one place, the most expensive is kept."""
        earlier = self._found.get(place)
        if earlier is not None:
            names = (*earlier.programs, *finding.programs)
            worst = max(earlier, finding, key=lambda candidate: candidate.cost.weight)
            finding = replace(worst, programs=names)
        self._found[place] = finding

    def findings(self, name: str) -> Findings:
        """Return all findings, the worst first."""
        findings = sorted(
            self._found.values(),
            key=lambda finding: (
                finding.kind != "wrong",
                -finding.cost.weight,
                finding.line,
                finding.code,
            ),
        )
        return Findings(name, tuple(findings), self._programs, len(self._silenced))


def _finding(
    name: str,
    linted: LintedProgram,
    rule: LintRule,
    frame: UserFrame | None,
    group: list[Found],
) -> Finding:
    """Merge the findings of a rule on one line, and add up their costs."""
    worst = max(group, key=lambda finding: finding.flops + 100 * finding.bytes)
    sizes, flops = sum(finding.bytes for finding in group), sum(finding.flops for finding in group)
    text = worst.cost.format(bytes=in_bytes(sizes), flops=with_prefix(flops, "FLOPs"))
    more = f" ({len(group)} times)" if len(group) > 1 else ""
    frames = (frame,) if not worst.path and frame is not None else ()
    return Finding(
        rule.code,
        UNKNOWN if frame is None else linted.frames.text(frame),
        worst.message + more,
        FindingCost(sizes, flops, text),
        worst.advice,
        rule.kind,
        (name,),
        worst.command,
        linted.frames.stack(worst.path) if worst.path else frames,
    )
