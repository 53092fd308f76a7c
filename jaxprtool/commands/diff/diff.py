"""Compare two programs: find the equations that were removed, added or changed.

    diff(p, q).verdict
    diff(p, q).hunks[0].lines[0].source

Programs are matched as graphs (`ir.differences`), so names, source lines, and the order of
independent equations make no difference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.analysis.stats import count_equations
from jaxprtool.commands.cost.estimate import total_work
from jaxprtool.commands.cost.rules import Work
from jaxprtool.commands.profile.lines import Profile, TimedLine
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.body_matching import MatchedBody
from jaxprtool.ir.custom_rules import has_stubs, with_stubs
from jaxprtool.ir.differences import (
    Difference,
    counterparts,
    differences,
    has_other_operand_types,
    type_difference,
)
from jaxprtool.ir.documents import Number, Printed, document
from jaxprtool.ir.equations import bodies, weak_marks
from jaxprtool.ir.equivalence import is_cast
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import (
    Program,
    ProgramSignature,
    covering,
    program_signature,
    top_jaxpr,
)
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn
from jaxprtool.jaxcompat import Literal as LiteralAtom

#: The degrees of similarity of two programs.
Verdict: TypeAlias = Literal["equivalent", "same up to constants", "same up to dtypes", "different"]


@document(without=("program", "twin"), also=("flops", "bytes"))
@dataclass(frozen=True)
class Size:
    """The size of a program.

    Attributes:
        name: The name of the program.
        equations: The number of equations, at every depth.
        program: The program.
        twin: The size of a program that differs in names alone, and therefore costs the same.
    """

    name: str
    equations: int
    program: Program | AnyJaxpr = field(repr=False, compare=False)
    twin: Size | None = field(default=None, repr=False, compare=False)

    @cached_property
    def work(self) -> Work:
        """The cost of running it: FLOPs, bytes and so on."""
        return total_work(self.program) if self.twin is None else self.twin.work

    @property
    def flops(self) -> Number:
        """The FLOPs of running it."""
        return self.work.flops

    @property
    def bytes(self) -> Number:
        """The bytes that it reads and writes."""
        return self.work.bytes


@dataclass(frozen=True, eq=False)
class Line:
    """An equation that was removed, added or changed.

    If `before` and `after` are both None, the results or constants of the body have changed.

    Attributes:
        kind: "removed", "added" or "changed".
        before: The equation in the first program; None if it was added.
        after: The equation in the second program; None if it was removed.
        differences: The differences between the two.
        source: The user's line of the equation, followed by the library's; "" if unknown.
        source_before: The line of a changed equation in the first program.
    """

    kind: Literal["removed", "added", "changed"]
    before: JaxprEqn | None
    after: JaxprEqn | None
    differences: tuple[Difference, ...] = ()
    source: Place = UNKNOWN
    source_before: Place = UNKNOWN

    @property
    def equation(self) -> JaxprEqn | None:
        """The equation in the second program, or else in the first."""
        return self.after or self.before


@dataclass(frozen=True, eq=False)
class Hunk:
    """Lines of one body without an unchanged equation between them.

    Attributes:
        body: The body, in both programs.
        path: The equations around the body, the outermost first: `scan at model.py:14`.
        lines: The lines.
    """

    body: MatchedBody
    path: tuple[str, ...]
    lines: tuple[Line, ...]


@document(without=("is_dtype", "within"))
class BorderChange(NamedTuple):
    """An argument, result or named axis that was removed, added, or has changed its type.

    Attributes:
        what: "argument", "result" or "axis".
        name: The name.
        before: The type in the first program, or the size of an axis; "" if it was added.
        after: The same in the second program; "" if it was removed.
        is_dtype: Whether only the dtype has changed.
        within: The outermost pytree around a removed or added value that the other program lacks
            entirely, or the value's own name.
    """

    what: Literal["argument", "result", "axis"]
    name: str
    before: str
    after: str
    is_dtype: bool = False
    within: str = ""


@document(names={"before": "before_seconds", "after": "after_seconds"})
@dataclass(frozen=True)
class Seconds:
    """The measured time of a part of two programs, in one call.

    Attributes:
        before: The time in the first program, in seconds.
        after: The time in the second program, in seconds.
        is_split: Whether a part is an estimated share of fusions that also compute other lines.
    """

    before: float
    after: float
    is_split: bool


@dataclass(frozen=True)
class DiffTimes:
    """The measured times of two programs, split by whether lines differ (`diff_times`).

    Attributes:
        whole: The time of a call.
        differing: The time of the source lines with equations that differ.
        others: The time of other lines.
        no_line: The time of operations without a line, and the time in which no operation ran.
        hunks: The time of the lines of each hunk; hunks may share lines.
    """

    whole: Seconds
    differing: Seconds
    others: Seconds
    no_line: Seconds
    hunks: tuple[Seconds, ...]


@dataclass(frozen=True, eq=False)
class Diff(Printed):
    """The differences between two programs.

    Attributes:
        before: The size of the first program.
        after: The size of the second program.
        signatures: The names and types of the arguments and results of both programs.
        border: The arguments, results and axes that differ.
        hunks: The equations that differ.
        retyped: Equations that differ only in types, because their operands do.
        bodies: The bodies that correspond.
        times: The measured times; None if they were not measured.
    """

    before: Size
    after: Size
    signatures: tuple[ProgramSignature, ProgramSignature]
    border: tuple[BorderChange, ...]
    hunks: tuple[Hunk, ...]
    retyped: tuple[Line, ...]
    bodies: tuple[MatchedBody, ...]
    times: DiffTimes | None = None

    @cached_property
    def lines(self) -> list[Line]:
        """The lines of all hunks."""
        return [line for hunk in self.hunks for line in hunk.lines]

    @property
    def removed(self) -> list[Line]:
        """The lines of equations that only the first program has."""
        return [line for line in self.lines if line.kind == "removed"]

    @property
    def added(self) -> list[Line]:
        """The lines of equations that only the second program has."""
        return [line for line in self.lines if line.kind == "added"]

    @property
    def changed(self) -> list[Line]:
        """The lines of equations that differ from their counterparts."""
        return [line for line in self.lines if line.kind == "changed"]

    @cached_property
    def verdict(self) -> Verdict:
        """The degree of similarity of the programs."""
        kinds = {
            "dtype" if line.equation is not None and is_cast(line.equation) else "equation"
            for line in (*self.removed, *self.added)
        }
        changed = (*self.changed, *self.retyped)
        kinds |= {difference.kind for line in changed for difference in line.differences}
        kinds |= {"dtype" if change.is_dtype else "border" for change in self.border}
        if not kinds:
            return "equivalent"
        if kinds == {"constant"}:
            return "same up to constants"
        return "same up to dtypes" if kinds == {"dtype"} else "different"

    @property
    def is_equivalent(self) -> bool:
        """True if the programs are the same up to names, source lines and order."""
        return self.verdict == "equivalent"


@without_collector()
def diff(p: Program | AnyJaxpr, q: Program | AnyJaxpr) -> Diff:
    """Match two programs and return their differences.

    Names, source lines, and the order of independent equations make no difference. Arguments
    correspond by position if both programs have the same input pytree, and otherwise by name; so
    do results.

    Args:
        p: A program, or a closed jaxpr.
        q: The program to compare it with.

    Returns:
        The verdict, and the equations that were removed, added or changed from `p` to `q`.

    Raises:
        UnsupportedError: If a custom rule cannot be traced, or the programs are nested too deeply.
    """
    # A program that was read from a file may have stubs where the other has its callbacks.
    if has_stubs(top_jaxpr(p)) != has_stubs(top_jaxpr(q)):
        p, q = map(_with_stubs, (p, q))
    about = program_signature(p), program_signature(q)
    arguments, results = _corresponding(p, q, about)
    try:
        bodies = counterparts(_held(p), _held(q), arguments, results)
        changes = _HunkCollector(about)
        for body in bodies:
            changes.add(body)
    except RecursionError:
        message = "the programs are too deeply nested to be compared"
        raise UnsupportedError(message) from None
    border = tuple(_border_changes(p, q, about, bodies[0], arguments, results))
    before, after = _size(p, about[0]), _size(q, about[1])
    differ = border or changes.hunks or changes.retyped
    if not differ and all(body.are_twins for body in bodies):
        after = replace(after, twin=before)  # the estimate of costs takes longer than the match
    return Diff(
        before,
        after,
        about,
        border,
        tuple(changes.hunks),
        tuple(changes.retyped),
        tuple(bodies),
    )


def _held(program: Program | AnyJaxpr) -> AnyJaxpr:
    return program.jaxpr if isinstance(program, Program) else program


def _with_stubs(program: Program | AnyJaxpr) -> Program | AnyJaxpr:
    if isinstance(program, Program):
        return program.replace(jaxpr=with_stubs(program.jaxpr))
    return with_stubs(program)


def _size(program: Program | AnyJaxpr, about: ProgramSignature) -> Size:
    return Size(about.name, count_equations(program), program)


# --- arguments and results ------------------------------------------------------------------------

_Pairs: TypeAlias = list[tuple[int, int]]


def _corresponding(
    p: object, q: object, about: tuple[ProgramSignature, ProgramSignature]
) -> tuple[_Pairs, _Pairs]:
    """Return the positions of the arguments, and of the results, that correspond."""
    same_ins = same_outs = False
    if isinstance(p, Program) and isinstance(q, Program):
        same_ins, same_outs = p.in_tree == q.in_tree, p.out_tree == q.out_tree
    ins = [[value.name for value in signature.arguments] for signature in about]
    outs = [[value.name for value in signature.outputs] for signature in about]
    return _by_name(ins[0], ins[1], same_ins), _by_name(outs[0], outs[1], same_outs)


def _by_name(old: Sequence[str], new: Sequence[str], in_place: bool) -> _Pairs:
    """Pair positions with equal names and then, if as many are left on both sides, in order."""
    if in_place:
        return [(i, i) for i in range(len(old))]
    places = {name: j for j, name in enumerate(new)}
    pairs = {i: places.pop(name) for i, name in enumerate(old) if name in places}
    left = [i for i in range(len(old)) if i not in pairs]
    if len(left) == len(places):
        pairs.update(zip(left, sorted(places.values()), strict=True))
    return sorted(pairs.items())


def _border_changes(
    p: object,
    q: object,
    about: tuple[ProgramSignature, ProgramSignature],
    body: MatchedBody,
    arguments: _Pairs,
    results: _Pairs,
) -> Iterator[BorderChange]:
    jaxprs = [jaxcompat.open_jaxpr(side.jaxpr) for side in about]
    whats: tuple[tuple[Any, ...], ...] = (
        ("argument", arguments, [side.arguments for side in about], [x.invars for x in jaxprs]),
        ("result", results, [side.outputs for side in about], [x.outvars for x in jaxprs]),
    )
    for what, pairs, names, atoms in whats:
        kept = {i for i, _ in pairs}, {j for _, j in pairs}
        for i, j in pairs:
            avals = atoms[0][i].aval, atoms[1][j].aval
            kind = type_difference(body.keys, *avals)
            if kind:
                old, new = weak_marks(*avals)
                types = old + names[0][i].type, new + names[1][j].type
                yield BorderChange(what, names[1][j].name, *types, kind == "dtype")
        for values, has, is_old in zip(names, kept, (True, False), strict=True):
            alone = [i not in has for i in range(len(values))]
            for within, places in covering([value.name for value in values], alone).items():
                for value in (values[i] for i in places):
                    before, after = (value.type, "") if is_old else ("", value.type)
                    yield BorderChange(what, value.name, before, after, within=within)
    axes = [dict(x.axis_env) if isinstance(x, Program) else {} for x in (p, q)]
    for name in dict.fromkeys((*axes[0], *axes[1])):
        sizes = [str(env.get(name, "")) for env in axes]
        if sizes[0] != sizes[1]:
            yield BorderChange("axis", str(name), sizes[0], sizes[1])


# --- equations ------------------------------------------------------------------------------------


class _HunkCollector:
    """Collects the hunks of bodies."""

    def __init__(self, about: tuple[ProgramSignature, ProgramSignature]) -> None:
        self.hunks: list[Hunk] = []
        self.retyped: list[Line] = []
        self._frames = [frames_now(signature.roots) for signature in about]

    def add(self, body: MatchedBody) -> None:
        """Add the differences in a body."""
        path: tuple[str, ...] | None = None
        for lines in _runs(self._rows(body)):
            path = tuple(self._path(body)) if path is None else path
            self.hunks.append(Hunk(body, path, tuple(_removed_first(lines))))

    def _path(self, body: MatchedBody) -> Iterator[str]:
        """Yield the names and source lines of the equations around a body."""
        around = [new for _, new in body.path]
        for depth, eqn in enumerate(around):
            name, place = eqn.params.get("name"), self._frames[1].line_of(around[: depth + 1])
            called = f" {name}" if isinstance(name, str) else ""
            yield eqn.primitive.name + called + (f" at {place}" if place else "")

    def _source(self, body: MatchedBody, which: int, eqn: JaxprEqn) -> Place:
        """Return the source line of an equation of one of two bodies, or of one around it."""
        return self._frames[which].line_of([*(pair[which] for pair in body.path), eqn])

    def _rows(self, body: MatchedBody) -> Iterator[Line | None]:
        """Yield the lines of a body in the order of the second program.

        Yields None for one or more equations that are not shown. Removed equations come before the
        counterpart of the equation that they stood before.
        """
        before, after = (jaxpr.eqns for jaxpr in body.bodies)
        moved = _out_of_order(body)
        removed: list[Line] = []
        removed_before: dict[int, list[Line]] = {}
        for i in range(len(before)) if self._is_listed(body, 0) else body.pairs:
            eqn = before[i]
            if self._is_listed(body, 0) and body.is_alone(0, i):
                removed.append(Line("removed", eqn, None, source=self._source(body, 0, eqn)))
            elif i in body.opened[0]:
                removed.append(self._opened(body, eqn, None))
            elif removed and i in body.pairs:
                removed_before[body.pairs[i]], removed = removed, []
        partners = {j: i for i, j in body.pairs.items()}
        changes = tuple(_constants(body)) if body.call is None else ()
        if changes:
            yield Line("changed", None, None, changes)
        shown = range(len(after)) if self._is_listed(body, 1) else sorted(partners)
        last = -1
        for j in shown:
            eqn = after[j]
            if j != last + 1:
                yield None
            last = j
            yield from removed_before.get(j, ())
            if j in body.opened[1]:
                yield self._opened(body, None, eqn)
            elif j in partners:
                yield self._changed(body, before[partners[j]], eqn, j in moved)
            elif self._is_listed(body, 1) and body.is_alone(1, j):
                yield Line("added", None, eqn, source=self._source(body, 1, eqn))
            else:
                yield None
        yield from removed
        changes = tuple(_results(body)) if body.call is None else ()
        if changes:
            yield Line("changed", None, None, changes)

    @staticmethod
    def _is_listed(body: MatchedBody, which: int) -> bool:
        """Return True if the unpaired equations of one of the bodies are listed with this pair.

        The body of an inlined call is paired with a body that is also in a pair of its own, where
        the unpaired equations of that body are listed.
        """
        return body.call is None or body.call[0] == which

    def _opened(self, body: MatchedBody, old: JaxprEqn | None, new: JaxprEqn | None) -> Line:
        """Return the line of a call whose equations the other program has inline."""
        call = old or new
        assert call is not None
        how, which = ("inlined", 0) if new is None else ("outlined", 1)
        difference = Difference("call", "call", how, 0, None, None)
        return Line("changed", old, new, (difference,), self._source(body, which, call))

    def _changed(self, body: MatchedBody, old: JaxprEqn, new: JaxprEqn, moved: bool) -> Line | None:
        """Return the line of two counterparts, or None if they are the same."""
        changes = differences(body, old, new)
        if moved:
            changes.append(Difference("parameter", "order", "", 0, None, None))
        if not changes:
            return None
        places = self._source(body, 1, new), self._source(body, 0, old)
        line = Line("changed", old, new, tuple(changes), *places)
        if _follows(body, line):
            self.retyped.append(line)
            return None
        return line


def _follows(body: MatchedBody, line: Line) -> bool:
    """Return True if two counterparts differ only in types, and because their operands do."""
    assert line.before is not None and line.after is not None
    types = [
        getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
        for eqn in (line.before, line.after)
    ]
    return all(
        difference.kind in ("dtype", "shape")
        and (difference.part != "parameter" or [difference.before, difference.after] == types)
        for difference in line.differences
    ) and has_other_operand_types(body, line.before, line.after)


def _constants(body: MatchedBody) -> Iterator[Difference]:
    """Yield the constants of a body that have changed, or that only one program has."""
    keys = [body.keys.constants(jaxpr) for jaxpr in (body.before, body.after)]
    variables = [jaxpr.constvars for jaxpr in body.bodies]
    places = {id(var): j for j, var in enumerate(variables[1])}
    kept = set()
    for i, var in enumerate(variables[0]):
        partner = body.counterpart(var)
        j = places.get(id(partner))
        if j is None:
            if not body.is_matched(0, var):
                yield Difference("operand", "constant", "", i, var, None)
            continue
        kept.add(j)
        kind = type_difference(body.keys, var.aval, variables[1][j].aval)
        if kind or keys[0][i] != keys[1][j]:
            yield Difference(kind or "constant", "constant", "", j, var, variables[1][j])
    for j, var in enumerate(variables[1]):
        if j not in kept and not body.is_matched(1, var):
            yield Difference("operand", "constant", "", j, None, var)


def _results(body: MatchedBody) -> Iterator[Difference]:
    """Yield the results of a body that have changed."""
    for place, (old, new) in enumerate(body.results):
        if isinstance(old, LiteralAtom) and isinstance(new, LiteralAtom):
            if not body.agree(old, new):
                yield Difference("constant", "result of the body", "", place, old, new)
        elif body.is_rewired(old, new):
            yield Difference("operand", "result of the body", "", place, old, new)


def _out_of_order(body: MatchedBody) -> frozenset[int]:
    """Return the positions in the second body of equations whose effects have changed places."""
    eqns = body.bodies[0].eqns
    places = [
        j
        for i, j in body.pairs.items()
        if eqns[i].effects and not jaxcompat.only_names_axes(eqns[i].effects)
    ]
    return frozenset(places) - set(_longest_rise(places))


def _longest_rise(numbers: Sequence[int]) -> Iterator[int]:
    """Yield a longest increasing subsequence of distinct numbers, the largest first."""
    ends: list[int] = []
    ranks: list[int] = []
    for number in numbers:
        rank = bisect_left(ends, number)
        ends[rank : rank + 1] = [number]
        ranks.append(rank)
    wanted = len(ends) - 1
    for number, rank in zip(reversed(numbers), reversed(ranks), strict=True):
        if rank == wanted:
            wanted -= 1
            yield number


def _runs(rows: Iterable[Line | None]) -> Iterator[list[Line]]:
    """Split rows at each None, and yield the runs of lines between."""
    run: list[Line] = []
    for row in rows:
        if row is not None:
            run.append(row)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _removed_first(lines: Sequence[Line]) -> list[Line]:
    """Sort removed lines before added ones, between lines that have changed."""
    ordered: list[Line] = []
    added: list[Line] = []
    for line in lines:
        if line.kind == "added":
            added.append(line)
            continue
        if line.kind == "changed":
            ordered += added
            added = []
        ordered.append(line)
    return ordered + added


# --- diff times -----------------------------------------------------------------------------------
# The measured times of the differences between two programs, by source line.
#
# Times are measured by line, not by equation. The lines of a hunk in one program are those of its
# equations, and those of the counterparts of equations at the hunk's lines in the other program. So
# the time of a line that gained a small equation is compared with its time before.

#: The lines of a hunk in the first and in the second program, by name: `model.py:9`.
_Lines = tuple[set[str], set[str]]


def with_measured_times(comparison: Diff, before: Profile, after: Profile) -> Diff:
    """Add the measured times of two programs, and sort the hunks by how much their time changed.

    Args:
        comparison: The diff of the programs.
        before: The profile of the first program.
        after: The profile of the second program.
    """
    profiles = before, after
    measured = tuple(
        {line.name: line for line in profile.lines if line.name} for profile in profiles
    )
    reader = _LineNames(comparison)
    timed = [(hunk, reader.of_hunk(hunk)) for hunk in comparison.hunks]
    times = [(hunk, _seconds(measured, lines)) for hunk, lines in timed]
    times.sort(key=lambda pair: -abs(pair[1].after - pair[1].before))
    differing: _Lines = set(), set()
    for _, lines in timed:
        for all_of_them, some in zip(differing, lines, strict=True):
            all_of_them |= some
    others = set(measured[0]) - differing[0], set(measured[1]) - differing[1]
    whole = Seconds(before.wall_seconds, after.wall_seconds, False)
    parts = _seconds(measured, differing), _seconds(measured, others)
    rest = Seconds(
        max(whole.before - sum(part.before for part in parts), 0.0),
        max(whole.after - sum(part.after for part in parts), 0.0),
        False,
    )
    hunks = tuple(hunk for hunk, _ in times)
    by_hunk = tuple(seconds for _, seconds in times)
    return replace(comparison, hunks=hunks, times=DiffTimes(whole, *parts, rest, by_hunk))


def _seconds(measured: Sequence[dict[str, TimedLine]], lines: _Lines) -> Seconds:
    """Return the time of lines of both programs. Lines without operations take no time."""
    timed = [
        [of[name] for name in names if name in of]
        for of, names in zip(measured, lines, strict=True)
    ]
    before, after = (sum(line.seconds for line in side) for side in timed)
    return Seconds(before, after, any(line.is_split for side in timed for line in side))


class _LineNames:
    """Finds the lines of hunks.

    Args:
        found: The diff.
    """

    def __init__(self, comparison: Diff) -> None:
        self._frames = [frames_now(signature.roots) for signature in comparison.signatures]
        #: The lines of equations that correspond, for each line of a program.
        self._counterparts: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
        for body in comparison.bodies:
            around = [[pair[which] for pair in body.path] for which in (0, 1)]
            for i, j in body.pairs.items():
                eqns = body.bodies[0].eqns[i], body.bodies[1].eqns[j]
                names = [self._name(k, [*around[k], eqns[k]]) for k in (0, 1)]
                if all(names):
                    for k in (0, 1):
                        self._counterparts[k].setdefault(names[k], set()).add(names[1 - k])

    def of_hunk(self, hunk: Hunk) -> _Lines:
        """Return the lines of a hunk in both programs."""
        by_side: _Lines = set(), set()
        for line in hunk.lines:
            for which, eqn in enumerate((line.before, line.after)):
                if eqn is not None:
                    around = [pair[which] for pair in hunk.body.path]
                    by_side[which].update(self._names(which, [*around, eqn]))
        return by_side[0] | self._across(by_side[1], 1), by_side[1] | self._across(by_side[0], 0)

    def _across(self, names: Iterable[str], which: int) -> set[str]:
        """Return the lines in the other program of the counterparts of equations at some lines."""
        return {line for name in names for line in self._counterparts[which].get(name, ())}

    def _names(self, which: int, around: Sequence[JaxprEqn]) -> Iterator[str]:
        """Yield the lines of the last equation in `around`, and of all equations in its bodies."""
        if name := self._name(which, around):
            yield name
        for _, body in bodies(around[-1]):
            for eqn in body.eqns:
                yield from self._names(which, [*around, eqn])

    def _name(self, which: int, around: Sequence[JaxprEqn]) -> str:
        location = self._frames[which].location_of(around)
        return "" if location is None else self._frames[which].text(location.frame)
