"""A `shard_map` compiled as a whole, with results of its equations as additional results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxprtool.ir.core.structured import ShardMap


def can_be_checked(held: ShardMap) -> bool:
    """Return True if a `shard_map` runs on known devices and over all axes of their mesh."""
    if not isinstance(held.mesh, Mesh) or held.eqn.effects:
        return False
    return held.eqn.params["newly_manual_axes"] == set(held.mesh.axis_names)


def on_shards(
    held: ShardMap, function: Callable[..., Any], with_results: bool = True
) -> Callable[..., Any]:
    """Return a function of shards under a `shard_map` like an existing one.

    Args:
        held: The `shard_map`.
        function: Returns its results, and values to stack along a leading device axis.
        with_results: If False, it returns only the latter.
    """
    everywhere = PartitionSpec(held.mesh.axis_names)
    return jax.shard_map(
        function,
        mesh=held.mesh,
        in_specs=tuple(held.in_specs),
        out_specs=(list(held.out_specs), everywhere) if with_results else everywhere,
        check_vma=held.eqn.params["check_vma"],
    )
