"""Measure the startup cost of jaxprtool: `jaxprtool.jit(f)`, parsing a pipeline, one small pass.

Also measures the check of the argument types when a Program is called, which may take a microsecond
per argument.

    python tests/benchmarks/bench_door.py [rounds]

Each may take a millisecond. The first call of a process reads the entry points of installed
packages and imports the passes, so it is timed separately. `jax.jit(f)` is measured for comparison.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxprtool
from jaxprtool.passes import Pipeline

ALLOWED = 1.0


def ten_equations(x: Any) -> Any:
    """Compute ten equations, three of which are dead."""
    for _ in range(7):
        x = jnp.sin(x)
    jnp.cos(jnp.cos(jnp.cos(x)))
    return x


def milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    program = jaxprtool.trace(ten_equations, 1.0)
    assert len(program.jaxpr.eqns) == 10
    many = jaxprtool.trace(lambda xs: xs[0], [jnp.ones(3)] * 1000)
    arrays, numpys = [jnp.ones(3)] * 1000, [np.ones(3, np.float32)] * 1000
    cases: dict[str, tuple[Callable[[], Any], float | None]] = {
        "jaxprtool.jit(f)": (lambda: jaxprtool.jit(ten_equations), ALLOWED),
        'Pipeline.parse("grad, -O2")': (lambda: Pipeline.parse("grad, -O2"), ALLOWED),
        'program.apply("dce")': (lambda: program.apply("dce"), ALLOWED),
        "1000 arguments checked": (lambda: many.checked(arrays), ALLOWED),
        "1000 of NumPy checked": (lambda: many.checked(numpys), ALLOWED),
        "jax.jit(f)": (lambda: jax.jit(ten_equations), None),
    }
    first = {name: milliseconds(function) for name, (function, _) in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (function, _) in cases.items():
            times[name].append(milliseconds(function))
    print(f"JAX {jax.__version__}\n| {'call':<27} | first ms | median ms | allowed |")
    print(f"|{'-' * 29}|---------:|----------:|--------:|")
    for name, (_, allowed) in cases.items():
        limit = "" if allowed is None else f"{allowed:.1f}"
        median = statistics.median(times[name])
        print(f"| {name:<27} | {first[name]:8.2f} | {median:9.3f} | {limit:>7} |")


if __name__ == "__main__":
    main()
