"""Batching of while loops.

A while loop whose predicate is mapped runs until all batch elements are done, with every carry
mapped; JAX's `while` primitive then leaves the carries of finished batch elements unchanged.
"""

from __future__ import annotations

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.regions import regions
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.batch.axis import Dim
from jaxprtool.passes.mapping.batch.body import BatchBodyBuilder
from jaxprtool.passes.mapping.batch.table import refusal, structured_rules
from jaxprtool.passes.mapping.domains import Solution, by_edges, solve, write

rule(structured_rules, "scan")(by_edges)


@rule(structured_rules, "while")
def _while(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    found, domain = regions(eqn), builder.domain
    assert found is not None
    cond, body = found.bodies
    effects = cond.effects | body.effects
    if reason := jaxcompat.forbidden_in_loops(effects, masked=False):
        raise refusal(eqn, reason)
    solution = solve(builder, found)
    if solution is None:  # the predicate is mapped
        if reason := jaxcompat.forbidden_in_loops(effects, masked=True):
            raise refusal(eqn, reason)
        carried = {i for i, _ in found.carried}
        dims = [0 if i in carried else builder.kind(atom) for i, atom in enumerate(eqn.invars)]
        outs: list[Dim] = [0] * len(carried)
        conds, consts = ([dims[i] for i in region.ins] for region in found.regions)
        bodies = [domain.body(cond, conds, [0]), domain.matched(body, consts, outs, None)]
        solution = Solution(found, dims, outs, bodies)
    write(builder, solution)
    return True
