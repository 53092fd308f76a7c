"""Batching of shard_map.

Every shard of an operand has all batch elements, or, with `spmd_axis_name`, the batch elements are
distributed over these axes of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import ShardMap
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.batch.axis import Axis, Dim
from jaxprtool.passes.mapping.batch.body import BatchBodyBuilder, domain_of
from jaxprtool.passes.mapping.batch.table import structured_rules
from jaxprtool.passes.mapping.domains import Solution, write


@rule(structured_rules, "shard_map")
def _shard_map(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    found, axis = regions(eqn), builder.domain.axis
    assert found is not None
    call, inner = ShardMap.of(eqn), axis
    if (spread := axis.spmd_name) is not None:
        inner = replace(axis, size=axis.size // math.prod(call.mesh.shape[n] for n in spread))
    dims = [*map(builder.kind, eqn.invars)]
    in_specs = _specs(call.in_specs, dims, axis, "in_specs")
    with jaxcompat.manual_mesh(**eqn.params):
        made = domain_of(inner).body(call.body, dims)
    out_specs = _specs(call.out_specs, made.kinds, axis, "out_specs")
    solution = Solution(found, dims, [*made.kinds], [made])
    write(builder, solution, in_specs=in_specs, out_specs=out_specs)
    return True


def _specs(specs: Sequence[jax.P], dims: Sequence[Dim], axis: Axis, what: str) -> tuple[jax.P, ...]:
    """Return partition specs with an entry for the batch dimension."""
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
