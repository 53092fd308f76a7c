"""`jaxprtool shardings`: how XLA partitions a function over devices, by the user's lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.options import ModeledDevice, Panel, bandwidth_option
from jaxprtool.cli.session import Session, command, only_program
from jaxprtool.errors import (
    ArgumentsError,
    OutputError,
    UnsupportedError,
    did_you_mean,
)
from jaxprtool.ir.documents import some

if TYPE_CHECKING:
    from jaxprtool.api.targets import TracedTarget
    from jaxprtool.commands.shardings.partitions import ShardedValue, Shardings
    from jaxprtool.ir.program import Program

_SHOWN = Panel("Shardings")

_Replicated = Annotated[
    bool,
    _SHOWN.flag(
        "--replicated",
        "Show only replicated values that take more than 1 % of a device's memory.",
    ),
]
_Picture = Annotated[
    str | None,
    _SHOWN.option(
        "--picture",
        "NAME",
        "Draw which devices hold which parts of a value, or of all values whose names begin with "
        "NAME.",
    ),
]
_Propose = Annotated[
    bool,
    _SHOWN.flag(
        "--propose",
        "Also compile with other sharding constraints, and show those that reduce communication.",
    ),
]
_Bandwidth = Annotated[str | None, bandwidth_option(_SHOWN)]


@command
def shardings_command(
    session: Session,
    replicated: _Replicated = False,
    picture: _Picture = None,
    propose: _Propose = False,
    bandwidth: _Bandwidth = None,
    device: ModeledDevice = None,
    backend: options.CompileBackend = None,
    top: options.TopTall = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Show how XLA partitions a function over devices, by line.

    Compile the function and list each collective with its axes and bytes, the value that it moves,
    and why the partitioner added it. Nothing is run. If the machine has too few devices for the
    mesh, virtual CPU devices are used.

    [bold]Examples[/]

      jaxprtool shardings samples/sharded.py:grad_loss
      jaxprtool shardings samples/partitioned.py:step --mesh data=8 --in-specs "(P(), P('data'))"
    """
    most = options.row_limit(top, all, options.TALL_ROWS)
    if picture is not None and (json or replicated):
        raise OutputError("--picture cannot be combined with --json or --replicated")
    session.start()
    session.function.start_virtual_devices()
    from jaxprtool.analysis.devices import device_named, interconnect_named
    from jaxprtool.commands.shardings.partitions import with_link_times
    from jaxprtool.commands.shardings.table import pictures, shardings_tables

    link = None if bandwidth is None else interconnect_named(bandwidth)
    on = None if device is None else device_named(device)
    traced = session.traced(virtual=True)
    programs = session.programs(traced)
    facts = compiled_partition(
        session, traced, programs, backend=backend, propose=propose, avoidable=picture is None
    )
    facts = with_link_times(facts, link, on)
    if json:
        output.write_json(facts)
        return
    if picture is not None:
        output.write_rendered(pictures(_named(picture, facts), output.width()))
        return
    output.write_rendered(shardings_tables(facts, output.width(), most, replicated))


def _named(name: str, facts: Shardings) -> list[ShardedValue]:
    """Return the values whose names begin with `name`."""
    names = [value.name for value in facts.values]
    if chosen := [value for value in facts.values if value.name.startswith(name)]:
        return chosen
    hint = did_you_mean(name, names) or f"values: {some(names, 6)}"
    raise ArgumentsError(f"--picture: no value of {facts.name} is named '{name}'", hint)


def compiled_partition(
    session: Session,
    traced: TracedTarget,
    programs: Sequence[tuple[str, Program]],
    *,
    backend: str | None = None,
    propose: bool = False,
    avoidable: bool = False,
) -> Shardings:
    """Compile the only program, and return its shardings and collectives.

    Args:
        session: The options of the command.
        traced: The traced TARGET.
        programs: The programs after the passes.
        backend: A backend to compile for, or a TPU that this machine lacks: `tpu:v5e:2x2`.
        propose: Whether to try other sharding constraints.
        avoidable: Whether to try a few of them, and name the collectives that one avoids.

    Raises:
        UnsupportedError: If it runs on one device.
        BackendError: If there is no such backend, or it has too few devices.
    """
    from jaxprtool.commands.shardings.shardings import shardings

    inputs = traced.given_to(only_program("the partitioner takes", programs))
    session.on_progress(f"compiling {inputs.program.name}")
    if backend is not None:
        return _on_backend(inputs.program, backend, propose, avoidable)
    arguments = [inputs.values.get(name) for name in inputs.program.arg_names]
    with traced.mesh_set():
        return shardings(inputs.program, arguments, propose=propose, avoidable=avoidable)


def _on_backend(program: Program, backend: str, propose: bool, avoidable: bool) -> Shardings:
    from jaxprtool.commands.shardings.shardings import shardings
    from jaxprtool.execute.running.backends import devices_to_compile_for
    from jaxprtool.formats.lowering import on_devices

    if not program.meshes:
        raise UnsupportedError(
            f"{program.name} names no mesh to compile for '{backend}'", "name its axes: --mesh x=4"
        )
    there, devices = on_devices(program, devices_to_compile_for(backend), backend)
    return shardings(there, devices=devices, propose=propose, avoidable=avoidable)
