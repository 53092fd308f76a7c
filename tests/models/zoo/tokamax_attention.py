"""A training step through Tokamax's operators: normalization, attention and a gated unit."""

from functools import cache

import jax
import jax.numpy as jnp
import tokamax


def step(params, x):
    """Return the parameters after one step, and the loss."""

    def loss(params):
        normal = tokamax.layer_norm(x, params["scale"], params["offset"], implementation="xla")
        q, k, v = jnp.einsum("btd,pdhk->pbthk", normal, params["qkv"])
        attended = tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        rows = attended.reshape(x.shape)
        gated = tokamax.gated_linear_unit(
            rows, params["gate"], activation=jax.nn.silu, implementation="xla"
        )
        return jnp.mean((gated - x) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), value


@cache
def model():
    """Return the step and its arguments."""
    first, second, third = jax.random.split(jax.random.key(0), 3)
    params = {
        "scale": jnp.ones(16),
        "offset": jnp.zeros(16),
        "qkv": 0.3 * jax.random.normal(first, (3, 16, 2, 8)),
        "gate": 0.3 * jax.random.normal(second, (16, 2, 16)),
    }
    return step, (params, jax.random.normal(third, (2, 6, 16)))
