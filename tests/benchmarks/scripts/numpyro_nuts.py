"""Sample the posterior of a regression with NumPyro's NUTS."""

import sys

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS


def model(x, y):
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(x @ weights, scale), obs=y)


x = jax.random.normal(jax.random.key(0), (200, 8))
y = x @ jnp.arange(8.0) + 0.1
count = int(sys.argv[1]) if sys.argv[1:] else 500
chain = MCMC(NUTS(model), num_warmup=count, num_samples=count, progress_bar=False)
chain.run(jax.random.key(1), x, y)
print(chain.get_samples()["weights"].mean(0))
