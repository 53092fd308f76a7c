"""Find the mesh for a program whose argument types state how they are sharded.

Such types (`f32[8@data,4]`) name the axes of a mesh and their sizes, but no devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxprtool.errors import TooFewDevicesError
from jaxprtool.ir.basics.backends import start_backends
from jaxprtool.ir.programs.auto_sharding import is_over_devices
from jaxprtool.ir.programs.jit_options import JitOptions
from jaxprtool.ir.programs.program import Program


def mesh_set(
    axes: Mapping[str, int], explicit: bool, virtual: bool = False
) -> AbstractContextManager[object]:
    """Set a mesh of the first devices, or an abstract one if there are too few.

    Args:
        axes: The names of its axes, and their sizes.
        explicit: Whether the axes are explicit, and named in types; otherwise they are left to the
            partitioner.
        virtual: Whether the CPU's devices are used if JAX's default ones are too few.
    """
    mesh = _mesh(axes, AxisType.Explicit if explicit else AxisType.Auto, virtual)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)


def on_axes(program: Program, axes: Mapping[str, int]) -> Program:
    """Put a program on a mesh of the first devices, or on an abstract one if there are too few.

    Args:
        program: The program.
        axes: The names of the axes of its mesh, and their new sizes.

    Raises:
        ArgumentsError, UnsupportedError: As `Program.on_mesh`.
    """
    return program.on_mesh(_mesh(axes, AxisType.Auto))


def _mesh(axes: Mapping[str, int], kind: AxisType, virtual: bool = False) -> Mesh | AbstractMesh:
    sizes, names = tuple(axes.values()), tuple(axes)
    kinds, count = (kind,) * len(sizes), math.prod(sizes)
    start_backends()
    devices = jax.devices()
    if virtual and len(devices) < count:
        with suppress(RuntimeError):  # JAX_PLATFORMS leaves out the CPU
            devices = jax.devices("cpu")
    if len(devices) < count:
        return AbstractMesh(sizes, names, axis_types=kinds)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices[:count])


def mesh_in_types(program: Program) -> AbstractMesh | None:
    """Return the mesh without devices that a program names, or None.

    The types of arguments and results name it, or the shardings given to `jax.jit`; or equations,
    if nothing names devices.
    """
    meshes = [mesh_of(aval) for aval in (*program.in_avals, *program.out_avals)]
    if program.jit is not None:
        asked = (each.placement for each in (*program.jit.arguments, *program.jit.results))
        meshes += [getattr(each, "mesh", None) for each in asked]
    if not any(isinstance(mesh, Mesh | AbstractMesh) for mesh in meshes):
        inside = program.meshes
        meshes = [] if any(isinstance(mesh, Mesh) for mesh in inside) else inside
    return next((mesh for mesh in meshes if isinstance(mesh, AbstractMesh)), None)


def concrete_mesh(
    program: Program,
    arguments: Sequence[object],
    device: jax.Device | None = None,
    devices: Sequence[jax.Device] = (),
) -> Mesh | None:
    """Return the mesh of devices to run a program on, or None if its types name no mesh.

    It is the mesh that is set (`jax.set_mesh`), or the mesh of an argument, or else one of the
    first of `devices`, by default those of the platform of `device`. Raises TooFewDevicesError.
    """
    wanted = mesh_in_types(program)
    if wanted is None:
        return None
    known = [jax.sharding.get_mesh(), *map(mesh_of, arguments)]
    if device is None:
        for mesh in known:
            if isinstance(mesh, Mesh) and not mesh.empty and _alike(mesh.abstract_mesh, wanted):
                return mesh
    devices = devices or jax.devices(None if device is None else device.platform)
    count = math.prod(wanted.axis_sizes)
    if len(devices) < count:
        axes = ", ".join(f"{name}={size}" for name, size in wanted.shape.items())
        platform = devices[0].platform
        raise TooFewDevicesError(
            f"{program.name} runs on a mesh of {count} devices ({axes}), but backend "
            f"'{platform}' has {len(devices)}",
            f"--host-devices {count}, or JAX_NUM_CPU_DEVICES={count}, creates {count} devices on "
            "one CPU"
            if platform == "cpu"
            else f"--host-devices {count} creates {count} devices on the CPU",
            list(map(str, wanted.axis_names)),
        )
    chosen = np.array(devices[:count]).reshape(wanted.axis_sizes)
    return Mesh(chosen, wanted.axis_names, axis_types=wanted.axis_types)


def placed(program: Program, arguments: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Place the arguments on the devices of a mesh.

    A sharding in the options of `jax.jit` comes before that of the type. A value without such an
    option stays where it is if it is on the mesh already.
    """
    options = (program.jit or JitOptions()).of_arguments(program.arguments)
    given = zip(arguments, program.in_avals, options, strict=True)
    return [_placed(value, aval, asked.placement, mesh) for value, aval, asked in given]


def _placed(value: Any, aval: Any, placement: Any, mesh: Mesh) -> Any:
    sharding = getattr(placement, "sharding", placement)  # that of a layout
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        own = sharding.mesh if isinstance(sharding.mesh, Mesh) else mesh
        kind = sharding.memory_kind
        return jax.device_put(value, NamedSharding(own, sharding.spec, memory_kind=kind))
    if mesh_of(aval) is None or mesh_of(value) == mesh:
        return value
    return jax.device_put(value, NamedSharding(mesh, aval.sharding.spec))


def spread(program: Program, values: Sequence[Any]) -> list[Any]:
    """Move arrays to the shardings that `jax.jit` of the program states.

    `jax.jit` does not move arrays from other devices, and does not shard NumPy arrays over several
    processes, all of which pass the same values. Types, and values without such a sharding, are
    returned as they are.
    """
    if program.jit is None:
        return list(values)
    asked = (each.placement for each in program.jit.of_arguments(program.arguments))
    return [
        jax.device_put(value, placement)
        if isinstance(value, jax.Array | np.ndarray)
        and is_over_devices(placement)
        and isinstance(mesh := getattr(placement, "mesh", None), Mesh)
        and not mesh.empty
        else value
        for value, placement in zip(values, asked, strict=True)
    ]


def mesh_of(value: object) -> Any:
    """Return the mesh of an array or of its type, or None."""
    mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def _alike(a: AbstractMesh, b: AbstractMesh) -> bool:
    parts = attrgetter("axis_names", "axis_sizes", "axis_types")
    return bool(parts(a) == parts(b))
