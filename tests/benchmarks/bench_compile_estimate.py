"""Compare estimates of compile time with XLA: `python tests/benchmarks/bench_compile_estimate.py`.

Each program is compiled as traced, outlined and rolled, once and with empty caches. The table has
the number of distinct kernels and the CPU seconds, both estimated and measured, and the ratios.
Name programs to measure only those.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxprtool
from jaxprtool.commands.outline.compile_time import compile_estimate
from tests.benchmarks.outline_models import MODELS, Case
from tests.benchmarks.outline_models.packages import zoo

WAYS = ("", "outline", "roll")


def recurrence(steps: int) -> Case:
    """Return the gradient of a recurrent network over the rows of an array."""

    def loss(w: Any, xs: Any) -> Any:
        h = jnp.zeros(w.shape[0])
        for t in range(steps):
            h = jnp.tanh(w @ h + xs[t])
        return (h**2).sum()

    return Case(jax.grad(loss), (jnp.ones((64, 64)), jnp.ones((steps, 64))))


_BLOCKS = {"blocks": (3, 4, 6, 3), "channels": (64, 128, 256, 512), "bottleneck": True}

#: Small programs, since XLA's compile time hardly depends on widths.
PROGRAMS: dict[str, Callable[[], Case]] = {
    "recurrence, 100 steps": lambda: recurrence(100),
    "Flax GPT, no dropout, 12": zoo("flax_gpt", layers=12, width=64, length=32, dropout=0.0),
    "Haiku ResNet-50": zoo("haiku_resnet", size=32, **_BLOCKS),
    "transformer, 12": lambda: MODELS["transformer_gradient"].case(12),
    "LSTM, 30 steps": lambda: MODELS["lstm"].case(30),
    "experts, 3": lambda: MODELS["experts"].case(3),
    "Equinox ViT, 4": lambda: MODELS["equinox_vit"].case(4),
    "NNX ResNet, 6": lambda: MODELS["nnx_resnet"].case(6),
    "FlaxGPT2, 6": lambda: MODELS["flax_gpt2"].case(6),
    "Flax GPT, 6": lambda: MODELS["flax_gpt"].case(6),
}


def compile_seconds(program: jaxprtool.Program) -> float:
    """Return the CPU seconds that XLA takes to compile a program."""
    jax.clear_caches()
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    args, kwargs = jax.tree.unflatten(program.in_tree, types)
    lowered = jax.jit(program).lower(*args, **kwargs)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


def rows(name: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each way to compile a program."""
    case = PROGRAMS[name]()
    program = jaxprtool.trace(case.fun, *case.args)
    for way in WAYS:
        made = program.apply(way) if way else program
        if way and made is program:
            continue
        estimate = compile_estimate(made)
        measured = compile_seconds(made)
        if estimate.seconds is None:  # programs about which the estimate says nothing
            continue
        ratio = estimate.seconds / measured
        seconds = f"{estimate.seconds:.2f}", f"{measured:.2f}", f"{ratio:.2f}"
        yield "" if way else name, way or "as traced", f"{estimate.different:,}", *seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(lambda x: x + 1)(1.0)  # start XLA before the first measurement
    table = Table(title=f"JAX {jax.__version__}", title_justify="left")
    for heading in ("", "", "kernels", "estimated, s", "measured, s", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in options.programs or PROGRAMS:
        for row in rows(name):
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
