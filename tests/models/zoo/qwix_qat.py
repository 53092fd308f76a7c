"""A training step of a network that Qwix quantizes to int8, with straight-through gradients."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import qwix

RULES = [qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]


class Network(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


QUANTIZED = qwix.quantize_model(Network(), qwix.QtProvider(RULES))


def step(params, x, y):
    """Return the parameters after one step, and the loss."""

    def loss(params):
        return jnp.mean((QUANTIZED.apply({"params": params}, x) - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), value


@cache
def model():
    """Return the step and its arguments."""
    x = jax.random.normal(jax.random.key(1), (8, 6))
    params = QUANTIZED.init(jax.random.key(0), x)["params"]
    return step, (params, x, jnp.sin(x[:, :4]))
