"""What each equation of a jaxpr costs, with all that is in its bodies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from jaxprtool.analysis.cost.bodies import Bodies, Body, Item
from jaxprtool.analysis.cost.tallies import Key, Sums
from jaxprtool.ir.symbols import symbols_of
from jaxprtool.jaxcompat import Jaxpr

#: The size at which it is decided what is written to memory.
_SIZE = 512


def operations_by_equation(jaxpr: Jaxpr) -> dict[int, Any]:
    """Return the FLOPs and transcendentals of each equation, at most, by its `id`; 0 of others."""
    bodies = Bodies(dict.fromkeys(symbols_of(jaxpr), _SIZE))
    sums = Sums(bodies, _ByEquation())[jaxpr]
    found = {key: tally.most.flops + tally.most.transcendentals for key, tally in sums.items()}
    return defaultdict(int, found)


class _ByEquation:
    """Groups by the equation at the top of the program."""

    def key(self, item: Item, body: Body) -> Key:
        return id((*item.node.calls, item.eqn)[0])

    def lifted(self, key: Key, item: Item, body: Body, number: int) -> Key:
        return self.key(item, body)
