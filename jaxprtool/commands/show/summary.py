"""Summarize a program: its most important facts, its signature, its bodies and its lines.

A suggestion is a command and the counted or measured fact that supports it. Without such a fact
there is none: a program with nothing to gain has no suggestions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from jaxprtool.analysis.stats import Stats, count_equations, stats
from jaxprtool.commands.cost.estimate import Cost, Group
from jaxprtool.commands.lint.lint import Finding, Findings, lint
from jaxprtool.commands.memory.estimate import Live, Memory, Point, outlined_memory
from jaxprtool.commands.profile.lines import Profile, TimedLine
from jaxprtool.commands.residuals.policies import gives_one_float
from jaxprtool.commands.residuals.residuals import Placement, Residuals
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.documents import document, in_bytes, plural
from jaxprtool.ir.equations import holders, inner_jaxprs, outer_first
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.program import (
    NamedValue,
    Program,
    ValueGroup,
    bytes_of_values,
    grouped_values,
    program_signature,
)
from jaxprtool.ir.repetition import Repetition, repetition
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr
from jaxprtool.jaxcompat.source_locations import UserFrame
from jaxprtool.passes.loops.outline import Outline

# --- summary --------------------------------------------------------------------------------------
# The most important facts about a program, and the commands to run next.

#: The maximum number of lines, values and findings, and of suggestions.
_MOST, _MOST_SUGGESTIONS = 3, 5

#: The beginning of the codes of findings about NaN and infinities.
_NUMERICS = "JT7"

#: Returns the command line of a command, and its options, on the program; given passes run on it
#: first. None stands for the function as traced, without passes.
CommandLine: TypeAlias = Callable[[str, Sequence[str] | None], str]


@dataclass(frozen=True)
class Suggestion:
    """A command to run next.

    Attributes:
        fact: The counted or measured fact that supports it.
        command: The command line.
    """

    fact: str
    command: str


@dataclass(frozen=True)
class ValuesSize:
    """The size of the arguments or of the results of a program.

    Attributes:
        count: The number of arrays.
        bytes: Their bytes; None if unknown.
    """

    count: int
    bytes: int | None


class ProgramFacts(NamedTuple):
    """What is known of a program.

    Attributes:
        stats: Its size.
        cost: Its cost by line.
        memory: Its memory, or why it is unknown.
        residuals: The residuals of the function as traced, or why it has none.
        profile: Its measured time; None if it was not measured.
        findings: The findings of `lint`.
        repetition: The bodies that repeat in it.
        is_loss: Whether it returns one floating-point number.
        is_partitioned: Whether the report shows its shardings.
    """

    stats: Stats
    cost: Cost
    memory: Memory | str
    residuals: Residuals | str
    profile: Profile | None
    findings: Findings
    repetition: Repetition | None
    is_loss: bool
    is_partitioned: bool


@document(
    without=("facts",),
    also=("residual_count", "residual_bytes"),
    optional=("measured", "peak", "residual_count", "residual_bytes"),
)
@dataclass(frozen=True)
class Summary:
    """The most important facts about a program.

    Attributes:
        name: The name of the program.
        equations: The number of its equations, at every depth.
        arguments: The size of its arguments.
        results: The size of its results.
        total: The cost of the whole program.
        lines: The lines with the most FLOPs, the most first.
        measured: The lines that take the most time; None if it was not measured.
        peak: The peak of memory; None if it is unknown.
        live: The largest values live at the peak.
        finding_count: The number of findings of `lint`.
        findings: The worst of them.
        suggestions: What to do next.
        facts: What is known of the program.
    """

    name: str
    equations: int
    arguments: ValuesSize
    results: ValuesSize
    total: Group
    lines: tuple[Group, ...]
    measured: tuple[TimedLine, ...] | None
    peak: Point | None
    live: tuple[Live, ...]
    finding_count: int
    findings: tuple[Finding, ...]
    suggestions: tuple[Suggestion, ...]
    facts: ProgramFacts = field(repr=False)

    @property
    def residual_count(self) -> int | None:
        """The number of values that the gradient keeps; None if there is none."""
        kept = self.facts.residuals
        return None if isinstance(kept, str) else len(kept.residuals)

    @property
    def residual_bytes(self) -> int | None:
        """The bytes that the gradient keeps; None if unknown."""
        kept = self.facts.residuals
        return None if isinstance(kept, str) else kept.total_bytes


def summarized(facts: ProgramFacts, command_line: CommandLine | None) -> Summary:
    """Return the summary of a program.

    Args:
        facts: What is known of it.
        command_line: Returns the command line of a suggestion; None for no suggestions.
    """
    memory, times = facts.memory, facts.profile
    estimate = None if isinstance(memory, str) else memory
    suggested = () if command_line is None else _suggestions(facts, command_line)
    named = [line for line in times.lines if line.name] if times is not None else None
    return Summary(
        facts.stats.name,
        facts.stats.equations,
        _size(facts.stats.arguments),
        _size(facts.stats.outputs),
        facts.cost.total,
        tuple(_dearest(facts.cost)[:_MOST]),
        None if named is None else tuple(named[:_MOST]),
        None if estimate is None else estimate.at,
        () if estimate is None else estimate.live[:_MOST],
        len(facts.findings),
        facts.findings.findings[:_MOST],
        tuple(islice(suggested, _MOST_SUGGESTIONS)),
        facts,
    )


def _size(values: Sequence[NamedValue]) -> ValuesSize:
    return ValuesSize(len(values), bytes_of_values(values))


def _dearest(cost: Cost) -> list[Group]:
    """Return the groups with a known line that have FLOPs or move bytes, the most FLOPs first."""
    return [
        group
        for group in cost.groups
        if group.name and any(number != 0 for number in group.work)  # numbers may be symbolic
    ]


# --- suggestions ------------------------------------------------------------------------------


def _suggestions(facts: ProgramFacts, command: CommandLine) -> Iterator[Suggestion]:
    """Yield suggestions, the most urgent first."""
    yield from _about_findings(facts, command)
    yield from _about_memory(facts, command)
    yield from _about_repetition(facts.repetition, command)
    yield from _about_time(facts, command)
    if (left := facts.cost.left_to_partitioner) and not facts.is_partitioned:
        values = plural(len(left), "value")
        fact = f"{values} with a sharding over several devices are counted whole"
        yield Suggestion(fact, command("shardings", ()))


def _about_findings(facts: ProgramFacts, command: CommandLine) -> Iterator[Suggestion]:
    findings = facts.findings.findings
    if not findings:
        return
    wrong = sum(finding.kind == "wrong" for finding in findings)
    fact = f"{plural(len(findings), 'finding')} of lint"
    if wrong:
        some = "" if wrong == len(findings) else f", {wrong:,} of which"
        fact += f"{some} may make results wrong"
    yield Suggestion(fact, command("lint", ()))
    numeric = next((finding for finding in findings if finding.code.startswith(_NUMERICS)), None)
    if numeric is not None:
        passes = ["grad"] if facts.is_loss else []
        fact = f"{numeric.line}: {numeric.message}" if numeric.line else numeric.message
        yield Suggestion(fact, command("nans", passes))


def _about_memory(facts: ProgramFacts, command: CommandLine) -> Iterator[Suggestion]:
    """Yield what lowers the peak of a gradient, or else what the peak is made of."""
    memory, kept = facts.memory, facts.residuals
    if not isinstance(kept, str) and (fact := _residuals_fact(kept, memory)):
        argnums = ",".join(map(str, kept.argnums))
        option = "" if argnums in ("", "0") else f" --argnums {argnums}"
        yield Suggestion(fact, command(f"residuals{option}", None))
    elif not isinstance(memory, str) and memory.temporary_bytes > max(
        memory.argument_bytes, memory.result_bytes, memory.constant_bytes
    ):
        share = memory.temporary_bytes / memory.peak_bytes
        fact = f"temporaries are {in_bytes(memory.temporary_bytes)} of the peak, {share:.0%}"
        yield Suggestion(fact, command("memory", ()))


def _residuals_fact(kept: Residuals, memory: Memory | str) -> str:
    """Return what jax.checkpoint saves, or how much a step hands to its backward part; or ""."""
    if kept.placements:
        before = kept.placements[0]
        best = min(kept.placements, key=lambda placement: (placement.peak_bytes, placement.flops))
        return "" if best.peak_bytes >= before.peak_bytes else _placement_fact(before, best)
    if not kept.is_inside or isinstance(memory, str) or not kept.total_bytes:
        return ""
    if kept.total_bytes <= memory.argument_bytes:
        return ""
    return (
        f"the backward part reads {in_bytes(kept.total_bytes)} of residuals; "
        f"the arguments are {in_bytes(memory.argument_bytes)}"
    )


def _placement_fact(before: Placement, after: Placement) -> str:
    policy = after.policy.partition("(")[0]
    where = f" around {' and '.join(after.only)}" if after.only else ""
    peaks = f"from {in_bytes(before.peak_bytes)} to {in_bytes(after.peak_bytes)}"
    more = after.flops / before.flops - 1 if before.flops else 0
    return (
        f"jax.checkpoint with {policy}{where} lowers the estimated peak of the gradient {peaks}, "
        f"for {more:.0%} more FLOPs"
    )


def _about_repetition(repetition: Repetition | None, command: CommandLine) -> Iterator[Suggestion]:
    if repetition is None or not repetition.bodies:
        return
    body = repetition.bodies[0]
    fact = f"{body.copies:,} copies of {body.name} are {body.share:.0%} of the equations"
    fact += f"; outlined, {repetition.compiled:,} are compiled"
    memory = repetition.memory
    if memory is not None and memory.needs_warning:
        fact += f", with {in_bytes(memory.outlined)} of temporary memory"
        fact += f" instead of {in_bytes(memory.as_traced)}"
    yield Suggestion(fact, command("outline", ()))


def _about_time(facts: ProgramFacts, command: CommandLine) -> Iterator[Suggestion]:
    """Yield how to measure the dearest line, or what the measured time says that FLOPs do not."""
    shares = _shares_of_flops(facts.cost)
    first = next(iter(shares), "")
    if facts.profile is None:
        if shares.get(first):
            fact = f"{first} has {shares[first]:.0%} of the FLOPs, as estimated"
            yield Suggestion(f"{fact}; its time is not measured", command("profile", ()))
        return
    dearest = next((line for line in facts.profile.lines if line.name), None)
    overhead = max(facts.profile.own, key=lambda row: row.share, default=None)
    if overhead is not None and (dearest is None or overhead.share > dearest.share):
        fact = f"{overhead.kind}: {overhead.share:.0%} of a call, more than any line takes"
        yield Suggestion(fact, command("profile", ()))
    if dearest is not None and shares and dearest.name != first:
        fact = f"{dearest.name} takes {dearest.share:.0%} of a call"
        fact += f", with {shares.get(dearest.name, 0):.0%} of the FLOPs"
        yield Suggestion(fact, command("source --measure", ()))


def _shares_of_flops(cost: Cost) -> dict[str, float]:
    """Return the share of each line in FLOPs, as `cost` shows it; empty if they are symbolic."""
    counts = {group.name: _operations(group) for group in _dearest(cost)}
    total = _operations(cost.total)
    if not total or not all(type(count) is int for count in counts.values()):
        return {}
    return {name: count / total for name, count in counts.items()}


def _operations(group: Group) -> Any:
    return group.work.flops + group.work.transcendentals


# --- overview -------------------------------------------------------------------------------------
# Summarize a program: its signature in the user's names, its bodies and its source lines.
#
# Equations are counted as in `stats`: where they run, with the body of a jit at each call.


@dataclass(frozen=True)
class HeldBody:
    """A body in a program.

    Attributes:
        kind: The primitive of the equations that hold it.
        name: The name of the function, or of the parameter that the body is.
        calls: The number of times that it is held, over all copies of its holders.
        equations: The number of its equations, at every depth.
    """

    kind: str
    name: str
    calls: int
    equations: int


@dataclass(frozen=True)
class Overview:
    """A summary of a program. The largest parts come first.

    Attributes:
        stats: Its size.
        arguments: Its arguments, grouped by the user's names, in order.
        outputs: Its results likewise.
        bodies: The bodies of more than one equation.
        lines: The number of equations by line of the user's own source.
    """

    stats: Stats
    arguments: tuple[ValueGroup, ...]
    outputs: tuple[ValueGroup, ...]
    bodies: tuple[HeldBody, ...]
    lines: tuple[tuple[UserFrame, int], ...]


def overview(program: Program | AnyJaxpr) -> Overview:
    """Return the summary of a program."""
    counted, about = stats(program), program_signature(program)
    runs = _runs(about.jaxpr)
    return Overview(
        counted,
        grouped_values(counted.arguments),
        grouped_values(counted.outputs),
        tuple(_bodies(runs)),
        tuple(_lines(runs, frames_now(about.roots))),
    )


def _runs(top: Jaxpr) -> dict[Jaxpr, int]:
    """Return how often each body occurs in a program, callers before callees."""
    runs = dict.fromkeys(outer_first(top), 0)
    runs[top] = 1
    for jaxpr, number in runs.items():
        for body in inner_jaxprs(jaxpr):
            runs[body] += number
    return runs


def _bodies(runs: dict[Jaxpr, int]) -> list[HeldBody]:
    """Return the bodies of several equations, sorted by the equations in all their copies."""
    by_body: dict[Jaxpr, HeldBody] = {}
    for jaxpr in runs:
        for eqn, inner in holders(jaxpr):
            for path, body in inner:
                if body not in by_body and len(body.eqns) > 1:
                    named = str(eqn.params.get("name") or path)
                    size = count_equations(body)
                    by_body[body] = HeldBody(eqn.primitive.name, named, runs[body], size)
    return sorted(by_body.values(), key=lambda body: -body.calls * body.equations)


def _lines(runs: dict[Jaxpr, int], reader: Frames) -> list[tuple[UserFrame, int]]:
    """Return the lines that equations come from, each with its number of equations."""
    counts: Counter[tuple[str, int]] = Counter()
    frames: dict[tuple[str, int], UserFrame] = {}
    for jaxpr, number in runs.items():
        copies = Counter(eqn.source_info.traceback for eqn in jaxpr.eqns)
        for traceback, eqn in {eqn.source_info.traceback: eqn for eqn in jaxpr.eqns}.items():
            if (location := reader.location(eqn)) is not None:
                frame = location.frame
                counts[frame.file, frame.line] += number * copies[traceback]
                frames[frame.file, frame.line] = frame
    return [(frames[line], number) for line, number in counts.most_common()]


# --- summary --------------------------------------------------------------------------------------
# Compute the facts for the summary of `report` that its page does not compute otherwise.


def facts_of(
    program: Program,
    cost: Cost,
    memory: Memory | str,
    residuals: Residuals | str,
    profile: Profile | None = None,
    is_partitioned: bool = False,
    codes: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> ProgramFacts:
    """Return the facts about a program, with its counts, findings of lint and repeated bodies.

    Args:
        program: The program.
        cost: Its cost by line.
        memory: Its memory, or why it is unknown.
        residuals: The residuals of the function as traced, or why it has none.
        profile: Its measured time; None if it was not measured.
        is_partitioned: Whether the report shows its shardings.
        codes: The codes of lint to select, and to ignore.
    """
    return ProgramFacts(
        stats(program),
        cost,
        memory,
        residuals,
        profile,
        lint(program, *codes),
        _repetition(program),
        gives_one_float(program),
        is_partitioned,
    )


def _repetition(program: Program) -> Repetition | None:
    """Return the repeated bodies that `outline` finds; None if it cannot outline the program."""
    try:
        outlined = Outline()(program)
    except JaxprToolError:
        return None
    repeats = repetition(outlined, program)
    return replace(repeats, memory=outlined_memory(outlined)) if repeats.bodies else repeats
