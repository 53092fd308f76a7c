"""Estimate the cost of each equation of a program, at every depth, summed over all its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from jaxprtool.analysis.cost.bodies import Bodies
from jaxprtool.analysis.cost.groupings import Whole
from jaxprtool.analysis.cost.tallies import Sums
from jaxprtool.analysis.cost.trip_counts import runs_of
from jaxprtool.analysis.cost.work import Work, total
from jaxprtool.ir.core.equations import outer_first
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.ir.shapes.symbols import symbols_of
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr

#: The size of symbolic dimensions at which fusion is decided.
_SIZE = 512


def work_by_equation(program: Program | AnyJaxpr) -> dict[int, Work]:
    """Return the cost of each equation, at every depth, summed over all its runs.

    The cost of an equation with bodies is that of its bodies. Inside a `cond` every branch counts
    as if it ran. A loop with an unknown trip count counts as one iteration.

    Args:
        program: A `Program`, or a jaxpr.

    Returns:
        The cost by the `id` of the equation.
    """
    jaxpr = top_jaxpr(program)
    bodies = Bodies(dict.fromkeys(symbols_of(jaxpr), _SIZE))
    sums = Sums(bodies, Whole())
    runs = defaultdict[Jaxpr, Any](int, {jaxpr: 1})
    found: defaultdict[int, list[Work]] = defaultdict(list)

    def inside(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
        return (body for item in bodies[jaxpr].items for body in item.bodies)

    for each in outer_first(jaxpr, inside):
        body = bodies[each]
        for item in body.items:
            work = item.work
            if item.bodies:
                work = total(tally.most for tally in sums.inside(item, body).values())
            work = work.times(runs[each] * item.devices)
            for eqn in (*item.node.calls, item.eqn):
                found[id(eqn)].append(work)
            for held in item.bodies:
                runs[held] += runs[each] * item.devices * runs_of(item.held)
    return {key: total(works) for key, works in found.items()}
