"""Programs to map over a batch, with arguments of which the last is a single example.

    models() -> {name: (closed jaxpr, arguments, number of arguments that are not batched)}

All take one example, like a function for `jax.vmap`. They are per-example gradients of networks
that scan over layers or over time, convolve, or branch on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.benchmarks.models import transformer_gradient

Model = tuple[Any, list[Any], int]

WIDTH, LENGTH, LAYERS = 32, 16, 6


def models() -> dict[str, Model]:
    """Return all models by name."""
    made = {"6-layer gradient": _of_gradient(transformer_gradient(6), 1)}
    for name, function, parameters, example in (
        ("scanned transformer", scanned_transformer, transformer_parameters(), tokens()),
        ("convolutional net", convnet, convnet_parameters(), image()),
        ("recurrent net", recurrent, recurrent_parameters(), tokens()),
        ("early exit", early_exit, transformer_parameters(), tokens()),
        ("routed attention", routed_attention, routed_parameters(), tokens()),
    ):
        gradient = function is not early_exit  # JAX cannot differentiate a while loop
        made[name] = model(function, parameters, example, gradient=gradient)
    return made


def model(function: Callable[..., Any], parameters: Any, example: Any, *, gradient: bool) -> Model:
    """Return a loss of parameters and one example as a model, or its value and gradient."""
    fun = jax.value_and_grad(function) if gradient else function
    leaves = jax.tree.leaves((parameters, example))
    return jax.make_jaxpr(fun)(parameters, example), leaves, len(leaves) - 1


def _of_gradient(closed: Any, examples: int) -> Model:
    args = [draw(i, *v.aval.shape) for i, v in enumerate(closed.invars)]
    return closed, args, len(args) - examples


def draw(seed: int, *shape: int) -> Any:
    """Return values of about 1 / sqrt(width), the same at each call."""
    scale = (shape[0] if shape else 1) ** -0.5
    return scale * jax.random.normal(jax.random.key(seed), shape)


def tokens() -> Any:
    return draw(1000, LENGTH, WIDTH)


def image() -> Any:
    return draw(1001, 16, 16, 3)


# --- a transformer in a scan ----------------------------------------------------------------------


def transformer_parameters() -> dict[str, Any]:
    names = ("query", "key", "value", "out")
    made = {name: draw(i, LAYERS, WIDTH, WIDTH) for i, name in enumerate(names)}
    up, down = draw(5, LAYERS, WIDTH, 4 * WIDTH), draw(6, LAYERS, 4 * WIDTH, WIDTH)
    return {**made, "up": up, "down": down, "scale": jnp.ones((LAYERS, WIDTH))}


def layer(p: dict[str, Any], x: Any) -> Any:
    h = p["scale"] * (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    heads = [(h @ p[name]).reshape(LENGTH, 4, -1) for name in ("query", "key", "value")]
    scores = jnp.einsum("qhd,khd->hqk", *heads[:2]) * (WIDTH // 4) ** -0.5
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    x = x + jnp.einsum("hqk,khd->qhd", weights, heads[2]).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def scanned_transformer(parameters: dict[str, Any], x: Any) -> Any:
    x, _ = lax.scan(lambda x, p: (layer(p, x), None), x, parameters)
    return jnp.square(x).mean()


def early_exit(parameters: dict[str, Any], x: Any) -> Any:
    """Repeat the layers until the tokens hardly change. Batch elements differ in the iterations."""
    first = jax.tree.map(lambda p: p[0], parameters)

    def going(state: Any) -> Any:
        step, before, x = state
        return (step < 8) & (jnp.abs(x - before).mean() > 0.5)

    def body(state: Any) -> Any:
        step, _, x = state
        return step + 1, x, layer(first, x)

    return lax.while_loop(going, body, (0, jnp.zeros_like(x) - 9, x))[2]


# --- attention with data-dependent branches -------------------------------------------------------


def routed_parameters() -> dict[str, Any]:
    return {**transformer_parameters(), "router": draw(9, WIDTH)}


def routed_attention(parameters: dict[str, Any], x: Any) -> Any:
    """Apply or skip each layer, depending on the example."""
    parameters = dict(parameters)
    router = parameters.pop("router")

    def step(x: Any, p: Any) -> Any:
        taken = (x @ router).sum() > 0
        return lax.cond(taken, lambda x: layer(p, x), lambda x: x * 0.9, x), None

    x, _ = lax.scan(step, x, parameters)
    return jnp.square(x).mean()


# --- a convolutional net, and a recurrent one -----------------------------------------------------


def convnet_parameters() -> list[Any]:
    kernels = [draw(1, 3, 3, 3, 8), draw(2, 3, 3, 8, 16)]
    return [*kernels, draw(3, 4 * 4 * 16, 10)]


def convnet(parameters: list[Any], image: Any) -> Any:
    *kernels, dense = parameters
    x = image[None]
    for kernel in kernels:
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = lax.reduce_window(
            jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
    return -jax.nn.log_softmax(x.reshape(-1) @ dense)[3]


def recurrent_parameters() -> dict[str, Any]:
    return {"in": draw(1, WIDTH, 4 * WIDTH), "state": draw(2, WIDTH, 4 * WIDTH)}


def recurrent(parameters: dict[str, Any], xs: Any) -> Any:
    """Apply an LSTM over the tokens."""

    def step(state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(x @ parameters["in"] + h @ parameters["state"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    _, hs = lax.scan(step, (jnp.zeros(WIDTH), jnp.zeros(WIDTH)), xs)
    return jnp.square(hs).mean()
