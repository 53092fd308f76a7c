"""A small vision transformer with a Python loop over its layers, and how to compile it faster.

JAX traces each layer again, and its gradient too. The commands show what repeats, what XLA
compiles, and the program with one shared body that is called for each layer.

    jaxprtool outline samples/layers.py:loss -p value_and_grad
    jaxprtool outline samples/layers.py:loss --compile
    jaxprtool opt samples/layers.py:loss -p outline
"""

import jax
import jax.numpy as jnp

import jaxprtool

DEPTH, PATCH = 4, 4

_LAYER = {
    "norm": "f32[32]",
    "queries": "f32[2,32,16]",
    "keys": "f32[2,32,16]",
    "values": "f32[2,32,16]",
    "out": "f32[2,16,32]",
    "second_norm": "f32[32]",
    "up": "f32[32,64]",
    "down": "f32[64,32]",
}

#: Tokens are of width 32: patches of 4 x 4 pixels in three channels.
PARAMS = {
    "embedding": "f32[48,32]",
    "positions": "f32[16,32]",
    "layers": [_LAYER] * DEPTH,
    "head": "f32[32,10]",
}
IMAGES, LABELS = "f32[4,16,16,3]", "i32[4]"


def norm(scale, x):
    """Normalize each token to mean 0 and variance 1, and multiply it by `scale`."""
    centred = x - x.mean(-1, keepdims=True)
    return scale * centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def attention(params, x):
    """Attention of every token to every other: f32[batch, tokens, width] -> the same."""
    queries, keys, values = (
        jnp.einsum("btw,hwd->bhtd", x, params[name]) for name in ("queries", "keys", "values")
    )
    scores = jnp.einsum("bhqd,bhkd->bhqk", queries, keys) / queries.shape[-1] ** 0.5
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    weights /= weights.sum(-1, keepdims=True)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, values)
    return jnp.einsum("bhqd,hdw->bqw", mixed, params["out"])


def layer(params, x):
    """Attention and then two dense layers, each with a residual connection."""
    x = x + attention(params, norm(params["norm"], x))
    hidden = jax.nn.silu(norm(params["second_norm"], x) @ params["up"])
    return x + hidden @ params["down"]


def patches(images):
    """The image as tokens: f32[batch, height, width, channels] -> f32[batch, tokens, 48]."""
    batch, height, width, channels = images.shape
    split = images.reshape(batch, height // PATCH, PATCH, width // PATCH, PATCH, channels)
    return split.swapaxes(2, 3).reshape(batch, -1, PATCH * PATCH * channels)


@jaxprtool.example(PARAMS, IMAGES)
def forward(params, images):
    """The logits of each image's class: f32[batch, height, width, 3] -> f32[batch, 10]."""
    x = patches(images) @ params["embedding"] + params["positions"]
    for each in params["layers"]:
        x = layer(each, x)
    return x.mean(axis=1) @ params["head"]


@jaxprtool.example(PARAMS, IMAGES, LABELS)
def loss(params, images, labels):
    """The mean cross-entropy of the labels."""
    log_probabilities = jax.nn.log_softmax(forward(params, images))
    return -(jax.nn.one_hot(labels, 10) * log_probabilities).sum(axis=-1).mean()
