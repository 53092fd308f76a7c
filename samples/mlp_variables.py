"""A network that creates its own weights, and `unzip`, which makes them an argument.

`net` draws each weight where it uses it, and names it with `variable`. A direct call of `net` is a
network with new random weights. To train it, `unzip` splits it into two functions: `init` takes the
key and returns the named weights, and `apply` takes weights and inputs and returns outputs. All
random draws move to `init`, and each scope of `nest` becomes a dict.

`train` differentiates the loss with respect to these weights.

    jaxprtool unzip samples/mlp_variables.py:net --key-args 0
    jaxprtool unzip samples/mlp_variables.py:net --key-args 0 -o net/
    jaxprtool run   samples/mlp_variables.py:train
"""

import jax
import jax.numpy as jnp

import jaxprtool
from jaxprtool import nest, variable


def dense(key, x, features):
    """A linear layer: f32[batch, any] -> f32[batch, features]."""
    scale = x.shape[-1] ** -0.5
    weights = variable(scale * jax.random.normal(key, (x.shape[-1], features)), name="weights")
    bias = variable(jnp.zeros(features), name="bias")
    return x @ weights + bias


@jaxprtool.example("key<fry>[]", "f32[8,3]")
def net(key, x):
    """Two hidden layers and a readout: f32[batch, 3] -> f32[batch, 1]."""
    first, second, readout = jax.random.split(key, 3)
    x = jnp.tanh(nest(dense, scope="first")(first, x, 32))
    x = jnp.tanh(nest(dense, scope="second")(second, x, 32))
    return nest(dense, scope="readout")(readout, x, 1)


@jaxprtool.example("key<fry>[]", "f32[8,3]", "f32[8,1]")
def loss(key, x, y):
    """The mean squared error of the network that the key initializes."""
    return jnp.square(net(key, x) - y).mean()


def data(key):
    """Points of a cube, and the target: a sine wave along its diagonal."""
    x = jax.random.uniform(key, (256, 3), minval=-1.0)
    return x, jnp.sin(2.0 * x.sum(axis=-1, keepdims=True))


@jaxprtool.example("key<fry>[]")
def train(key):
    """Run 100 steps of gradient descent: the weights, and the loss before every tenth step."""
    init_key, data_key = jax.random.split(key)
    x, y = data(data_key)
    init, apply = jaxprtool.unzip(loss)(init_key, x, y)

    def step(params, _):
        value, gradient = jax.value_and_grad(apply)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    params, losses = jax.lax.scan(step, init(init_key), length=100)
    return params, losses[::10]
