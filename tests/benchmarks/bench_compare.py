"""Measure how long `compare` takes to find a planted fault.

    python tests/benchmarks/bench_compare.py [LAYERS]

The gradient of a network of unrolled layers is compared with the same gradient after one constant
of a layer was changed, or after a wrong rewrite of the network before differentiation. Times are
wall and CPU seconds. For reference, the table has the time to compile and run both programs once.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxprtool

WIDTH = 16


@jaxprtool.rewrite(x="f32[a,b]")
def silu(x):
    return x * jax.lax.logistic(x)


@silu.to
def _(x):
    return x * jax.lax.logistic(x * 1.01)


def network(depth, wrong_at=None):
    def loss(params, x):
        for i, (up, down) in enumerate(params):
            hidden = x / jnp.sqrt(
                (x * x).mean(-1, keepdims=True) + (0.1 if i == wrong_at else 1e-5)
            )
            x = x + jax.nn.silu(hidden @ up) @ down
        return (x**2).mean()

    return loss


def timed(function):
    clock, cpu = time.perf_counter(), time.process_time()
    value = function()
    return value, time.perf_counter() - clock, time.process_time() - cpu


def main(depth):
    rng = np.random.default_rng(0)
    shapes = [((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))] * depth
    params = [tuple(rng.standard_normal(s).astype(np.float32) / 6 for s in pair) for pair in shapes]
    args = params, rng.standard_normal((4, WIDTH)).astype(np.float32)
    right = jaxprtool.trace(network(depth), *args)
    gradient = right.apply("grad")
    place = 2 * depth // 3
    wrong = jaxprtool.trace(network(depth, place), *args).apply("grad")
    rewritten = right.apply(silu).apply("grad")
    count = len(gradient.jaxpr.eqns)
    print(f"JAX {jax.__version__}, {count:,} equations")
    for name, other in (
        (f"a wrong number in layer {place}", wrong),
        ("a wrong rewrite", rewritten),
    ):
        for bisect in (False, True):
            found, clock, cpu = timed(
                lambda: jaxprtool.compare([gradient, other], args, bisect=bisect)  # noqa: B023
            )
            what = "--bisect" if bisect else "compare"
            where = found.partings[0] if bisect else None
            message = f"  {where.primitive} at {where.source}" if where else ""
            print(f"{name:28} {what:10} {clock:7.1f} s {cpu:7.1f} s of CPU{message}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
