"""The memory of compiled programs in several commands: tables, limits, and full devices."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxprtool.cli import output
from jaxprtool.errors import CheckError, OutOfMemoryError, UnsupportedError

if TYPE_CHECKING:
    from jaxprtool.analysis.memory import Memory
    from jaxprtool.analysis.memory.compiled import CompiledPeak
    from jaxprtool.api.targets import RunInputs
    from jaxprtool.cli.progress import OnProgress
    from jaxprtool.render.terminal.rendering import Rendering

#: The number of lines in the table of a program that does not fit.
_TOP = 8


def peak_of(given: RunInputs) -> CompiledPeak:
    """Return XLA's buffers at the peak of a program, compiled for the devices of its arguments."""
    from jaxprtool.api.investigate.compiled_memory import compiled_memory

    names = given.program.arg_names
    return compiled_memory(given.program, [given.values.get(name) for name in names])


def require_within(limit: int, found: Sequence[Memory | CompiledPeak]) -> None:
    """Raise CheckError for the first program that needs more than `limit` bytes."""
    from jaxprtool.analysis.memory import Memory
    from jaxprtool.analysis.memory.compiled import estimated_lines
    from jaxprtool.ir.basics.quantities import in_bytes

    for each in found:
        if each.peak_bytes <= limit:
            continue
        if isinstance(each, Memory):
            lines = estimated_lines(each)
        else:
            lines = {line.line: line.bytes for line in each.lines}
        line = max(lines, key=lambda name: lines[name])
        raise CheckError(
            f"{each.name} needs {in_bytes(each.peak_bytes)}, "
            f"{in_bytes(each.peak_bytes - limit)} more than --limit {in_bytes(limit)}; "
            f"{in_bytes(lines[line])} of it {'at' if ':' in line else 'are'} {line}"
        )


@contextlib.contextmanager
def buffers_shown(given: RunInputs, on_progress: OnProgress) -> Iterator[None]:
    """Add to an OutOfMemoryError a table of the memory that the program needs.

    The table has XLA's buffers if the program can be compiled, and is an estimate otherwise.
    """
    try:
        yield
    except OutOfMemoryError as error:
        on_progress(f"{error.message}: finding its buffers")
        lines = [("", line) for line in _table(given).plain().splitlines()]
        raise OutOfMemoryError(error.message, error.hint, lines) from error.__cause__


def _table(given: RunInputs) -> Rendering:
    from jaxprtool.analysis.memory import memory
    from jaxprtool.render.reports.compiled_memory import compiled_table
    from jaxprtool.render.reports.memory import memory_table

    width = output.width(sys.stderr) - 4
    try:
        found = peak_of(given)
    except UnsupportedError:
        return memory_table(memory(given.program), width, _TOP, "")
    return compiled_table(found, width, _TOP, "")
