"""Whether XLA would partition a program: by shardings that `jax.jit` was given, or constraints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxprtool.ir.border import top_jaxpr
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program


def partitioned_by_xla(program: Program) -> bool:
    """Return whether XLA would partition a program, which its jaxpr does not show.

    The arrays of such a jaxpr are whole, and it has none of the collectives.
    """
    return any(_device_count(each) > 1 for each in _placements(program))


def _placements(program: Program) -> Iterator[Any]:
    if program.jit is not None:
        yield from (each.placement for each in (*program.jit.arguments, *program.jit.results))
    for eqn in equations(top_jaxpr(program)):
        if eqn.primitive.name == "sharding_constraint":
            yield eqn.params["sharding"]
        elif eqn.primitive.name == "jit":
            yield from (*eqn.params["in_shardings"], *eqn.params["out_shardings"])


def _device_count(placement: Any) -> int:
    """Return how many devices a sharding, or the layout with one, is for; 0 if none is told."""
    sharding = getattr(placement, "sharding", placement)
    return getattr(sharding, "num_devices", 0)
