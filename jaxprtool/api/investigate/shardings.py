"""`shardings`: how XLA partitions a program over devices, by the user's line.

found = jaxprtool.shardings(program)
found.collectives[0].line, found.collectives[0].reason, found.values[0].spec
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from jaxprtool.analysis.shardings import Shardings
from jaxprtool.analysis.shardings.collectives import found_collectives
from jaxprtool.analysis.shardings.constraint_specs import constraint_specs
from jaxprtool.analysis.shardings.repeated_work import repeated_work
from jaxprtool.analysis.shardings.sharded_module import ShardedModule
from jaxprtool.analysis.shardings.values import found_values
from jaxprtool.api.investigate.constraints import with_constraints
from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.running.compile_cache import compiled_afresh
from jaxprtool.formats.partitioning import Partitioned, partitioned
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.quantities import some
from jaxprtool.ir.hlo.mesh_axes import MeshAxes
from jaxprtool.ir.hlo.products import product_flops
from jaxprtool.ir.programs.meshes import mesh_of
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.ref_contents import with_contents
from jaxprtool.ir.source.frames import Frames, frames_now


def shardings(
    program: Program,
    arguments: Sequence[object] = (),
    *,
    propose: bool = False,
    devices: Sequence[jax.Device] = (),
) -> Shardings:
    """Compile a program for the devices of its mesh, and return its collectives and shardings.

    JAX's compilation cache is not used. Nothing is run.

    Args:
        program: A `Program` with a mesh: by the shardings given to `jax.jit`, by `shard_map`, or in
            its types.
        arguments: Its flat arguments or their types, if they lie on several devices.
        propose: Whether to compile the program also with other sharding constraints, and return
            those that reduce communication.
        devices: The devices for the mesh in its types; by default JAX's devices. They may describe
            a machine that is not present (`jax.experimental.topologies`).

    Raises:
        ArgumentsError: If it was traced with arguments on several devices, and none are given.
        UnsupportedError: If it runs on one device; for symbolic sizes or free named axes; or if XLA
            cannot compile it.
        BackendError: If there are too few devices for its mesh.
    """
    avals = dict(program.arguments)
    placed = [name for name in program.sharded if mesh_of(avals[name]) is None]
    if placed and not arguments:  # types do not say where they lie
        raise ArgumentsError(
            f"{program.name} was traced with {some(placed, 3)} on several devices",
            "also pass its flat arguments, which have the devices",
        )
    program = with_contents(program)
    compile = partial(_shardings, arguments=arguments, devices=devices)
    found, whole = compile(program)
    if not propose:
        return found
    return with_constraints(found, constraint_specs(whole), program, lambda p: compile(p)[0])


def _shardings(
    program: Program, arguments: Sequence[object], devices: Sequence[jax.Device]
) -> tuple[Shardings, ShardedModule]:
    """Return the facts of a program, and its module before the partitioner."""
    with compiled_afresh():
        found = partitioned(program, arguments, devices)
    axes = _axes(program, found, found.devices)
    frames = frames_now(program.roots)
    whole = ShardedModule(found.before, axes, frames, program.out_names)
    with without_collector():
        return _described(program, found, whole, frames), whole


def _described(
    program: Program, found: Partitioned, whole: ShardedModule, frames: Frames
) -> Shardings:
    devices, axes = found.devices, whole.axes
    memory = found.compiled.memory_analysis()
    memory_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    parts = ShardedModule(found.after, axes, frames)
    repeated, share = repeated_work(whole, parts)
    return Shardings(
        program.name,
        len(devices),
        devices[0].platform,
        axes.shape,
        memory_bytes,
        product_flops(found.final),
        found_collectives(whole, parts, found.final),
        found_values(whole, found.final, memory_bytes, _reduced(program)),
        repeated,
        share,
    )


def _reduced(program: Program) -> dict[str, list[str]]:
    """Return the axes that the types of arguments and results name as reduced, by name."""
    found = {}
    for name, aval in (*program.arguments, *program.results):
        sharding: Any = getattr(aval, "sharding", None)
        if axes := getattr(getattr(sharding, "spec", None), "reduced", None):
            found[name] = [str(axis) for axis in sharding.mesh.axis_names if axis in axes]
    return found


def _axes(program: Program, found: Partitioned, devices: Sequence[Any]) -> MeshAxes:
    """Return the axes of the program's mesh, the one with most axes if it names several.

    If no mesh is of these devices, there is one axis, "devices".
    """
    numbers = {device.id: i for i, device in enumerate(devices)}
    placed = jax.tree.leaves((found.compiled.input_shardings, found.compiled.output_shardings))
    given = (mesh for each in placed if (mesh := getattr(each, "mesh", None)) is not None)
    best: MeshAxes | None = None
    for mesh in (*program.meshes, *given):
        known = mesh.devices.flat if isinstance(mesh, Mesh) else devices
        order = [numbers[each.id] for each in known if each.id in numbers]
        is_of_these = len(order) == prod(mesh.axis_sizes) == len(devices)
        if is_of_these and (best is None or len(mesh.shape) > len(best.shape)):
            best = MeshAxes(mesh.shape, order)
    return best or MeshAxes({"devices": len(devices)})
