"""A `shard_map` that is compiled as a whole, with more results: what its equations give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxprtool.ir.core.structured import ShardMap


def can_be_checked(held: ShardMap) -> bool:
    """Return True if a `shard_map` runs on devices that are known, on all axes of their mesh."""
    if not isinstance(held.mesh, Mesh) or held.eqn.effects:
        return False
    return held.eqn.params["newly_manual_axes"] == set(held.mesh.axis_names)


def on_shards(
    held: ShardMap, function: Callable[..., Any], with_results: bool = True
) -> Callable[..., Any]:
    """Return a function of shards under a `shard_map` like one that there is.

    Args:
        held: The `shard_map`.
        function: Returns its results, and what has a leading axis for the device.
        with_results: If False, it returns the latter alone.
    """
    everywhere = PartitionSpec(held.mesh.axis_names)
    return jax.shard_map(
        function,
        mesh=held.mesh,
        in_specs=tuple(held.in_specs),
        out_specs=(list(held.out_specs), everywhere) if with_results else everywhere,
        check_vma=held.eqn.params["check_vma"],
    )
