"""`jaxprtool memory`: the values in memory at a function's peak."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, Panel
from jaxprtool.cli.session import Session, command, only_program
from jaxprtool.errors import CheckError, OutOfMemoryError, OutputError, UnsupportedError

if TYPE_CHECKING:
    from jaxprtool.api.targets import RunInputs
    from jaxprtool.cli.output import OnProgress
    from jaxprtool.commands.memory.compiled import CompiledPeak
    from jaxprtool.commands.memory.estimate import Memory
    from jaxprtool.formats.hlo import StoredModule
    from jaxprtool.render.terminal.tables import Rendering

_Out = Annotated[
    str | None,
    options.out_option("Also draw the memory over time, with matplotlib.", "FILE.svg|FILE.png"),
]

_Pprof = Annotated[
    str | None,
    OUTPUT.option(
        "--pprof", "FILE.pb.gz", "Also write the values live at the peak by call stack, for pprof."
    ),
]

_Compiled = Annotated[
    bool,
    Panel("Compiled program").flag(
        "--compiled", "Compile the function, and show XLA's buffers at its peak by line."
    ),
]

_Top = Annotated[
    int | None, options.top_option(f"{options.ROWS}; {options.TALL_ROWS} with --compiled")
]

_Limit = Annotated[
    str | None,
    Panel("Compiled program").option(
        "--limit", "SIZE", "Exit with code 1 if the peak is larger: 16GiB, 500MB, 1e9."
    ),
]


@command
def memory_command(
    session: Session,
    out: _Out = None,
    pprof: _Pprof = None,
    compiled: _Compiled = False,
    backend: options.CompileBackend = None,
    limit: _Limit = None,
    top: _Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Estimate the peak memory, and list what is live at the peak.

    This estimates what XLA needs after fusion; only --compiled compiles. Each row has the line that
    makes a value and the equation that reads it last. Similar values share a row. Below the table
    are arguments that the function could donate, and by how much the peak would fall. An HLO module
    has XLA's buffers if its file has them, and otherwise those of its schedule.

    [bold]Examples[/]

      jaxprtool memory samples/transformer.py:loss -p grad
      jaxprtool memory samples/transformer.py:train_step --top 5 -o memory.svg
      jaxprtool memory samples/transformer.py:train_step --compiled --limit 16GiB
      jaxprtool memory samples/transformer.py:train_step --compiled --backend tpu:v5e:2x2
      jaxprtool memory dump/jit_step
    """
    from jaxprtool.ir.documents import bytes_of

    shown = options.row_limit(top, all, options.TALL_ROWS if compiled else options.ROWS)
    most = None if limit is None else bytes_of(limit)
    picture_format = None if out is None else output.figure_format(out)
    if backend is not None and not compiled:
        raise OutputError("--backend compiles the function for other devices", "add --compiled")
    session.start()
    from jaxprtool.commands.memory import table as render
    from jaxprtool.commands.memory.donatable import donatable
    from jaxprtool.commands.memory.estimate import memory as found_memory
    from jaxprtool.commands.memory.table import compiled_table

    if (stored := session.module()) is not None:
        if compiled or out is not None or pprof is not None:
            raise OutputError("--compiled, -o and --pprof need a program, not an HLO module")
        rows = options.row_limit(top, all, options.TALL_ROWS)
        require_within(most, [_module_memory(stored, rows, json)])
        return
    traced = session.traced()
    programs = session.programs(traced)
    if out is not None:
        only_program("-o takes", programs)
    if pprof is not None:
        only_program("--pprof takes", programs)
    if compiled:
        only_program("--compiled takes", programs)
    session.on_progress("counting")
    estimates = [found_memory(program) for _, program in programs]
    missing = [
        donatable(program, estimate)
        for (_, program), estimate in zip(programs, estimates, strict=True)
    ]
    if out is not None and picture_format is not None:
        session.on_progress("drawing")
        with output.written_file(out) as file:
            file.write(render.memory_picture(estimates[0], picture_format))
    if pprof is not None:
        with output.written_file(pprof) as file:
            file.write(_profile(estimates[0]))
    peak = None
    if compiled:
        session.on_progress(f"compiling {programs[0][0]}")
        peak = measured_peak(traced.given_to(programs[0][1]), backend)
    if peak is None:
        output.say_if_partitioned((program for _, program in programs), json)
    output.say_unused_donations(program for _, program in programs)
    if json:
        from jaxprtool.commands.memory.table import MemoryDocument

        first = estimates[0]
        output.write_json(
            MemoryDocument(first.peak_bytes, first.at, first.live, estimates, peak, missing[0])
        )
    elif peak is not None:
        output.write_rendered(compiled_table(peak, output.width(), shown))
    else:
        output.write_each(
            render.memory_table(estimate, output.width(), shown, missing=entry)
            for estimate, entry in zip(estimates, missing, strict=True)
        )
    require_within(most, [peak] if peak is not None else estimates)


def _module_memory(stored: StoredModule, rows: int | None, json: bool) -> CompiledPeak:
    """Write the memory of an HLO module, and return it."""
    from jaxprtool.commands.memory.compiled import module_peak
    from jaxprtool.commands.memory.table import ModuleMemoryDocument, compiled_table

    peak = module_peak(stored)
    if json:
        output.write_json(ModuleMemoryDocument(peak.peak_bytes, peak))
    else:
        output.write_rendered(compiled_table(peak, output.width(), rows))
    return peak


def _profile(estimate: Memory) -> bytes:
    """Return the live values at the peak by call stack, as a profile."""
    from jaxprtool.formats.pprof import Sample, pprof_profile

    sample_types = [("bytes", "bytes"), ("values", "count")]
    alive = [
        Sample(
            live.frames,
            f"{live.primitive or live.name or live.kind} {live.type}",
            (live.bytes, live.count),
        )
        for live in estimate.live
    ]
    return pprof_profile(estimate.name, sample_types, alive)


# --- compiled memory ------------------------------------------------------------------------------
# The memory of compiled programs in several commands: tables, limits, and full devices.

#: The number of lines in the table of a program that does not fit.
_TOP = 8


def measured_peak(inputs: RunInputs, backend: str | None = None) -> CompiledPeak:
    """Return XLA's buffers at the peak of a program, compiled for the devices of its arguments.

    With a backend, it is compiled for the devices of this backend.
    """
    from jaxprtool.commands.memory.compiled import compiled_memory

    names = inputs.program.arg_names
    arguments = [inputs.values.get(name) for name in names]
    return compiled_memory(inputs.program, arguments, backend)


def require_within(limit: int | None, peaks: Sequence[Memory | CompiledPeak]) -> None:
    """Raise CheckError for the first program that needs more than `limit` bytes, if it is given."""
    if limit is None:
        return
    from jaxprtool.commands.memory.compiled import estimated_lines
    from jaxprtool.commands.memory.estimate import Memory
    from jaxprtool.ir.documents import in_bytes

    for peak in peaks:
        if peak.peak_bytes <= limit:
            continue
        if isinstance(peak, Memory):
            lines = estimated_lines(peak)
        else:
            lines = {line.line: line.bytes for line in peak.lines}
        line = max(lines, key=lambda name: lines[name])
        raise CheckError(
            f"{peak.name} needs {in_bytes(peak.peak_bytes)}, "
            f"{in_bytes(peak.peak_bytes - limit)} more than --limit {in_bytes(limit)}; "
            f"{in_bytes(lines[line])} of it {'at' if ':' in line else 'are'} {line}"
        )


@contextlib.contextmanager
def buffers_shown(inputs: RunInputs, on_progress: OnProgress) -> Iterator[None]:
    """Add to an OutOfMemoryError a table of the memory that the program needs.

    The table has XLA's buffers if the program can be compiled, and is an estimate otherwise.
    """
    try:
        yield
    except OutOfMemoryError as error:
        on_progress(f"{error.message}: finding its buffers")
        lines = [("", line) for line in _table(inputs).plain().splitlines()]
        raise OutOfMemoryError(error.message, error.hint, lines) from error.__cause__


def _table(inputs: RunInputs) -> Rendering:
    from jaxprtool.commands.memory.estimate import memory
    from jaxprtool.commands.memory.table import compiled_table, memory_table

    width = output.width(sys.stderr) - 4
    try:
        peak = measured_peak(inputs)
    except UnsupportedError:
        return memory_table(memory(inputs.program), width, _TOP, "")
    return compiled_table(peak, width, _TOP, "")
