"""Measure the time of `outline` per equation: `python tests/benchmarks/bench_outline_scaling.py`.

The time is compared with JAX's tracing of the same programs:

    layers      a hundred equations with two softmaxes, repeated with other parameters
    gradient    the gradient of a transformer; forward and backward halves are nested
    widths      layers of distinct widths: the same operations, no two with the same types
    random      random operations on arrays of one type: only short sequences repeat

Times are CPU times of the calling thread, medians of rounds. The program is in no cache of the
pass. The type check of the result is not included.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

import jaxprtool
from jaxprtool import passes as framework
from jaxprtool.ir.backends import clear_caches
from tests.benchmarks.bench_outline import written_equations
from tests.benchmarks.models import transformer_loss, transformer_shapes
from tests.programs.same import count_equations

UNARY = (lax.sin, lax.cos, lax.tanh, lax.exp, lax.neg, lax.abs, lax.floor, lax.logistic, lax.erf)
BINARY = (lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.pow, lax.atan2)

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# --- programs -------------------------------------------------------------------------------------


def layers(size: int) -> Made:
    def function(params: Any, x: Any) -> Any:
        for p in params:
            x = jax.nn.softmax(jax.nn.softmax(operations(82, [x, *p])))
        return x

    return function, ([(spec(8), spec(8))] * (size // 100), spec(8))


def gradient(size: int) -> Made:
    return jax.value_and_grad(transformer_loss), transformer_shapes(max(1, size // 185))


def widths(size: int) -> Made:
    def function(params: Any, x: Any) -> Any:
        for w, b in params:
            y = lax.dot(x, w)
            x = lax.mul(lax.tanh(lax.add(y, b)), lax.logistic(lax.neg(y)))
        return x

    numbers = range(8, 8 + size // 6)
    params = [(spec(n, n + 1), spec(4, n + 1)) for n in numbers]
    return function, (params, spec(4, 8))


def random_operations(size: int) -> Made:
    return lambda *xs: operations(size, list(xs)), (spec(8),) * 4


def operations(count: int, values: list[Any]) -> Any:
    """Apply `count` operations, each to the last result and maybe to one of 20 earlier ones."""
    drawn = random.Random(0)
    for _ in range(count):
        if drawn.random() < 0.5:
            values.append(drawn.choice(UNARY)(values[-1]))
        else:
            values.append(drawn.choice(BINARY)(values[-1], drawn.choice(values[-20:])))
    return values[-1]


PROGRAMS: dict[str, Callable[[int], Made]] = {
    "layers": layers,
    "gradient": gradient,
    "widths": widths,
    "random": random_operations,
}


# --- measuring ------------------------------------------------------------------------------------


def seconds(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.thread_time()
    function()
    return time.thread_time() - start


def row(name: str, size: int, rounds: int) -> Iterator[str]:
    """Return the cells of one program's row."""
    outline = framework.find_pass("outline")()
    fun, args = PROGRAMS[name](size)
    tracing, outlining = [], []
    for _ in range(rounds):
        jax.clear_caches()
        clear_caches()
        tracing.append(seconds(lambda: jax.make_jaxpr(lambda *xs: fun(*xs))(*args)))
        program = jaxprtool.trace(fun, *args)
        outlining.append(seconds(lambda program=program: outline(program)))  # type: ignore[misc]
    result = outline(program)
    count = count_equations(program.jaxpr)
    theirs, ours = statistics.median(tracing), statistics.median(outlining)
    yield from (name, f"{count:,}", f"{written_equations(result.jaxpr):,}")
    yield from (f"{ours:.2f}", f"{ours / count * 1e6:.1f}", f"{theirs:.2f}", f"{ours / theirs:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if unknown := set(options.programs) - set(PROGRAMS):
        parser.error(f"no program {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    table = Table(title=f"outline (JAX {jax.__version__})")
    headings = ("equations", "after", "seconds", "µs an equation", "JAX traces, s", "ratio")
    table.add_column("program")
    for heading in headings:
        table.add_column(heading, justify="right")
    gc.freeze()
    for name in options.programs or PROGRAMS:
        for size in options.sizes:
            table.add_row(*row(name, size, options.rounds))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
