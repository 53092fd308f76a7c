"""Compare `passed_residuals` with JAX's `print_saved_residuals`.

Measures gradients of a transformer, of the samples, and of programs of many equations. The table
has CPU seconds, each measured once: tracing, `passed_residuals` in total, and its parts, which are
`vjp`, the analysis of the two halves, and the bytes under each policy. JAX's function traces and
differentiates the function itself, and does not compare policies.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool.analysis.stats import count_equations
from jaxprtool.commands.residuals.policies import bytes_by_policy, policies_of
from jaxprtool.commands.residuals.residuals import passed_residuals
from jaxprtool.passes.framework.retrace import function_of
from tests.benchmarks.models import transformer_loss, transformer_shapes


def deep(layers: int) -> Callable[..., Any]:
    """Return a function of three equations a layer, along a chain that needs no residuals."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(layers):
            x = jnp.tanh(x) * w + x
        return x.sum()

    return loss


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.process_time()
    result = function(*args)
    return result, time.process_time() - start


def measure(table: Table, name: str, trace: Callable[[], jaxprtool.Program]) -> None:
    program, tracing = timed(trace)
    _, whole = timed(jaxprtool.residuals, program)
    jax.clear_caches()
    halves, splitting = timed(program.apply, "vjp")
    _, reading = timed(passed_residuals, halves["forward"], halves["backward"], {})
    _, weighing = timed(bytes_by_policy, program, policies_of(program))
    jax.clear_caches()
    args = jax.tree.unflatten(
        program.in_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        _, theirs = timed(lambda: print_saved_residuals(function_of(program), *args[0], **args[1]))
    times = (tracing, whole, splitting, reading, weighing, theirs)
    table.add_row(name, f"{count_equations(program.jaxpr):,}", *(f"{each:.2f}" for each in times))


def main() -> None:
    columns = ("trace", "residuals", "vjp", "analysis", "policies", "JAX's")
    table = Table("", "equations", *(f"s, {each}" for each in columns))
    shapes = transformer_shapes(12)
    measure(table, "12 layers", lambda: jaxprtool.trace(transformer_loss, *shapes))
    sample = Path(__file__).parents[2] / "samples" / "transformer.py"
    measure(table, "the sample", lambda: jaxprtool.load(f"{sample}:loss"))
    ones = jnp.ones(8), jnp.ones(8)
    for layers in (1000, 3000):
        measure(table, f"{layers} rounds", lambda n=layers: jaxprtool.trace(deep(n), *ones))
    Console().print(table)


if __name__ == "__main__":
    main()
