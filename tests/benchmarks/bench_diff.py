"""Compare diffs of large programs with `difflib` on the text.

A program of N equations is compared with the same program after an equation was inserted at the
front and one in the middle. The table has the CPU seconds of matching the equations and of the
unified diff of both listings, and the number of lines of each diff.
"""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxprtool


def chain(rounds: int, extra: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Return a function of three equations an iteration, with one more before some iterations."""

    def fun(a: Any) -> Any:
        for i in range(rounds):
            if i in extra:
                a = a + 1.0
            a = jnp.sin(a) * 2.0 + a
        return a

    return fun


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    """Return the CPU seconds of a call of `work`, and its result."""
    start = time.process_time()
    lines = work()
    return time.process_time() - start, lines


def main(sizes: list[int]) -> None:
    """Print a row for each number of equations."""
    table = Table("equations", "diff", "lines", "difflib", "lines")
    aval = jax.ShapeDtypeStruct((8,), "float32")
    for size in sizes:
        rounds = size // 3
        before = jaxprtool.trace(chain(rounds), aval)
        after = jaxprtool.trace(chain(rounds, (0, rounds // 2)), aval)
        texts = [str(program.jaxpr).splitlines() for program in (before, after)]
        own = seconds(lambda p=before, q=after: len(jaxprtool.diff(p, q).lines))
        lines = seconds(lambda t=texts: len([*difflib.unified_diff(*t, n=0)]))
        cells = [f"{own[0]:.1f}", str(own[1]), f"{lines[0]:.1f}", str(lines[1])]
        table.add_row(f"{size:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [1_000, 10_000, 100_000])
