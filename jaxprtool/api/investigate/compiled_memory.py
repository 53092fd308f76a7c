"""`compiled_memory`: the buffers of a compiled program at its peak, by the user's line.

found = jaxprtool.compiled_memory(program)
found.peak_bytes, found.estimate_bytes, found.buffers[0].line
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool.analysis.memory import memory
from jaxprtool.analysis.memory.compiled import CompiledPeak
from jaxprtool.analysis.memory.compiled import compiled_peak as analysis
from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.formats.lowering import compiled
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.documents import some
from jaxprtool.ir.program import Program


def compiled_memory(program: Program, arguments: Sequence[object] = ()) -> CompiledPeak:
    """Compile a program, and return XLA's buffers at its peak beside the estimate of `memory`.

    JAX's compilation cache is not used: its executables may have the lines of an earlier source.
    Refs are arguments and results, as in `run`.

    Args:
        program: A `Program`.
        arguments: Its flat arguments or their types, if they lie on several devices.

    Raises:
        ArgumentsError: If it was traced with arguments on several devices, and none are given.
        UnsupportedError: For symbolic sizes or free named axes, if XLA cannot compile the program,
            or if the backend does not describe its buffers.
        BackendError: If there are too few devices for its mesh.
    """
    if program.sharded and not arguments:
        raise ArgumentsError(
            f"{program.name} was traced with {some(program.sharded, 3)} on several devices",
            "also pass its flat arguments, which have the devices",
        )
    program = with_contents(program)
    estimate = memory(program)
    with compiled_afresh():
        return analysis(program, compiled(program, arguments), estimate)
