"""Choose the repeated segments that become calls: those that save most, best first.

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

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from jaxprtool.passes.loops.outline.bodies import Repeated, first_equation
from jaxprtool.passes.loops.outline.origin import nearness
from jaxprtool.passes.loops.outline.text import Positions, Text
from jaxprtool.passes.loops.outline.windows import GROWTH, Windows

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


class Choice:
    """One selection among the repeated segments of a text."""

    def __init__(self, text: Text, costs: Costs):
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
            found = self._segment(starts, length)
            if found is None:
                continue
            if heap and found.saved < 0.8 * -heap[0][0] and found.saved < 0.8 * -hoped:
                heappush(heap, (-found.saved, next(number), starts, length))
                continue
            self._take(found)
            yield found
            heappush(heap, (-found.saved, next(number), starts, length))

    def _take(self, found: Segment) -> None:
        for start in found.starts:
            self._free[start : start + found.length] = False
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
        return any(isinstance(item, Repeated) for item in self._text.copy(start, length))

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
            found = self._alike(*moved)
            if found.saved > best.saved:
                best = found
            if len(found.starts) == len(moved[0]):
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
        found: NDArray[np.float64] = crossing[starts[:, None] + np.arange(length + 1)].sum(0)
        return found

    def _alike(self, starts: Positions, length: int, cost: float) -> Segment:
        """Return the copies that connect values in the same way, of the kind that saves most."""
        tokens = self._text.tokens[starts[:, None] + np.arange(length)]
        starts = starts[(tokens == tokens[0]).all(1)]  # equal hashes are no proof
        links = self._text.links(starts, length)
        by_links: dict[bytes, list[int]] = {}
        for i, row in enumerate(links):
            by_links.setdefault(row.tobytes(), []).append(i)
        found = [
            self._saving(starts[copies], length, links[copies[0]], cost)
            for copies in by_links.values()
        ]
        return max(found, key=lambda segment: segment.saved)

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
