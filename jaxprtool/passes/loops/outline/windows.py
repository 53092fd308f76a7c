"""Windows of a text that have the same tokens, found by their hashes.

A window of m tokens is hashed as a polynomial of them, modulo 2**64, from sums over prefixes (R. M.
Karp and M. O. Rabin, "Efficient randomized pattern-matching algorithms", 1987), so that all windows
of one length cost a few operations on arrays. Lengths grow by a factor: a segment is found at the
greatest of these lengths that it contains, and then extended. Equal hashes are assumed to be equal
windows here; callers compare the equations.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from jaxprtool.passes.loops.outline.text import Positions

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
        found: NDArray[np.uint64] = (
            self._sums[starts + length] - self._sums[starts]
        ) * self._inverses[starts]
        return found

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
            before = group[order - 1]  # index -1 wraps to the last position, where it is -1
            first, end = (
                np.minimum.reduceat(before, bounds[:-1]),
                np.maximum.reduceat(before, bounds[:-1]),
            )
            moved = (first == end) & (first >= 0) & (sizes[first] == sizes)
            chosen = np.flatnonzero(repeated & ~moved)
            yield length, [np.sort(order[bounds[i] : bounds[i + 1]]) for i in chosen]
            starts = np.sort(order[np.repeat(repeated, sizes)])
            length = max(length + 1, int(length * GROWTH))
            starts = starts[starts + length <= n]

    def _sorted(self, starts: Positions, length: int) -> tuple[Positions, Positions]:
        """Return starts sorted by window, and the bounds of the groups of equal ones."""
        found = self.hashes(starts, length)
        order = np.argsort(found, kind="stable")
        ordered = found[order]
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
            found = self.hashes(starts - more if left else starts, length + more)
            if (found == found[0]).all():
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
