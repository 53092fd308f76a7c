"""Divide the time of a run among the operations, so that the parts add up to the time.

Operations run at the same time on several threads. Each instant is divided equally among the
operations that a thread is known to run. An operation that was handed to other threads gets the
share of a thread that is free, since it may still be waiting for one. Loops, branches and calls
contain the operations of their bodies, on the same thread or on others: they get only the instants
at which no operation runs, which is their overhead. The work of the host gets the instants at which
nothing else runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

#: The ranks of operations: a thread runs it, or it was handed to other threads.
RUNNING, HANDED_ON = 0, 1


class Span(NamedTuple):
    """Something that ran.

    Attributes:
        start: When it began.
        end: When it ended.
        key: Identifies what ran.
        rank: RUNNING or HANDED_ON for operations, which share an instant. If none runs, the other
            span with the lowest rank gets the instant; of several, the one that began last.
    """

    start: float
    end: float
    key: Any
    rank: int = RUNNING


def clipped(spans: Iterable[Span], windows: Sequence[tuple[float, float]]) -> list[Span]:
    """Return the spans that begin in windows, each up to the end of its window.

    XLA reports the end of some loops only during the next call. Windows are in order.
    """
    starts, found = [start for start, _ in windows], []
    for span in spans:
        place = bisect_right(starts, span.start) - 1
        if place >= 0 and span.start < (end := windows[place][1]):
            found.append(span._replace(end=min(end, span.end)))
    return found


def divided(spans: Sequence[Span]) -> dict[Any, float]:
    """Return the time of each key. The sum is the time at which any span runs."""
    found: defaultdict[Any, float] = defaultdict(float)
    edges = [(span.start, 1, i) for i, span in enumerate(spans)]
    edges += [(span.end, 0, i) for i, span in enumerate(spans)]
    edges.sort()
    threads = _most_at_once(spans, edges)
    now = 0.0
    had = [0.0, 0.0]  # the share so far of an operation of each rank that runs all the time
    began: tuple[dict[int, float], dict[int, float]] = ({}, {})  # `had` when operations began
    others: dict[int, None] = {}  # other running spans, in the order in which they began
    for at, begins, i in edges:
        if at > now:
            running, handed_on = map(len, began)
            free = max(threads - running, 0 if running else 1)
            part = min(1.0, free / handed_on) if handed_on else 0.0
            if running or handed_on:
                each = (at - now) / (running + part * handed_on)
                had[RUNNING] += each
                had[HANDED_ON] += each * part
            elif others:
                least = min(spans[other].rank for other in others)
                key = next(spans[o].key for o in reversed(others) if spans[o].rank == least)
                found[key] += at - now
        now, span = at, spans[i]
        if span.rank > HANDED_ON:
            if begins:
                others[i] = None
            else:
                del others[i]
        elif begins:
            began[span.rank][i] = had[span.rank]
        else:
            found[span.key] += had[span.rank] - began[span.rank].pop(i)
    return dict(found)


def _most_at_once(spans: Sequence[Span], edges: Iterable[tuple[float, int, int]]) -> int:
    """Return how many operations run at the same time at most."""
    most = running = 0
    for _, begins, i in edges:
        if spans[i].rank == RUNNING:
            running += 1 if begins else -1
            most = max(most, running)
    return most
