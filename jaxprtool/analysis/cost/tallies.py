"""Sum the costs of a program's equations by group. Each body is summed once.

A body counts as often as it runs: that of a scan in each iteration, that of a call at each call. A
`cond` has a range of costs, from the cheapest branch to the most expensive. A `while` with an
unknown trip count counts as one iteration. A `Grouping` determines the group of an equation within
its body, and lifts the groups of a body to the enclosing equation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Protocol, TypeAlias

import jax

from jaxprtool.analysis.cost.bodies import Bodies, CostedBody, Item
from jaxprtool.analysis.cost.rules import ANY_UNIT
from jaxprtool.analysis.cost.trip_counts import trip_count
from jaxprtool.analysis.cost.work import NOTHING, Work, largest, smallest, total
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.jaxcompat import Jaxpr

#: The key of a group; any hashable value.
Key: TypeAlias = Any


class Grouping(Protocol):
    """A way to group equations."""

    def key(self, item: Item, body: CostedBody) -> Key:
        """Return the group of an equation, within the body that it is in."""

    def lifted(self, key: Key, item: Item, body: CostedBody, number: int) -> Key:
        """Return the group, in `body`, of a group in the `number`-th body of an equation."""


@dataclass(slots=True)
class Tally:
    """The cost of a group.

    Attributes:
        least: The cost with the cheapest branches.
        most: The cost with the most expensive branches.
        per_round: Whether a part is in a loop with an unknown trip count, and counted once.
        products: The maximum number of FLOPs of matrix products by precision, and of what any unit
            may compute (`rules.product_of`).
    """

    least: Work = NOTHING
    most: Work = NOTHING
    per_round: bool = False
    products: dict[str, Any] = field(default_factory=dict)

    def times(self, count: Any) -> Tally:
        """Return the cost of `count` runs."""
        if count == 1:
            return self
        products = {of: flops * count for of, flops in self.products.items()}
        return Tally(self.least.times(count), self.most.times(count), self.per_round, products)

    def add_items(self, items: Iterable[tuple[Work, str]]) -> None:
        """Add the costs of equations, each with the precision of a product, or ""."""
        works = []
        for work, product in items:
            works.append(work)
            if product:
                flops = work.flops + (work.transcendentals if product == ANY_UNIT else 0)
                self.products[product] = self.products.get(product, 0) + flops
        done = total(works)
        self.add(Tally(done, done))

    def add(self, other: Tally) -> None:
        """Add the cost of another group."""
        same = self.least is self.most and other.least is other.most
        self.most += other.most
        self.least = self.most if same else self.least + other.least
        self.per_round |= other.per_round
        for of, flops in other.products.items():
            self.products[of] = self.products.get(of, 0) + flops


Tallies = dict[Key, Tally]


class Sums:
    """The costs of a program's bodies, by group.

    Args:
        bodies: The bodies.
        grouping: How equations are grouped.
        all_devices: Whether a `shard_map` counts on all its devices, or on one.
    """

    def __init__(self, bodies: Bodies, grouping: Grouping, all_devices: bool = True) -> None:
        self._bodies, self._grouping, self._all_devices = bodies, grouping, all_devices

    @cached_method
    def __getitem__(self, jaxpr: Jaxpr) -> Tallies:
        body, sums = self._bodies[jaxpr], Tallies()
        own: defaultdict[Key, list[tuple[Work, str]]] = defaultdict(list)
        for item in body.items:
            devices = item.devices if self._all_devices else 1
            if item.bodies:
                for key, tally in self.inside(item, body).items():
                    _add(sums, key, tally.times(devices))
            elif item.work is not NOTHING:
                key = self._grouping.key(item, body)
                own[key].append((item.work.times(devices), item.product))
        for key, items in own.items():
            sums.setdefault(key, Tally()).add_items(items)
        return sums

    def inside(self, item: Item, body: CostedBody) -> Tallies:
        """Return the groups of an equation's bodies, lifted to it, for one run of the equation."""
        lifted = self._grouping.lifted
        found: list[Tallies] = []
        for number, inside in enumerate(item.bodies):
            tallies: Tallies = {}
            for key, tally in self[inside].items():
                _add(tallies, lifted(key, item, body, number), tally)
            found.append(tallies)
        if item.held is None:
            return _together(found)
        if item.held.kind == "branch":
            return _either(found)
        count = trip_count(item.held)
        if count is not None:
            return {key: tally.times(count) for key, tally in _together(found).items()}
        for tally in (together := _together(found)).values():
            tally.per_round = True
        return together


def _add(sums: Tallies, key: Key, tally: Tally) -> None:
    there = sums.get(key)
    if there is None:
        sums[key] = replace(tally, products=dict(tally.products))
    else:
        there.add(tally)


def _together(found: Iterable[Tallies]) -> Tallies:
    sums: Tallies = {}
    for tallies in found:
        for key, tally in tallies.items():
            _add(sums, key, tally)
    return sums


def _either(branches: list[Tallies]) -> Tallies:
    """Return the range of costs of each group, over branches of which one runs."""
    nothing = Tally()
    ranges: Tallies = {}
    for key in dict.fromkeys(key for tallies in branches for key in tallies):
        each = [tallies.get(key, nothing) for tallies in branches]
        ranges[key] = Tally(
            smallest(tally.least for tally in each),
            largest(tally.most for tally in each),
            any(tally.per_round for tally in each),
            {of: _most(of, each) for of in dict.fromkeys(of for t in each for of in t.products)},
        )
    return ranges


def _most(of: str, tallies: Iterable[Tally]) -> Any:
    return reduce(jax.core.max_dim, (tally.products.get(of, 0) for tally in tallies))
