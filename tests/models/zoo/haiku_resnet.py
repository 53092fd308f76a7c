"""Haiku's ResNet, with batch statistics, and the gradient of its loss."""

from functools import cache

import haiku as hk
import jax
import jax.numpy as jnp
import optax


@cache
def model(blocks=(1, 1, 1, 1), channels=(4, 4, 8, 8), bottleneck=False, size=16):
    """Return the gradient of the loss, with the new batch statistics, and its arguments."""

    channels[0] // 4 if bottleneck else channels[0]

    @hk.transform_with_state
    def net(images):
        resnet = hk.nets.ResNet(
            blocks_per_group=blocks,
            num_classes=10,
            bottleneck=bottleneck,
            channels_per_group=channels,
            initial_conv_config={
                "output_channels": channels[0] // 4 if bottleneck else channels[0]
            },
            use_projection=(True, True, True, True),
        )
        return resnet(images, is_training=True)

    def gradient(params, state, images, labels):
        def loss(params):
            logits, new = net.apply(params, state, None, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        return jax.grad(loss, has_aux=True)(params)

    images = jax.random.normal(jax.random.key(1), (2, size, size, 3))
    params, state = jax.jit(net.init)(jax.random.key(0), images)
    return gradient, (params, state, images, jnp.array([1, 2]))
