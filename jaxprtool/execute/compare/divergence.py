"""The first equation at which two variants diverge.

Both are run piece by piece on the same inputs. At several cuts through the reference, all values
that are live at the cut are compared with their counterparts in the variant. The search continues
between the last cut at which all agree and the first at which some differ, from the values there.
It enters calls, the branch taken, and the first diverging iteration of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.execute.compare.body_runs import BodyRun, Executor, needed
from jaxprtool.execute.compare.comparator import Comparator, comparable
from jaxprtool.execute.compare.iterations import first_iteration
from jaxprtool.ir.core.equations import variables
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.structured import Cond, Scan, ShardMap, While, view
from jaxprtool.ir.equality.equation_keys import is_cast
from jaxprtool.ir.equality.equivalence import same_operation
from jaxprtool.ir.equality.value_keys import literal_key
from jaxprtool.ir.evaluation.interpret import branch_of
from jaxprtool.ir.graphs.counterparts import MatchedBody, counterparts
from jaxprtool.jaxcompat import AbstractRef, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

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
class Found:
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
            for each in counterparts(a, b, arguments):
                self._bodies.setdefault(each.bodies, each)
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
    ) -> Found | None:
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
        a, b = (BodyRun(*each) for each in zip(self._executors, bodies, arguments, strict=True))
        outs = list(zip(a.jaxpr.outvars, b.jaxpr.outvars, strict=True))
        if results is None:
            results = a.values(a.jaxpr.outvars), b.values(b.jaxpr.outvars)
        values = zip(outs, *results, strict=True)
        wrong = [pair for pair, x, y in values if self._comparator.differ(x, y)]
        if not wrong:
            return None
        counterpart = self._matches.of(a.jaxpr, b.jaxpr, positions)
        level = _Level(self._comparator, a, b, counterpart, wrong)
        return self._inward(level.cause(level.found(path, self._on_progress)))

    def _inward(self, found: Found) -> Found:
        """Return the divergence inside the bodies of an equation, or `found` if there is none."""
        old, new = found.eqns
        if old is None or new is None or type(view(old)) is not type(view(new)):
            return found
        inner = self._inside(found, old, new)
        return found if inner is None else inner

    def _inside(self, found: Found, old: JaxprEqn, new: JaxprEqn) -> Found | None:
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
                bodies, given, number = part.bodies, part.arguments, part.number
            case Cond() as cond, Cond() as other_cond:
                bodies = (
                    branch_of(cond, operands[0][0]),
                    branch_of(other_cond, operands[1][0]),
                )
                given = operands[0][1:], operands[1][1:]
            case _ if a.kind == "call" and b.kind == "call":
                bodies = a.bodies[0], b.bodies[0]
                pairs = zip((a, b), operands, strict=True)
                of_a, of_b = ([values[i] for i in e.regions[0].ins] for e, values in pairs)
                given = of_a, of_b
            case _:
                return None
        entered = EnteredBody(old, number, x.jaxpr, _given_to(a, bodies[0]))
        return self.find(bodies, given, None, (*found.path, entered))


def _order(loop: Scan | While) -> tuple[int, bool] | None:
    """Return the number of iterations of a scan and whether it runs in reverse."""
    return (loop.length, loop.reverse) if isinstance(loop, Scan) else None


def _given_to(held: Regions, body: ClosedJaxpr) -> list[Atom]:
    """Return the operand of each argument of an equation's body."""
    opened = jaxcompat.open_jaxpr(body)
    which = [jaxcompat.open_jaxpr(each) for each in held.bodies].index(opened)
    return [held.eqn.invars[i] for i in held.regions[which].ins]


class _Level:
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
            if other is not None and comparable(var) and var.aval.shape == other.aval.shape:
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

    def found(self, path: Path, on_progress: Callable[[str], object]) -> Found:
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

    def cause(self, found: Found) -> Found:
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

    def _at_results(self, path: Path) -> Found:
        self._compute(self._wrong)
        wrong = [pair for pair in self._wrong if self._differ(pair)]
        if not wrong:
            return Found((self._a, self._b), path, (None, None), [], [], ((), ()))
        old, new = wrong[0]
        eqns = self._a.definitions.get(old), self._b.definitions.get(new)  # type: ignore[arg-type]
        return self._found(path, eqns, wrong)

    def _found(
        self, path: Path, eqns: tuple[JaxprEqn | None, JaxprEqn | None], wrong: Sequence[Pair]
    ) -> Found:
        known = set(self._counterparts) - {old for old, _ in wrong}
        others = {new: old for old, new in self._counterparts.items() if old in known}
        removed = _between(self._a, [old for old, _ in wrong], known)
        added = _between(self._b, [new for _, new in wrong], others.keys())
        operands = {v: None for eqn in removed for v in variables(eqn.invars) if v in known}
        operands |= {others[v]: None for eqn in added for v in variables(eqn.invars) if v in others}
        pairs: list[Pair] = [(v, self._counterparts[v]) for v in operands]
        pairs += _literals(*eqns)
        self._compute(pairs)
        between = tuple(
            [eqn for eqn in found if eqn is not own]
            for found, own in zip((removed, added), eqns, strict=True)
        )
        return Found((self._a, self._b), path, eqns, wrong, pairs, between)  # type: ignore[arg-type]


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
    found: dict[Var, frozenset[Var]] = {}
    for eqn in eqns:
        given = (found.get(v, frozenset()) for v in variables(eqn.invars))
        others = frozenset().union(*given)
        for var in eqn.outvars:
            found[var] = frozenset([var]) if var in matched else others
    yield from found.items()


def _between(run: BodyRun, wanted: Sequence[Atom], known: Any) -> list[JaxprEqn]:
    """Return the equations that compute values from those with a counterpart."""
    return needed(run.jaxpr, variables(wanted), known)
