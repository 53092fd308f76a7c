"""The loop of delta debugging: take steps on chunks of a list, which become half as large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def take_chunks(
    sites: Callable[[], Sequence[T]],
    take: Callable[[Sequence[Sequence[T]], Sequence[T]], int | None],
    size: int,
    least: int = 1,
) -> None:
    """Take a step on as many sites as possible, in chunks that become half as large.

    Args:
        sites: Returns the sites that are left; called again after each step taken.
        take: Takes a step on the first of some chunks where that is possible, and returns the
            number of this chunk, or None. It is also given all sites.
        size: The size of the first chunks.
        least: The size of the last.
    """
    left = sites()
    while size >= least and left:
        start = 0
        while start < len(left):
            starts = range(start, len(left), size)
            taken = take([left[i : i + size] for i in starts], left)
            if taken is None:
                break
            start = starts[taken]
            left = sites()
        size = min(size, len(left)) // 2


def minimal_subset(items: Sequence[T], holds: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a subset for which a condition holds, but not without any one of its items.

    Args:
        items: The items, for all of which the condition holds. Earlier ones are dropped first.
        holds: The condition on a subset.
    """
    kept = list(items)

    def take(chunks: Sequence[Sequence[T]], _: Sequence[T]) -> int | None:
        nonlocal kept
        for number, chunk in enumerate(chunks):
            rest = [each for each in kept if each not in chunk]
            if holds(rest):
                kept = rest
                return number
        return None

    size, before = (len(kept) + 1) // 2, None
    while kept and kept != before:
        before = kept
        take_chunks(lambda: kept, take, size)
        size = 1
    return kept
