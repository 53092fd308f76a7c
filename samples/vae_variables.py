"""A variational autoencoder, and the two kinds of random numbers that a model can draw.

A model draws weights once, before training, and noise at every step. With a single key, `unzip`
cannot distinguish them. So this loss takes two: `key`, for the weights, becomes the argument of
`init`, and `noise_key` stays an argument of `apply`. `tangled` uses one key for both, so `unzip`
raises an error that shows a path from the key to the loss without a variable. `decode` uses the
scope "decoder" of `loss`, and so takes the same weights.

    jaxprtool unzip samples/vae_variables.py:loss --key-args 0
    jaxprtool unzip samples/vae_variables.py:tangled --key-args 0
    jaxprtool run   samples/vae_variables.py:train
"""

import jax
import jax.numpy as jnp

import jaxprtool
from jaxprtool import nest, variable

SIDE, HIDDEN, LATENT = 8, 32, 2


def dense(key, x, features):
    """A linear layer: f32[batch, any] -> f32[batch, features]."""
    scale = x.shape[-1] ** -0.5
    weights = variable(scale * jax.random.normal(key, (x.shape[-1], features)), name="weights")
    bias = variable(jnp.zeros(features), name="bias")
    return x @ weights + bias


def perceptron(key, x, features):
    """One hidden layer, and a linear layer after it."""
    hidden, out = jax.random.split(key)
    x = jnp.tanh(nest(dense, scope="hidden")(hidden, x, HIDDEN))
    return nest(dense, scope="out")(out, x, features)


@jaxprtool.example("key<fry>[]", "f32[16,64]")
def encode(key, images):
    """The mean and log-variance of the normal distribution of each image's latent."""
    x = nest(perceptron, scope="encoder")(key, images, 2 * LATENT)
    return x[:, :LATENT], x[:, LATENT:]


@jaxprtool.example("key<fry>[]", "f32[16,2]")
def decode(key, latents):
    """The images of latents, as logits: f32[batch, 2] -> f32[batch, 64]."""
    return nest(perceptron, scope="decoder")(key, latents, SIDE * SIDE)


@jaxprtool.example("key<fry>[]", "key<fry>[]", "f32[16,64]")
def loss(key, noise_key, images):
    """The mean negative evidence lower bound, with one sample of the latent for each image."""
    encoder, decoder = jax.random.split(key)
    mean, log_variance = encode(encoder, images)
    noise = jax.random.normal(noise_key, mean.shape)
    logits = decode(decoder, mean + jnp.exp(log_variance / 2) * noise)
    misfit = jnp.logaddexp(0.0, logits) - images * logits
    excess = (jnp.exp(log_variance) + jnp.square(mean) - 1.0 - log_variance) / 2
    return (misfit.sum(axis=-1) + excess.sum(axis=-1)).mean()


@jaxprtool.example("key<fry>[]", "f32[16,64]")
def tangled(key, images):
    """The loss with one key for everything. It cannot be unzipped: init would draw the noise."""
    key, noise_key = jax.random.split(key)
    return loss(key, noise_key, images)


def spots(key):
    """Images with one bright spot at a random position: f32[128, 64]."""
    centre = jax.random.uniform(key, (128, 2, 1), minval=1.0, maxval=SIDE - 2.0)
    bump = jnp.exp(-jnp.square(jnp.arange(SIDE) - centre) / 3)
    return (bump[:, 0, :, None] * bump[:, 1, None, :]).reshape(128, -1)


@jaxprtool.example("key<fry>[]")
def train(key):
    """Run 100 steps with momentum: the weights, and the loss before every tenth step."""
    init_key, data_key, noise_key = jax.random.split(key, 3)
    images = spots(data_key)
    init, apply = jaxprtool.unzip(loss, key_args=0)(init_key, noise_key, images)

    def step(state, noise_key):
        params, momentum = state
        value, gradient = jax.value_and_grad(apply)(params, noise_key, images)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        params = jax.tree.map(lambda p, m: p - 0.02 * m, params, momentum)
        return (params, momentum), value

    params = init(init_key)
    state = params, jax.tree.map(jnp.zeros_like, params)
    (params, _), losses = jax.lax.scan(step, state, jax.random.split(noise_key, 100))
    return params, losses[::10]
