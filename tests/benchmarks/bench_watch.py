"""Compare watching values with JAX's tools: `python tests/benchmarks/bench_watch.py`.

Every value of the gradient of a transformer and of a scan over many iterations is summarized. The
table has CPU seconds in a process that has compiled nothing: compiling and running the program,
`watch`, `watch` again, `jax.debug.callback` after each equation with the same statistics by NumPy,
and the function under `jax.disable_jit`, which shows no values.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool.ir.evaluation import Interpreter, bind
from jaxprtool.ir.regions import Cond, Scan, While, view
from jaxprtool.jaxcompat import JaxprEqn
from tests.benchmarks.bench_nans import layers, rounds


class _Calling(Interpreter):
    """Evaluates a jaxpr during tracing, with a callback after each equation."""

    def __init__(self, call: Callable[[np.ndarray], None]) -> None:
        self._call = call

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        results = bind(eqn, operands)
        for x in results:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                jax.debug.callback(self._call, x)
        return results

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        held = view(eqn)
        if isinstance(held, While | Cond):
            return bind(eqn, operands)
        if not isinstance(held, Scan):
            return super().equation(eqn, operands)
        n, k = len(held.consts), len(held.carry)

        def one(carry: Any, xs: Any) -> Any:
            outs = self.run(held.body, [*operands[:n], *carry, *xs])
            return outs[:k], outs[k:]

        carry, ys = jax.lax.scan(
            one, operands[n : n + k], operands[n + k :], held.length, held.reverse
        )
        return [*carry, *ys]


def plain(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    jax.block_until_ready(jax.jit(function)(*args))
    return ""


def ours(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    rows = jaxprtool.watch(jaxprtool.trace(function, *args), args, by="equation").rows
    return f"{sum(row.times for row in rows):,} values"


def callbacks(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    seen = []

    def call(x: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            _, powers = np.frexp(x)
            counts = np.bincount(powers.ravel() + 200, minlength=400)
            seen.append((x.min(), x.max(), x.mean(), x.std(), np.isnan(x).sum(), counts))

    program = jaxprtool.trace(function, *args)
    flat = jax.tree.leaves(args)
    jax.block_until_ready(jax.jit(lambda *a: _Calling(call).run(program.jaxpr, a))(*flat))
    jax.effects_barrier()
    return f"{len(seen):,} values"


def without_jit(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    with jax.disable_jit():
        jax.block_until_ready(function(*args))
    return ""


PROGRAMS = {"4 layers": (layers, 4), "1000 rounds": (rounds, 1000), "50000 rounds": (rounds, 50000)}
MEANS = {
    "compile and run": plain,
    "watch": ours,
    "jax.debug.callback": callbacks,
    "jax.disable_jit": without_jit,
}


def measured(program: str, means: str, results: Any) -> None:
    """Put the seconds of the first and the second call into a queue, and what was reported."""
    make, number = PROGRAMS[program]
    function, args = make(number)
    times = []
    for _ in range(2):
        start = time.process_time()
        message = MEANS[means](function, args)
        times.append(time.process_time() - start)
    results.put((*times, message))


def main() -> None:
    table = Table("", "by", "s, first", "s, again", "sees")
    spawn = multiprocessing.get_context("spawn")
    for program in PROGRAMS:
        for means in MEANS:
            if program == "50000 rounds" and means.startswith("jax."):
                continue  # these take minutes
            results = spawn.Queue()
            process = spawn.Process(target=measured, args=(program, means, results))
            process.start()
            first, again, message = results.get()
            process.join()
            table.add_row(program, means, f"{first:.2f}", f"{again:.2f}", message)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
