"""Batching of jit, whose shardings have an entry for the batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import CALLS, Call
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.mapping.batch.axis import Axis, Dim
from jaxprtool.passes.mapping.batch.body import BatchBodyBuilder
from jaxprtool.passes.mapping.batch.table import refusal, structured_rules
from jaxprtool.passes.mapping.domains import by_edges, solve, write

#: The parameters of a jit that have an entry per operand, or per result, by parameter name.
Layouts = dict[str, tuple[Any, ...]]

rule(structured_rules, *CALLS)(by_edges)


@rule(structured_rules, "jit")
def _jit(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    found, axis = regions(eqn), builder.domain.axis
    solution = None if found is None else solve(builder, found)
    assert found is not None and solution is not None
    call, ins, outs = Call.of(eqn), solution.operands, solution.results
    write(
        builder,
        solution,
        operand_params=_laid_out(call.operand_params, "in", call.operands, ins, eqn, axis),
        out_params=_laid_out(call.out_params, "out", call.outs, outs, eqn, axis),
    )
    return True


def _laid_out(
    params: Layouts,
    side: str,
    atoms: Sequence[Atom],
    dims: Sequence[Dim],
    eqn: JaxprEqn,
    axis: Axis,
) -> Layouts:
    """Return the parameters of a jit for operands, or results, with their batch dimensions."""
    if any(layout is not None for layout in params[f"{side}_layouts"]):
        raise refusal(eqn, "Concrete layouts are not supported for vmap(jit).")
    shardings = tuple(
        sharding
        if dim is None or jaxcompat.is_unspecified(sharding)
        else jaxcompat.mapped_sharding(
            axis.data, sharding, dim, eqn.params["ctx_mesh"], axis.aval(atom.aval, dim)
        )
        for sharding, dim, atom in zip(params[f"{side}_shardings"], dims, atoms, strict=True)
    )
    return {**params, f"{side}_shardings": shardings}
