"""Arrays that a function closes over."""

from __future__ import annotations

from collections.abc import Iterator

from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Value
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import lint_rule
from jaxprtool.ir.basics.quantities import in_bytes
from jaxprtool.ir.core.equations import type_of

#: Smaller constants are not reported.
LEAST_BYTES = 1 << 20

_BAD = """
    import jax.numpy as jnp
    import numpy as np
    import jaxprtool

    TABLE = np.ones((1024, 512), np.float32)


    @jaxprtool.example("f32[8,1024]")
    def f(x):
        return jnp.tanh(x @ TABLE)  # JT101
"""

_GOOD = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[8,1024]", "f32[1024,512]")
    def f(x, table):
        return jnp.tanh(x @ table)
"""


@lint_rule("JT101", "large-constant", bad=_BAD, good=_GOOD)
def large_constants(program: LintedProgram) -> Iterator[Found]:
    """A function closes over an array of 1 MiB or more.

    The array becomes a constant of the program. Every executable has a copy of it, each compilation
    hashes and keeps it, it cannot be donated or sharded, and a new array means a new compilation.
    """
    seen = dict[int, Value]()
    for scope in program.top.inside():
        for value in scope.constants:
            if value.constant is None or value.bytes < LEAST_BYTES or not value.live_readers:
                continue
            if id(value.constant) in seen:
                continue
            seen[id(value.constant)] = value
            yield _found(program, value)


def _found(program: LintedProgram, value: Value) -> Found:
    node = value.live_readers[0]
    frame = program.frame(node)
    name = "" if frame is None else program.sources.captured_name(frame, value.constant)
    what = f"'{name}'" if name else "an array"
    return Found(
        node,
        f"{what} is a constant of the program, {type_of(value.aval)} of {in_bytes(value.bytes)}",
        "pass it as an argument, or compute it inside the function",
        "{bytes} in every executable that is compiled from it",
        bytes=value.bytes,
    )
