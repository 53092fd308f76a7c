"""Find the parts of a program that XLA's partitioner shards, which its jaxpr does not show.

The arrays of such a program are whole, and the jaxpr has none of the collectives: its costs are
those of all devices together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from jaxprtool.ir.core.equations import equations, named
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn


def left_to_partitioner(program: Program | AnyJaxpr) -> tuple[str, ...]:
    """Return the parts of a program with a sharding over several devices; () if there are none.

    Returns:
        The paths of arguments and results with such a sharding, given to `jax.jit`, in their types,
        or by the arguments of the call, and equations: `sharding_constraint at model.py:9`.
    """
    return tuple(dict.fromkeys(_parts(program)))


def partitioner_note(name: str, parts: Sequence[str]) -> str:
    """Return a note that a program was not partitioned; "" if it needs none.

    Args:
        name: The name of the program.
        parts: The parts that are left to the partitioner.
    """
    if not parts:
        return ""
    return (
        f"{name} is not partitioned; XLA would partition it by its shardings. Arrays have their "
        "whole size, and collectives are missing"
    )


def is_over_devices(placement: Any) -> bool:
    """Return True for a sharding, or the layout with one, over several devices."""
    sharding = getattr(placement, "sharding", placement)
    return getattr(sharding, "num_devices", 0) > 1


def _parts(program: Program | AnyJaxpr) -> Iterator[str]:
    if isinstance(program, Program):
        yield from (name for name in program.arg_names if name in program.sharded)
        if program.jit is not None:
            options = (*program.jit.arguments, *program.jit.results)
            yield from (each.name for each in options if is_over_devices(each.placement))
        yield from (
            name for name, aval in (*program.arguments, *program.results) if _is_sharded(aval)
        )
    yield from (named(eqn) for eqn in equations(top_jaxpr(program)) if _states_sharding(eqn))


def _states_sharding(eqn: JaxprEqn) -> bool:
    """Return True if an equation states how an array is sharded over devices."""
    params = eqn.params
    if eqn.primitive.name == "sharding_constraint":
        return is_over_devices(params["sharding"])
    if eqn.primitive.name == "jit":
        return any(map(is_over_devices, (*params["in_shardings"], *params["out_shardings"])))
    if eqn.primitive.name == "shard_map":
        mesh = params["mesh"]
        pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
        known = {name for name, axis_type in pairs if axis_type is AxisType.Manual}
        rest = set(mesh.axis_names) - known - set(params["newly_manual_axes"])
        return any(mesh.shape[axis] > 1 for axis in rest)
    return False


def _is_sharded(aval: Any) -> bool:
    """Return True if a type states that its values are sharded over devices: `f32[8@x]`."""
    sharding = getattr(aval, "sharding", None)
    sizes = {} if sharding is None else sharding.mesh.shape
    spec = PartitionSpec() if sharding is None else sharding.spec
    axes = (*jax.tree.leaves(spec.partitions), *spec.unreduced)
    return any(sizes.get(axis, 1) > 1 for axis in axes)
