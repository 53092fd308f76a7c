"""The golden files: programs as written by each JAX release, which all releases must read.

    python -m tests.formats.jaxpr.golden

writes those of the running JAX into `golden/<version>`. Do so after an addition to the format, or
for a new release. A published file must stay readable, so existing files are never changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxprtool import nest, sow, variable
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace
from tests.programs.case import Case

FOLDER = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[3]

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def literals(x, n):
    special = jnp.stack([x, jnp.float32(-0.0), jnp.float32(np.nan), jnp.float32(-np.inf)])
    wide = x.astype(jnp.bfloat16) * jnp.bfloat16(1.1) + 3
    return special, wide, n // 3 + jnp.uint8(200), lax.complex(x, x * 1e-30), x > 0.1


def constants(x):
    small = jnp.asarray(np.array([[0.1, -2.0], [np.inf, 4.0]], np.float32))
    table = jnp.asarray(np.random.RandomState(0).normal(size=(16, 16)).astype(np.float32))
    half = jnp.asarray(np.arange(100) / 7, jnp.bfloat16)
    return x[:2, :2] * small, table @ table[0], half.sum()


def control_flow(x, n):
    def body(carry, row):
        return carry * 0.5 + row.sum(), jnp.where(row > carry, row, 0.0)

    total, rows = lax.scan(body, jnp.float32(0), x, reverse=True)
    count, power = lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 2), (0, total))
    branches = [jnp.sin, jnp.cos, lambda y: y * count]
    return rows, power, lax.switch(n, branches, x), lax.cond(n > 1, jnp.tanh, jnp.abs, x)


@jax.custom_jvp
def power(x, n):
    return x**n


@power.defjvp
def _power_jvp(primals, tangents):
    x, n = primals
    # The rule calls its own function.
    return power(x, n), n * power(x, n - 1) * tangents[0] + 0 * tangents[1]


@jax.custom_vjp
def clipped(x, limit):
    return x * 2


clipped.defvjp(
    lambda x, limit: (x * 2, limit),
    lambda limit, g: (jnp.clip(g, -limit, limit), None),
)


def custom_rules(x):
    return power(x, 3.0).sum() + clipped(x, 0.5).sum() + jax.nn.relu(x).sum()


def rematerialized(x):
    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(lambda y: jnp.sin(y @ y.T) @ y, policy=policy)
    return jax.value_and_grad(lambda y: layer(layer(y)).sum())(x)


def random_numbers(key, seed):
    first, second = jax.random.split(key)
    noise = jax.random.normal(first, (3,)) + jax.random.uniform(second)
    other = jax.random.fold_in(jax.random.wrap_key_data(seed), 7)
    return noise, jax.random.bits(other, (2,)), second


def indexing(x, at):
    image = x.reshape(1, 1, 3, 4)
    convolved = lax.conv_general_dilated(image, jnp.ones((2, 1, 2, 2)), (1, 1), "SAME")
    updated = x.at[at, 1].add(10.0).at[0].set(jnp.arange(4.0))
    products = jnp.einsum("ij,kj->ik", x, x), lax.dot(x, x.T, precision="highest")
    windows = lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")
    return convolved, updated, x[at], jnp.take(x, at, axis=1), products, windows


def reductions(x):
    joined = lax.reduce(x, np.float32(0), lambda a, b: a + b * 2, (1,))
    order = lax.sort((x, -x), dimension=1, num_keys=1)
    parts = jnp.cumsum(x, 0), jnp.argmax(x, 1), lax.top_k(x, 2), jnp.linalg.norm(x)
    return joined, order, parts, jnp.linalg.solve(x[:, :3] + 3 * jnp.eye(3), x[:, 0])


def scopes(x):
    with jax.named_scope("outer"):
        y = jnp.sin(x)
        with jax.named_scope("inner"):
            y = jax.jit(jax.nn.silu)(y) + jax.jit(jax.nn.silu)(x)
    return jax.vmap(lambda row: jnp.dot(row, row))(y)


class Pair(NamedTuple):
    left: Any
    right: Any


def structures(pair, *, options):
    return Pair(pair.right, {"b": pair.left, "a": (None, [options["x"]])}), OrderedDict(
        z=np.float32(1)
    )


def sharded(x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(None, "data"),
        out_specs=(PartitionSpec("data"), PartitionSpec()),
    )
    def both(part):
        total = lax.psum(part.sum(), "data")
        return part.sum(0) * total, total

    return both(x)


def sown(x):
    def layer(x):
        params = variable({"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}, name="params")
        return x @ params["w"] + params["b"]

    return sow(nest(layer, scope="first")(x), tag="seen", name="y", mode="append", key=x)


def over_an_axis(x):
    return lax.psum(x, "i") / lax.axis_size("i"), lax.all_gather(x, "i")


#: The programs by the names of their files.
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("literals", literals, (np.float32(0.3), 7)),
        Case("constants", constants, (X,)),
        Case("control_flow", control_flow, (X, 2)),
        Case("custom_rules", custom_rules, (X,)),
        Case("custom_rules_gradient", jax.grad(custom_rules), (X,)),
        Case("rematerialized", rematerialized, (X,)),
        Case("indexing", indexing, (X, np.array([2, 0]))),
        Case("reductions", reductions, (X,)),
        Case("scopes", scopes, (X,)),
        Case("structures", structures, (Pair(X, X[0]),), {"options": {"x": X}}),
        Case("sharded", sharded, (X,)),
        Case("sown", sown, (X,)),
        Case("double", lambda x: (x * np.float64(0.1), jnp.arange(3)), (np.pi,), x64=True),
    )
}


def random_case() -> Case:
    """Return a random case. It is made on demand, since a key is an array on a device."""
    seed = np.array([1, 2], np.uint32)
    return Case("random_numbers", random_numbers, (jax.random.key(0), seed))


def axis_program() -> Program:
    """Return a program with an axis of its environment."""
    return trace(over_an_axis, X, axis_env=[("i", 4)])


def programs() -> dict[str, Callable[[], Program]]:
    """Return all golden programs by name."""
    cases = {**CASES, "random_numbers": random_case()}
    traced: dict[str, Callable[[], Program]] = {n: case.program for n, case in cases.items()}
    return {**traced, "over_an_axis": axis_program}


def write_all() -> None:
    """Write the golden files of the running JAX."""
    folder = FOLDER / jax.__version__
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in programs().items():
        path = folder / f"{name}.jaxpr"
        write(make(), path)
        path.write_text(path.read_text().replace(str(ROOT), "/home/me/jaxprtool"))


if __name__ == "__main__":
    from tests.formats.jaxpr import golden  # so that classes do not belong to __main__

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    golden.write_all()
