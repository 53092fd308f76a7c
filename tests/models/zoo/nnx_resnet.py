"""A residual network in Flax NNX, and the step that trains it."""

from functools import cache

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Residual(nnx.Module):
    """Two convolutions with batch normalization, and a skip connection."""

    def __init__(self, width, rngs):
        self.first = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Conv(width, width, (3, 3), rngs=rngs)

    def __call__(self, x):
        return x + self.second(nnx.relu(self.norm(self.first(x))))


class ResNet(nnx.Module):
    """A stem, residual blocks, dropout and a linear classifier."""

    def __init__(self, blocks, width, rngs):
        self.stem = nnx.Conv(3, width, (3, 3), strides=2, rngs=rngs)
        self.blocks = nnx.List([Residual(width, rngs) for _ in range(blocks)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((1, 2))))


@cache
def model(blocks=2, width=8, size=8):
    """Return the step, over the state of model and optimizer, and its arguments."""
    resnet = ResNet(blocks, width, nnx.Rngs(0))
    optimizer = nnx.Optimizer(resnet, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    graphdef, state = nnx.split((resnet, optimizer))

    @jax.jit
    def step(state, images, labels):
        resnet, optimizer = nnx.merge(graphdef, state)

        def loss(resnet):
            logits = resnet(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = nnx.value_and_grad(loss)(resnet)
        optimizer.update(resnet, grads)
        return nnx.state((resnet, optimizer)), value

    images = jax.random.normal(jax.random.key(1), (2, size, size, 3))
    return step, (state, images, jnp.array([1, 7]))
