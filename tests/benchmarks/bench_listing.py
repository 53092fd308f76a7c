"""Compare the listing with JAX's: `python tests/benchmarks/bench_listing.py`.

Plain text is compared with `str(jaxpr)`. Colored text with source lines, printed to a Rich
console, is compared with `jaxpr.pretty_print(use_color=True, source_info=True)`. The two of each
pair alternate, and medians of CPU time are compared. The plain texts must be equal.
"""

from __future__ import annotations

import argparse
import gc
import io
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
from jaxprtool.render.terminal.listing import ShowOptions, listing
from tests.benchmarks.models import synthetic, transformer_gradient


def plain(jaxpr: Any) -> str:
    return listing(jaxpr).plain()


def colored(jaxpr: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    console.print(listing(jaxpr, ShowOptions(source=True)), soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined]


def jax_colored(jaxpr: Any) -> str:
    return jaxpr.pretty_print(use_color=True, source_info=True)


def seconds(function: Callable[[Any], str], jaxpr: Any) -> float:
    gc.collect()
    start = time.process_time()
    function(jaxpr)
    return time.process_time() - start


def compare(functions: tuple[Callable[[Any], str], ...], jaxpr: Any, repeat: int) -> list[float]:
    """Return the median time of each function, in seconds."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeat):
        for function, taken in zip(functions, times, strict=True):
            taken.append(seconds(function, jaxpr))
    return list(map(statistics.median, times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=int, default=100_000, help="equations of the largest program")
    options = parser.parse_args()
    table = Table(title="the listing and JAX's (medians, milliseconds), JAX / ours")
    for name in ("program", "equations", "text", "jax", "ours", "ratio"):
        table.add_column(name, justify="left" if name in ("program", "text") else "right")
    sizes = [n for n in (10**3, 10**4, 10**5) if n <= options.max]
    programs = [("transformer gradient", transformer_gradient())]
    programs += [("synthetic", synthetic(n)) for n in sizes]
    pairs = {"plain": (str, plain), "colored": (jax_colored, colored)}
    for name, closed in programs:
        jaxpr = jaxcompat.open_jaxpr(closed)
        assert str(jaxpr) == plain(jaxpr)
        size = len(jaxpr.eqns)
        for text, functions in pairs.items():
            theirs, ours = compare(functions, jaxpr, max(5, min(25, 10**5 // size)))
            figures = f"{theirs * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{theirs / ours:.1f}"
            table.add_row(name, f"{size:,}", text, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
