"""The modules of a program over several devices: before and after XLA's partitioner, and compiled.

    found = partitioned(program)
    found.before.entry.instructions, found.final.entry.instructions

XLA writes them while it compiles (`xla_dump_to`). In the first, each instruction has the sharding
that Shardy assigned to it, and arrays have their whole size. The partitioner splits the arrays and
adds collectives, which later passes merge and move. The *final* module is the one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.lowering import compiled
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.hlo.module import Module, compiled_module, read_module
from jaxprtool.ir.hlo.wire import message
from jaxprtool.ir.programs.program import Program

#: The options that make XLA write the module. They take precedence over the user's `XLA_FLAGS`.
_DUMP = {
    "xla_dump_hlo_pass_re": "spmd-partitioning",
    "xla_dump_hlo_module_re": ".*",
    "xla_dump_hlo_pipeline_re": ".*",
    "xla_dump_max_hlo_modules": -1,
    "xla_dump_hlo_as_proto": True,
    "xla_dump_compress_protos": False,
}


@dataclass(frozen=True, eq=False)
class Partitioned:
    """A program compiled for several devices.

    Attributes:
        compiled: The compiled program.
        devices: Its devices.
        before: Its module before the partitioner, with the sharding of each instruction.
        after: Its module after the partitioner, in which operations keep their names and lines.
        final: The module of one device that runs.
    """

    compiled: jax.stages.Compiled
    devices: Sequence[jax.Device]
    before: Module
    after: Module
    final: Module


def partitioned(
    program: Program, arguments: Sequence[object] = (), devices: Sequence[jax.Device] = ()
) -> Partitioned:
    """Compile a program for the devices of its mesh, and return its modules.

    JAX's persistent compilation cache must be off, since a cached program is not partitioned again.

    Args:
        program: The program.
        arguments: Its flat arguments, if known. Arguments on several devices keep their shardings.
        devices: The devices for its mesh, or descriptions of devices that this machine lacks; by
            default JAX's.

    Raises:
        UnsupportedError: If it runs on one device; for free named axes or symbolic sizes; or if XLA
            cannot compile it, or writes no modules.
        BackendError: If there are too few devices for its mesh.
    """
    if program.symbols:
        names = "=…, ".join(program.symbols)
        raise UnsupportedError(
            f"the partitioner needs sizes of {program.name} that are numbers",
            f'write them in --args, or -p "specialize({names}=…)"',
        )
    with TemporaryDirectory(prefix="jaxprtool-") as folder:
        options = {**_DUMP, "xla_dump_to": folder}
        first = devices[0] if devices else None
        found = compiled(program, arguments, first, devices, compiler_options=options)
        used = _devices(found)
        if len(used) == 1:
            raise UnsupportedError(
                f"{program.name} is not partitioned: it is compiled for one device",
                "give its arguments shardings over a mesh, by jax.jit(in_shardings=…), shard_map, "
                "or types such as f32[8@x,4]",
            )
        before = sorted(Path(folder).glob("*.before_*spmd-partitioning*.pb"))
        after = sorted(Path(folder).glob("*.after_*spmd-partitioning*.pb"))
        if not (before and after):
            raise UnsupportedError(f"XLA did not write the modules of {program.name}")
        with without_collector():
            modules = _dumped(before[0]), _dumped(after[-1]), compiled_module(found)
            return Partitioned(found, used, *modules)


def _devices(found: jax.stages.Compiled) -> Sequence[jax.Device]:
    """Return the devices of a compiled program, in the order of their numbers in its module."""
    executable = found.runtime_executable()
    if hasattr(executable, "local_devices"):
        return list(executable.local_devices())
    # Compiled for descriptions of devices, on which nothing can be loaded.
    placed = jax.tree.leaves((found.input_shardings, found.output_shardings))
    meshes = (mesh for each in placed if (mesh := getattr(each, "mesh", None)) is not None)
    return next((list(mesh.devices.flat) for mesh in meshes), list(placed[0].device_set))


def _dumped(path: Path) -> Module:
    """Return the module in a file that XLA wrote: an `HloProto`, whose field 1 is the module."""
    return read_module(message(path.read_bytes())[1][-1])
