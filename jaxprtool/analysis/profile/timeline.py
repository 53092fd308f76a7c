"""Divide the time of a run among what ran, so that the parts add up to the time.

Operations run at the same time on several threads. Each instant is divided equally among the
operations that run at it. Loops, branches and calls contain the operations of their bodies, on the
same thread or on others: they get only the instants at which no other operation runs, which is their
overhead. What the host does gets the instants at which no operation runs at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Something that ran.

    Attributes:
        start: When it began.
        end: When it ended.
        key: What it was.
        rank: 0 for operations, which share an instant; of others, the one with the lowest rank that
            began last has an instant for itself.
    """

    start: float
    end: float
    key: Hashable
    rank: int = 0


def clipped(spans: Iterable[Span], windows: Sequence[tuple[float, float]]) -> list[Span]:
    """Return the parts of spans that lie in windows, which are in order and do not overlap."""
    ordered, found, first = sorted(spans, key=lambda each: each.start), [], 0
    for span in ordered:
        while first < len(windows) and windows[first][1] <= span.start:
            first += 1
        for start, end in windows[first:]:
            if start >= span.end:
                break
            inside = max(start, span.start), min(end, span.end)
            if inside[0] < inside[1]:
                found.append(span._replace(start=inside[0], end=inside[1]))
    return found


def divided(spans: Sequence[Span]) -> dict[Hashable, float]:
    """Return the time of each key. The sum is the time at which any span runs."""
    found: dict[Hashable, float] = {}
    edges = [(span.start, 1, i) for i, span in enumerate(spans)]
    edges += [(span.end, 0, i) for i, span in enumerate(spans)]
    edges.sort()
    shared, now = 0.0, 0.0  # `shared` is what an operation that runs all the time would have got
    began: dict[int, float] = {}  # running operations, with `shared` when they began
    others: dict[int, None] = {}  # other running spans, in the order in which they began
    for at, begins, i in edges:
        if at > now:
            if began:
                shared += (at - now) / len(began)
            elif others:
                least = min(spans[each].rank for each in others)
                key = next(spans[i].key for i in reversed(others) if spans[i].rank == least)
                found[key] = found.get(key, 0.0) + at - now
        now, span = at, spans[i]
        if span.rank:
            if begins:
                others[i] = None
            else:
                del others[i]
        elif begins:
            began[i] = shared
        else:
            found[span.key] = found.get(span.key, 0.0) + shared - began.pop(i)
    return found
