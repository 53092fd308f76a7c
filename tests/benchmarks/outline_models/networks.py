"""Other networks in pure JAX, and the gradients of their losses."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.benchmarks import gradient_models as models
from tests.benchmarks.gradient_models import drawn_array
from tests.benchmarks.outline_models.case import Case
from tests.benchmarks.outline_models.transformer import norm


def resnet50() -> Case:
    """ResNet-50 on images of 64 by 64."""
    return _resnet((3, 4, 6, 3))


def resnet152() -> Case:
    """ResNet-152 on images of 64 by 64."""
    return _resnet((3, 8, 36, 3))


def _resnet(counts: tuple[int, ...]) -> Case:
    images = drawn_array(2, 64, 64, 3)
    params = models.resnet_parameters(counts)
    return Case(jax.value_and_grad(models.resnet_loss), (params, images))


def unet() -> Case:
    """A diffusion model's U-Net: few blocks, at most two at each resolution."""
    args = models.unet_parameters(), drawn_array(2, 32, 32, 3), jnp.full((2,), 0.3)
    return Case(jax.value_and_grad(models.unet_loss), args)


def lstm(steps: int) -> Case:
    """An LSTM unrolled in a Python loop."""
    args = models.rnn_parameters(), drawn_array(steps, 8, 32)
    return Case(jax.value_and_grad(models.rnn_loss), args)


# --- a mixture of experts -------------------------------------------------------------------------

_EXPERTS, _WIDTH = 8, 64


def experts(layers: int) -> Case:
    """Layers of eight experts each, in two Python loops, and the same as a scan of scans."""
    x = drawn_array(256, _WIDTH)
    layer = {
        "norm": {"scale": jnp.ones(_WIDTH), "bias": jnp.zeros(_WIDTH)},
        "router": drawn_array(_WIDTH, _EXPERTS),
        "experts": [
            {"up": drawn_array(_WIDTH, 4 * _WIDTH), "down": drawn_array(4 * _WIDTH, _WIDTH)}
            for _ in range(_EXPERTS)
        ],
    }
    params = [layer] * layers
    stacked = {**layer, "experts": _stack(layer["experts"])}
    return Case(jax.value_and_grad(experts_loss), (params, x), (_stack([stacked] * layers), x))


def _stack(trees: Any) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def experts_loss(params: Any, x: Any) -> Any:
    if isinstance(params, list):
        for p in params:
            x = _experts_layer(x, p)
    else:
        x, _ = lax.scan(lambda x, p: (_experts_layer(x, p), None), x, params)
    return jnp.square(x).mean()


def _experts_layer(x: Any, p: Any) -> Any:
    """Route each token to the two experts with the largest router scores."""
    y = norm(x, p["norm"])
    scores = y @ p["router"]
    least = lax.top_k(scores, 2)[0][:, -1:]
    gates = jax.nn.softmax(jnp.where(scores >= least, scores, -jnp.inf))

    def expert(w: Any, gate: Any) -> Any:
        return gate[:, None] * (jax.nn.gelu(y @ w["up"]) @ w["down"])

    if isinstance(p["experts"], list):
        return x + sum(expert(w, gates[:, i]) for i, w in enumerate(p["experts"]))
    return lax.scan(lambda x, each: (x + expert(*each), None), x, (p["experts"], gates.T))[0]


# --- no repetition --------------------------------------------------------------------------------


def mlp() -> Case:
    """Layers of distinct widths: there is nothing to outline."""
    widths = range(32, 32 + 16 * 8, 8)
    params = [(drawn_array(a, b), jnp.zeros(b)) for a, b in itertools.pairwise(widths)]
    return Case(jax.value_and_grad(_mlp_loss), (params, drawn_array(16, 32)))


def _mlp_loss(params: Any, x: Any) -> Any:
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.square(x).mean()
