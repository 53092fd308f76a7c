"""Training steps of Flax NNX and Equinox with Adam, moved from eight devices to two."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.execute.running.run import run
from tests.programs.sharded import mesh_of

pytestmark = pytest.mark.models
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
eqx = pytest.importorskip("equinox")

ADAM = optax.adam(1e-2)
X = jax.random.normal(jax.random.key(1), (32, 16))
LABELS = jnp.arange(32) % 8


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.out = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.gelu(self.norm(self.inner(x))))


def of_nnx() -> tuple[Any, Any]:
    graphdef, params = nnx.split(Net(nnx.Rngs(0)))
    return params, lambda params, x: nnx.merge(graphdef, params)(x)


def of_equinox() -> tuple[Any, Any]:
    model = eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x)


def training(model: Any, mesh: Any) -> jaxprtool.Program:
    """Trace a step on a mesh: weights are split along their last axis, if it is divisible."""
    params, apply = model
    state = ADAM.init(params)

    def step(params, state, x, labels):
        def loss(params):
            logits = apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = ADAM.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    def placed(leaf):
        return NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), "data") if leaf.ndim else P())

    rows = NamedSharding(mesh, P("data"))
    trees = (*(jax.tree.map(placed, each) for each in (params, state)), rows, rows)
    outs = NamedSharding(mesh, P()), *trees[:2]
    jitted = jax.jit(step, in_shardings=trees, out_shardings=outs, donate_argnums=(0, 1))
    return jaxprtool.trace(jitted, params, state, X, LABELS)


@pytest.mark.parametrize("make", [of_nnx, of_equinox])
def test_a_training_step_on_eight_devices_equals_that_on_two(make, tmp_path):
    model = make()
    eight, two = (training(model, mesh_of(data=size)) for size in (8, 2))
    jaxprtool.write(eight, tmp_path / "eight.jaxpr")
    made = jaxprtool.read(tmp_path / "eight.jaxpr").on_mesh(mesh_of(data=2))
    assert jaxprtool.equivalent(made, two) and made.jit == two.jit
    flat = jax.tree.leaves((model[0], ADAM.init(model[0]), X, LABELS))
    outs = [
        run(program, jax.tree.map(jnp.array, flat), repeat=0).outputs for program in (made, eight)
    ]
    for a, b in zip(*outs, strict=True):
        np.testing.assert_allclose(a.value, b.value, rtol=1e-4, atol=1e-5)
