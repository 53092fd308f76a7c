"""Compare the FLOPs of a step by our rules, by XLA and by JAX's roofline, and the time to count.

    python tests/benchmarks/bench_cost.py [--sizes N,N] [--rounds N]

Measures gradients of models, and programs of many equations. XLA counts the FLOPs of the lowered
program before optimization. Times are medians of CPU seconds without tracing, and their ratio to
ours. The time of roofline includes tracing, since it traces the function itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals
from jax.experimental.roofline import roofline
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import cost, memory, residuals, trace
from jaxprtool.ir.documents import with_prefix
from tests.benchmarks.gradient_models import losses
from tests.benchmarks.mapped_models import scanned_transformer, tokens, transformer_parameters
from tests.benchmarks.models import synthetic, transformer_loss, transformer_shapes


def median(function: Callable[[], Any], rounds: int) -> float:
    """Return the median CPU time of a function, in seconds."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def of_models(rounds: int) -> Table:
    """Print the costs of the gradients of models."""
    names = ("ours", "XLA", "roofline")
    table = Table("model", *(f"FLOPs, {name}" for name in names), *(f"s, {name}" for name in names))
    of_scan = (scanned_transformer, (transformer_parameters(), tokens()))
    for name, (loss, args) in {**losses(), "scan of a transformer": of_scan}.items():
        gradient = jax.value_and_grad(loss)
        program, traced = trace(gradient, *args), jax.jit(gradient).trace(*args)
        ways: list[Callable[[], float]] = [
            lambda p=program: cost(p).total.work.flops,
            lambda t=traced: t.lower().cost_analysis()["flops"],
            lambda f=gradient, a=args: _roofline(f, a),
        ]
        taken = [median(way, rounds) for way in ways]
        flops = [with_prefix(way()) for way in ways]
        ratios = [f"{each:.2f} ({each / taken[0]:.1f}x)" for each in taken]
        table.add_row(name, *flops, *ratios)
    return table


def _roofline(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    found = roofline(lambda *args: function(*args))(*args)[1]
    return float(found.unfused_flops)


def of_ways(rounds: int) -> Table:
    """Print the time of each kind of report, for the gradient of a transformer of 12 layers."""
    shapes = transformer_shapes(12)
    args = jax.tree.map(lambda each: jnp.ones(each.shape, each.dtype), shapes)
    loss, gradient = trace(transformer_loss, *shapes), jax.grad(transformer_loss)
    program, lowered = trace(gradient, *shapes), jax.jit(gradient).lower(*shapes)
    table = Table("report", "s")
    for name, way in {
        "cost": lambda: cost(program),
        "memory": lambda: memory(program),
        "residuals, and the bytes under each policy": lambda: residuals(loss),
        "print_saved_residuals, which traces": lambda: _silently(
            lambda: print_saved_residuals(transformer_loss, *shapes)
        ),
        "cost_analysis of what is lowered": lowered.cost_analysis,
        "cost_analysis, memory_analysis, which compile": lambda: _compiled(gradient, shapes),
        "a step under jax.profiler, which compiles": lambda: _profiled(gradient, args),
    }.items():
        table.add_row(name, f"{median(way, rounds):.2f}")
    return table


def _silently(function: Callable[[], Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        function()


def _compiled(function: Callable[..., Any], shapes: tuple[Any, ...]) -> Any:
    jax.clear_caches()
    compiled = jax.jit(function).lower(*shapes).compile()
    return compiled.cost_analysis(), compiled.memory_analysis()


def _profiled(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    jax.clear_caches()
    with tempfile.TemporaryDirectory() as folder, jax.profiler.trace(folder):
        jax.block_until_ready(jax.jit(function)(*args))


def of_sizes(sizes: list[int], rounds: int) -> Table:
    """Print the time to compute the cost of many equations."""
    table = Table("equations", *(f"s, by {by}" for by in ("line", "scope", "primitive")))
    for size in sizes:
        jaxpr = synthetic(size)
        times = [
            median(lambda by=by, j=jaxpr: cost(j, by), rounds)
            for by in ("line", "scope", "primitive")
        ]
        table.add_row(f"{size}", *(f"{each:.2f}" for each in times))
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="10000,100000")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("jax._src.roofline").setLevel(logging.ERROR)
    logging.getLogger("jax.experimental.roofline.roofline").setLevel(logging.ERROR)
    console = Console()
    console.print(of_models(options.rounds))
    console.print(of_ways(options.rounds))
    console.print(of_sizes([int(each) for each in options.sizes.split(",")], options.rounds))
