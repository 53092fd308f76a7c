"""Compare `jaxprtool.jit` with `jax.jit`: `python tests/benchmarks/bench_jit.py`.

    warm    a call of a compiled function: the two alternate, medians of many calls
    trace   tracing the function anew: JAX's tracing, and ours with an empty and a full pipeline

Each transformation pass is also compared with `jax.make_jaxpr` of the function that JAX transforms.
Times are CPU times of the calling thread, so that other load on the machine matters little.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxprtool import passes as framework
from jaxprtool import trace
from jaxprtool.api.jit import jit
from tests.benchmarks.models import small_jits
from tests.programs.same import count_equations

TRANSFORMS = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "named_call": jax.named_call,
}


def mlp(params: Any, x: Any) -> Any:
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.square(x).mean()


def transformer(params: Any, x: Any) -> Any:
    def norm(x: Any, scale: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return scale * (x - mean) / jnp.sqrt(variance + 1e-5)

    for p in params:
        h = norm(x, p["norm1"])
        q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
        x = x + jax.nn.softmax(q @ k.T / 8.0) @ v @ p["o"]
        x = x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]
    return jnp.square(x).mean()


def transformer_arguments(layers: int) -> tuple[Any, Any]:
    shapes = dict.fromkeys(("q", "k", "v", "o"), (64, 64))
    shapes |= {"norm1": (64,), "norm2": (64,), "up": (64, 256), "down": (256, 64)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return [layer] * layers, jax.ShapeDtypeStruct((32, 64), jnp.float32)


def seconds(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.thread_time()
    function()
    return time.thread_time() - start


# --- warm calls -----------------------------------------------------------------------------------


def warm(ours: Callable[..., Any], theirs: Callable[..., Any], args: Any, rounds: int) -> Any:
    """Return the median microseconds of a call of each, and the median ratio."""
    calls = 200

    def many(function: Callable[..., Any]) -> float:
        start = time.thread_time()
        for _ in range(calls):
            function(*args)
        return (time.thread_time() - start) / calls * 1e6

    for function in (ours, theirs):
        many(function)
    pairs = []
    for i in range(rounds):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        times = {first: many(first), second: many(second)}
        pairs.append((times[ours], times[theirs]))
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def warm_table(passes: str, rounds: int) -> Table:
    cases: dict[str, tuple[Any, Any]] = {
        "x + 1": (lambda x: x + 1, (jnp.float32(1),)),
        "20 arguments": (lambda *xs: sum(xs), tuple(jnp.float32(i) for i in range(20))),
        "mlp, a tree": (mlp, ([(jnp.ones((8, 8)), jnp.ones(8))] * 4, jnp.ones((4, 8)))),
    }
    table = Table("warm call", "ours µs", "jax.jit µs", "ratio")
    for name, (fun, args) in cases.items():
        ours, theirs, ratio = warm(jit(fun, passes=passes), jax.jit(fun), args, rounds)
        table.add_row(name, f"{ours:.1f}", f"{theirs:.1f}", f"{ratio:.3f}")
    return table


def nnx_table(rounds: int) -> Table:
    """Compare calls with Flax NNX objects with `nnx.jit`."""
    import optax
    from flax import nnx

    def layer(model: Any, x: Any) -> Any:
        return model(x)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
        optimizer.update(model, gradient)
        return loss

    def state() -> tuple[Any, Any]:
        layers = (nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))
        model = nnx.Sequential(*layers)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    x, table = jnp.ones((4, 16)), Table("warm call, NNX", "ours µs", "nnx.jit µs", "ratio")
    for name, fun, count in (("a model", layer, 1), ("a training step", step, 2)):
        ours, theirs = (
            functools.partial(jitted, *state()[:count], x)
            for jitted in (jit(nnx.jit(fun)), nnx.jit(fun))
        )
        a, b, ratio = warm(ours, theirs, (), rounds)
        table.add_row(name, f"{a:.1f}", f"{b:.1f}", f"{ratio:.3f}")
    return table


# --- tracing --------------------------------------------------------------------------------------


def trace_table(pipelines: list[str], layers: int, rounds: int) -> Table:
    fun, args = jax.grad(transformer), transformer_arguments(layers)
    times: dict[str, list[float]] = {"jax.jit": []}
    for _ in range(rounds):
        jax.clear_caches()
        times["jax.jit"].append(seconds(lambda: jax.jit(fun).trace(*args)))
        for passes in pipelines:
            jax.clear_caches()
            made = jit(fun, passes=passes)
            found = seconds(lambda made=made: made.trace(*args))  # type: ignore[misc]
            times.setdefault(f"ours, '{passes}'", []).append(found)
    return ratios(f"tracing a gradient of {layers} layers", times)


def small_jits_table(pipelines: list[str], count: int, rounds: int) -> Table:
    """Trace calls of jitted functions whose bodies JAX has traced before."""
    chain, x = small_jits(count), jax.ShapeDtypeStruct((8,), jnp.float32)
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for passes in (None, *pipelines):

            def fun(x: Any) -> Any:  # a new function: JAX caches traces
                return chain(x)

            jitted = jax.jit(fun) if passes is None else jit(fun, passes=passes)
            taken = seconds(lambda jitted=jitted: jitted.trace(x))  # type: ignore[misc]
            if number:  # the first round is a warm-up
                name = "jax.jit" if passes is None else f"ours, '{passes}'"
                times.setdefault(name, []).append(taken)
    return ratios(f"tracing {count:,} small jits", times)


def ratios(title: str, times: dict[str, list[float]]) -> Table:
    table = Table(title, "seconds", "ratio to jax.jit")
    base = statistics.median(times["jax.jit"])
    for name, taken in times.items():
        median = statistics.median(taken)
        table.add_row(name, f"{median:.4f}", f"{median / base:.2f}")
    return table


def transform_table(layers: int, rounds: int) -> Table:
    args = transformer_arguments(layers)
    program = trace(transformer, *args)
    title = f"{layers} layers, {count_equations(program.jaxpr)} equations"
    table = Table(title, "the pass ms", "JAX traces ms", "ratio", "equations made")
    for name, transform in TRANSFORMS.items():
        rewrite = framework.find_pass(name)()
        ours, theirs = [], []
        for _ in range(rounds):
            jax.clear_caches()
            theirs.append(seconds(lambda f=transform: jax.make_jaxpr(f(transformer))(*args)))  # type: ignore[misc]
            jax.clear_caches()
            ours.append(seconds(lambda rewrite=rewrite: rewrite(program)))  # type: ignore[misc]
        made = count_equations(rewrite(program).jaxpr)
        a, b = statistics.median(ours), statistics.median(theirs)
        table.add_row(name, f"{a * 1e3:.0f}", f"{b * 1e3:.0f}", f"{a / b:.2f}", str(made))
    for name in ("vjp", "linearize"):
        rewrite, ours = framework.find_pass(name)(), []
        for _ in range(rounds):
            jax.clear_caches()
            ours.append(seconds(lambda rewrite=rewrite: rewrite(program)))  # type: ignore[misc]
        parts = rewrite(program)
        made = sum(count_equations(part.jaxpr) for part in parts.values())
        table.add_row(name, f"{statistics.median(ours) * 1e3:.0f}", "", "", str(made))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", nargs="*", default=["-O1"])
    options = parser.parse_args()
    console = Console(width=120)
    console.print(f"JAX {jax.__version__}")
    console.print(warm_table("dce", max(options.rounds * 4, 9)))
    if find_spec("flax") and find_spec("optax"):
        console.print(nnx_table(max(options.rounds * 4, 9)))
    for count in (10**3, 10**4):
        console.print(small_jits_table(["-O0", "dce", *options.passes], count, options.rounds))
    console.print(trace_table(["-O0", "dce", *options.passes], options.layers, options.rounds))
    console.print(transform_table(options.layers, options.rounds))


if __name__ == "__main__":
    main()
