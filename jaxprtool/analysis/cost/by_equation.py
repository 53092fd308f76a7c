"""Count the operations of an equation, including its bodies."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.analysis.cost.rules import cost_rules, work_of
from jaxprtool.analysis.cost.trip_counts import runs_of
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.structured import ShardMap, run_jaxprs
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn


class Operations:
    """The FLOPs and transcendentals of equations; each body is visited once.

    The most expensive branch counts, and all devices of a `shard_map`. A loop with an unknown trip
    count counts as one iteration, and an equation with an unknown cost as 0.
    """

    def of(self, eqn: JaxprEqn) -> Any:
        """Return the number of operations of an equation, which may be symbolic."""
        held = regions(eqn)
        if held is not None:
            return self._held(held)
        if inner := _inner(eqn):
            return sum(map(self._body, inner))
        work = None if traits(eqn).collective else work_of(eqn)
        return 0 if work is None else work.flops + work.transcendentals

    def is_known(self, eqn: JaxprEqn) -> bool:
        """Return whether the costs of an equation and of all equations in its bodies are known."""
        held = regions(eqn)
        if bodies := _inner(eqn) if held is None else held.jaxprs:
            return all(map(self._is_known, bodies))
        return traits(eqn).collective or work_of(eqn) is not None

    def _held(self, held: Regions) -> Any:
        each = list(map(self._body, held.jaxprs))
        if held.kind == "branch":
            return reduce(jax.core.max_dim, each)
        devices = held.view.mesh.size if isinstance(held.view, ShardMap) else 1
        return sum(each) * runs_of(held) * devices

    @cached_method
    def _body(self, jaxpr: Jaxpr) -> Any:
        return sum(map(self.of, jaxpr.eqns))

    @cached_method
    def _is_known(self, jaxpr: Jaxpr) -> bool:
        return all(map(self.is_known, jaxpr.eqns))


def _inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs that an equation without regions runs; none if a rule has its cost."""
    if cost_rules.get(eqn.primitive.name) is not None:
        return []
    return [jaxcompat.open_jaxpr(body) for _, body in run_jaxprs(eqn)]
