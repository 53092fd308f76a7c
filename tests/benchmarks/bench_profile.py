"""Measure the share of the wall time that `jaxprtool profile` explains, and its overhead.

    python tests/benchmarks/bench_profile.py [MODEL…|overhead]

For each model, the table has the time of a call with and without the profiler, the share explained,
and the remainder. For a program of 10,000 equations, `overhead` prints the seconds that a profile
of a call takes in addition to the call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool.commands.cost.estimate import cost
from jaxprtool.commands.profile.lines import profile_of
from jaxprtool.execute.profile import recorded, step
from jaxprtool.ir.documents import duration
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program
from tests.models.zoo import equinox_vit, flax_gpt, nnx_resnet

SAMPLES = Path(__file__).parents[2] / "samples"


def traced(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Program, Any]:
    function, args = call
    return jaxprtool.trace(function, *args), args


def transformer() -> tuple[Program, Any]:
    return jaxprtool.load(f"{SAMPLES}/transformer.py:loss").apply("grad"), None


def unrolled_lstm(steps: int = 40, batch: int = 64, width: int = 256) -> tuple[Program, Any]:
    def loss(weights: Any, xs: Any) -> Any:
        h = c = jnp.zeros((batch, width))
        for x in xs:
            gates = jnp.concatenate([x, h], -1) @ weights
            i, f, o, g = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return jnp.square(h).mean()

    key = jax.random.key(0)
    weights = jax.random.normal(key, (2 * width, 4 * width)) * 0.05
    return traced((jax.grad(loss), (weights, jax.random.normal(key, (steps, batch, width)))))


def diffrax_solve() -> tuple[Program, Any]:
    import diffrax

    def field(t: Any, y: Any, weights: Any) -> Any:
        return jnp.tanh(y @ weights)

    def solve(weights: Any, start: Any) -> Any:
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.02, start, weights
        )
        return found.ys

    key = jax.random.key(0)
    shapes = jax.random.normal(key, (256, 256)) * 0.1, jax.random.normal(key, (256, 256))
    return traced((solve, shapes))


MODELS: dict[str, Callable[[], tuple[Program, Any]]] = {
    "transformer": transformer,
    "Flax GPT": lambda: traced(flax_gpt.model(layers=4, width=256, length=256)),
    "NNX ResNet": lambda: traced(nnx_resnet.model(blocks=3, width=128, size=64)),
    "Equinox ViT": lambda: traced(equinox_vit.model(blocks=4, width=256, size=64)),
    "Diffrax": diffrax_solve,
    "LSTM": unrolled_lstm,
}


def explained(names: list[str]) -> Table:
    columns = "model", "profiled", "without", "explained", "the rest"
    table = Table(*columns)
    for name in names:
        program, args = MODELS[name]()
        found = jaxprtool.profile(program, args)
        waits = ("between operations", "dispatch", "idle")
        rest = [f"{each.kind} {each.share:.1%}" for each in found.own if each.kind in waits]
        plain = "" if found.plain_seconds is None else duration(found.plain_seconds)
        wall = duration(found.wall_seconds)
        table.add_row(name, wall, plain, f"{found.explained:.1%}", ", ".join(rest))
    return table


def overhead(equations: int = 10_000) -> str:
    """Print the CPU seconds that a profile of one call takes in addition to the call."""

    def chain(x: Any, w: Any) -> Any:
        for _ in range(equations // 3):
            x = jnp.tanh(x @ w) + 0.1
        return x

    args = jnp.ones((16, 64)), jnp.full((64, 64), 0.01)
    program = jaxprtool.trace(chain, *args)
    call = jax.jit(chain).lower(*args).compile()
    jax.block_until_ready(call(*args))
    start = time.process_time()
    with recorded() as found:
        before = time.process_time()
        with step():
            jax.block_until_ready(call(*args))
        called = time.process_time() - before
    assert found.trace is not None
    profile_of(found.trace, program.name, frames_now())
    cost(program)
    seconds = time.process_time() - start - called
    return f"{len(program.jaxpr.eqns):,} equations: {seconds:.2f} s of CPU beyond the call"


if __name__ == "__main__":
    names = sys.argv[1:] or [*MODELS, "overhead"]
    Console().print(explained([name for name in names if name in MODELS]))
    if "overhead" in names:
        print(overhead())
