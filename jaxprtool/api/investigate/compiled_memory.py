"""`compiled_memory`: the buffers of a compiled program at its peak, by the user's line.

found = jaxprtool.compiled_memory(program)
found.peak_bytes, found.estimate_bytes, found.buffers[0].line
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool.analysis.memory import memory
from jaxprtool.analysis.memory.compiled import CompiledPeak
from jaxprtool.analysis.memory.compiled import compiled_memory as analysis
from jaxprtool.execute.running.compile_cache import compiled_afresh
from jaxprtool.formats.lowering import compiled
from jaxprtool.ir.programs.program import Program


def compiled_memory(program: Program, arguments: Sequence[object] = ()) -> CompiledPeak:
    """Compile a program, and return XLA's buffers at its peak beside the estimate of `memory`.

    JAX's compilation cache is not used: its executables may have the lines of an earlier source.

    Args:
        program: A `Program`.
        arguments: Its flat arguments or their types, if they lie on several devices.

    Raises:
        UnsupportedError: For symbolic sizes or free named axes, if XLA cannot compile the program,
            or if the backend does not describe its buffers.
        BackendError: If there are too few devices for its mesh.
    """
    estimate = memory(program)
    with compiled_afresh():
        return analysis(program, compiled(program, arguments), estimate)
