"""Batching of shard_map.

Every shard of an operand has all lanes, or, with `spmd_axis_name`, the lanes are spread over these
axes of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import ShardMap
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.body import batch_body, lifted
from jaxprtool.passes.batch.table import Rebuilt, rebuilt, structured_rules


@rule(structured_rules, "shard_map")
def _shard_map(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    call = ShardMap.of(eqn)
    spread = axis.spmd_name
    inner = axis
    if spread is not None:
        inner = replace(axis, size=axis.size // math.prod(call.mesh.shape[n] for n in spread))
    in_specs = _specs(call.in_specs, dims, axis, "in_specs")
    with jaxcompat.manual_mesh(**eqn.params):
        body, out_dims = batch_body(call.body, dims, inner)
    body, consts = lifted(body)
    in_specs = (*(jax.P() for _ in consts), *in_specs)
    out_specs = _specs(call.out_specs, out_dims, axis, "out_specs")

    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return rebuilt(call, dims, out_dims, consts, body=body, **specs)


def _specs(specs: Sequence[jax.P], dims: Sequence[Dim], axis: Axis, what: str) -> tuple[jax.P, ...]:
    """Partition specs with an entry more for the mapped dimension."""
    own = axis.spmd_name or axis.mesh_axes or ()
    for spec in specs:
        if (used := set(own).intersection(jaxcompat.axes_of_spec(spec))) and axis.spmd_name:
            raise ValueError(f"vmap spmd_axis_name cannot appear in shard_map {what}: {used}")
        if used:
            raise ValueError(f"vmapped away explicit mesh axis cannot appear in shard_map {what}")
    return tuple(
        spec if dim is None else jaxcompat.spec_with_entry(spec, dim, axis.spmd_name)
        for spec, dim in zip(specs, dims, strict=True)
    )
