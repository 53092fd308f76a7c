"""Compare `jaxprtool.shardings` with compiling alone, to measure the reading and the analysis.

    python tests/benchmarks/bench_shardings.py [LAYERS …]

The programs are training steps of unrolled, fully sharded layers on eight virtual devices. Each is
compiled by `jax.jit` alone, compiled while XLA dumps the modules around its partitioner, and passed
to `shardings`, alternately. The table has medians of three, in seconds, and the number of equations
and of collectives. The last line compares the refusal of a program for one device with tracing it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxprtool
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.lowering import compiled, partitioned
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program
from tests.benchmarks.models import transformer_loss, transformer_shapes
from tests.programs.sharded import floats, mesh_of, trained, under_jit

LAYERS = 10, 100, 300


def program(layers: int) -> Program:
    """Return a training step of `layers` layers, whose weights are gathered where they are used."""
    mesh = mesh_of(fsdp=8)

    def loss(params, x):
        for each in params:
            up, down = (with_sharding_constraint(w, P()) for w in each)
            x = with_sharding_constraint(x + jax.nn.gelu(x @ up) @ down, P("fsdp"))
        return jnp.mean(jnp.square(x))

    step = under_jit(trained(loss), mesh, P("fsdp"), P("fsdp"))
    params = [(floats(32, 64), floats(64, 32))] * layers
    with jax.set_mesh(mesh):
        return jaxprtool.trace(step, params, floats(64, 32))


def seconds(call: Callable[[Program], object], program: Program) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call(program)
    return time.perf_counter() - start


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    table = Table("layers", "equations", "collectives", "compile", "and dump", "shardings", "added")
    for layers in map(int, sys.argv[1:] or LAYERS):
        made = program(layers)
        calls = compiled, partitioned, jaxprtool.shardings
        times = [[seconds(call, made) for call in calls] for _ in range(3)]
        plain, dumped, whole = map(median, zip(*times, strict=True))
        count = len(jaxprtool.shardings(made).collectives)
        figures = f"{plain:.2f}", f"{dumped:.2f}", f"{whole:.2f}", f"{whole - plain:+.2f}"
        size = len(list(equations(made.jaxpr)))
        table.add_row(str(layers), f"{size:,}", f"{count:,}", *figures)
    Console(width=120).print(table)
    alone, args = transformer_loss, transformer_shapes(4)
    traced = jaxprtool.trace(jax.grad(alone), *args)
    trace = seconds(lambda _: jax.make_jaxpr(jax.grad(alone))(*args), traced)
    refused = seconds(refusal, traced)
    print(f"one device: JAX's trace {trace:.2f} s, shardings {refused:.2f} s")


def refusal(program: Program) -> None:
    """Ask for the shardings of a program for one device."""
    try:
        jaxprtool.shardings(program)
    except UnsupportedError:
        return
    raise AssertionError("the program is partitioned")


if __name__ == "__main__":
    main()
