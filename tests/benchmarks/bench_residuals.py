"""Residuals beside JAX's `print_saved_residuals`: `python tests/benchmarks/bench_residuals.py`.

A gradient of many equations. Seconds of CPU time, once each:
tracing, what `vjp` takes, what the analysis of its halves takes, and JAX's function, which traces
and differentiates on its own.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool.analysis.residuals import residuals


def deep(layers: int) -> Callable[..., Any]:
    """Return a function of three equations a layer, along a chain that is not kept."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(layers):
            x = jnp.tanh(x) * w + x
        return x.sum()

    return loss


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.process_time()
    result = function(*args)
    return result, time.process_time() - start


def measure(name: str, fun: Callable[..., Any], *args: Any) -> None:
    program, tracing = timed(jaxprtool.trace, fun, *args)
    halves, splitting = timed(program.apply, "vjp")
    _, reading = timed(residuals, halves["forward"], halves["backward"], {})
    with contextlib.redirect_stdout(io.StringIO()):
        _, theirs = timed(print_saved_residuals, fun, *args)
    times = f"trace {tracing:.2f}, vjp {splitting:.2f}, analysis {reading:.2f}, JAX's {theirs:.2f}"
    print(f"{name}: {len(program.jaxpr.eqns):,} equations: {times}")


def main() -> None:
    for layers in (1000, 3000):
        measure(f"{layers} layers", deep(layers), jnp.ones(8), jnp.ones(8))


if __name__ == "__main__":
    main()
