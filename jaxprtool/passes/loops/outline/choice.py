"""Which repeated segments become calls: those that save most, best first.

What is saved is what a compiler has to look at: the equations of all copies but one, less what the
calls cost, which is more the more values cross their boundary. A segment is moved, and its ends cut
off, where fewer values cross then, and where no chain of equations that a compiler fuses is cut in
two. Where equations repeat without a gap, any period of them could be the segment: of those that
save about the same it is the one that begins where scopes and source lines do. Several periods at
once are none.

All of this looks at tokens. What is chosen is compared operand by operand: copies of a segment pass
values on among themselves in the same way, or they are not copies of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from jaxprtool.passes.loops.outline.bodies import first_equation
from jaxprtool.passes.loops.outline.origin import nearness
from jaxprtool.passes.loops.outline.text import Positions, Text
from jaxprtool.passes.loops.outline.windows import GROWTH, Windows

#: Of the periods of windows that follow one another, so many are compared by where they come from,
#: and operand by operand.
_TRIED, _COMPARED = 32, 8

#: Where there are more windows than that, only periods that few values cross are looked at.
_MOST = 100_000


@dataclass(frozen=True)
class Costs:
    """What counts as a gain. All but the first two are in equations.

    Attributes:
        copies: The least number of copies.
        equations: The least number of equations of a segment.
        body: What a shared body costs.
        operand: What each operand and result of a call costs.
        fusible: Whether a segment counts of which a compiler fuses all: as a stage of an optimizer,
            which is compiled in no time, and then updates its arrays in place.
        call: What a call costs besides.
        value: What each value costs that crosses a boundary which may be moved.
        fused: What it costs besides if a compiler would fuse the two sides.
        gaps: Whether there may be other equations between the copies.
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


@dataclass(frozen=True, eq=False)
class Segment:
    """Copies of a segment: where they start, how long they are, and what they save in all."""

    starts: Positions
    length: int
    saved: float


class Choice:
    """One round of choosing among the repeated segments of a text."""

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
        """Return about the most that a group can save, however it is extended."""
        longest = int(length * GROWTH) + 1
        copies = min(len(starts), 1 + int(starts[-1] - starts[0]) // length)
        end = min(int(starts[0]) + longest, len(self._text.tokens))
        weight = float(self._text.weights[end] - self._text.weights[starts[0]])
        if copies < self._costs.copies:
            return 0.0
        return (copies - 1) * weight - copies * self._costs.call - self._costs.body

    # --- one group -----------------------------------------------------------------------------

    def _segment(self, starts: Positions, length: int) -> Segment | None:
        """Return the best segment that a group of equal windows gives; None if it gains nothing."""
        starts = _apart(starts[self._taken[starts + length] == self._taken[starts]], length)
        if len(starts) < self._costs.copies:
            return None
        starts, length = self._extended(starts, length)
        if self._windows.is_periodic(int(starts[0]), length):
            return None  # its period is a segment, and more copies of it are saved
        best = Segment(starts, length, 0.0)
        for moved in self._moved(starts, length):
            found = self._alike(*moved)
            if found.saved > best.saved:
                best = found
            if len(found.starts) == len(moved[0]):
                break  # those that follow cannot save more
        return best if best.saved > 0 else None

    def _extended(self, starts: Positions, length: int) -> tuple[Positions, int]:
        """Return windows made longer, to the right and then to the left, while they are equal."""
        gap = int(np.diff(starts).min())
        n = len(self._text.tokens)
        most = min(gap, n - int(starts[-1])) - length
        length += self._windows.common(starts, length, self._free_after(starts + length, most))
        most = min(gap - length, int(starts[0]))
        left = self._windows.common(starts, length, self._free_before(starts, most), left=True)
        return starts - left, length + left

    def _free_after(self, ends: Positions, most: int) -> int:
        """Return how many positions after each of some are free, up to most."""
        while most > 0 and (self._taken[ends + most] != self._taken[ends]).any():
            most //= 2
        return max(most, 0)

    def _free_before(self, starts: Positions, most: int) -> int:
        while most > 0 and (self._taken[starts - most] != self._taken[starts]).any():
            most //= 2
        return max(most, 0)

    def _moved(self, starts: Positions, length: int) -> list[tuple[Positions, int, float]]:
        """Return the windows moved, or cut at their ends, to where least crosses them.

        Each with what the boundaries cost. If most windows follow one another, several are
        returned: any period may be one in which all copies are alike.
        """
        crossing = self._crossing(starts, length)
        weights = self._text.weights
        if 2 * int((np.diff(starts) == length).sum()) >= len(starts) - 1:
            return self._turned(starts, length, crossing)
        most = length // 4
        inner = weights[starts[0] : starts[0] + length + 1] - weights[starts[0]]
        lost = inner[: most + 1] * (len(starts) - 1) + crossing[: most + 1]
        first = int(lost.argmin())
        gone = (inner[-1] - inner[length - most :]) * (len(starts) - 1) + crossing[length - most :]
        end = length - most + int(gone.argmin())
        return [(starts + first, end - first, float(crossing[first] + crossing[end]))]

    def _turned(
        self, starts: Positions, length: int, crossing: NDArray[np.float64]
    ) -> list[tuple[Positions, int, float]]:
        """Return the best of the periods, of windows most of which follow one another."""
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
        """Return how near windows are to what stands before them, by an inner one of them."""
        start = int(starts[len(starts) // 2])
        before, after = (self._text.items[i] for i in (start - 1, start))
        if before is None or after is None:
            return (0, 0, 0)
        return nearness(first_equation([before]), first_equation([after]))

    def _crossing(self, starts: Positions, length: int) -> NDArray[np.float64]:
        """Return what values cost that cross each of the offsets in windows, of all in sum.

        Values that come from further away than a window is long cross any boundary, wherever it is.
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
        """Return the copies that pass values on in the same way, of the kind that saves most."""
        tokens = self._text.tokens[starts[:, None] + np.arange(length)]
        starts = starts[(tokens == tokens[0]).all(1)]  # equal hashes are no proof
        links = self._text.links(starts, length)
        kinds: dict[bytes, list[int]] = {}
        for i, row in enumerate(links):
            kinds.setdefault(row.tobytes(), []).append(i)
        found = [
            self._saving(starts[kind], length, links[kind[0]], cost) for kind in kinds.values()
        ]
        return max(found, key=lambda segment: segment.saved)

    def _saving(self, starts: Positions, length: int, links: Positions, cost: float) -> Segment:
        text, costs = self._text, self._costs
        if not costs.gaps:
            runs = np.split(starts, np.flatnonzero(np.diff(starts) != length) + 1)
            starts = max(runs, key=len)
        weight = text.weight(int(starts[0]), length)
        size = text.sizes[int(starts[0]) + length] - text.sizes[int(starts[0])]
        if len(starts) < costs.copies or size < costs.equations:
            return Segment(starts, length, 0.0)
        if not costs.fusible and text.fuses(int(starts[0]), length):
            return Segment(starts, length, 0.0)
        results = text.results(starts, length).any(0)
        call = costs.call + costs.operand * (int((links < 0).sum()) + int(results.sum()))
        gone = (len(starts) - 1) * weight
        return Segment(starts, length, gone - len(starts) * call - costs.body - cost)


def _apart(starts: Positions, length: int) -> Positions:
    """Return as many starts, from the first, as windows there do not overlap."""
    chosen: list[int] = []
    end = -1
    for start in starts.tolist():
        if start >= end:
            chosen.append(start)
            end = start + length
    return np.array(chosen, np.int64)
