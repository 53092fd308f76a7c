"""`jaxprtool cost`: where a function's FLOPs and bytes go, by the user's own lines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, Compiled, Panel, bandwidth_option
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import Session, command, only_program
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxprtool.analysis.devices import DeviceSpec
    from jaxprtool.api.targets import RunInputs
    from jaxprtool.commands.cost.estimate import Cost
    from jaxprtool.commands.shardings.partitions import Shardings
    from jaxprtool.ir.program import Program

_COUNTED = Panel("Cost")


#: The groupings of the cost.
By = Literal["line", "scope", "primitive", "dtype", "argument", "kernel"]

_By = Annotated[
    By,
    _COUNTED.choice(
        "--by",
        By,
        "Group by source line, module scope, primitive, dtype, argument read, or kernel of an HLO "
        "module.",
    ),
]
_Seconds = Annotated[
    float | None,
    _COUNTED.option(
        "--seconds", "S", "Measured run time, to report the FLOP rate and utilization.", min=1e-9
    ),
]
_Measure = Annotated[
    bool,
    _COUNTED.flag("--measure", "Compile and run the function here, and use the measured time."),
]
_Bandwidth = Annotated[str | None, bandwidth_option()]
_Pprof = Annotated[
    str | None,
    OUTPUT.option(
        "--pprof", "FILE.pb.gz", "Also write a profile by call stack, for pprof and speedscope."
    ),
]


@command
def cost_command(
    session: Session,
    by: _By = "line",
    device: options.ModeledDevice = None,
    seconds: _Seconds = None,
    measure: _Measure = False,
    compiled: Compiled = False,
    bandwidth: _Bandwidth = None,
    pprof: _Pprof = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Estimate FLOPs and memory traffic; --measure also times it.

    Loops are counted once per iteration, calls once per call, and branches as a range from the
    cheapest to the most expensive. Bytes are the memory traffic that remains after fusion. Of an
    HLO module, a file or a module in a folder of --xla_dump_to, the kernels are counted, and the
    copies that XLA inserted are listed; with --compiled also those of a function on one device.

    [bold]Examples[/]

      jaxprtool cost samples/transformer.py:loss -p grad
      jaxprtool cost samples/transformer.py:loss --by scope --device h100
      jaxprtool cost jax.numpy:matmul --args "f32[n,d], f32[d,d]"
      jaxprtool cost dump/jit_step --by kernel
    """
    most = options.row_limit(top, all)
    if seconds is not None and measure:
        raise OutputError("--seconds and --measure cannot be combined: both give the run time")
    if bandwidth is not None and not compiled:
        raise OutputError("--bandwidth times the collectives of --compiled", "add --compiled")
    session.start()
    from jaxprtool.analysis.devices import device_named, interconnect_named
    from jaxprtool.commands.cost.estimate import cost as found_cost
    from jaxprtool.commands.cost.estimate import with_times
    from jaxprtool.commands.cost.table import symbols_in

    on = None if device is None else device_named(device)
    link = None if bandwidth is None else interconnect_named(bandwidth)
    if (stored := session.module()) is not None:
        if by == "argument":
            raise OutputError("--by argument needs a program, not an HLO module")
        if measure or compiled or pprof is not None:
            raise OutputError("--measure, --compiled and --pprof need a program, not an HLO module")
        from jaxprtool.commands.cost.modules import module_cost

        if not stored.module.schedule:
            output.note("before XLA's optimizations nothing is fused: the bytes are an upper bound")
        session.on_progress("counting")
        found = module_cost(stored.module, by, stored.assignment)
        _write([with_times(found, on, seconds)], on, most, json)
        return
    traced = session.traced()
    named = session.programs(traced)
    programs = [program for _, program in named]
    if compiled and not any(program.meshes or program.sharded for program in programs):
        program = only_program("--compiled takes", named)
        if bandwidth is not None or measure or pprof is not None:
            raise OutputError(
                "--bandwidth, --measure and --pprof with --compiled need a program on several "
                "devices"
            )
        session.on_progress(f"compiling {program.name}")
        _write([with_times(_compiled_cost(program, by), on, seconds)], on, most, json)
        return
    if by == "kernel":
        raise OutputError(
            "--by kernel groups the kernels of an HLO module, or of a program compiled for one "
            "device",
            "add --compiled",
        )
    session.on_progress("counting")
    estimates = [found_cost(program, by) for program in programs]
    if on is not None or measure:
        require_numbers(any(map(symbols_in, estimates)))
    if pprof is not None:
        program = only_program("--pprof takes", [(program.name, program) for program in programs])
        with output.written_file(pprof) as file:
            file.write(_profile(program))
    split = None
    if compiled:
        from jaxprtool.commands.shardings.command import compiled_partition
        from jaxprtool.commands.shardings.partitions import with_link_times

        split = with_link_times(compiled_partition(session, traced, named), link, on)
    else:
        output.say_if_partitioned(programs, json)
    taken = [
        _seconds(traced.given_to(p), session.on_progress) if measure else seconds for p in programs
    ]
    estimates = [
        with_times(estimate, on, time) for estimate, time in zip(estimates, taken, strict=True)
    ]
    _write(estimates, on, most, json, split)


def _write(
    costs: Sequence[Cost],
    device: DeviceSpec | None,
    most: int | None,
    json: bool,
    split: Shardings | None = None,
) -> None:
    """Write costs as a document or as tables, after those of the devices of a single program."""
    from jaxprtool.commands.cost.table import CostDocument, copies_rendering, cost_table

    if json:
        output.write_json(CostDocument(costs[0].total, costs[0].groups, costs, split))
        return
    if split is not None:
        from jaxprtool.commands.shardings.table import device_tables

        output.write_rendered(device_tables(split, output.width(), most))
        output.write_text("")
        if (copies := copies_rendering(split.copies, output.width(), most)) is not None:
            output.write_rendered(copies)
            output.write_text("")
    beside = split is not None
    output.write_each(cost_table(cost, output.width(), most, device, beside) for cost in costs)


def _compiled_cost(program: Program, by: By) -> Cost:
    """Return the cost of a program's kernels, after compiling it for one device."""
    from jaxprtool.commands.cost.modules import module_cost
    from jaxprtool.commands.memory.compiled import compiled_for
    from jaxprtool.ir.conversions import with_contents

    if by == "argument":
        raise OutputError("--by argument needs a program that is not compiled")
    stored = compiled_for(with_contents(program), (), None)
    found = module_cost(stored.module, by, stored.assignment)
    return replace(found, name=program.name)


def require_numbers(is_symbolic: object) -> None:
    """Raise OutputError if a requested time depends on symbolic sizes."""
    if is_symbolic:
        hint = 'write them in --args, or -p "specialize(n=512)"'
        raise OutputError("a time estimate needs sizes that are numbers", hint)


def _profile(program: Program) -> bytes:
    """Return the cost of a program by call stack, as a profile."""
    from jaxprtool.commands.cost.estimate import cost_by_stack
    from jaxprtool.formats.pprof import Sample, pprof_profile

    sample_types = [("flops", "count"), ("transcendentals", "count"), ("bytes", "bytes")]
    samples = [
        Sample(*entry.stack, (entry.work.flops, entry.work.transcendentals, entry.work.bytes))
        for entry in cost_by_stack(program)
    ]
    return pprof_profile(program.name, sample_types, samples)


def _seconds(inputs: RunInputs, on_progress: OnProgress) -> float:
    """Return the run time of a program on the device of `run`."""
    from jaxprtool.cli.session import ready
    from jaxprtool.execute.running import run

    prepared = ready(inputs, seed=0)
    report = run.run(
        prepared.program, prepared.filled.arguments, prepared.device, on_progress=on_progress
    )
    times = report.times
    return times.first_call if times.repeat is None else times.repeat
