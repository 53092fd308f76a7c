"""Train a small Flax NNX GPT for some steps. The last batch of each epoch is smaller."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WIDTH, HEADS, LAYERS, LETTERS, LENGTH = 64, 4, 4, 96, 64


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.grow = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.shrink = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.first(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.shrink(nnx.gelu(self.grow(self.second(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(LETTERS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, letters):
        x = self.embed(letters)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


@nnx.jit
def step(model, optimizer, letters):
    def loss(model):
        logits = model(letters[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, letters[:, 1:]).mean()

    value, slopes = nnx.value_and_grad(loss)(model)
    optimizer.update(model, slopes)
    return value


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
random = np.random.default_rng(0)
for i in range(int(sys.argv[1]) if sys.argv[1:] else 60):
    rows = 8 if i % 10 < 9 else 5
    value = step(model, optimizer, jnp.asarray(random.integers(0, LETTERS, (rows, LENGTH))))
    if i % 20 == 0:
        print(i, float(value))
jax.block_until_ready(value)
