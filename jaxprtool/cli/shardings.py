"""`jaxprtool shardings`: how XLA partitions a function over devices, by the user's lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.cost import Device
from jaxprtool.cli.options import Panel
from jaxprtool.cli.running import bandwidth_option, partitioned
from jaxprtool.cli.session import Session, command
from jaxprtool.errors import ArgumentsError, OutputError, did_you_mean
from jaxprtool.ir.documents import some

if TYPE_CHECKING:
    from jaxprtool.analysis.shardings import ShardedValue, Shardings

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
_Backend = Annotated[
    str | None,
    options.backend_option(
        "Compile for the devices of cpu, gpu or tpu. With the package libtpu, also for a TPU that "
        "this machine lacks: tpu:v5e:2x2.",
        _SHOWN,
    ),
]


@command
def shardings(
    session: Session,
    replicated: _Replicated = False,
    picture: _Picture = None,
    propose: _Propose = False,
    bandwidth: _Bandwidth = None,
    device: Device = None,
    backend: _Backend = None,
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
    most = options.rows(top, all, options.TALL_ROWS)
    if picture is not None and (json or replicated):
        raise OutputError("--picture cannot be combined with --json or --replicated")
    session.start()
    session.function.start_virtual_devices()
    from jaxprtool.analysis.cost.devices import device_named, interconnect_named
    from jaxprtool.analysis.shardings import timed
    from jaxprtool.render.reports.shardings import pictures, shardings_tables

    link = None if bandwidth is None else interconnect_named(bandwidth)
    on = None if device is None else device_named(device)
    traced = session.traced(virtual=True)
    programs = session.programs(traced)
    facts = partitioned(session, traced, programs, backend=backend, propose=propose)
    facts = timed(facts, link, on)
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
