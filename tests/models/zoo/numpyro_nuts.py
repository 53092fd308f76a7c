"""One transition of NumPyro's no-U-turn sampler."""

from functools import cache

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS


def schools(sigma, y):
    """The eight-schools model, non-centred."""
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(sigma)):
        unit = numpyro.sample("unit", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mean + scale * unit, sigma), obs=y)


@cache
def model():
    """Return the transition and its arguments."""
    sigma = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    y = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    kernel = NUTS(schools)
    state = kernel.init(jax.random.key(0), 10, None, (sigma, y), {})

    def transition(state, sigma, y):
        return kernel.sample(state, (sigma, y), {})

    return transition, (state, sigma, y)
