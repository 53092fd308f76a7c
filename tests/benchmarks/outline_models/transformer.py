"""A pre-norm transformer in pure JAX: forward, gradient, and steps of AdamW.

The parameters of the layers are a list, for a Python loop, or one tree of stacked arrays, for a
scan.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.benchmarks.outline_models.case import Case

WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 128, 4, 64, 4, 256


def loss(params: Any, tokens: Any) -> Any:
    """Return the mean cross entropy of each token given the previous ones."""
    logits = forward(params, tokens[:, :-1])
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -found.mean()


def forward(params: Any, tokens: Any) -> Any:
    """Return the logits of the next tokens."""
    x = params["embed"][tokens] + params["positions"]
    if isinstance(params["layers"], list):
        for p in params["layers"]:
            x = layer(x, p)
    else:
        x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    return norm(x, params["norm"]) @ params["embed"].T


def layer(x: Any, p: Any) -> Any:
    x = x + attention(norm(x, p["norm1"]), p)
    hidden = jax.nn.gelu(norm(x, p["norm2"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def attention(x: Any, p: Any) -> Any:
    """Apply causal attention with HEADS heads."""
    batch, length, width = x.shape

    def heads(w: Any) -> Any:
        return (x @ w).reshape(batch, length, HEADS, width // HEADS).swapaxes(1, 2)

    scores = heads(p["q"]) @ heads(p["k"]).mT * (width // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ heads(p["v"])
    return mixed.swapaxes(1, 2).reshape(x.shape) @ p["o"]


def norm(x: Any, p: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


# --- training -------------------------------------------------------------------------------------


def adamw_step(state: Any, tokens: Any) -> Any:
    """Return the state after one step of AdamW, written by hand, and the loss."""
    params, means, squares, count = state
    value, grads = jax.value_and_grad(loss)(params, tokens)
    count = count + 1
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
    squares = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, squares, grads)
    first, second = 1 - 0.9**count, 1 - 0.999**count

    def update(p: Any, m: Any, v: Any) -> Any:
        return p - 1e-3 * (m / first / (jnp.sqrt(v / second) + 1e-8) + 1e-4 * p)

    return (jax.tree.map(update, params, means, squares), means, squares, count), value


# --- cases ----------------------------------------------------------------------------------------


def forward_case(layers: int) -> Case:
    params, tokens = parameters(layers), drawn_tokens()[:, :-1]
    return Case(forward, (params, tokens), (stacked(params), tokens))


def gradient_case(layers: int) -> Case:
    params, tokens = parameters(layers), drawn_tokens()
    return Case(jax.value_and_grad(loss), (params, tokens), (stacked(params), tokens))


def adamw_case(layers: int) -> Case:
    params, tokens = parameters(layers), drawn_tokens()

    def state(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return params, zeros, zeros, jnp.float32(0)

    return Case(adamw_step, (state(params), tokens), (state(stacked(params)), tokens))


def optax_case(layers: int) -> Case:
    import optax

    params, tokens = parameters(layers), drawn_tokens()
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def arguments(params: Any) -> Any:
        return params, optimizer.init(params), tokens

    return Case(step, arguments(params), arguments(stacked(params)))


# --- parameters -----------------------------------------------------------------------------------


def parameters(layers: int) -> Any:
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape) * 0.02, jnp.float32)

    def norm_parameters() -> Any:
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def layer_parameters() -> Any:
        return {
            **{name: drawn(WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
            "up": drawn(WIDTH, 4 * WIDTH),
            "up_bias": jnp.zeros(4 * WIDTH),
            "down": drawn(4 * WIDTH, WIDTH),
            "down_bias": jnp.zeros(WIDTH),
            "norm1": norm_parameters(),
            "norm2": norm_parameters(),
        }

    return {
        "embed": drawn(VOCABULARY, WIDTH),
        "positions": drawn(LENGTH, WIDTH),
        "layers": [layer_parameters() for _ in range(layers)],
        "norm": norm_parameters(),
    }


def drawn_tokens() -> Any:
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, VOCABULARY)


def stacked(params: Any) -> Any:
    """Return the parameters with those of the layers as one tree of stacked arrays."""
    return {**params, "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])}
