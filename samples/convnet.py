"""A residual convolutional network: convolution, group norm, pooling, and their gradients.

The gradient of a convolution is two more convolutions with other dimension numbers, and that of max
pooling is a `select_and_scatter_add`.

    jaxprtool show samples/convnet.py:grad_loss --only 'conv*,reduce_window*,select_and*'
    jaxprtool opt  samples/convnet.py:grad_loss -p mixed_precision --stats
"""

import jax
import jax.numpy as jnp
from jax import lax

import jaxprtool

GROUPS = 4

#: Kernels are height x width x channels in x channels out; images batch x height x width x channel.
PARAMS = {
    "stem": "f32[3,3,3,16]",
    "blocks": [
        {"first": "f32[3,3,16,16]", "second": "f32[3,3,16,16]", "scale": "f32[16]"},
        {"first": "f32[3,3,16,16]", "second": "f32[3,3,16,16]", "scale": "f32[16]"},
    ],
    "head": "f32[16,10]",
}
IMAGES, LABELS = "f32[4,16,16,3]", "i32[4]"


def init(key):
    """Initial weights, scaled to preserve the variance of activations."""
    keys = iter(jax.random.split(key, 8))
    he = jax.nn.initializers.he_normal()

    def block():
        first, second = (he(next(keys), (3, 3, 16, 16)) for _ in range(2))
        return {"first": first, "second": second, "scale": jnp.ones(16)}

    return {
        "stem": he(next(keys), (3, 3, 3, 16)),
        "blocks": [block(), block()],
        "head": he(next(keys), (16, 10)),
    }


def conv(x, kernel):
    """A convolution that keeps height and width."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def group_norm(x, scale):
    """Normalize groups of each image's channels to mean 0 and variance 1."""
    groups = x.reshape(*x.shape[:3], GROUPS, -1)
    mean = groups.mean(axis=(1, 2, 4), keepdims=True)
    variance = jnp.square(groups - mean).mean(axis=(1, 2, 4), keepdims=True)
    return scale * ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)


def max_pool(x):
    """The maximum of every two by two pixels."""
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


@jaxprtool.example(PARAMS, IMAGES)
def forward(params, images):
    """The logits of each image's class: f32[batch, height, width, 3] -> f32[batch, 10]."""
    x = conv(images, params["stem"])
    for block in params["blocks"]:
        hidden = conv(jax.nn.relu(group_norm(x, block["scale"])), block["first"])
        x = max_pool(x + conv(jax.nn.relu(hidden), block["second"]))
    return x.mean(axis=(1, 2)) @ params["head"]


@jaxprtool.example(PARAMS, IMAGES, LABELS)
def loss(params, images, labels):
    """The mean cross-entropy of the labels."""
    log_probabilities = jax.nn.log_softmax(forward(params, images))
    return -(jax.nn.one_hot(labels, 10) * log_probabilities).sum(axis=-1).mean()


@jaxprtool.example(PARAMS, IMAGES, LABELS)
def grad_loss(params, images, labels):
    """The gradient of the loss with respect to every weight."""
    return jax.grad(loss)(params, images, labels)
