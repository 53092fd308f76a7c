"""Compare `Program.apply` with JAX: `python tests/benchmarks/bench_apply.py`.

Measures the time a user waits when a pass is applied to the gradient of a 48-layer transformer: the
pass, the type check of its result, and the overhead around them. `batch` is compared with JAX's
tracing of `jax.vmap` of the function, `dce` with JAX's `dce_jaxpr`, the type check with JAX's own
checker, and `jaxprtool.vmap` with `jax.vmap`, both traced by `jax.make_jaxpr`.

Each measurement uses a fresh copy of the program, or a fresh function, so that no cache of this
program is hit. "warm" means that both sides have processed a similar program before, "cold" that
all caches of both are empty. The two sides alternate. The table has the medians, and the median of
the ratios of each round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool import jaxcompat, trace
from jaxprtool.ir.program import Program, type_check
from tests.benchmarks.models import small_jits, transformer_loss, transformer_shapes

LANES = 8


def fresh(program: Program) -> Program:
    """Return a copy of the program whose jaxpr is in no cache."""
    return program.replace(jaxpr=program.jaxpr.replace(jaxpr=program.jaxpr.jaxpr.replace()))


def half_dead(program: Program) -> Program:
    """Return the program with a copy of its equations whose results are unused."""
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    names: dict[Any, Any] = {}

    def copied(v: Any) -> Any:
        return names.setdefault(v, type(v)(v.aval))

    dead = [
        eqn.replace(
            invars=[names.get(v, v) if isinstance(v, jaxcompat.Var) else v for v in eqn.invars],
            outvars=[copied(v) for v in eqn.outvars],
        )
        for eqn in jaxpr.eqns
    ]
    eqns = [eqn for pair in zip(jaxpr.eqns, dead, strict=True) for eqn in pair]
    return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns))


def mapped(vmap: Callable[..., Any], gradient: Any, shapes: Any, in_axes: Any) -> Any:
    """Trace `vmap(gradient)` with JAX."""

    def wide(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((LANES, *shape.shape), shape.dtype)

    axes = (in_axes,) * 2 if isinstance(in_axes, int) else in_axes
    pairs = zip(shapes, axes, strict=True)
    args = [x if axis is None else jax.tree.map(wide, x) for x, axis in pairs]
    # A new function each time, since JAX caches traces.
    return jax.make_jaxpr(vmap(lambda *args: gradient(*args), in_axes))(*args)


def seconds(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(
    ours: Callable[[Program], Any],
    theirs: Callable[[Program], Any],
    program: Program,
    rounds: int,
    cold: bool,
) -> tuple[float, float, float]:
    """Return the median seconds of both sides, and the median ratio of theirs to ours."""
    times: list[tuple[float, float]] = []
    for i in range(rounds + 1):
        taken = {}
        for side in (ours, theirs) if i % 2 else (theirs, ours):
            if cold:
                jax.clear_caches()
                jaxprtool.clear_caches()
            taken[side] = seconds(partial(side, fresh(program)))
        times.append((taken[ours], taken[theirs]))
    times = times[1:]  # the first round is a warm-up
    mine, jaxs = (statistics.median(column) for column in zip(*times, strict=True))
    return mine, jaxs, statistics.median(b / a for a, b in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="part of the names of the rows to measure")
    options = parser.parse_args()
    shapes = transformer_shapes(options.layers)
    gradient = jax.value_and_grad(transformer_loss)
    program = trace(gradient, *shapes)
    after = program.apply("cse")

    def dce(program: Program) -> Any:
        jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
        return jaxcompat.jax_dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)

    rows: dict[str, Any] = {}
    for axes in ((None, 0), 0):

        def batch(p: Program, axes: Any = axes) -> Any:
            return p.apply(f"batch({axes}, axis_size={LANES})")

        def jaxs(_: Program, axes: Any = axes) -> Any:
            return mapped(jax.vmap, gradient, shapes, axes)

        def drop_in(_: Program, axes: Any = axes) -> Any:
            return mapped(jaxprtool.vmap, gradient, shapes, axes)

        rows[f'apply("batch"), in_axes={axes}, cold'] = batch, jaxs, True
        rows[f'apply("batch"), in_axes={axes}, warm'] = batch, jaxs, False
        rows[f"vmap, in_axes={axes}, warm"] = drop_in, jaxs, False

        def one_lane(_: Program) -> Any:
            return jax.make_jaxpr(lambda *args: gradient(*args))(*shapes)

        rows[f"one batch element, compared with vmap at {axes}"] = one_lane, jaxs, False
    half = half_dead(program)
    rows['apply("dce"), all alive'] = lambda p: p.apply("dce"), dce, False
    rows['apply("dce"), half dead'] = (
        lambda _: fresh(half).apply("dce"),
        lambda _: dce(fresh(half)),
        False,
    )
    for count in (10**3, 10**4):
        jits = trace(small_jits(count), jax.ShapeDtypeStruct((8,), jnp.float32))
        wide = jax.ShapeDtypeStruct((LANES, 8), jnp.float32)

        def batch_of_jits(_: Program, jits: Program = jits) -> Any:
            return fresh(jits).apply(f"batch(0, axis_size={LANES})")

        def vmap_of_jits(_: Program, jits: Program = jits, wide: Any = wide) -> Any:
            return jax.make_jaxpr(jax.vmap(jaxcompat.jaxpr_as_fun(fresh(jits).jaxpr)))(wide)

        rows[f'apply("dce"), {count:,} jits'] = (
            lambda _, jits=jits: fresh(jits).apply("dce"),
            lambda _, jits=jits: dce(fresh(jits)),
            False,
        )
        rows[f'apply("batch"), {count:,} jits, warm'] = batch_of_jits, vmap_of_jits, False
    rows["the check after cse"] = (
        lambda p: type_check(after, program),
        lambda p: type_check(after),
        False,
    )
    table = Table(title=f"Program.apply and JAX, {len(program.jaxpr.eqns):,} equations (medians)")
    for name in ("", "jax ms", "ours ms", "jax / ours"):
        table.add_column(name, justify="right" if name else "left")
    gc.freeze()
    for name, (ours, theirs, cold) in rows.items():
        if options.only in name:
            mine, jaxs, ratio = compare(ours, theirs, program, options.rounds, cold)
            table.add_row(name, f"{jaxs * 1e3:.1f}", f"{mine * 1e3:.1f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
