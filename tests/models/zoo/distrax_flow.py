"""A normalizing flow of Distrax: samples, and their log density."""

from functools import cache

import distrax
import jax
import jax.numpy as jnp


def sample(params, key):
    """Return eight samples of a flow and their log densities."""
    base = distrax.MultivariateNormalDiag(jnp.zeros(3), jnp.ones(3))
    affine = distrax.ScalarAffine(params["shift"], jnp.exp(params["scale"]))
    bijector = distrax.Chain([distrax.Block(affine, 1), distrax.Block(distrax.Tanh(), 1)])
    flow = distrax.Transformed(base, bijector)
    return flow.sample_and_log_prob(seed=key, sample_shape=(8,))


@cache
def model():
    """Return the sampling and its arguments."""
    params = {"shift": jnp.array([0.1, -0.2, 0.3]), "scale": jnp.array([0.0, 0.2, -0.1])}
    return sample, (params, jax.random.key(0))
