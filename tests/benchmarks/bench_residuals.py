"""Compare the derivatives of a program, and its residuals, with JAX's of the function.

    python tests/benchmarks/bench_residuals.py [--sizes N,N] [--rounds N]

The first table has medians of CPU seconds, taken in turns in one process: JAX's trace of the
gradient of the function, and the passes, `residuals` and `source` on the traced program, each also
as a multiple of JAX's trace.

The second table compares `passed_residuals` with JAX's `print_saved_residuals`, on a transformer, a
sample, and programs of many equations. It has CPU seconds, each measured once: tracing,
`passed_residuals` in total, and its parts, which are `vjp`, the analysis of the two halves, and the
bytes under each policy. JAX's function traces and differentiates the function itself, and does not
compare policies.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import statistics
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
from jaxprtool import jaxcompat
from jaxprtool.analysis.stats import count_equations
from jaxprtool.commands.residuals.policies import WholeCheckpoint, policies_of
from jaxprtool.commands.residuals.residuals import passed_residuals
from jaxprtool.passes.retrace import function_of
from tests.benchmarks.models import transformer_loss, transformer_shapes

#: What is measured, on a program that no cache knows.
WAYS: dict[str, Callable[[jaxprtool.Program], Any]] = {
    **{name: lambda p, n=name: p.apply(n) for name in ("grad", "value_and_grad")},
    **{name: lambda p, n=name: p.apply(n) for name in ("vjp", "linearize")},
    "residuals": lambda p: jaxprtool.residuals(p),
    "and peaks": lambda p: jaxprtool.residuals(p, peaks=True),
    "source": lambda p: jaxprtool.source(p),
    "without residuals": lambda p: jaxprtool.source(p, residuals=False),
}


def deep(layers: int) -> Callable[..., Any]:
    """Return a function of three equations a layer, along a chain that needs no residuals."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(layers):
            x = jnp.tanh(x) * w + x
        return x.sum()

    return loss


def scanned(layers: int) -> Callable[..., Any]:
    """Return a function of a scan with three equations a layer in its body."""

    def loss(w: Any, x: Any) -> Any:
        def body(x: Any, _: None) -> Any:
            for _ in range(layers):
                x = jnp.tanh(x) * w + x
            return x, None

        return jax.lax.scan(body, x, length=3)[0].sum()

    return loss


def row(name: str, fun: Callable[..., Any], args: Any, rounds: int) -> list[str]:
    """Return a row of the first table."""
    program = jaxprtool.trace(fun, *args)
    times: dict[str, list[float]] = {"JAX": [], **{way: [] for way in WAYS}}
    for _ in range(rounds):
        gradient = jax.grad(lambda *args: fun(*args))
        times["JAX"].append(timed(jax.make_jaxpr(gradient), *args)[1])
        for way, run in WAYS.items():
            fresh = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr))
            times[way].append(timed(run, fresh)[1])
    medians = {way: statistics.median(taken) for way, taken in times.items()}
    whole = medians.pop("JAX")
    shown = (f"{seconds:.2f} ({seconds / whole:.1f})" for seconds in medians.values())
    return [name, f"{count_equations(program.jaxpr):,}", f"{whole:.2f}", *shown]


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    gc.collect()
    start = time.process_time()
    result = function(*args)
    return result, time.process_time() - start


def weighed(program: jaxprtool.Program) -> None:
    """Take the bytes under each policy."""
    whole = WholeCheckpoint(program, (0,))
    for policy in policies_of(program).values():
        whole.kept_bytes(policy)


def measure(table: Table, name: str, trace: Callable[[], jaxprtool.Program]) -> None:
    program, tracing = timed(trace)
    _, whole = timed(jaxprtool.residuals, program)
    jax.clear_caches()
    halves, splitting = timed(program.apply, "vjp")
    _, reading = timed(passed_residuals, halves["forward"], halves["backward"], {})
    _, weighing = timed(weighed, program)
    jax.clear_caches()
    args = jax.tree.unflatten(
        program.in_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        _, theirs = timed(lambda: print_saved_residuals(function_of(program), *args[0], **args[1]))
    times = (tracing, whole, splitting, reading, weighing, theirs)
    table.add_row(name, f"{count_equations(program.jaxpr):,}", *(f"{each:.2f}" for each in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,10000")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ones = jnp.ones(8), jnp.ones(8)
    gradients = Table("", "equations", "s, JAX's gradient", *(f"s, {way}" for way in WAYS))
    for size in map(int, options.sizes.split(",")):
        gradients.add_row(*row("rounds", deep(size // 3), ones, options.rounds))
        layers = max(1, size // 57)
        shapes = transformer_shapes(layers)
        gradients.add_row(*row(f"{layers} layers", transformer_loss, shapes, options.rounds))
        gradients.add_row(*row("scan of rounds", scanned(size // 3), ones, options.rounds))
    Console(width=200).print(gradients)
    columns = ("trace", "residuals", "vjp", "analysis", "policies", "JAX's")
    table = Table("", "equations", *(f"s, {each}" for each in columns))
    shapes = transformer_shapes(12)
    measure(table, "12 layers", lambda: jaxprtool.trace(transformer_loss, *shapes))
    sample = Path(__file__).parents[2] / "samples" / "transformer.py"
    measure(table, "the sample", lambda: jaxprtool.load(f"{sample}:loss"))
    for layers in (1000, 3000):
        measure(table, f"{layers} rounds", lambda n=layers: jaxprtool.trace(deep(n), *ones))
    Console().print(table)


if __name__ == "__main__":
    main()
