"""How XLA partitions a program over devices, for `shardings` and for `--compiled`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, only_program
from jaxprtool.errors import BackendError, UnsupportedError

if TYPE_CHECKING:
    from jaxprtool.analysis.shardings import Shardings
    from jaxprtool.api.targets import Traced
    from jaxprtool.ir.programs.program import Program

_DEVICES = Panel("Several devices")

Compiled = Annotated[
    bool,
    _DEVICES.flag(
        "--compiled",
        "Compile the function for its mesh, and show what each device sends, as `shardings` does.",
    ),
]


def bandwidth_option(panel: Panel = _DEVICES) -> Any:
    """Return the declaration of `--bandwidth`."""
    return panel.option(
        "--bandwidth",
        "NAME|SPEED",
        "Show the minimum time of collectives over an interconnect: nvlink4, tpu-v5e, pcie5, "
        "300GB/s.",
    )


def partitioned(
    session: Session,
    traced: Traced,
    programs: Sequence[tuple[str, Program]],
    *,
    backend: str | None = None,
    propose: bool = False,
) -> Shardings:
    """Compile the only program, and return its shardings and collectives.

    Args:
        session: The options of the command.
        traced: The traced TARGET.
        programs: The programs after the passes.
        backend: A backend to compile for, or a TPU that this machine lacks: `tpu:v5e:2x2`.
        propose: Whether to try other sharding constraints.

    Raises:
        UnsupportedError: If it runs on one device.
        BackendError: If there is no such backend, or it has too few devices.
    """
    from jaxprtool.api.investigate.shardings import shardings

    given = traced.given_to(only_program("the partitioner takes", programs))
    session.on_progress(f"compiling {given.program.name}")
    if backend is not None:
        return _on_backend(given.program, backend, propose)
    arguments = [given.values.get(name) for name in given.program.arg_names]
    with session.mesh_set_for(traced):
        return shardings(given.program, arguments, propose=propose)


def _on_backend(program: Program, backend: str, propose: bool) -> Shardings:
    import numpy as np
    from jax.sharding import Mesh

    from jaxprtool.api.investigate.shardings import shardings
    from jaxprtool.execute.running.backends import devices_to_compile_for

    devices = devices_to_compile_for(backend)
    if not program.meshes:
        raise UnsupportedError(
            f"{program.name} names no mesh to compile for '{backend}'", "name its axes: --mesh x=4"
        )
    mesh = max(program.meshes, key=lambda each: len(each.shape))
    count = prod(mesh.axis_sizes)
    if len(devices) < count:
        raise BackendError(
            f"{program.name} runs on a mesh of {count} devices, but '{backend}' has {len(devices)}"
        )
    chosen = np.array(devices[:count]).reshape(mesh.axis_sizes)
    there = program.on_mesh(Mesh(chosen, mesh.axis_names, axis_types=mesh.axis_types))
    return shardings(there, devices=devices[:count], propose=propose)
