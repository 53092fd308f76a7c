"""Compare diffs of large programs with `difflib` on the text.

A program of N equations is compared with another one: the same program after an equation was
inserted at the front and one in the middle ("edit"), a program of other operations ("other"), and
the same program of small jitted functions, traced again ("calls"). The table has the median CPU
microseconds an equation of the diff and of the unified diff of both listings, and the number of
lines of each diff.
"""

from __future__ import annotations

import difflib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxprtool
from jaxprtool.ir.backends import clear_caches


def chain(rounds: int, extra: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Return a function of three equations an iteration, with one more before some iterations."""

    def fun(a: Any) -> Any:
        for i in range(rounds):
            if i in extra:
                a = a + 1.0
            a = jnp.sin(a) * 2.0 + a
        return a

    return fun


def other(rounds: int) -> Callable[[Any], Any]:
    """Return a function of about as many equations an iteration that shares few of them."""

    def fun(a: Any) -> Any:
        for i in range(rounds):
            a = jnp.tanh(a) + (a * 2.0 if i % 3 else jnp.exp(a))
        return a

    return fun


def calls(rounds: int) -> Callable[[Any], Any]:
    """Return a function of a jitted function of two equations an iteration."""

    def fun(a: Any) -> Any:
        for i in range(rounds):
            a = jax.jit(lambda x, i=i: jnp.sin(x) * i)(a)
        return a

    return fun


def pairs(rounds: int) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """Return the functions to compare, by name."""
    return {
        "edit": (chain(rounds), chain(rounds, (0, rounds // 2))),
        "other": (chain(rounds), other(rounds)),
        "calls": (calls(rounds), calls(rounds)),
    }


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    """Return the median CPU seconds of three calls of `work`, with empty caches, and its result."""
    times, lines = [], 0
    for _ in range(3):
        clear_caches()
        start = time.process_time()
        lines = work()
        times.append(time.process_time() - start)
    return statistics.median(times), lines


def main(sizes: list[int]) -> None:
    """Print a row for each pair of functions and number of equations."""
    table = Table("programs", "equations", "diff", "lines", "difflib", "lines")
    aval = jax.ShapeDtypeStruct((8,), "float32")
    for size in sizes:
        for name, functions in pairs(size // 3).items():
            before, after = (jaxprtool.trace(fun, aval) for fun in functions)
            texts = [str(program.jaxpr).splitlines() for program in (before, after)]
            own = seconds(lambda p=before, q=after: len(jaxprtool.diff(p, q).lines))
            lines = seconds(lambda t=texts: len([*difflib.unified_diff(*t, n=0)]))
            cells = [f"{own[0] / size * 1e6:.0f} µs", str(own[1])]
            cells += [f"{lines[0] / size * 1e6:.0f} µs", str(lines[1])]
            table.add_row(name, f"{size:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [1_000, 10_000])
