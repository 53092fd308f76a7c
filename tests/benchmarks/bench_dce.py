"""Compare dead-code elimination with JAX's: `python tests/benchmarks/bench_dce.py`.

Each measurement uses a fresh copy of the program, so that neither side hits its cache (nested
bodies are in both caches). The two sides alternate, and medians are compared. Equations are counted
at the top level.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import jaxcompat
from jaxprtool.passes.cleanup.dce import dce_jaxpr
from tests.benchmarks.models import synthetic, transformer_gradient


def measure(function: Callable, jaxpr: Any) -> tuple[float, Any]:
    fresh = jaxpr.replace()
    gc.collect()
    start = time.perf_counter()
    result, _ = function(fresh, [True] * len(fresh.outvars), True)
    return time.perf_counter() - start, result


def compare(closed: Any, repeat: int) -> tuple[float, float, int, int]:
    """Return the median seconds of JAX and of ours, and the number of equations that each keeps."""
    jaxpr = jaxcompat.open_jaxpr(closed)
    times: dict[Callable, list[float]] = {jaxcompat.jax_dce_jaxpr: [], dce_jaxpr: []}
    left = {}
    for _ in range(repeat):
        for function, seconds in times.items():
            taken, result = measure(function, jaxpr)
            seconds.append(taken)
            left[function] = len(result.eqns)
    (theirs, ours), (n, m) = map(statistics.median, times.values()), left.values()
    return theirs, ours, n, m


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--max", type=int, default=1_000_000, help="equations of the largest program"
    )
    options = parser.parse_args()
    table = Table(title="dce and JAX's dce_jaxpr (medians)")
    for name in ("program", "equations", "jax: left", "ours: left", "jax ms", "ours ms", "ratio"):
        table.add_column(name, justify="left" if name == "program" else "right")
    sizes = [n for n in (10**3, 10**4, 10**5, 10**6) if n <= options.max]
    programs = [("48-layer gradient", transformer_gradient())]
    programs += [("synthetic, half dead", synthetic(n)) for n in sizes]
    gc.freeze()  # exclude the programs from garbage collection, which keeps collections fast
    for name, closed in programs:
        size = len(closed.eqns)
        theirs, ours, n, m = compare(closed, repeat=max(5, min(31, 10**6 // size)))
        figures = f"{theirs * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{ours / theirs:.2f}"
        table.add_row(name, f"{size:,}", f"{n:,}", f"{m:,}", *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
