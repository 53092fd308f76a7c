"""`Program.apply` beside JAX, in one run: `python tests/benchmarks/bench_apply.py`.

What a user waits for when a pass is applied to the gradient of a 48-layer transformer: the pass,
the type check of its result, and all that is around them. `batch` stands beside JAX's tracing of
`jax.vmap` of the function, `dce` beside JAX's `dce_jaxpr`, and the check of a result beside JAX's
own checker. Each measurement is of a fresh copy of the program, so that nobody answers from a
cache; the sides alternate, and medians are compared.
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

import jax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import jaxcompat, trace
from jaxprtool.ir.program import Program, type_check
from tests.benchmarks.models import transformer_loss, transformer_shapes

LANES = 8


def fresh(program: Program) -> Program:
    """A copy whose jaxpr no cache knows."""
    return program.replace(jaxpr=program.jaxpr.replace(jaxpr=program.jaxpr.jaxpr.replace()))


def mapped(gradient: Callable[..., Any], shapes: Any, in_axes: Any) -> Callable[[], Any]:
    """JAX's tracing of `jax.vmap` of a function."""

    def wide(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((LANES, *shape.shape), shape.dtype)

    axes = (in_axes,) * 2 if isinstance(in_axes, int) else in_axes
    pairs = zip(shapes, axes, strict=True)
    args = [x if axis is None else jax.tree.map(wide, x) for x, axis in pairs]
    # A function of its own each time: JAX remembers what it has traced.
    return lambda: jax.make_jaxpr(jax.vmap(lambda *args: gradient(*args), in_axes))(*args)


def seconds(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(ours: Callable[[Program], Any], theirs: Callable[[Program], Any], program: Program):
    """Median seconds of both sides."""
    times: list[tuple[float, float]] = []
    for _ in range(7):
        one, other = fresh(program), fresh(program)
        times.append((seconds(lambda p=one: ours(p)), seconds(lambda p=other: theirs(p))))
    return (statistics.median(column) for column in zip(*times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    layers = parser.parse_args().layers
    shapes = transformer_shapes(layers)
    gradient = jax.value_and_grad(transformer_loss)
    program = trace(gradient, *shapes)
    after = program.apply("cse")

    def dce(program: Program) -> Any:
        jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
        return jaxcompat.jax_dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)

    rows = {
        f'apply("batch"), in_axes={axes}': (
            lambda p, axes=axes: p.apply(f"batch({axes}, axis_size={LANES})"),
            lambda p, axes=axes: mapped(gradient, shapes, axes)(),
        )
        for axes in ((None, 0), 0)
    }
    rows['apply("dce")'] = lambda p: p.apply("dce"), dce
    rows["the check after cse"] = lambda p: type_check(after, program), lambda p: type_check(after)
    table = Table(
        title=f"Program.apply beside JAX, {len(program.jaxpr.eqns):,} equations (medians)"
    )
    for name in ("", "jax ms", "ours ms", "jax / ours"):
        table.add_column(name, justify="right" if name else "left")
    gc.freeze()
    for name, (ours, theirs) in rows.items():
        mine, jaxs = compare(ours, theirs, program)
        table.add_row(name, f"{jaxs * 1e3:.1f}", f"{mine * 1e3:.1f}", f"{jaxs / mine:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
