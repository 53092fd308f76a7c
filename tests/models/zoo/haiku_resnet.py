"""Haiku's ResNet, with batch statistics, and the gradient of its loss."""

from functools import cache

import haiku as hk
import jax
import jax.numpy as jnp
import optax


def forward(images):
    """Return the logits of a small ResNet."""
    resnet = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=10,
        bottleneck=False,
        channels_per_group=(4, 4, 8, 8),
        initial_conv_config={"output_channels": 4},
        use_projection=(True, True, True, True),
    )
    return resnet(images, is_training=True)


NET = hk.transform_with_state(forward)


def gradient(params, state, images, labels):
    """Return the gradient of the loss, and the new batch statistics."""

    def loss(params):
        logits, new = NET.apply(params, state, None, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

    return jax.grad(loss, has_aux=True)(params)


@cache
def model():
    """Return the gradient and its arguments."""
    images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    params, state = jax.jit(NET.init)(jax.random.key(0), images)
    return gradient, (params, state, images, jnp.array([1, 2]))
