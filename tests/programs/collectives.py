"""An independent parser of the collectives in a compiled module's text, by regular expressions.

It shares no code with the package, so that tests can compare the two. It reads modules for CPU,
which have no asynchronous collectives (`all-reduce-start`).
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import NamedTuple

_KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(sorted(_KINDS, key=len, reverse=True))})\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Collective(NamedTuple):
    """A kind of collective, and the bytes of its result on one device."""

    kind: str
    bytes: int


def collectives(text: str) -> Counter[Collective]:
    """Count the executions of each collective of a module. A loop of unknown length counts once."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            name = head[2]
            entry = name if head[1] else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return _of_computation(entry, bodies)


def _of_computation(name: str, bodies: dict[str, list[str]]) -> Counter[Collective]:
    found: Counter[Collective] = Counter()
    for line in bodies[name]:
        collective = _COLLECTIVE.search(line)
        if collective:
            found[Collective(collective[2], _bytes(collective[1]))] += 1
            continue
        trips = _TRIPS.search(line)
        called = _CALLED.findall(line)
        for names in _BRANCHES.findall(line):
            called += re.findall(r"[\w.\-]+", names)
        for inner in dict.fromkeys(called):
            for each, count in _of_computation(inner, bodies).items():
                found[each] += count * (int(trips[1]) if trips else 1)
    return found


def _bytes(types: str) -> int:
    return sum(_array_bytes(*each) for each in _ARRAY.findall(types))


def _array_bytes(element: str, sizes: str) -> int:
    bits = 8 if element == "pred" else int(re.sub(r"\D", "", element))
    return prod(int(size) for size in sizes.split(",") if size) * bits // 8
