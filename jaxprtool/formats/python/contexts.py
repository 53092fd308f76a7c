"""The settings an equation was traced in, as what a `with` statement enters."""

from __future__ import annotations

from typing import Any

from jaxprtool.formats.python.expressions import Expression, call


def settings(context: Any) -> list[Expression]:
    """The context managers that make a context of the default one.

    The mesh of a `shard_map`'s body is not among them: the body has it from the `shard_map`.
    """
    found: list[Expression] = []
    if context.compute_type is not None:
        found.append(call("compute_on", context.compute_type))
    if not context.threefry_partitionable:
        found.append(call("jax.threefry_partitionable", False))
    if context.xla_metadata:
        found.append(call("set_xla_metadata", **context.xla_metadata))
    mesh = context.cur_abstract_mesh
    if not mesh.empty and not mesh.manual_axes:
        found.append(call("jax.sharding.use_abstract_mesh", mesh))
    return found
