"""Measure how long `reduce` takes for planted faults in programs of thousands of equations."""

import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxprtool

# Two virtual CPU devices, with a timeout of 2 s for a collective.
jax.config.update("jax_num_cpu_devices", 2)
os.environ["XLA_FLAGS"] = " ".join(
    f"--xla_cpu_collective_call_{what}_timeout_seconds=2" for what in ("warn_stuck", "terminate")
)

#: A plug-in whose rewrite is wrong.
WRONG = """
from jax import lax
from jaxprtool import Pass
from jaxprtool.extend import map_equations

class Wrong(Pass):
    \"\"\"Take a sine for a cosine.\"\"\"

    name = "wrong"

    def __call__(self, program):
        def rule(eqn):
            if eqn.primitive.name != "cos":
                return None
            return [eqn.replace(primitive=lax.sin_p)]

        return program.replace(jaxpr=map_equations(program.jaxpr, rule))
"""


def attention(x, w):
    q, k, v = (x @ w[i] for i in range(3))
    weights = jax.nn.softmax(q @ k.T / jnp.sqrt(q.shape[-1]))
    return weights @ v


def layers(x, ws, odd=lambda x: x):
    for i, w in enumerate(ws):
        mean = x.mean(-1, keepdims=True)
        x = (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        x = x + attention(x, w)
        x = x + jax.nn.gelu(x @ w[3]) @ w[4]
        if i == 20:
            x = odd(x)
    return x.sum()


def rewritten():
    """Return a gradient of 48 layers, one with a sine, which a faulty pass replaces by a cosine."""
    ws = jnp.sin(jnp.arange(48 * 5 * 16 * 16.0)).reshape(48, 5, 16, 16) * 0.1
    x = jnp.cos(jnp.arange(8 * 16.0)).reshape(8, 16)
    return jax.grad(lambda x, ws: layers(x, ws, jnp.sin)), (x, ws), "mismatch -p wrong"


def log_of_zero():
    """Return a gradient of 24 layers around a scan with a log of zero in an iteration."""

    def scanned(x):
        def step(x, i):
            y = jnp.log(x * (3 - i) ** 2)
            return jnp.tanh(x + 0.1), jnp.where(jnp.isfinite(y), y, 0.0).sum()

        x, sums = lax.scan(step, jnp.abs(x) + 1.0, jnp.arange(6.0))
        return x + sums.sum()

    ws = jnp.sin(jnp.arange(24 * 5 * 16 * 16.0)).reshape(24, 5, 16, 16) * 0.1
    x = jnp.cos(jnp.arange(8 * 16.0)).reshape(8, 16)
    return jax.grad(lambda x, ws: layers(x, ws, scanned)), (x, ws), "nan"


def folded():
    """Return a gradient of 24 layers with a window sum over constants, which XLA folds."""

    def windows(x):
        numbers = lax.iota(jnp.float32, 1 << 17)
        sums = lax.reduce_window(numbers, 0.0, lax.add, (1 << 16,), (1,), "VALID")
        return x * sums[0]

    ws = jnp.sin(jnp.arange(24 * 5 * 16 * 16.0)).reshape(24, 5, 16, 16) * 0.1
    x = jnp.cos(jnp.arange(8 * 16.0)).reshape(8, 16)
    return jax.grad(lambda x, ws: layers(x, ws, windows)), (x, ws), "timeout 10"


def segfault():
    """Return a gradient of 24 layers with a sum of a product of seven axes.

    It crashes XLA of jaxlib 0.10.2 (jax-ml/jax#40412), and no later release.
    """
    table = jnp.sin(jnp.arange(6144.0)).reshape(3, 1, 2, 2, 8, 8, 8)

    def contracted(x):
        return x + jnp.tanh((table * (table + x[0, 0])).sum(3)).mean()

    ws = jnp.sin(jnp.arange(24 * 5 * 16 * 16.0)).reshape(24, 5, 16, 16) * 0.1
    x = jnp.cos(jnp.arange(8 * 16.0)).reshape(8, 16)
    return jax.grad(lambda x, ws: layers(x, ws, contracted)), (x, ws), "crash"


def deadlock():
    """Return a gradient of 24 layers with a collective that only the first device reaches.

    XLA aborts the process when the others have not arrived before the timeout.
    """

    def mean_on_first(loss):
        first = lax.axis_index("data") == 0
        return lax.cond(first, lambda loss: lax.pmean(loss, "data"), lambda loss: loss, loss)

    def step(ws, x):
        loss, grads = jax.value_and_grad(lambda ws: layers(x, ws))(ws)
        return ws - 0.1 * lax.pmean(grads, "data"), mean_on_first(loss)[None]

    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P("data"))}
    ws = jnp.sin(jnp.arange(24 * 5 * 16 * 16.0)).reshape(24, 5, 16, 16) * 0.1
    x = jnp.cos(jnp.arange(8 * 16.0)).reshape(8, 16)
    return jax.shard_map(step, mesh=mesh, check_vma=False, **specs), (ws, x), "crash"


FAULTS = {
    "rewritten": rewritten,
    "log_of_zero": log_of_zero,
    "folded": folded,
    "segfault": segfault,
    "deadlock": deadlock,
}


def main(names):
    print("| fault | equations | left | tries | seconds |\n| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        plugin = Path(folder) / "wrong.py"
        plugin.write_text(WRONG)
        for name in names or FAULTS:
            fun, arguments, check = FAULTS[name]()
            program = jaxprtool.trace(fun, *arguments)
            flat = jax.tree.leaves(arguments)
            found = jaxprtool.reduce(
                program,
                check,
                values=dict(zip(program.arg_names, flat, strict=True)),
                plugins=[str(plugin)] if "wrong" in check else (),
                on_progress=lambda doing: print(doing, file=sys.stderr),
            )
            counts = f"{found.equations_before:,} | {found.equations_after}"
            print(f"| {name} | {counts} | {found.tries} | {found.seconds:.0f} |")
            print(found.program, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
