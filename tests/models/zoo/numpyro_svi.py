"""One update of stochastic variational inference in NumPyro."""

from functools import cache

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal


def regression(x, y):
    """Linear regression with unknown noise."""
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ weights, noise), obs=y)


@cache
def model():
    """Return the update and its arguments."""
    x = jax.random.normal(jax.random.key(0), (16, 3))
    y = x @ jnp.array([1.0, -2.0, 0.5])
    svi = SVI(regression, AutoNormal(regression), numpyro.optim.Adam(1e-2), Trace_ELBO())
    return svi.update, (svi.init(jax.random.key(1), x, y), x, y)
