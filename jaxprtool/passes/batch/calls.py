"""Batching of calls: jit, closed_call (eval_jaxpr in 0.12) and remat.

Their bodies are batched, once for each pattern of mapped operands, and stay shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import Call
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.batch.axis import Axis, Dim, at_bdim
from jaxprtool.passes.batch.body import batch_body, lifted
from jaxprtool.passes.batch.table import Rebuilt, rebuilt, refusal, structured_rules

#: What a jit says of its operands, or results, by the name of the parameter.
Layouts = dict[str, tuple[Any, ...]]


@rule(structured_rules, *Call.primitives)
def _call(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    call = Call.of(eqn)
    body, out_dims = batch_body(call.body, dims, axis)
    if eqn.primitive.name == "remat2":  # as by JAX's rule
        body, out_dims = batch_body(call.body, dims, axis, at_bdim(out_dims, 0))
    consts: tuple[Any, ...] = ()
    if not traits(eqn).holds_constants:
        body, consts = lifted(body)
    if eqn.primitive.name == "jit":
        changes: dict[str, Any] = {
            "operand_params": _laid_out(call.operand_params, "in", call.operands, dims, eqn, axis),
            "out_params": _laid_out(call.out_params, "out", call.outs, out_dims, eqn, axis),
        }
    else:
        own = [*[None] * len(consts), *range(len(call.operands))]
        changes = call.entries(own, range(len(call.outs)))
    return rebuilt(call, dims, out_dims, consts, body=body, **changes)


def _laid_out(
    params: Layouts,
    side: str,
    atoms: Sequence[Atom],
    dims: Sequence[Dim],
    eqn: JaxprEqn,
    axis: Axis,
) -> Layouts:
    """What a jit says of its operands, or results, when these have a mapped dimension more."""
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
