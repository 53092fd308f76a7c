"""A GPT of functions and dictionaries, and the step that trains it with momentum."""

from functools import cache

import jax
import jax.numpy as jnp

HEADS = 2


def norm(x, scale):
    """Return the rows with zero mean and unit variance, scaled."""
    return scale * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(params, x):
    """Return causal attention of several heads."""
    length, width = x.shape[-2:]
    q, k, v = jnp.split(x @ params["qkv"], 3, -1)
    q, k, v = (a.reshape(*a.shape[:-1], HEADS, -1) for a in (q, k, v))
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / jnp.sqrt(width // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
    return mixed.reshape(x.shape) @ params["out"]


def block(x, params):
    """Return a pre-norm block's output, as the body of a scan over layers."""
    x = x + attention(params, norm(x, params["norm1"]))
    hidden = jax.nn.gelu(norm(x, params["norm2"]) @ params["up"])
    return x + hidden @ params["down"], None


def loss(params, tokens):
    """Return the cross entropy of each next token."""
    x = params["embed"][tokens[:, :-1]] + params["place"][: tokens.shape[1] - 1]
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    log_probs = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean()


def step(training, tokens):
    """Return weights and momenta after one step, and the loss."""
    params, momenta = training
    value, gradient = jax.value_and_grad(loss)(params, tokens)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradient)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta), value


@cache
def model(layers=2, width=16, length=8):
    """Return the step and its arguments."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    made = lambda *shape: 0.1 * jax.random.normal(next(keys), shape)  # noqa: E731
    blocks = {
        "norm1": jnp.ones((layers, width)),
        "norm2": jnp.ones((layers, width)),
        "qkv": made(layers, width, 3 * width),
        "out": made(layers, width, width),
        "up": made(layers, width, 4 * width),
        "down": made(layers, 4 * width, width),
    }
    params = {"embed": made(32, width), "place": made(length, width), "blocks": blocks}
    tokens = jax.random.randint(next(keys), (2, length + 1), 0, 32)
    return step, ((params, jax.tree.map(jnp.zeros_like, params)), tokens)
