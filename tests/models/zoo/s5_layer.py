"""An S5 layer, a diagonal complex state space by an associative scan, and its training step."""

from functools import cache

import jax
import jax.numpy as jnp


def combine(left, right):
    """Return two steps of the recurrence as one."""
    return right[0] * left[0], right[0] * left[1] + right[1]


def layer(params, inputs):
    """Return the outputs of a sequence of inputs."""
    decay = jax.lax.complex(-jnp.exp(params["decay"]), params["frequency"])
    pace = jnp.exp(params["pace"])
    step = jnp.exp(decay * pace)
    weights = jax.lax.complex(*params["in"]) * ((step - 1.0) / decay)[:, None]
    driven = inputs.astype(weights.dtype) @ weights.T
    steps = jnp.broadcast_to(step, driven.shape)
    _, states = jax.lax.associative_scan(combine, (steps, driven))
    read = (states @ jax.lax.complex(*params["out"]).T).real
    return jax.nn.gelu(2.0 * read + params["skip"] * inputs)


def loss(params, batch):
    """Return the error of the layer in computing the running mean."""
    wanted = jnp.cumsum(batch, 1) / jnp.arange(1, batch.shape[1] + 1)[:, None]
    return jnp.square(jax.vmap(layer, (None, 0))(params, batch) - wanted).mean()


def step(params, batch):
    """Return the parameters after one step, and the loss."""
    value, gradient = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda w, g: w - 1e-2 * g, params, gradient), value


@cache
def model(width=4, states=6):
    """Return the step and its arguments."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "decay": jnp.full(states, -0.7),
        "frequency": jnp.pi * jnp.arange(1.0, states + 1),
        "pace": jnp.full(states, -2.0),
        "in": jax.random.normal(keys[0], (2, states, width)) / width,
        "out": jax.random.normal(keys[1], (2, width, states)) / states,
        "skip": jnp.ones(width),
    }
    return step, (params, jax.random.normal(keys[2], (2, 10, width)))
