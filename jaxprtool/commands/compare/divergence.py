"""The first equation, iteration and prefix at which two variants diverge.

Both are run piece by piece on the same inputs. At several cuts through the reference, all values
that are live at the cut are compared with their counterparts in the variant. The search continues
between the last cut at which all agree and the first at which some differ, from the values there.
It enters calls, the branch taken, and the first diverging iteration of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias
from typing import Literal as OneOf

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.compare.variants import (
    BodyRun,
    Comparator,
    Compared,
    Executor,
    Measure,
    Risk,
    Tolerance,
    Variant,
    is_comparable,
    measured,
    needed,
)
from jaxprtool.execute.stepping import Progress, advanced, resumed_progress
from jaxprtool.ir.body_matching import MatchedBody
from jaxprtool.ir.conversions import with_scalar_predicates
from jaxprtool.ir.differences import counterparts
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.dtypes import as_array, is_extended
from jaxprtool.ir.equations import all_jaxprs, free_variables, variables
from jaxprtool.ir.equivalence import is_cast, same_operation
from jaxprtool.ir.evaluation import LoopOperands, branch_of, row_of, slice_number
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.keys import literal_key
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.regions import Cond, Regions, Scan, ShardMap, While, holds_jaxpr, regions, view
from jaxprtool.ir.scopes import ScopePaths
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import AbstractRef, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# --- divergence -----------------------------------------------------------------------------------
# The first equation at which two variants diverge.

#: The number of cuts compared at once.
CUTS = 32

#: A variable of the reference and its counterpart; either may be a literal in results.
Pair: TypeAlias = tuple[Any, Any]


class EnteredBody(NamedTuple):
    """An equation of the reference whose body is searched.

    Attributes:
        eqn: The equation.
        iteration: The number of the iteration of a loop; for a scan, the index of the row it reads.
        around: The body that contains it.
        operands: The operand of each argument of its body, in the first iteration of a loop.
    """

    eqn: JaxprEqn
    iteration: int | None
    around: Jaxpr
    operands: Sequence[Atom]


#: The entered equations, outermost first.
Path: TypeAlias = tuple[EnteredBody, ...]


@dataclass(frozen=True, eq=False)
class DivergencePoint:
    """A point where two variants diverge.

    Attributes:
        runs: The bodies in which they diverge.
        path: The equations around them in the reference.
        eqns: The diverging equation of each; None if it has no such equation.
        results: Their differing results.
        operands: The corresponding values from which the results are computed.
        between: Equations of each, without a counterpart, between these operands and the results.
    """

    runs: tuple[BodyRun, BodyRun]
    path: Path
    eqns: tuple[JaxprEqn | None, JaxprEqn | None]
    results: Sequence[Pair]
    operands: Sequence[Pair]
    between: tuple[Sequence[JaxprEqn], Sequence[JaxprEqn]]


class Matches:
    """The correspondence between variables of two programs, body by body."""

    def __init__(self) -> None:
        self._bodies: dict[tuple[Jaxpr, Jaxpr], MatchedBody] = {}

    def of(
        self, a: Jaxpr, b: Jaxpr, arguments: Sequence[tuple[int, int]] | None
    ) -> Callable[[Var], Var | None]:
        """Return the function from a variable of one body to its counterpart in the other.

        `arguments` are the pairs of positions of corresponding arguments, if their order differs.
        """
        if a is b:
            return lambda var: var
        if (a, b) not in self._bodies:
            for match in counterparts(a, b, arguments):
                self._bodies.setdefault(match.bodies, match)
        return self._bodies[a, b].counterpart


class DivergenceSearch:
    """A search for where two variants diverge.

    Args:
        comparator: Determines which values differ.
        executors: The executor of each.
        on_progress: Called with progress messages.
    """

    def __init__(
        self,
        comparator: Comparator,
        executors: tuple[Executor, Executor],
        on_progress: Callable[[str], object],
    ):
        self._comparator, self._executors, self._on_progress = comparator, executors, on_progress
        self._matches = Matches()

    def find(
        self,
        bodies: tuple[ClosedJaxpr, ClosedJaxpr],
        arguments: tuple[Sequence[Any], Sequence[Any]],
        results: tuple[Sequence[Any], Sequence[Any]] | None = None,
        path: Path = (),
        positions: Sequence[tuple[int, int]] | None = None,
    ) -> DivergencePoint | None:
        """Return where two bodies diverge on arguments that agree.

        Args:
            bodies: The bodies.
            arguments: The arguments of each.
            results: The results of each, if known.
            path: The equations around them.
            positions: The positions of the arguments that correspond, if not in one order.

        Returns:
            None if all results agree.
        """
        a, b = (BodyRun(*triple) for triple in zip(self._executors, bodies, arguments, strict=True))
        outs = list(zip(a.jaxpr.outvars, b.jaxpr.outvars, strict=True))
        if results is None:
            results = a.values(a.jaxpr.outvars), b.values(b.jaxpr.outvars)
        values = zip(outs, *results, strict=True)
        wrong = [pair for pair, x, y in values if self._comparator.differ(x, y)]
        if not wrong:
            return None
        counterpart = self._matches.of(a.jaxpr, b.jaxpr, positions)
        level = _DivergentBodies(self._comparator, a, b, counterpart, wrong)
        return self._inward(level.cause(level.found(path, self._on_progress)))

    def _inward(self, found: DivergencePoint) -> DivergencePoint:
        """Return the divergence inside the bodies of an equation, or `found` if there is none."""
        old, new = found.eqns
        if old is None or new is None or type(view(old)) is not type(view(new)):
            return found
        inner = self._inside(found, old, new)
        return found if inner is None else inner

    def _inside(
        self, found: DivergencePoint, old: JaxprEqn, new: JaxprEqn
    ) -> DivergencePoint | None:
        a, b = regions(old), regions(new)
        if a is None or b is None or isinstance(a.view, ShardMap):
            return None
        if (len(old.invars), len(old.outvars)) != (len(new.invars), len(new.outvars)):
            return None
        x, y = found.runs
        operands = x.values(old.invars), y.values(new.invars)
        number = None
        match a.view, b.view:
            case (Scan() | While()) as loop, (Scan() | While()) as other:
                if len(loop.carry) != len(other.carry) or _order(loop) != _order(other):
                    return None
                self._on_progress(f"looking for the iteration of {old.primitive.name}")
                results = x.values(old.outvars), y.values(new.outvars)
                loops = loop, other
                part = first_iteration(self._comparator, self._executors, loops, operands, results)
                if part is None:
                    return None
                bodies, arguments, number = part.bodies, part.arguments, part.number
            case Cond() as cond, Cond() as other_cond:
                bodies = (
                    branch_of(cond, operands[0][0]),
                    branch_of(other_cond, operands[1][0]),
                )
                arguments = operands[0][1:], operands[1][1:]
            case _ if a.kind == "call" and b.kind == "call":
                bodies = a.bodies[0], b.bodies[0]
                pairs = zip((a, b), operands, strict=True)
                of_a, of_b = ([values[i] for i in e.regions[0].ins] for e, values in pairs)
                arguments = of_a, of_b
            case _:
                return None
        entered = EnteredBody(old, number, x.jaxpr, _given_to(a, bodies[0]))
        return self.find(bodies, arguments, None, (*found.path, entered))


def _order(loop: Scan | While) -> tuple[int, bool] | None:
    """Return the number of iterations of a scan and whether it runs in reverse."""
    return (loop.length, loop.reverse) if isinstance(loop, Scan) else None


def _given_to(inside: Regions, body: ClosedJaxpr) -> list[Atom]:
    """Return the operand of each argument of an equation's body."""
    opened = jaxcompat.open_jaxpr(body)
    which = [jaxcompat.open_jaxpr(candidate) for candidate in inside.bodies].index(opened)
    return [inside.eqn.invars[i] for i in inside.regions[which].ins]


class _DivergentBodies:
    """Two bodies, some of whose results differ.

    Args:
        comparator: Determines which values differ.
        a: The reference's body.
        b: The variant's body.
        counterpart: The map from a variable of `a` to its counterpart in `b`.
        wrong: The results that differ.
    """

    def __init__(
        self,
        comparator: Comparator,
        a: BodyRun,
        b: BodyRun,
        counterpart: Callable[[Var], Var | None],
        wrong: Sequence[Pair],
    ):
        self._comparator, self._a, self._b, self._wrong = comparator, a, b, wrong
        self._counterparts: dict[Var, Var] = {}
        outs = {old for old, _ in wrong if not isinstance(old, Literal)}
        self._eqns = needed(a.jaxpr, outs, ())
        for var in [
            *a.jaxpr.invars,
            *a.jaxpr.constvars,
            *(v for e in self._eqns for v in e.outvars),
        ]:
            other = counterpart(var)
            if other is not None and is_comparable(var) and var.aval.shape == other.aval.shape:
                self._counterparts[var] = other
        self._defined = {v: i for i, eqn in enumerate(self._eqns) for v in eqn.outvars}
        self._last = {v: i for i, eqn in enumerate(self._eqns) for v in variables(eqn.invars)}
        self._last |= dict.fromkeys(outs, len(self._eqns))
        self._has_refs = any(isinstance(v.aval, AbstractRef) for v in self._defined)
        self._roots = dict(_roots(self._eqns, self._counterparts))
        self._points = [
            i
            for i, eqn in enumerate(self._eqns)
            if any(v in self._counterparts for v in eqn.outvars)
        ]

    def found(self, path: Path, on_progress: Callable[[str], object]) -> DivergencePoint:
        """Return the first point at which corresponding values differ, or else the results."""
        low, high = -1, len(self._points)
        while high - low > 1:
            on_progress(f"comparing {high - low:,} equations")
            low, high = self._narrowed(low, high)
        if high == len(self._points):
            return self._at_results(path)
        eqn = self._eqns[self._points[high]]
        pairs = [(v, self._counterparts[v]) for v in eqn.outvars if v in self._counterparts]
        self._compute(pairs)
        wrong = [pair for pair in pairs if self._differ(pair)]
        other = self._b.definitions.get((wrong or pairs)[0][1])
        return self._found(path, (eqn, other), wrong or pairs)

    def cause(self, found: DivergencePoint) -> DivergencePoint:
        """Return the first difference of the programs before a point that only passes it on.

        The search may miss it, since it tolerates more of intermediate values than of results.
        """
        exact = replace(self._comparator, exact=True)

        def wrong(pairs: Sequence[Pair]) -> list[Pair]:
            self._compute(pairs)
            return [p for p in pairs if exact.differ(self._a.value(p[0]), self._b.value(p[1]))]

        old, new = found.eqns
        is_same = old is not None and new is not None and _is_same(old, new)
        if not is_same or not all(map(is_cast, chain(*found.between))) or not wrong(found.operands):
            return found
        for eqn in needed(self._a.jaxpr, variables([v for v, _ in found.operands]), ()):
            pairs = [(v, self._counterparts[v]) for v in eqn.outvars if v in self._counterparts]
            other = self._b.definitions.get(pairs[0][1]) if pairs else None
            if other is not None and not _is_same(eqn, other) and (first := wrong(pairs)):
                return self._found(found.path, (eqn, other), first)
        return found

    def _narrowed(self, low: int, high: int) -> tuple[int, int]:
        """Return a narrower pair of points, the first of which agrees and the second does not."""
        inside = high - low - 1
        count = min(CUTS, inside)
        cuts = sorted({low + 1 + (i + 1) * inside // count - 1 for i in range(count)})
        fronts = {cut: self._front(cut) for cut in cuts}
        self._compute([pair for front in fronts.values() for pair in front])
        agree = [cut for cut in cuts if not any(map(self._differ, fronts[cut]))]
        if self._has_refs:  # refs are not compared: the first difference is more reliable
            high = next((cut for cut in cuts if cut not in agree), high)
            agree = [cut for cut in agree if cut < high]
        # The last that agrees: a correct rewrite may have differing intermediate values.
        low = max(agree, default=low)
        high = min((cut for cut in cuts if cut > low), default=high)
        if high - low > 1:
            kept = self._front(low) if low >= 0 else []
            self._a.evict(old for old, _ in kept)
            self._b.evict(new for _, new in kept)
        return low, high

    def _front(self, point: int) -> list[Pair]:
        """Return the live values at a point, or the corresponding values from which they come."""
        place = self._points[point]
        live = (v for v, i in self._defined.items() if i <= place < self._last.get(v, -1))
        roots = dict.fromkeys(root for v in live for root in self._roots[v])
        return [(v, self._counterparts[v]) for v in roots]

    def _compute(self, pairs: Sequence[Pair]) -> None:
        self._a.compute(old for old, _ in pairs)
        self._b.compute(new for _, new in pairs)

    def _differ(self, pair: Pair) -> bool:
        return self._comparator.differ(self._a.value(pair[0]), self._b.value(pair[1]))

    def _at_results(self, path: Path) -> DivergencePoint:
        self._compute(self._wrong)
        wrong = [pair for pair in self._wrong if self._differ(pair)]
        if not wrong:
            return DivergencePoint((self._a, self._b), path, (None, None), [], [], ((), ()))
        old, new = wrong[0]
        eqns = self._a.definitions.get(old), self._b.definitions.get(new)  # type: ignore[arg-type]
        return self._found(path, eqns, wrong)

    def _found(
        self, path: Path, eqns: tuple[JaxprEqn | None, JaxprEqn | None], wrong: Sequence[Pair]
    ) -> DivergencePoint:
        matched = set(self._counterparts) - {old for old, _ in wrong}
        others = {new: old for old, new in self._counterparts.items() if old in matched}
        removed = _between(self._a, [old for old, _ in wrong], matched)
        added = _between(self._b, [new for _, new in wrong], others.keys())
        operands = {v: None for eqn in removed for v in variables(eqn.invars) if v in matched}
        operands |= {others[v]: None for eqn in added for v in variables(eqn.invars) if v in others}
        pairs: list[Pair] = [(v, self._counterparts[v]) for v in operands]
        pairs += _literals(*eqns)
        self._compute(pairs)
        between = tuple(
            [eqn for eqn in unmatched if eqn is not diverging]
            for unmatched, diverging in zip((removed, added), eqns, strict=True)
        )
        return DivergencePoint((self._a, self._b), path, eqns, wrong, pairs, between)  # type: ignore[arg-type]


def _is_same(old: JaxprEqn, new: JaxprEqn) -> bool:
    """Return True if two equations compute the same from equal operands; literals are equal."""
    literals = [
        [literal_key(v) if type(v) is Literal else None for v in e.invars] for e in (old, new)
    ]
    return literals[0] == literals[1] and same_operation(old, new)


def _literals(old: JaxprEqn | None, new: JaxprEqn | None) -> Iterator[Pair]:
    """Yield pairs of operands at the same position and of the same shape, one of them a literal."""
    if old is not None and new is not None and len(old.invars) == len(new.invars):
        for a, b in zip(old.invars, new.invars, strict=True):
            if Literal in (type(a), type(b)) and np.shape(a.aval) == np.shape(b.aval):
                yield a, b


def _roots(
    eqns: Sequence[JaxprEqn], matched: dict[Var, Var]
) -> Iterator[tuple[Var, frozenset[Var]]]:
    """Yield each variable with its nearest ancestors (or itself) that have a counterpart."""
    roots: dict[Var, frozenset[Var]] = {}
    for eqn in eqns:
        ancestors = (roots.get(v, frozenset()) for v in variables(eqn.invars))
        others = frozenset().union(*ancestors)
        for var in eqn.outvars:
            roots[var] = frozenset([var]) if var in matched else others
    yield from roots.items()


def _between(run: BodyRun, wanted: Sequence[Atom], matched: Any) -> list[JaxprEqn]:
    """Return the equations that compute values from those with a counterpart."""
    return needed(run.jaxpr, variables(wanted), matched)


# --- iterations -----------------------------------------------------------------------------------
# The first iteration of a loop in which two variants diverge.
#
# Iterations are compiled for a dynamic count and start from known carries, so that the binary
# search runs no iteration more than twice.

#: An upper bound on the iterations of a loop.
_ALL = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Iteration:
    """An iteration in which two variants diverge.

    Attributes:
        number: Its number, from 0; for a scan, the index of the row it reads.
        bodies: The diverging body of each variant.
        arguments: The arguments of each body.
    """

    number: int
    bodies: tuple[ClosedJaxpr, ClosedJaxpr]
    arguments: tuple[list[Any], list[Any]]


class _Iterations:
    """The iterations of a variant's loop.

    Args:
        executor: Runs the iterations.
        loop: The loop.
        operands: Its operands.
    """

    def __init__(self, executor: Executor, loop: Scan | While, operands: Sequence[Any]):
        self._executor, self.loop = executor, loop
        self.operands = LoopOperands.of(loop, map(as_array, operands))
        self._compiled = jax.jit(self._until)

    def run(self, number: int, carry: Sequence[Any], stop: int) -> tuple[int, list[Any]]:
        """Run the iterations from `number` on to `stop`, or until the loop ends.

        Returns the total number of iterations run, and the carry after them.
        """
        run = self._one_by_one if self._executor.op_by_op else self._compiled
        with self._executor.running():
            end = run(self.operands, np.int32(number), list(carry), np.int32(stop))
        return int(end.number), list(end.carry)

    def _until(self, operands: LoopOperands, number: Any, carry: list[Any], stop: Any) -> Progress:
        return jax.lax.while_loop(  # type: ignore[no-any-return]
            lambda progress: progress.more & (progress.number < stop),
            lambda progress: advanced(self.loop, operands, progress),
            resumed_progress(self.loop, operands, number, carry),
        )

    def _one_by_one(self, operands: LoopOperands, number: Any, carry: Any, stop: Any) -> Progress:
        progress = resumed_progress(self.loop, operands, number, carry, self._executor.run)
        while progress.more and progress.number < stop:
            progress = advanced(self.loop, operands, progress, self._executor.run, row_of)
        return progress

    def given(self, number: int, carry: Sequence[Any]) -> list[Any]:
        """Return the arguments of the body in an iteration."""
        with self._executor.running():
            rows = [row_of(x, slice_number(self.loop, number)) for x in self.operands.xs]
        return [*self.operands.consts, *carry, *rows]


def first_iteration(
    comparator: Comparator,
    executors: tuple[Executor, Executor],
    loops: tuple[Scan | While, Scan | While],
    operands: tuple[Sequence[Any], Sequence[Any]],
    results: tuple[Sequence[Any], Sequence[Any]],
) -> Iteration | None:
    """Return the first iteration in which two loops diverge, or None.

    Args:
        comparator: Determines which values differ.
        executors: The executor of each.
        loops: The two loops.
        operands: The operands of each.
        results: The results of each.
    """
    last = _first_row(comparator, loops[0], results)
    a = _Iterations(executors[0], loops[0], operands[0])
    b = _Iterations(executors[1], loops[1], operands[1])
    runs, starts = (a, b), [a.operands.carry, b.operands.carry]
    stop = _ALL if last is None else last
    ends = [iterations.run(0, start, stop) for iterations, start in zip(runs, starts, strict=True)]
    count = min(number for number, _ in ends)
    uneven = ends[0][0] != ends[1][0]
    if uneven:
        ends = [
            iterations.run(0, start, count) for iterations, start in zip(runs, starts, strict=True)
        ]
    carries = [carry for _, carry in ends]
    if not _diverge(comparator, carries):
        if last is None and not uneven:
            return None
        return _condition(count, runs, carries) if uneven else _body(count, runs, carries)
    agreed, wrong, carries = 0, count, starts
    while wrong - agreed > 1:
        middle = (agreed + wrong) // 2
        middles = [
            iterations.run(agreed, carry, middle)[1]
            for iterations, carry in zip(runs, carries, strict=True)
        ]
        if _diverge(comparator, middles):
            wrong = middle
        else:
            agreed, carries = middle, middles
    return _body(agreed, runs, carries)


def _body(number: int, runs: tuple[_Iterations, _Iterations], carries: Sequence[Any]) -> Iteration:
    a, b = runs
    arguments = a.given(number, carries[0]), b.given(number, carries[1])
    return Iteration(slice_number(a.loop, number), (a.loop.body, b.loop.body), arguments)


def _condition(
    number: int, runs: tuple[_Iterations, _Iterations], carries: Sequence[Any]
) -> Iteration:
    a, b = runs
    assert isinstance(a.loop, While) and isinstance(b.loop, While)
    arguments = [*a.operands.cond_consts, *carries[0]], [*b.operands.cond_consts, *carries[1]]
    return Iteration(number, (a.loop.cond, b.loop.cond), arguments)


def _diverge(comparator: Comparator, carries: Sequence[Sequence[Any]]) -> bool:
    return any(comparator.differ(*pair) for pair in zip(*carries, strict=True))


def _first_row(
    comparator: Comparator, loop: Scan | While, results: tuple[Sequence[Any], Sequence[Any]]
) -> int | None:
    """Return the number of the first iteration with a differing row in a stacked result."""
    if not isinstance(loop, Scan):
        return None
    count = len(loop.carry)
    first_rows = []
    for pair in zip(*(outs[count:] for outs in results), strict=True):
        wrong = comparator.wrong(*pair)
        rows = np.flatnonzero(wrong.any(axis=tuple(range(1, wrong.ndim))))
        if len(rows):
            first_rows.append(loop.length - 1 - int(rows[-1]) if loop.reverse else int(rows[0]))
    return min(first_rows, default=None)


# --- prefixes -------------------------------------------------------------------------------------
# Find the smallest prefix of a program that two variants compute differently, compiled whole.
#
# Values in the middle of a program become results of the prefix only where the rest of the program
# reads them, so that the compiler may fuse all equations before, as in the whole program.

_EXACT = Comparator(Tolerance(0, 0), exact=True)


@document(names={"source": "place"})
@dataclass(frozen=True)
class Prefix:
    """The shortest prefix of a program for which a search has found different values.

    The prefix without its last equation gave equal values.

    Attributes:
        count: The number of equations of the prefix.
        total: The number of equations of the program, at its outer level.
        primitive: The primitive of its last equation.
        source: The user's line of that equation, followed by the library's.
        code: The source text of that line, if its file exists.
        results: The values that differ, of those that the rest of the program reads.
    """

    count: int
    total: int
    primitive: str
    source: Place
    code: str
    results: tuple[Measure, ...]


def differing_prefix(
    program: Program,
    executors: tuple[Executor, Executor],
    on_progress: Callable[[str], object] = lambda doing: None,
) -> Prefix | None:
    """Return a prefix whose values differ, while those of one equation fewer are bitwise equal.

    Args:
        program: The program that both run.
        executors: The executor of each variant.
        on_progress: Called with progress messages.

    Returns:
        None if the values of the whole program are equal.
    """
    search = _WrongValueSearch(program, executors)
    eqns = jaxcompat.open_jaxpr(program.jaxpr).eqns
    low, high = 0, len(eqns)
    wrong = search.wrong(high)
    while wrong and high - low > 1:
        middle = (low + high) // 2
        on_progress(f"comparing the first {middle:,} of {len(eqns):,} equations")
        measures = search.wrong(middle)
        if measures:
            high, wrong = middle, measures
        else:
            low = middle
    if not wrong:
        return None
    eqn, frames = eqns[high - 1], frames_now(program.roots)
    return Prefix(
        high,
        len(eqns),
        str(eqn.primitive.name),
        frames.line_of((eqn,)),
        frames.code_of((eqn,)),
        tuple(wrong),
    )


class _WrongValueSearch:
    def __init__(self, program: Program, executors: tuple[Executor, Executor]):
        self._program, self._executors = program, executors
        self._jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
        self._frames = frames_now(program.roots)
        self._definitions = {v: eqn for eqn in self._jaxpr.eqns for v in eqn.outvars}

    def wrong(self, count: int) -> list[Measure]:
        """Return the values that differ after the first `count` equations."""
        live = self._live(count)
        old, new = (self._values(executor, live) for executor in self._executors)
        return [
            measured(self._frames.named([self._definitions[var]]), a, b, Tolerance(0, 0))
            for var, a, b in zip(live, old, new, strict=True)
            if _EXACT.differ(a, b)
        ]

    def _values(self, executor: Executor, live: Sequence[Var]) -> list[Any]:
        return BodyRun(executor, self._program.jaxpr, executor.arguments).values(live)

    def _live(self, count: int) -> list[Var]:
        """Return the values of the first `count` equations that are read later, or are results."""
        computed = {v for eqn in self._jaxpr.eqns[:count] for v in eqn.outvars}
        later = [atom for eqn in self._jaxpr.eqns[count:] for atom in eqn.invars]
        read = dict.fromkeys(variables([*later, *self._jaxpr.outvars]))
        return [v for v in read if v in computed and is_comparable(v)]


# --- bisection ------------------------------------------------------------------------------------
# Results of variants compared: where they diverge, on which inputs, and from run to run.


@document(
    without=("reference", "code", "at_call"),
    names={"source": "place", "place": "pass_number", "step": "pass"},
)
@dataclass(frozen=True)
class Divergence:
    """The first equation at which a variant diverges from the reference.

    Attributes:
        reference: The name of the reference.
        variant: The name of the variant.
        step: The pass that causes the difference; "" if none does.
        place: The number of this pass, from 1; 0 if none.
        passes: The number of passes.
        found: Whether an equation was found.
        why: Why no equation was found, or "".
        strict: Whether it was found only by applying the tolerance to each element.
        within: Whether all results are within tolerance. The equation is then the first whose bits
            differ.
        primitive: The primitive of the equation.
        source: The user's line of the equation, followed by the library's.
        code: The source text of that line, if its file exists.
        scope: The scopes around the equation, as `cost --by scope` groups them.
        path: The enclosing equations, the outermost first.
        iteration: The iteration of each enclosing loop, from 0.
        counterpart: The equation of the variant, if it is a different one: `cos at model.py:7`.
        parameters: The parameters that differ.
        operands: The differences of its operands.
        results: The differences of its results.
        removed: The equations between these operands and results that only the reference has.
        added: The equations between them that only the variant has.
        at_call: Whether any of these equations is a call.
    """

    reference: str
    variant: str
    step: str = ""
    place: int = 0
    passes: int = 0
    found: bool = False
    why: str = ""
    strict: bool = False
    within: bool = False
    primitive: str = ""
    source: Place = UNKNOWN
    code: str = ""
    scope: str = ""
    path: tuple[str, ...] = ()
    iteration: tuple[int, ...] = ()
    counterpart: str = ""
    parameters: tuple[str, ...] = ()
    operands: tuple[Measure, ...] = ()
    results: tuple[Measure, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    at_call: bool = False


def find_divergence(
    variants: tuple[Variant, Variant],
    arguments: tuple[Sequence[Any], Sequence[Any]],
    results: tuple[Sequence[Any], Sequence[Any]] | None,
    tolerance: Tolerance,
    on_progress: Callable[[str], object] = lambda doing: None,
    positions: Sequence[tuple[int, int]] | None = None,
    exact: bool = False,
    executor: Callable[[Variant, Sequence[Any]], Executor] = Executor,
) -> Divergence:
    """Return the first equation at which a variant diverges from the reference.

    Args:
        variants: The reference and the other variant.
        arguments: The arguments of each.
        results: The results of each, if known.
        tolerance: The tolerance.
        on_progress: Called with progress messages.
        positions: The pairs of positions of corresponding arguments, if their order differs.
        exact: Whether all bits must be equal, instead of `tolerance`.
        executor: Returns an executor of the pieces of a variant.
    """
    first, second = (
        replace(variant, program=with_scalar_predicates(variant.program)) for variant in variants
    )
    variants = first, second
    found, strict = _divergence_point(
        variants, arguments, results, tolerance, on_progress, positions, exact, executor
    )
    if found is not None:
        return _DivergenceDescriber(variants[0], found, tolerance).divergence(
            variants[0].name, variants[1].name, strict and not exact
        )
    why = "every result is within tolerance"
    return Divergence(variants[0].name, variants[1].name, why=why)


def _divergence_point(
    variants: tuple[Variant, Variant],
    arguments: tuple[Sequence[Any], Sequence[Any]],
    results: tuple[Sequence[Any], Sequence[Any]] | None,
    tolerance: Tolerance,
    on_progress: Callable[[str], object],
    positions: Sequence[tuple[int, int]] | None,
    exact: bool,
    executor: Callable[[Variant, Sequence[Any]], Executor],
) -> tuple[DivergencePoint | None, bool]:
    """Return where two variants diverge, or None; and whether the tolerance is of each element."""
    executors: Any = tuple(executor(*pair) for pair in zip(variants, arguments, strict=True))
    bodies: Any = tuple(variant.program.jaxpr for variant in variants)
    placed = executors[0].arguments, executors[1].arguments
    for strict in (True,) if exact else (False, True):
        comparator = Comparator(tolerance, strict, exact)
        search = DivergenceSearch(comparator, executors, on_progress)
        found = search.find(bodies, placed, results, positions=positions)
        if found is not None:
            return found, strict
    return None, True


def diverging_part(
    programs: tuple[Program, Program], arguments: Sequence[Any]
) -> tuple[ClosedJaxpr, list[Any]] | None:
    """Return the equations of a program that another one computes differently, with operands.

    Args:
        programs: The reference and the other program.
        arguments: Their flat arguments.

    Returns:
        A jaxpr of the first equation that differs, after those of the reference alone that lead to
        it, and the values of its arguments, on which both programs agree. None if all results do.
    """
    before, after = (
        Variant(name, with_scalar_predicates(program), op_by_op=True)
        for name, program in zip(("before", "after"), programs, strict=True)
    )
    both, default = (arguments, arguments), Tolerance()
    point, _ = _divergence_point(
        (before, after), both, None, default, lambda doing: None, None, False, Executor
    )
    if point is None or not point.results:
        return None
    run, outs = point.runs[0], variables([old for old, _ in point.results])
    eqns = needed(run.jaxpr, outs, {old for old, _ in point.operands})
    operands = [*free_variables(eqns, outs)]
    body = jaxcompat.new_jaxpr((), (), operands, outs, eqns, run.jaxpr.debug_info)
    return body, run.values(operands)


class _DivergenceDescriber:
    """Describes a search result."""

    def __init__(self, variant: Variant, found: DivergencePoint, tolerance: Tolerance):
        self._program, self._found, self._tolerance = variant.program, found, tolerance
        self._frames = frames_now(variant.program.roots)
        self._scopes = ScopePaths(all_jaxprs(top_jaxpr(variant.program)), variant.program.roots)

    def divergence(self, reference: str, variant: str, strict: bool) -> Divergence:
        found = self._found
        old, new = found.eqns
        path = tuple(entered.eqn for entered in found.path)
        shown = old or new
        if not found.results:
            return Divergence(reference, variant, why=_FUSED, path=self._frames.path_of(path))
        around = (*path, *((shown,) if shown is not None else ()))
        same = new is None or (old is not None and old.primitive.name == new.primitive.name)
        return Divergence(
            reference,
            variant,
            found=True,
            strict=strict,
            primitive="" if shown is None else str(shown.primitive.name),
            source=self._frames.line_of(around),
            code=self._frames.code_of(around),
            scope="/".join(self._scopes.of(around)),
            path=self._frames.path_of(path),
            iteration=tuple(
                entered.iteration for entered in found.path if entered.iteration is not None
            ),
            counterpart="" if same or new is None else self._frames.named((*path, new)),
            parameters=_other_parameters(old, new),
            operands=tuple(map(self._measured, found.operands)),
            results=tuple(map(self._measured, found.results)),
            removed=tuple(self._frames.named((*path, eqn)) for eqn in found.between[0]),
            added=tuple(self._frames.named((*path, eqn)) for eqn in found.between[1]),
            at_call=any(map(_is_call, (old, new, *found.between[0], *found.between[1]))),
        )

    def _measured(self, pair: Pair) -> Measure:
        (a, b), (old, new) = self._found.runs, pair
        return measured(self._name(old), a.value(old), b.value(new), self._tolerance)

    def _name(self, atom: Atom) -> str:
        """Return the name of a value of the reference: an argument, or the equation's."""
        path, body = self._found.path, self._found.runs[0].jaxpr
        while not isinstance(atom, Literal):
            definition = next((eqn for eqn in body.eqns if atom in eqn.outvars), None)
            if definition is not None:
                return self._frames.named([*(entered.eqn for entered in path), definition])
            if atom not in body.invars:
                return "a constant"
            place = body.invars.index(atom)
            if not path:
                return self._program.arg_names[place]
            atom, body, path = path[-1].operands[place], path[-1].around, path[:-1]
        return "a literal"


_FUSED = (
    "run with intermediate values as results, no equation differs: the variants differ only "
    "where the compiler fuses equations"
)


def _is_call(eqn: JaxprEqn | None) -> bool:
    inside = None if eqn is None else regions(eqn)
    return inside is not None and inside.kind == "call"


def _other_parameters(old: JaxprEqn | None, new: JaxprEqn | None) -> tuple[str, ...]:
    """Return the differing parameters of two equations of one primitive, except for bodies."""
    if old is None or new is None or old.primitive is not new.primitive:
        return ()
    pairs = ((k, a, new.params.get(k)) for k, a in old.params.items() if not holds_jaxpr([a]))
    return tuple(f"{k}: {b} instead of {a}" for k, a, b in pairs if str(a) != str(b))


# --- trials ---------------------------------------------------------------------------------------
# Random inputs, and the reduction of an input on which two variants differ.

#: The number of inputs tried during a reduction.
MOST_TRIES = 300

#: The maximum number of elements of an input that is described.
_FEW = 4

#: The scales of floats after the first trial, as powers of ten.
_POWERS = (-2, -1, 0, 1, 2)


def scaled(values: Sequence[Any], random: Sequence[bool], trial: int) -> list[Any]:
    """Return the inputs of a trial; after the first, random floats are scaled."""
    rng = np.random.default_rng((trial, len(values)))
    return [
        (np.asarray(x) * 10.0 ** int(rng.choice(_POWERS))).astype(x.dtype)
        if trial and is_random and _is_number(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        else x
        for x, is_random in zip(values, random, strict=True)
    ]


def _is_number(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and not is_extended(dtype) and dtype != jax.dtypes.float0


def minimized(
    values: Sequence[Any], free: Sequence[bool], fails: Callable[[Sequence[Any]], bool]
) -> tuple[list[Any], int]:
    """Return a reduced input that still fails, and the number of inputs tried.

    An argument becomes zero, or else keeps as few nonzero elements as needed, by bisection. The
    remaining elements become one, or else integers.

    Args:
        values: Flat arguments.
        free: Whether each argument may change.
        fails: Returns True if the failure occurs for values of the same types.
    """
    search = _Minimizer(list(values), fails)
    for place, is_free in enumerate(free):
        if is_free and _is_number(values[place]):
            search.minimize(place)
    return search.values, search.tries


class _Minimizer:
    def __init__(self, values: list[Any], fails: Callable[[Sequence[Any]], bool]):
        self.values, self.tries, self._fails = values, 0, fails

    def minimize(self, place: int) -> None:
        """Reduce one argument."""
        array = np.asarray(self.values[place])
        if not array.any() or self._take(place, np.zeros_like(array)):
            return
        self._drop(place)
        left = np.asarray(self.values[place])
        if self._take(place, (left != 0).astype(left.dtype)) or left.dtype == bool:
            return
        if jnp.issubdtype(left.dtype, jnp.floating):
            self._take(place, np.rint(left.astype(np.float64)).astype(left.dtype))

    def _drop(self, place: int) -> None:
        """Set elements to zero, starting with large parts, as long as it still fails."""
        parts = 2
        while self.tries < MOST_TRIES:
            array = np.asarray(self.values[place])
            nonzero = np.flatnonzero(array)
            if len(nonzero) < 2:
                return
            parts = min(parts, len(nonzero))
            if any(self._take(place, reduced) for reduced in _without(array, nonzero, parts)):
                parts = max(parts - 1, 2)
            elif parts == len(nonzero):
                return
            else:
                parts *= 2

    def _take(self, place: int, array: np.ndarray) -> bool:
        """Replace an argument by an array if it still fails; return whether it was replaced."""
        if self.tries >= MOST_TRIES or np.array_equal(array, np.asarray(self.values[place])):
            return False
        self.tries += 1
        tried = [*self.values[:place], array, *self.values[place + 1 :]]
        if not self._fails(tried):
            return False
        self.values = tried
        return True


def _without(array: np.ndarray, nonzero: np.ndarray, parts: int) -> Iterator[np.ndarray]:
    for part in np.array_split(nonzero, parts):
        zeroed = array.copy()
        zeroed.reshape(-1)[part] = 0
        yield zeroed


def input_text(value: Any) -> str:
    """Return an input in words: `zero except [2, 1] = 1.0`."""
    if not _is_number(value):
        return "random"
    array = np.asarray(value)
    indices = np.argwhere(array)
    if not len(indices):
        return "zero"
    if array.ndim == 0:
        return str(array)
    if len(indices) > _FEW:
        return f"{len(indices):,} of {array.size:,} elements are not zero"
    parts = (f"{list(map(int, place))} = {array[tuple(place)]}" for place in indices)
    return "zero except " + ", ".join(parts)


# --- comparison -----------------------------------------------------------------------------------
# Results of variants of a program compared with a reference.


class SmallestArgument(NamedTuple):
    """An argument of the smallest failing input.

    Attributes:
        name: The name of the argument.
        value: Its value in words: `zero except [2] = 1.0`.
    """

    name: str
    value: str


@document(without=("arguments",), also=("within",))
@dataclass(frozen=True)
class Comparison(Printed):
    """The results of variants of a program on the same inputs.

    Attributes:
        name: The name of the program.
        reference: The name of the variant that the others are compared with.
        inputs: A description of the inputs.
        random: The names of the arguments that are random.
        variants: The other variants, with the differences of their results.
        error: Why the reference has no results to compare with, or "".
        partings: The first diverging equation of each variant outside of the tolerance, if
            requested.
        arguments: The flat arguments of the compared runs.
        smallest: If trials failed, the arguments of the smallest failing input.
    """

    name: str
    reference: str
    inputs: str
    random: tuple[str, ...]
    variants: tuple[Compared, ...]
    error: str = ""
    partings: tuple[Divergence, ...] = ()
    arguments: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    smallest: tuple[SmallestArgument, ...] = ()

    @property
    def unproven(self) -> list[str]:
        """A message for each result with mostly non-finite elements, which prove nothing."""
        results = {result.name: result for variant in self.variants for result in variant.unproven}
        return [
            f"{name} is not finite in {max(result.nonfinite):,} of {result.size:,} elements"
            for name, result in results.items()
        ]

    @property
    def within(self) -> bool:
        """Whether all variants ran, and all results are within tolerance."""
        return not self.error and all(variant.within for variant in self.variants)


# --- repeated -------------------------------------------------------------------------------------
# The results of `determinism`: the differences between runs of a program.

#: The change for a run: none, a new compilation, a new trace, another process, ….
Kind: TypeAlias = OneOf["run", "compile", "trace", "process", "device", "threads", "option"]


@document(also=("equal", "differing"))
@dataclass(frozen=True)
class Repetition:
    """A run compared with the first one, bit for bit.

    Attributes:
        name: The change: `compiled again`, `8 threads (NPROC=8)`.
        kind: The kind of this change.
        results: The difference of each result; empty if the results cannot be compared.
        other_program: How its traced program differs from that of the first run, or "".
        error: Why the run has no results, in one line, or "".
    """

    name: str
    kind: Kind
    results: tuple[Measure, ...] = ()
    other_program: str = ""
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether it ran, and the program and all bits are the same. All NaNs count as equal."""
        return not (self.error or self.other_program) and self.differing == 0

    @property
    def differing(self) -> int:
        """The number of results that differ."""
        return sum(not result.equal for result in self.results)


@dataclass(frozen=True)
class Cause:
    """Where a run begins to differ from the first one.

    Attributes:
        name: The name of the run.
        divergence: The first equation whose results differ for equal operands, with intermediate
            values as results; or why none was found.
        prefix: If no equation was found, the smallest prefix of the program that differs when
            compiled as a whole; null if there is none.
    """

    name: str
    divergence: Divergence
    prefix: Prefix | None = None


@document(also=("equal",))
@dataclass(frozen=True)
class Determinism(Printed):
    """A program run again in several ways, compared bit for bit with its first run.

    Attributes:
        name: The name of the program.
        inputs: A description of the inputs.
        random: The names of the arguments that are random.
        reference: The device of the first run.
        repetitions: The other runs.
        causes: Where runs begin to differ, one for each kind of change and each option.
        risks: Equations that may differ in other runs, or on other devices.
        not_tried: The kinds of runs that were not tried, each with the reason.
    """

    name: str
    inputs: str
    random: tuple[str, ...]
    reference: str
    repetitions: tuple[Repetition, ...]
    causes: tuple[Cause, ...] = ()
    risks: tuple[Risk, ...] = ()
    not_tried: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all runs gave the same bits, and all traces the same program."""
        return all(repetition.equal for repetition in self.repetitions)

    @property
    def unproven(self) -> tuple[Measure, ...]:
        """The results with mostly non-finite elements, whose equal bits prove nothing."""
        results = {m.name: m for run in self.repetitions for m in run.results if not m.is_proof}
        return tuple(results.values())


@dataclass(frozen=True)
class FreshRun:
    """The program and the results of the same function in another process.

    Attributes:
        program: The text of its program, with stubs for callbacks.
        results: Its results by name.
    """

    program: str
    results: dict[str, Any]
