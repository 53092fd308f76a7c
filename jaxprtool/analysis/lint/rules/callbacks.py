"""Calls of Python functions from inside loops."""

from __future__ import annotations

from collections.abc import Iterator

from jaxprtool.analysis.cost.trip_counts import trip_count
from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import lint_rule

_BAD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[100,64]")
    def f(start, xs):
        def step(h, x):
            h = jnp.tanh(h + x)
            jax.debug.print("h {}", h)  # JT601
            return h, None

        return jax.lax.scan(step, start, xs)[0]
"""

_GOOD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[100,64]")
    def f(start, xs):
        def step(h, x):
            return jnp.tanh(h + x), None

        h, _ = jax.lax.scan(step, start, xs)
        jax.debug.print("h {}", h)
        return h
"""


@lint_rule("JT601", "callback-in-loop", bad=_BAD, good=_GOOD)
def callbacks_in_loops(program: LintedProgram) -> Iterator[Found]:
    """A loop prints or calls a Python function in each iteration.

    In each iteration, the device sends values to the host, and may have to wait for it.
    """
    for node in program.where(lambda node: node.traits.callback):
        loop = node.scope.loop
        if loop is None or loop.held is None:
            continue
        runs, known = node.scope.runs, trip_count(loop.held) is not None
        if known and runs < 2:
            continue
        often = f"{runs:,} times" if known else "in each iteration"
        size = sum(value.bytes for value in (*node.ins, *node.outs)) * runs
        yield Found(
            node,
            f"{node.name} in a loop calls the host {often}",
            "call it once after the loop, on stacked values, or remove it",
            f"{runs:,} calls to the host, which send it {{bytes}}"
            if known
            else "a call to the host in each iteration, which sends it {bytes}",
            bytes=size,
        )
