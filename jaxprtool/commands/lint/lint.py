"""Find what wastes memory or time in a program, or makes its results wrong.

    for finding in lint(program):
        finding.code, finding.line, finding.message, finding.cost.bytes

Each rule has a code that never changes, and is in a table that plug-ins add to. Rules look for
patterns in a graph of the program in which calls are inlined (`graph`), and state what a finding
costs. Comments in the source silence findings. Findings of a rule on the same line of several
programs, such as those of a recorded run, are merged.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from jaxprtool.commands.lint import rules as own_rules
from jaxprtool.commands.lint.graph import LintedProgram, Node, SourceReader
from jaxprtool.errors import ArgumentsError, PluginError, described, did_you_mean
from jaxprtool.ir.documents import Printed, document, in_bytes, plural, shell_word, with_prefix
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn
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


# --- findings -------------------------------------------------------------------------------------
# The findings of `lint`: a code, the user's line, the cost, and advice.

#: Whether a finding makes results wrong (or NaN), or wastes memory or time.
Kind: TypeAlias = Literal["wrong", "waste"]


@dataclass(frozen=True)
class FindingCost:
    """The cost of a finding.

    Attributes:
        bytes: The bytes that are stored, moved or sent for nothing.
        flops: The operations that are done for nothing, or in too wide a type.
        text: The cost in words.
    """

    bytes: int
    flops: int
    text: str

    @property
    def weight(self) -> int:
        """A number to compare costs by: a byte takes as long as a hundred operations."""
        return self.flops + 100 * self.bytes


@document(names={"line": "place"}, without=("frames",))
@dataclass(frozen=True)
class Finding:
    """A finding of a rule.

    Attributes:
        code: The code of the rule: `JT101`.
        line: The user's line, `model.py:9`; "" if unknown.
        message: What is wrong there.
        cost: What it costs.
        advice: How to fix it.
        kind: "wrong" if results may be wrong, or "waste".
        programs: The names of the programs that it is in.
        command: The command that shows more of it, with TARGET for the program; "" if there is
            none.
        frames: The frames of the line, the innermost first.
    """

    code: str
    line: Place
    message: str
    cost: FindingCost
    advice: str
    kind: Kind
    programs: tuple[str, ...]
    command: str
    frames: tuple[UserFrame, ...] = field(repr=False)


@document(without=("silenced",))
@dataclass(frozen=True)
class Findings(Printed):
    """The findings of all rules in a program, or in several.

    Attributes:
        name: The name of the program, or of the recorded run.
        findings: The findings: first those that make results wrong, then the most expensive.
        programs: The number of programs that were checked.
        silenced: The number of findings that comments in the source silence.
    """

    name: str
    findings: tuple[Finding, ...]
    programs: int
    silenced: int = 0

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def on(self, target_of: Callable[[str], str]) -> Findings:
        """Return the findings with commands that can be pasted.

        Args:
            target_of: Returns the TARGET of a program, given its name.
        """
        return replace(
            self,
            findings=tuple(
                replace(finding, command=_pasted(finding.command, target_of(finding.programs[0])))
                for finding in self.findings
            ),
        )


def _pasted(command: str, target: str) -> str:
    """Return a command on a TARGET; "" if TARGET is a function, which has none inside."""
    if "TARGET:" in command and target.rpartition("/")[2].count(":"):
        return ""
    return command.replace("TARGET", shell_word(target))


class Found(NamedTuple):
    """What the check of a rule yields.

    Attributes:
        where: The place: an equation, its path (the equations around it, and its own), or a line.
            None if it is the function.
        message: What is wrong, without a full stop.
        advice: How to fix it.
        cost: What follows the word "costs": a phrase in which `{bytes}` and `{flops}` stand for
            the sums over all findings of the rule on the same line.
        bytes: The bytes that it costs.
        flops: The operations that it costs.
        argument: The argument at fault, if the place is the function.
        command: The command that shows more of it, with TARGET for the program; `TARGET:loss` is
            the function `loss` inside it.
    """

    where: Node | tuple[JaxprEqn, ...] | UserFrame | None
    message: str
    advice: str
    cost: str
    bytes: int = 0
    flops: int = 0
    argument: str = ""
    command: str = ""

    @property
    def path(self) -> tuple[JaxprEqn, ...]:
        """The path of the equation; () if it is about a line or the function."""
        if isinstance(self.where, UserFrame):
            return ()
        return self.where.path if isinstance(self.where, Node) else self.where or ()


# --- table ----------------------------------------------------------------------------------------
# The open table of lint rules, filled by `lint_rule` and by plug-ins.
#
#     @lint_rule("XY101", "slow-thing", bad=BAD, good=GOOD)
#     def slow_things(program):
#         """What is found, and why it matters."""
#         yield Found(node, "…", "…", "copies of {bytes}", bytes=node.bytes)
#
# Our own rules are the modules in `commands/lint/rules/`. A plug-in lists a module with its rules
# in the entry-point group `jaxprtool.lint`.
#
# The examples are texts of modules with a function `f` that has arguments by `jaxprtool.example`.
# In the bad one, the lines of the findings end in a comment with the code. Tests run them, and the
# documentation shows them. A finding whose cost is in words alone, such as "a transfer in every
# step", needs no bytes and no operations; it is listed after those that have them.

GROUP = "jaxprtool.lint"

#: The check of a rule: yields its findings in a program.
Check: TypeAlias = Callable[[LintedProgram], Iterable[Found]]


@dataclass(frozen=True)
class LintRule:
    """A rule.

    Attributes:
        code: Its code, which never changes: `JT101`.
        name: A name that says what it finds.
        about: What it finds and why that matters, in one paragraph.
        kind: Whether a finding makes results wrong, or is waste.
        bad: The text of a module in whose function `f` it finds something.
        good: The same module without the fault.
        check: Yields the findings in a program.
        module: The module that defines it.
    """

    code: str
    name: str
    about: str
    kind: Kind
    bad: str
    good: str
    check: Check
    module: str


lint_rules: dict[str, LintRule] = {}


def lint_rule(
    code: str, name: str, *, bad: str, good: str, kind: Kind = "waste"
) -> Callable[[Check], Check]:
    """Return a decorator that adds a function to the rules.

    The docstring of the function says what it finds, and why that matters.

    Args:
        code: Its code, which never changes: `XY101`.
        name: A name that says what it finds.
        bad: The text of a module in whose function `f` it finds something.
        good: The same module without the fault.
        kind: "wrong" if a finding makes results wrong, "waste" if it wastes memory or time.

    Raises:
        PluginError: If another module has a rule with this code.
    """

    def add(check: Check) -> Check:
        module = check.__module__
        if code in lint_rules and lint_rules[code].module != module:
            taken = lint_rules[code]
            raise PluginError(
                f"lint rule {code} of {module} has the code of '{taken.name}' of {taken.module}"
            )
        about = " ".join(inspect.cleandoc(check.__doc__ or "").split())
        texts = {"bad": textwrap.dedent(bad).lstrip(), "good": textwrap.dedent(good).lstrip()}
        lint_rules[code] = LintRule(code, name, about, kind, **texts, check=check, module=module)
        return check

    return add


def all_rules() -> list[LintRule]:
    """Return our own rules and those of installed plug-ins, in the order of their codes.

    Raises:
        PluginError: If a plug-in cannot be imported.
    """
    _load()
    return [lint_rules[code] for code in sorted(lint_rules)]


@cache
def _load() -> None:
    """Import our modules of rules, which are in `commands/lint/rules/`, and those of plug-ins."""
    files = (path for folder in own_rules.__path__ for path in Path(folder).glob("[!_]*.py"))
    for path in sorted(files):
        _import_rules(str(path), partial(import_module, f"{own_rules.__name__}.{path.stem}"))
    for point in entry_points(group=GROUP):
        _import_rules(point.dist.name if point.dist else point.module, point.load)


def _import_rules(origin: str, load: Callable[[], object]) -> None:
    """Import a module of rules. `origin` is the file or the package that an error names."""
    try:
        load()
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        message = f"the lint rules of {origin} cannot be imported: {described(error)}"
        raise PluginError(message) from error


def _codes(codes: str | Iterable[str]) -> tuple[str, ...]:
    parts = codes.split(",") if isinstance(codes, str) else codes
    return tuple(filter(None, (part.strip() for part in parts)))


def chosen_rules(
    select: str | Iterable[str] = (), ignore: str | Iterable[str] = ()
) -> list[LintRule]:
    """Return the rules with codes that begin with one in `select`, and with none in `ignore`.

    Args:
        select: Codes, or their beginnings: `JT1`, or a text of them with commas. All rules if
            empty.
        ignore: The codes of rules to leave out, likewise.

    Raises:
        ArgumentsError: If no rule has a code that begins with one of them.
    """
    rules, select, ignore = all_rules(), _codes(select), _codes(ignore)
    codes = [rule.code for rule in rules]
    for prefix in (*select, *ignore):
        if not any(code.startswith(prefix) for code in codes):
            hint = did_you_mean(prefix, codes) or f"the codes are {', '.join(codes)}"
            raise ArgumentsError(f"no lint rule has the code '{prefix}'", hint)
    return [
        rule
        for rule in rules
        if (not select or rule.code.startswith(select)) and not rule.code.startswith(ignore)
    ]
