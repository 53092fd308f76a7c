"""A vision transformer in Equinox, and the step that trains it under `filter_jit`."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Block(eqx.Module):
    """A pre-norm transformer block."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, width, key=first)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=second)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(h, h, h), key=key)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class ViT(eqx.Module):
    """Patches, blocks and a linear classifier."""

    patches: eqx.nn.Conv2d
    positions: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key, blocks, width, size):
        keys = jax.random.split(key, 3 + blocks)
        self.patches = eqx.nn.Conv2d(3, width, 4, 4, key=keys[0])
        self.positions = jax.random.normal(keys[1], ((size // 4) ** 2, width))
        self.blocks = [Block(width, k) for k in keys[3:]]
        self.head = eqx.nn.Linear(width, 10, key=keys[2])

    def __call__(self, image, key):
        x = self.patches(image).reshape(self.positions.shape[::-1]).T + self.positions
        for block, k in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, k)
        return self.head(x.mean(0))


OPTIMIZER = optax.adamw(1e-3)


@eqx.filter_jit
def step(vit, opt_state, images, labels, key):
    """Return the model and the optimizer's state after one step, and the loss."""

    @eqx.filter_value_and_grad
    def loss(vit):
        logits = jax.vmap(vit)(images, jax.random.split(key, len(images)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = loss(vit)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(vit, eqx.is_array))
    return eqx.apply_updates(vit, updates), opt_state, value


@cache
def model(blocks=2, width=16, size=8):
    """Return the step and its arguments. Activation functions are leaves of the model."""
    vit = ViT(jax.random.key(0), blocks, width, size)
    images = jax.random.normal(jax.random.key(1), (2, 3, size, size))
    opt_state = OPTIMIZER.init(eqx.filter(vit, eqx.is_array))
    return step, (vit, opt_state, images, jnp.array([3, 8]), jax.random.key(2))
