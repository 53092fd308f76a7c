"""One pre-norm transformer written four times: with Flax, Haiku, by hand, and with variables.

The layers are unrolled and have the same names everywhere. The computation is the same, and so are
the parameters once `flax_parameters` or `haiku_parameters` has renamed the hand-written ones. The
version by hand and ours draw the same values from the same key.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp

from jaxprtool import nest, variable

LAYERS, WIDTH, HEADS, EPSILON = 12, 64, 4, 1e-5

weights_of = jax.nn.initializers.lecun_normal()


def attend(query: Any, key: Any, value: Any) -> Any:
    """Apply causal attention with HEADS heads to f32[batch, length, width], without parameters."""
    batch, length, width = query.shape

    def heads(x):
        return x.reshape(batch, length, HEADS, -1).swapaxes(1, 2)

    scores = heads(query) @ heads(key).mT * (width // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ heads(value)
    return mixed.swapaxes(1, 2).reshape(query.shape)


# --- by hand --------------------------------------------------------------------------------------


def init_by_hand(key):
    """Return the parameters, as nested dicts."""
    keys = jax.random.split(key, LAYERS)
    params = {f"layer_{i}": init_layer(key) for i, key in enumerate(keys)}
    return {**params, "norm": init_norm()}


def init_layer(key):
    attention, mlp = jax.random.split(key)
    query, key, value, out = jax.random.split(attention, 4)
    up, down = jax.random.split(mlp)
    return {
        "attention": {
            "norm": init_norm(),
            "query": init_linear(query, WIDTH, WIDTH),
            "key": init_linear(key, WIDTH, WIDTH),
            "value": init_linear(value, WIDTH, WIDTH),
            "out": init_linear(out, WIDTH, WIDTH),
        },
        "mlp": {
            "norm": init_norm(),
            "up": init_linear(up, WIDTH, 4 * WIDTH),
            "down": init_linear(down, 4 * WIDTH, WIDTH),
        },
    }


def init_linear(key, inputs, outputs):
    return {"weights": weights_of(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def init_norm():
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}


def apply_by_hand(params, x):
    """Map f32[batch, length, WIDTH] to the same shape."""
    for i in range(LAYERS):
        layer = params[f"layer_{i}"]
        x = x + attention_by_hand(layer["attention"], x)
        x = x + mlp_by_hand(layer["mlp"], x)
    return norm_by_hand(params["norm"], x)


def attention_by_hand(params, x):
    x = norm_by_hand(params["norm"], x)
    query, key, value = (linear_by_hand(params[name], x) for name in ("query", "key", "value"))
    return linear_by_hand(params["out"], attend(query, key, value))


def mlp_by_hand(params, x):
    x = norm_by_hand(params["norm"], x)
    return linear_by_hand(params["down"], jax.nn.gelu(linear_by_hand(params["up"], x)))


def linear_by_hand(params, x):
    return x @ params["weights"] + params["bias"]


def norm_by_hand(params, x):
    x = x - x.mean(-1, keepdims=True)
    scale = params["scale"] * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON)
    return x * scale + params["bias"]


# --- with variables -------------------------------------------------------------------------------


def with_variables(key, x):
    """Apply the whole transformer, which creates its own parameters."""
    for i, own in enumerate(jax.random.split(key, LAYERS)):
        x = nest(layer, scope=f"layer_{i}")(own, x)
    return nest(norm, scope="norm")(x)


def layer(key, x):
    attention_key, mlp_key = jax.random.split(key)
    x = x + nest(attention, scope="attention")(attention_key, x)
    return x + nest(mlp, scope="mlp")(mlp_key, x)


def attention(key, x):
    keys = jax.random.split(key, 4)
    x = nest(norm, scope="norm")(x)
    query, key, value = (
        nest(linear, scope=name)(key, x, WIDTH)
        for name, key in zip(("query", "key", "value"), keys, strict=False)
    )
    return nest(linear, scope="out")(keys[3], attend(query, key, value), WIDTH)


def mlp(key, x):
    up, down = jax.random.split(key)
    x = nest(norm, scope="norm")(x)
    return nest(linear, scope="down")(
        down, jax.nn.gelu(nest(linear, scope="up")(up, x, 4 * WIDTH)), WIDTH
    )


def linear(key, x, features):
    weights = variable(weights_of(key, (x.shape[-1], features)), name="weights")
    return x @ weights + variable(jnp.zeros(features), name="bias")


def norm(x):
    scale = variable(jnp.ones(x.shape[-1]), name="scale")
    bias = variable(jnp.zeros(x.shape[-1]), name="bias")
    x = x - x.mean(-1, keepdims=True)
    scale = scale * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON)
    return x * scale + bias


# --- with Flax ------------------------------------------------------------------------------------


def flax_norm():
    return nn.LayerNorm(epsilon=EPSILON, use_fast_variance=False, name="norm")


class FlaxAttention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = flax_norm()(x)
        query, key, value = (nn.Dense(WIDTH, name=name)(x) for name in ("query", "key", "value"))
        return nn.Dense(WIDTH, name="out")(attend(query, key, value))


class FlaxMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = flax_norm()(x)
        return nn.Dense(WIDTH, name="down")(jax.nn.gelu(nn.Dense(4 * WIDTH, name="up")(x)))


class FlaxLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + FlaxAttention(name="attention")(x)
        return x + FlaxMLP(name="mlp")(x)


class FlaxTransformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = FlaxLayer(name=f"layer_{i}")(x)
        return flax_norm()(x)


def flax_parameters(params):
    """Return the hand-written parameters under Flax's names."""
    return {"params": {name: _flax_names(value) for name, value in params.items()}}


def _flax_names(params):
    if "weights" in params:
        return {"kernel": params["weights"], "bias": params["bias"]}
    if "scale" in params:
        return params
    return {name: _flax_names(value) for name, value in params.items()}


# --- with Haiku -----------------------------------------------------------------------------------


def haiku_norm():
    return hk.LayerNorm(-1, create_scale=True, create_offset=True, eps=EPSILON, name="norm")


class HaikuAttention(hk.Module):
    def __call__(self, x):
        x = haiku_norm()(x)
        query, key, value = (hk.Linear(WIDTH, name=name)(x) for name in ("query", "key", "value"))
        return hk.Linear(WIDTH, name="out")(attend(query, key, value))


class HaikuMLP(hk.Module):
    def __call__(self, x):
        x = haiku_norm()(x)
        return hk.Linear(WIDTH, name="down")(jax.nn.gelu(hk.Linear(4 * WIDTH, name="up")(x)))


class HaikuLayer(hk.Module):
    def __call__(self, x):
        x = x + HaikuAttention(name="attention")(x)
        return x + HaikuMLP(name="mlp")(x)


def haiku_forward(x):
    """The function for `hk.transform`."""
    for i in range(LAYERS):
        x = HaikuLayer(name=f"layer_{i}")(x)
    return haiku_norm()(x)


def haiku_parameters(params, scope=""):
    """Return the hand-written parameters under Haiku's names: one dict per module, by path."""
    if "weights" in params:
        return {scope: {"w": params["weights"], "b": params["bias"]}}
    if "scale" in params:
        return {scope: {"scale": params["scale"], "offset": params["bias"]}}
    named = {}
    for name, value in params.items():
        named |= haiku_parameters(value, f"{scope}/{name}" if scope else name)
    return named
