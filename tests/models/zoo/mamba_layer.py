"""A Mamba block, a selective state space by a sequential scan, and its training step."""

from functools import cache

import jax
import jax.numpy as jnp


def convolve(x, kernel):
    """Return the causal convolution of each channel with its own kernel."""
    taps, width = kernel.shape
    return jax.lax.conv_general_dilated(
        x[None],
        kernel[:, None, :],
        window_strides=(1,),
        padding=[(taps - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=width,
    )[0]


def select(params, x):
    """Return the outputs of the state space whose steps depend on the input."""
    pace = jax.nn.softplus(x @ params["pace"] + params["bias"])
    write, read = jnp.split(x @ params["select"], 2, -1)
    decay = -jnp.exp(params["decay"])

    def one(state, now):
        x, pace, write, read = now
        state = jnp.exp(pace[:, None] * decay) * state + (pace * x)[:, None] * write
        return state, state @ read

    _, y = jax.lax.scan(one, jnp.zeros_like(decay), (x, pace, write, read))
    return y + params["skip"] * x


def block(params, x):
    """Return a residual block's output."""
    scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    inner, gate = jnp.split((x * scale) @ params["in"], 2, -1)
    inner = select(params, jax.nn.silu(convolve(inner, params["kernel"])))
    return x + (inner * jax.nn.silu(gate)) @ params["out"]


def loss(params, batch):
    """Return the error of the block in predicting the next input."""
    found = jax.vmap(block, (None, 0))(params, batch[:, :-1])
    return jnp.square(found - batch[:, 1:]).mean()


def step(params, batch):
    """Return the parameters after one step, and the loss."""
    value, gradient = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda w, g: w - 1e-2 * g, params, gradient), value


@cache
def model(width=4, inner=6, states=3):
    """Return the step and its arguments."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    made = lambda *shape: jax.random.normal(next(keys), shape) / shape[0]  # noqa: E731
    params = {
        "in": made(width, 2 * inner),
        "kernel": made(3, inner),
        "pace": made(inner, inner),
        "bias": jnp.full(inner, -2.0),
        "select": made(inner, 2 * states),
        "decay": jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1))),
        "skip": jnp.ones(inner),
        "out": made(inner, width),
    }
    return step, (params, jax.random.normal(next(keys), (2, 9, width)))
