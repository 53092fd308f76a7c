"""Choose the repeated segments that become calls, in a program as one sequence of tokens.

The saving is measured in equations that a compiler processes: those of all copies but one, minus
the cost of the calls, which grows with the number of values that cross their boundary. A segment is
shifted or shortened if fewer values then cross its boundary, and no chain of equations that a
compiler fuses is cut in two. If equations repeat without a gap, any period of them could be the
segment: among those that save about the same, the one that begins where a scope or a function
begins is chosen. A segment of several periods is rejected.

All of this uses tokens. The chosen copies are then compared operand by operand: copies of a segment
must connect their values in the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import JaxprCache, anchor, cached_method
from jaxprtool.ir.equations import (
    Contains,
    bodies,
    equations,
    fuses,
    holders,
    reachable,
    size_of,
    substitute,
)
from jaxprtool.ir.equivalence import Unkeyable, parameters_key
from jaxprtool.ir.regions import CustomJVP, call, holds_jaxpr, regions, sub_jaxprs, view
from jaxprtool.ir.rewrite import with_bodies
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Mark,
    Var,
    open_jaxpr,
)
from jaxprtool.primitives import scope_of, sow_p

# --- choice ---------------------------------------------------------------------------------------
# Choose the repeated segments that become calls: those that save most, best first.

#: The number of periods of consecutive windows that are compared by their origin, and operand by
#: operand.
_TRIED, _COMPARED = 32, 8

#: With more windows than this, only periods that few values cross are considered.
_MOST = 100_000


@dataclass(frozen=True)
class Costs:
    """The costs that savings are weighed against. All but the first two are in equations.

    Attributes:
        copies: The minimum number of copies.
        equations: The minimum number of equations of a segment.
        body: The cost of a shared body.
        operand: The cost of each operand and result of a call.
        fusible: True if a segment that a compiler fuses as a whole may be chosen, such as a stage
            of an optimizer. Inlined, it compiles in no time and updates its arrays in place.
        call: The fixed cost of a call.
        value: The cost of each value that crosses a boundary which may be moved.
        fused: The additional cost if a compiler would fuse the two sides.
        gaps: True if there may be other equations between the copies.
        periods: True if a segment may be repetitions of one that has too few equations.
    """

    copies: int
    equations: int
    body: float
    operand: float
    fusible: bool = True
    call: float = 1.0
    value: float = 0.1
    fused: float = 0.5
    gaps: bool = True
    periods: bool = False


@dataclass(frozen=True, eq=False)
class Segment:
    """The copies of a segment: their starts, their length, and the total saving."""

    starts: Positions
    length: int
    saved: float


class SegmentChoice:
    """One selection among the repeated segments of a text."""

    def __init__(self, text: ItemSequence, costs: Costs):
        self._text = text
        self._costs = costs
        self._windows = Windows(text.tokens)
        self._free = np.ones(len(text.tokens) + 1, bool)
        self._taken = np.zeros(len(text.tokens) + 1, np.int64)
        definition = np.append(text.definitions, -1)[text.read]  # there may be none
        self._near = np.where(text.read >= 0, text.readers - definition, np.iinfo(np.int64).max)

    def segments(self) -> Iterator[Segment]:
        """Yield segments that do not overlap, those that save most first."""
        number = count()
        heap = [
            (-self._at_most(starts, length), next(number), starts, length)
            for length, groups in self._windows.groups(1, self._costs.copies)
            for starts in groups
        ]
        heap = [entry for entry in heap if entry[0] < 0]
        heapify(heap)
        while heap:
            hoped, _, starts, length = heappop(heap)
            segment = self._segment(starts, length)
            if segment is None:
                continue
            if heap and segment.saved < 0.8 * -heap[0][0] and segment.saved < 0.8 * -hoped:
                heappush(heap, (-segment.saved, next(number), starts, length))
                continue
            self._take(segment)
            yield segment
            heappush(heap, (-segment.saved, next(number), starts, length))

    def _take(self, segment: Segment) -> None:
        for start in segment.starts:
            self._free[start : start + segment.length] = False
        np.cumsum(~self._free[:-1], out=self._taken[1:])

    def _at_most(self, starts: Positions, length: int) -> float:
        """Return an approximate upper bound of the saving by a group, however it is extended."""
        longest = int(length * GROWTH) + 1
        copies = min(len(starts), 1 + int(starts[-1] - starts[0]) // length)
        end = min(int(starts[0]) + longest, len(self._text.tokens))
        weight = float(self._text.weights[end] - self._text.weights[starts[0]])
        if copies < self._costs.copies:
            return 0.0
        return (copies - 1) * weight - copies * self._costs.call - self._costs.body

    def _size(self, start: int, length: int) -> int:
        """Return the number of equations of a segment."""
        return int(self._text.sizes[start + length] - self._text.sizes[start])

    def _is_segment(self, start: int, length: int) -> bool:
        """Return True if a period may be a segment: it is long enough, or contains a call."""
        if not self._costs.periods or self._size(start, length) >= self._costs.equations:
            return True
        return any(isinstance(item, SegmentCopy) for item in self._text.copy(start, length))

    # --- one group -----------------------------------------------------------------------------

    def _segment(self, starts: Positions, length: int) -> Segment | None:
        """Return the best segment of a group of equal windows; None if it saves nothing."""
        starts = _not_overlapping(
            starts[self._taken[starts + length] == self._taken[starts]], length
        )
        if len(starts) < self._costs.copies:
            return None
        starts, length = self._extended(starts, length)
        periods = self._windows.periods(int(starts[0]), length)
        if any(self._is_segment(int(starts[0]), period) for period in periods):
            return None  # its period is a segment, and more copies of that are saved
        best = Segment(starts, length, 0.0)
        for moved in self._moved(starts, length):
            segment = self._alike(*moved)
            if segment.saved > best.saved:
                best = segment
            if len(segment.starts) == len(moved[0]):
                break  # those that follow cannot save more
        return best if best.saved > 0 else None

    def _extended(self, starts: Positions, length: int) -> tuple[Positions, int]:
        """Extend windows while they are equal, to the right and then to the left."""
        gap = int(np.diff(starts).min())
        n = len(self._text.tokens)
        most = min(gap, n - int(starts[-1])) - length
        length += self._windows.common(starts, length, self._free_after(starts + length, most))
        most = min(gap - length, int(starts[0]))
        left = self._windows.common(starts, length, self._free_before(starts, most), left=True)
        return starts - left, length + left

    def _free_after(self, ends: Positions, most: int) -> int:
        """Return how many positions after each end are free, up to `most`."""
        while most > 0 and (self._taken[ends + most] != self._taken[ends]).any():
            most //= 2
        return max(most, 0)

    def _free_before(self, starts: Positions, most: int) -> int:
        while most > 0 and (self._taken[starts - most] != self._taken[starts]).any():
            most //= 2
        return max(most, 0)

    def _moved(self, starts: Positions, length: int) -> list[tuple[Positions, int, float]]:
        """Return the windows shifted or shortened so that the fewest values cross their boundaries.

        Each comes with the cost of its boundaries. If most windows are consecutive, several periods
        are returned, since the copies may be alike in any of them.
        """
        crossing = self._crossing(starts, length)
        weights = self._text.weights
        if 2 * int((np.diff(starts) == length).sum()) >= len(starts) - 1:
            return self._best_periods(starts, length, crossing)
        most = length // 4
        inner = weights[starts[0] : starts[0] + length + 1] - weights[starts[0]]
        lost = inner[: most + 1] * (len(starts) - 1) + crossing[: most + 1]
        first = int(lost.argmin())
        gone = (inner[-1] - inner[length - most :]) * (len(starts) - 1) + crossing[length - most :]
        end = length - most + int(gone.argmin())
        return [(starts + first, end - first, float(crossing[first] + crossing[end]))]

    def _best_periods(
        self, starts: Positions, length: int, crossing: NDArray[np.float64]
    ) -> list[tuple[Positions, int, float]]:
        """Return the best periods for windows most of which are consecutive."""
        weight = self._text.weight(int(starts[0]), length)
        starts = np.concatenate([[starts[0] - length], starts])
        moves = np.arange(length) if length * len(starts) <= _MOST else np.argsort(crossing)[:64]
        at = starts + moves[:, None]
        inside = (at >= 0) & (at + length < len(self._text.tokens))
        at = np.where(inside, at, 0)
        hashes = self._windows.hashes(at, length)
        same = hashes == hashes[:, [len(starts) // 2]]
        same &= inside & (self._taken[at + length] == self._taken[at])
        copies = same.sum(1)
        cost = 2 * crossing[moves] * copies / len(starts)
        gain = (copies - 1) * weight - cost
        best = np.argsort(-gain, kind="stable")[:_TRIED]
        best = best[copies[best] >= self._costs.copies]
        if not len(best):
            return []
        as_good = gain[best] >= gain[best[0]] - self._costs.fused * 2 * copies[best[0]]
        natural = sorted(best[as_good].tolist(), key=lambda i: self._nearness(at[i][same[i]]))
        chosen = [*natural, *best[~as_good].tolist()][:_COMPARED]
        return [(at[i][same[i]], length, float(cost[i])) for i in chosen]

    def _nearness(self, starts: Positions) -> tuple[int, int, int]:
        """Return the nearness of an inner window to the item before it; see `nearness`."""
        start = int(starts[len(starts) // 2])
        before, after = (self._text.items[i] for i in (start - 1, start))
        if before is None or after is None:
            return (0, 0, 0)
        return nearness(first_equation([before]), first_equation([after]))

    def _crossing(self, starts: Positions, length: int) -> NDArray[np.float64]:
        """Return the cost of the values that cross each offset in windows, summed over all windows.

        Values from further away than the length of a window cross any boundary, wherever it is.
        """
        text = self._text
        low, high = max(0, int(starts[0]) - length), int(starts[-1]) + length
        slots = slice(int(text.slots[low]), int(text.slots[min(high + length, len(text.tokens))]))
        near = np.flatnonzero(self._near[slots] <= length) + slots.start
        reader, definition = text.readers[near], text.definitions[text.read[near]]
        last = np.full(len(text.definitions), -1)
        np.maximum.at(last, text.read[near], reader)
        values = np.flatnonzero(last >= 0)
        fused = np.zeros(len(text.definitions), bool)
        fused[text.read[near[text.fusible[reader] & text.fusible[definition]]]] = True
        cost = self._costs.value + self._costs.fused * fused[values]
        change = np.zeros(len(text.tokens) + 2)
        np.add.at(change, text.definitions[values] + 1, cost)
        np.add.at(change, last[values] + 1, -cost)
        crossing = np.cumsum(change)
        totals: NDArray[np.float64] = crossing[starts[:, None] + np.arange(length + 1)].sum(0)
        return totals

    def _alike(self, starts: Positions, length: int, cost: float) -> Segment:
        """Return the copies that connect values in the same way, of the kind that saves most."""
        tokens = self._text.tokens[starts[:, None] + np.arange(length)]
        starts = starts[(tokens == tokens[0]).all(1)]  # equal hashes are no proof
        links = self._text.links(starts, length)
        by_links: dict[bytes, list[int]] = {}
        for i, row in enumerate(links):
            by_links.setdefault(row.tobytes(), []).append(i)
        candidates = [
            self._saving(starts[copies], length, links[copies[0]], cost)
            for copies in by_links.values()
        ]
        return max(candidates, key=lambda segment: segment.saved)

    def _saving(self, starts: Positions, length: int, links: Positions, cost: float) -> Segment:
        text, costs = self._text, self._costs
        if not costs.gaps:
            runs = np.split(starts, np.flatnonzero(np.diff(starts) != length) + 1)
            starts = max(runs, key=len)
        weight = text.weight(int(starts[0]), length)
        if len(starts) < costs.copies or self._size(int(starts[0]), length) < costs.equations:
            return Segment(starts, length, 0.0)
        if not costs.fusible and text.fuses(int(starts[0]), length):
            return Segment(starts, length, 0.0)
        results = text.results(starts, length).any(0)
        call = costs.call + costs.operand * (int((links < 0).sum()) + int(results.sum()))
        gone = (len(starts) - 1) * weight
        return Segment(starts, length, gone - len(starts) * call - costs.body - cost)


def _not_overlapping(starts: Positions, length: int) -> Positions:
    """Return a maximal subset of starts, from the first, whose windows do not overlap."""
    chosen: list[int] = []
    end = -1
    for start in starts.tolist():
        if start >= end:
            chosen.append(start)
            end = start + length
    return np.array(chosen, np.int64)


# --- bodies ---------------------------------------------------------------------------------------
# The bodies of a program while its repeated segments become calls.
#
# An `OutlineBody` is a jaxpr, or one of the new shared bodies, as a list of items: equations, and
# `SegmentCopy` ones, which will be calls. Items are replaced repeatedly; the calls are written at
# the end, from the innermost bodies outwards, since a shared body may contain calls itself by then.


@dataclass(eq=False)
class OutlineBody:
    """The items of one jaxpr.

    Attributes:
        items: Its equations and calls, in order.
        invars: Its arguments.
        outvars: Its results.
        name: The name of the calls of a shared body.
    """

    items: list[Item]
    invars: Sequence[Var]
    outvars: Sequence[Atom]
    name: str = ""


@dataclass(eq=False)
class SegmentCopy:
    """One copy of a segment: a call of its shared body.

    Attributes:
        body: The shared body.
        invars: The operands.
        outvars: The results.
        like: The first equation of the copy.
        source: The source info of the call.
    """

    body: OutlineBody
    invars: Sequence[Atom]
    outvars: Sequence[Var]
    like: JaxprEqn
    source: Any


Item: TypeAlias = "JaxprEqn | SegmentCopy"


@dataclass(eq=False)
class ProgramBodies:
    """All bodies of a program, from which the program is rebuilt with its calls.

    Attributes:
        jaxpr: The program's jaxpr.
        found: A body for each jaxpr that calls may be written in, the outermost first.
        shared: The new shared bodies.
        names: The body names that calls of the program are already marked with.
    """

    jaxpr: AnyJaxpr
    found: dict[Jaxpr, OutlineBody] = field(default_factory=dict)
    shared: list[OutlineBody] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for body in reachable((jaxcompat.open_jaxpr(self.jaxpr),), _open_jaxprs):
            self.found[body] = OutlineBody(list(body.eqns), body.invars, body.outvars)
            marked = (jaxcompat.marked_name(eqn) for eqn, _ in holders(body))
            self.names.update(name for name in marked if name is not None)

    def __iter__(self) -> Any:
        yield from self.found.values()
        yield from self.shared

    def open_calls(self) -> None:
        """Inline the calls of shared bodies that are called once, or consist of one call.

        Such bodies remain when they were found as a part of others.
        """
        self._drop_unused()
        mentions = Counter(
            item.body for body in self for item in body.items if isinstance(item, SegmentCopy)
        )
        removed = set()
        for body in self.shared:
            wraps = len(body.items) == 1 and isinstance(body.items[0], SegmentCopy)
            if wraps:
                body.items[0].body.name = body.name
            if wraps or mentions[body] < 2:
                removed.add(body)
        self.shared = [body for body in self.shared if body not in removed]
        for body in self if removed else ():
            body.items = list(chain.from_iterable(_without(removed, item) for item in body.items))

    def _drop_unused(self) -> None:
        """Forget the bodies that are no longer held or called: those of loops in copies."""
        start = self.found[jaxcompat.open_jaxpr(self.jaxpr)]
        reached = set(reachable((start,), self._inside))
        self.found = {jaxpr: body for jaxpr, body in self.found.items() if body in reached}
        self.shared = [body for body in self.shared if body in reached]

    def _inside(self, body: OutlineBody) -> Iterator[OutlineBody]:
        for item in body.items:
            if isinstance(item, SegmentCopy):
                yield item.body
            elif item.params and holds_jaxpr(item.params.values()) and _open(item):
                yield from (self.found[jaxpr] for _, jaxpr in bodies(item))

    def build(self, mark: Mark) -> AnyJaxpr:
        """Return the program with its calls written, and marked."""
        return _BodyRebuilder(self, mark).closed(self.jaxpr)


def first_equation(items: Sequence[Item]) -> JaxprEqn:
    """Return the first equation among items; for a call, the first of its copy."""
    first = items[0]
    return first.like if isinstance(first, SegmentCopy) else first


def _without(removed: Collection[OutlineBody], item: Item) -> Iterator[Item]:
    """Yield an item; for a call of one of these bodies, its equations on fresh variables."""
    if not isinstance(item, SegmentCopy) or item.body not in removed:
        yield item
        return
    atoms: dict[Atom, Atom] = dict(zip(item.body.invars, item.invars, strict=True))
    results = dict(zip(item.body.outvars, item.outvars, strict=True))
    source_of = jaxcompat.source_under(item.like.replace(source_info=item.source))
    for inner in item.body.items:
        operands = substitute(inner.invars, atoms)
        outs = [
            out if type(out := results.get(v, v)) is not DropVar and out is not v else _fresh(v)
            for v in inner.outvars
        ]
        atoms.update(zip(inner.outvars, outs, strict=True))
        yield from _without(
            removed, copied(inner, operands, outs, source_of(source_of_item(inner)))
        )


def _fresh(var: Var) -> Var:
    return DropVar(var.aval) if type(var) is DropVar else Var(var.aval)


def copied(item: Item, operands: list[Atom], outs: list[Var], source: Any) -> Item:
    """Return an item with other operands, results and source info."""
    if isinstance(item, SegmentCopy):
        return SegmentCopy(item.body, operands, outs, item.like, source)
    return item.replace(invars=operands, outvars=outs, source_info=source)


def source_of_item(item: Item) -> Any:
    """Return the `source_info` of an item."""
    return item.source if isinstance(item, SegmentCopy) else item.source_info


def _open(eqn: JaxprEqn) -> bool:
    """Return True if calls may be written in the bodies of an equation.

    JAX differentiates the function of a custom derivative in place of its body.
    """
    seen = view(eqn)
    return seen is not None and not isinstance(seen, CustomJVP)


def _open_jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Return the bodies in a jaxpr that calls may be written in."""
    return (body for eqn, inner in holders(jaxpr) if _open(eqn) for _, body in inner)


class _BodyRebuilder:
    """The rebuilt jaxprs of bodies with their calls, each made once."""

    def __init__(self, bodies: ProgramBodies, mark: Mark):
        self._bodies = bodies
        self._mark = mark
        self._closed: dict[Any, AnyJaxpr] = {}
        self._calls: dict[OutlineBody, JaxprEqn] = {}

    def closed(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr with the calls in it, at every depth."""
        body = self._bodies.found.get(jaxcompat.open_jaxpr(jaxpr))
        if body is None:
            return jaxpr
        key = anchor(jaxpr), type(jaxpr)
        if key not in self._closed:
            eqns = list(map(self._equation, body.items))
            old = jaxcompat.open_jaxpr(jaxpr).eqns
            same = len(eqns) == len(old) and all(a is b for a, b in zip(eqns, old, strict=True))
            self._closed[key] = jaxpr if same else jaxcompat.replace_jaxpr(jaxpr, eqns=eqns)
        return self._closed[key]

    def _equation(self, item: Item) -> JaxprEqn:
        if not isinstance(item, SegmentCopy):
            if item.params and holds_jaxpr(item.params.values()) and _open(item):
                return with_bodies(item, self.closed)
            return item
        if item.body not in self._calls:
            self._calls[item.body] = self._first_call(item)
        return self._calls[item.body].replace(
            invars=list(item.invars), outvars=list(item.outvars), source_info=item.source
        )

    def _first_call(self, item: SegmentCopy) -> JaxprEqn:
        body = item.body
        closed = _jaxpr(body, list(map(self._equation, body.items)))
        eqn = call(closed, item.invars, item.outvars, item.like)
        mark = self._mark
        if mark == "unit" and writes_into_arguments(closed):
            mark = "call"
        context = jaxcompat.marked(item.like.ctx, mark, body.name)
        return eqn.replace(ctx=context, effects=closed.effects)


def _jaxpr(body: OutlineBody, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    debug = jaxcompat.DebugInfo("jit", body.name, ("",) * len(body.invars), None)
    return jaxcompat.new_jaxpr((), (), body.invars, body.outvars, eqns, debug)


# --- text -----------------------------------------------------------------------------------------
# A program as one sequence of tokens, in which repetition is searched for.
#
# Each equation of each body is a position of the sequence, and equations with the same operation on
# operands of the same types have the same token. A token does not depend on which operands these
# are, on the values and weak types of literals, or on name scopes and source locations. Unique
# tokens separate bodies. Equations that may not be moved into a call have a unique token too: those
# with effects, and those whose meaning would change in a call.
#
# Arrays beside the tokens state where values are defined and last read, so that segments are
# compared, and the values that cross a boundary counted, without visiting the equations.

#: Positions in a text, or numbers of its operands or values.
Positions = NDArray[np.int64]

#: The last use of a value that is a result of its body.
NEVER_DEAD = np.iinfo(np.int64).max

#: The weight of an equation that only moves elements: it costs a compiler next to nothing.
MOVE_WEIGHT = 0.25

#: The weight of a reduction: XLA fuses it with everything around it, in superlinear time.
REDUCTION_WEIGHT = 12.0


@dataclass(frozen=True, eq=False)
class ItemSequence:
    """The sequence, with facts about each position, each operand and each value.

    Attributes:
        items: The item at each position; None between two bodies.
        starts: The position at which each body begins.
        tokens: The token of each position.
        weights: The cumulative cost of compilation, in equations: that of the first i positions.
        sizes: The cumulative number of equations, including those in bodies.
        values: The number of the first value that each position defines.
        slots: The number of the first operand of each position.
        read: The value of each operand, or -1 if no item of the body defines it.
        readers: The position of the item of each operand.
        definitions: The position that defines each value.
        last: The last position that reads each value; NEVER_DEAD if it is a result of the body.
        fusible: True if a compiler fuses the item with those that read it or that it reads.
    """

    items: Sequence[Item | None]
    starts: Sequence[int]
    tokens: Positions
    weights: NDArray[np.float64]
    sizes: Positions
    values: Positions
    slots: Positions
    read: Positions
    readers: Positions
    definitions: Positions
    last: Positions
    fusible: NDArray[np.bool_]

    def copy(self, start: int, length: int) -> list[Item]:
        """Return the items of a segment."""
        return [item for item in self.items[start : start + length] if item is not None]

    def fuses(self, start: int, length: int) -> bool:
        """Return True if a compiler fuses all of a segment."""
        return bool(self.fusible[start : start + length].all())

    def links(self, starts: Positions, length: int) -> Positions:
        """Return the number of the segment's value that each operand is; -1 for outside values.

        There is a row for each segment. All rows have the same length, since the segments have the
        same tokens.
        """
        first = int(starts[0])
        operands = np.arange(int(self.slots[first + length] - self.slots[first]))
        numbers = self.read[self.slots[starts][:, None] + operands] - self.values[starts][:, None]
        return np.where(numbers >= 0, numbers, -1)

    def results(self, starts: Positions, length: int) -> NDArray[np.bool_]:
        """Return True for each value of each segment that is read outside of the segment."""
        first = int(starts[0])
        values = np.arange(int(self.values[first + length] - self.values[first]))
        read: NDArray[np.bool_] = (
            self.last[self.values[starts][:, None] + values] >= starts[:, None] + length
        )
        return read

    def weight(self, start: int, length: int) -> float:
        """Return the compilation cost of a segment, in equations."""
        return float(self.weights[start + length] - self.weights[start])


class ItemToken(NamedTuple):
    """The token of an item, its weight, and its total number of equations."""

    number: int
    weight: float
    size: int


class Tokens:
    """The tokens of one run of the pass: equal for items with the same operation."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._types: dict[int, tuple[Aval, int]] = {}
        self._unique = 0
        self._sows = Contains(lambda eqn: eqn.primitive is sow_p or scope_of(eqn) is not None)
        #: By the id of the item, which is kept alive here too.
        self._items: dict[int, tuple[Item, ItemToken]] = {}

    def of(self, item: Item) -> ItemToken:
        """Return the token, weight and size of an item."""
        entry = self._items.get(id(item))
        if entry is None:
            entry = self._items[id(item)] = item, self._new(item)
        return entry[1]

    def unique_token(self) -> int:
        """Return a new, unique token."""
        self._unique -= 1
        return self._unique

    def copy(self) -> Tokens:
        """Return a copy, to which new items are added independently."""
        other = Tokens()
        other._known, other._types, other._items = (
            self._known.copy(),
            self._types.copy(),
            self._items.copy(),
        )
        other._unique = self._unique
        return other

    def _new(self, item: Item) -> ItemToken:
        if isinstance(item, SegmentCopy):
            return ItemToken(self._known.setdefault((item.body,), len(self._known)), 1.0, 1)
        stays = not traits(item).may_outline
        if item.effects and not jaxcompat.only_names_axes(item.effects):
            stays = True
        if item.params and holds_jaxpr(item.params.values()):
            weight, size = self._costs(item)
            stays = stays or any(item.params.get("donated_invars", ())) or self._sows.at(item)
        else:
            weight, size = _weight(item), 1
        return ItemToken(self.unique_token() if stays else self._number(item), weight, size)

    def _number(self, eqn: JaxprEqn) -> int:
        try:
            key, _ = parameters_key(eqn)
        except Unkeyable:
            return self.unique_token()
        types = [self._type(v.aval) for v in eqn.invars]
        # A gradient is weakly typed if the variable it is taken by is, which a literal never is.
        weak = [
            type(v) is not Literal and getattr(v.aval, "weak_type", False)
            for v in (*eqn.invars, *eqn.outvars)
        ]
        results = [self._type(v.aval) for v in eqn.outvars]
        whole = eqn.primitive, key, *types, None, *results, *weak, id(eqn.ctx)
        return self._known.setdefault(whole, len(self._known))

    def _type(self, aval: Aval) -> int:
        """Return a number for a type that does not depend on whether it is weak."""
        entry = self._types.get(id(aval))
        if entry is None:
            strong = aval.strip_weak_type() if hasattr(aval, "strip_weak_type") else aval
            entry = aval, self._known.setdefault(strong, len(self._known))
            self._types[id(aval)] = entry
        return entry[1]

    def _costs(self, eqn: JaxprEqn) -> tuple[float, int]:
        """Return the weight of an equation with bodies, and its total number of equations."""
        if jaxcompat.mark_of(eqn) != "plain":
            return 1.0, 1  # its body is shared already
        bodies = [self._costs_of(jaxcompat.open_jaxpr(body)) for _, body in sub_jaxprs(eqn)]
        return 1 + sum(weight for weight, _ in bodies), 1 + sum(size for _, size in bodies)

    @cached_method
    def _costs_of(self, body: Jaxpr) -> tuple[float, int]:
        costs = [
            self._costs(eqn) if holds_jaxpr(eqn.params.values()) else (_weight(eqn), 1)
            for eqn in body.eqns
        ]
        return sum(weight for weight, _ in costs), sum(size for _, size in costs)


def _weight(eqn: JaxprEqn) -> float:
    """Return the weight of an equation without bodies."""
    like = traits(eqn)
    if like.reduces:
        return REDUCTION_WEIGHT
    return MOVE_WEIGHT if like.moves else 1.0


def rough_tokens(jaxprs: Iterable[Jaxpr]) -> Positions:
    """Return cheap tokens of jaxprs, which are equal at least where those of `Tokens` are."""
    numbers: dict[Hashable, int] = {}
    tokens: list[int] = []
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            outs = eqn.outvars
            key = eqn.primitive, outs[0].aval if outs else None
            tokens.append(numbers.setdefault(key, len(numbers)))
        tokens.append(-1 - len(tokens))
    return np.array(tokens)


#: The text of a program in which nothing is outlined: the pass `outline` runs several times, with
#: other costs.
_first_texts = JaxprCache()


def first_text(bodies: ProgramBodies) -> tuple[ItemSequence, Tokens]:
    """Return the sequence of all items of a program, and their tokens."""
    known = _first_texts.of(bodies.jaxpr)
    if "text" not in known:
        tokens = Tokens()
        known["text"] = text_of(list(bodies), tokens), tokens
    text, tokens = known["text"]
    return text, tokens.copy()


def text_of(bodies: Sequence[OutlineBody], tokens: Tokens) -> ItemSequence:
    """Return the sequence of all items of some bodies."""
    items: list[Item | None] = []
    starts: list[int] = []
    token_numbers: list[int] = []
    weights: list[float] = [0.0]
    sizes: list[int] = [0]
    values: list[int] = [0]
    slots: list[int] = [0]
    read: list[int] = []
    last: list[int] = []
    fusible: list[bool] = []
    for body in bodies:
        starts.append(len(items))
        numbers: dict[Atom, int] = {}
        for item in body.items:
            position = len(items)
            token = tokens.of(item)
            items.append(item)
            token_numbers.append(token.number)
            weights.append(token.weight)
            sizes.append(token.size)
            fusible.append(not isinstance(item, SegmentCopy) and fuses(item))
            for atom in item.invars:
                value = -1 if type(atom) is Literal else numbers.get(atom, -1)
                read.append(value)
                if value >= 0:
                    last[value] = position
            for var in item.outvars:
                numbers[var] = len(last)
                last.append(-1)
            slots.append(len(read))
            values.append(len(last))
        for atom in body.outvars:
            if type(atom) is not Literal and atom in numbers:
                last[numbers[atom]] = NEVER_DEAD
        items.append(None)
        token_numbers.append(tokens.unique_token())
        weights.append(0.0)
        sizes.append(0)
        fusible.append(False)
        slots.append(len(read))
        values.append(len(last))
    starts.append(len(items))
    positions = np.arange(len(items))
    return ItemSequence(
        items,
        starts,
        np.array(token_numbers),
        np.cumsum(weights),
        np.cumsum(sizes),
        np.array(values),
        np.array(slots),
        np.array(read, np.int64),
        np.repeat(positions, np.diff(slots)),
        np.repeat(positions, np.diff(values)),
        np.array(last, np.int64),
        np.array(fusible),
    )


# --- windows --------------------------------------------------------------------------------------
# Windows of a text that have the same tokens, found by their hashes.
#
# A window of m tokens is hashed as a polynomial of them, modulo 2**64, from sums over prefixes (R.
# M. Karp and M. O. Rabin, "Efficient randomized pattern-matching algorithms", 1987), so that all
# windows of one length cost a few operations on arrays. Lengths grow by a factor: a segment is
# found at the greatest of these lengths that it contains, and then extended. Equal hashes are
# assumed to be equal windows here; callers compare the equations.

#: The ratio of successive lengths.
GROWTH = 1.4


class Windows:
    """The windows of a sequence of tokens."""

    def __init__(self, tokens: NDArray[np.int64]):
        n = len(tokens)
        draw = np.random.default_rng(0)
        _, numbers = np.unique(tokens, return_inverse=True)
        values = draw.integers(1, 2**63, size=int(numbers.max(initial=0)) + 1, dtype=np.uint64)
        base, inverse = _ODD, np.uint64(pow(int(_ODD), -1, 2**64))
        self._powers = _powers(base, n + 1)
        self._inverses = _powers(inverse, n + 1)
        self._sums = np.zeros(n + 1, np.uint64)
        np.cumsum(values[numbers] * self._powers[:n], out=self._sums[1:])

    def hashes(self, starts: Positions, length: int) -> NDArray[np.uint64]:
        """Return the hashes of the windows of a length at some starts."""
        hashes: NDArray[np.uint64] = (
            self._sums[starts + length] - self._sums[starts]
        ) * self._inverses[starts]
        return hashes

    def groups(self, least: int, copies: int) -> Iterator[tuple[int, list[Positions]]]:
        """Yield lengths, each with the groups of equal windows of that length.

        A group that is another one shifted to the right by one position is omitted.

        Args:
            least: The first length.
            copies: The minimum number of windows in a group.
        """
        n, length = len(self._sums) - 1, least
        starts = np.arange(n - length + 1)
        while len(starts) >= copies:
            order, bounds = self._sorted(starts, length)
            sizes = np.diff(bounds)
            repeated = sizes >= copies
            if not repeated.any():
                return
            group = np.full(n + 1, -1)
            group[order] = np.repeat(np.where(repeated, np.arange(len(sizes)), -1), sizes)
            previous = group[order - 1]  # index -1 wraps to the last position, where it is -1
            first, end = (
                np.minimum.reduceat(previous, bounds[:-1]),
                np.maximum.reduceat(previous, bounds[:-1]),
            )
            moved = (first == end) & (first >= 0) & (sizes[first] == sizes)
            chosen = np.flatnonzero(repeated & ~moved)
            yield length, [np.sort(order[bounds[i] : bounds[i + 1]]) for i in chosen]
            starts = np.sort(order[np.repeat(repeated, sizes)])
            length = max(length + 1, int(length * GROWTH))
            starts = starts[starts + length <= n]

    def _sorted(self, starts: Positions, length: int) -> tuple[Positions, Positions]:
        """Return starts sorted by window, and the bounds of the groups of equal ones."""
        hashes = self.hashes(starts, length)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        return starts[order], np.concatenate([[0], edges, [len(starts)]])

    def periods(self, start: int, length: int) -> Iterator[int]:
        """Yield the lengths of the shorter windows of which a window is repetitions."""
        at = np.array([start])
        for d in range(1, length // 2 + 1):
            rest = length - d
            if length % d == 0 and self.hashes(at, rest)[0] == self.hashes(at + d, rest)[0]:
                yield d

    def common(self, starts: Positions, length: int, most: int, *, left: bool = False) -> int:
        """Return by how many positions equal windows can be extended while equal, up to `most`."""
        low, high = 0, most
        while low < high:
            more = (low + high + 1) // 2
            hashes = self.hashes(starts - more if left else starts, length + more)
            if (hashes == hashes[0]).all():
                low = more
            else:
                high = more - 1
        return low


#: An odd number, which has an inverse modulo 2**64.
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


# --- origin ---------------------------------------------------------------------------------------
# The origin of an equation in the user's program: name scopes, and calls of functions.
#
# Where copies of a segment are consecutive, they can be cut at any period. The period that begins
# where a layer does is the clearest: there the scope changes, or the source location goes back from
# the last line of a function to its first.

_TRANSFORMATIONS = frozenset({"", "jvp", "transpose", "vmap", "jit", "rematted_computation"})


def scopes(eqn: JaxprEqn) -> list[str]:
    """Return the name scopes of an equation, without the transformations around them."""
    parts = re.split(r"[/()]", jaxcompat.name_stack(eqn))
    return [part for part in parts if part not in _TRANSFORMATIONS]


def calls(eqn: JaxprEqn) -> list[tuple[str, int]]:
    """Return the user's functions that an equation was traced in, outermost first, with lines.

    A special method, as `__call__`, has the name of its class.
    """
    frames = []
    for frame in reversed(jaxcompat.user_frames(eqn)):
        *outer, name = frame.function.split(".")
        frames.append((outer[-1] if outer and name.startswith("__") else name, frame.line))
    return frames


def nearness(before: JaxprEqn, after: JaxprEqn) -> tuple[int, int, int]:
    """Return how near two consecutive equations are to each other; the smallest is the best cut.

    Returns:
        The number of common scopes, the number of common calls, and the negated distance of their
        source lines.
    """
    path, other = calls(before), calls(after)
    depth = _shared(path, other)
    step = 0
    if depth < min(len(path), len(other)):
        step = abs(path[depth][1] - other[depth][1])
    return _shared(scopes(before), scopes(after)), depth, -step


def _shared(
    path: list[str] | list[tuple[str, int]], other: list[str] | list[tuple[str, int]]
) -> int:
    """Return the length of the common prefix of two paths."""
    depth = 0
    while depth < min(len(path), len(other)) and path[depth] == other[depth]:
        depth += 1
    return depth


# --- in place -------------------------------------------------------------------------------------
# Find the bodies whose results a compiler writes into their arguments.
#
# It does so if the array is not needed afterwards, and some elements are updated, or all are
# recomputed element by element, as in an optimizer's step on donated parameters. A unit is compiled
# for any caller, so it allocates another array, which is copied at every call.

#: The size in bytes of an array that may be copied at every call.
MOST_COPIED = 2**16


def writes_into_arguments(jaxpr: AnyJaxpr) -> bool:
    """Return True if a body may write a result into a large argument when it is inlined.

    It does if it, or a body within it, updates the argument, if the argument is a result, or if all
    equations are elementwise; the latter would compile no faster as a unit.
    """
    body = open_jaxpr(jaxpr)
    large = {v for v in body.invars if size_of(v.aval, 0) > MOST_COPIED}
    return bool(large) and (
        any(out in large for out in body.outvars) or _updates(body, large) or _is_elementwise(body)
    )


def _is_elementwise(jaxpr: Jaxpr) -> bool:
    for eqn in equations(jaxpr):
        like, inside = traits(eqn), regions(eqn)
        if like.reduces or like.expensive or like.collective or (inside and inside.repeats):
            return False
    return True


def _updates(jaxpr: AnyJaxpr, arrays: set[Var]) -> bool:
    """Return True if a body updates one of these arrays, which are variables of its own."""
    same = set(arrays)
    for eqn in open_jaxpr(jaxpr).eqns:
        if not same:
            return False
        if not any(_is_in(atom, same) for atom in eqn.invars):
            continue
        like = traits(eqn)
        if like.updates and _is_in(eqn.invars[0], same):
            return True
        if like.gives in ("same", "layout"):
            same |= {v for v in eqn.outvars if size_of(v.aval, 0) > MOST_COPIED}
        elif _updates_within(eqn, same):
            return True
    return False


def _updates_within(eqn: JaxprEqn, arrays: set[Var]) -> bool:
    """Return True if a body that an equation holds updates one of these arrays."""
    structured = regions(eqn)
    if structured is None:
        return False
    for body, region in zip(structured.bodies, structured.regions, strict=True):
        whole = {
            argument
            for argument, i in zip(body.invars, region.ins, strict=True)
            # A loop takes some of its operands a slice at a time.
            if _is_in(eqn.invars[i], arrays) and argument.aval.shape == eqn.invars[i].aval.shape
        }
        if whole and _updates(body, whole):
            return True
    return False


def _is_in(atom: Atom, arrays: set[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in arrays
