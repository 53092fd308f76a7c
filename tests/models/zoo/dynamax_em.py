"""One step of expectation maximization of a hidden Markov model in Dynamax."""

from functools import cache

import jax
import jax.numpy as jnp
from dynamax.hidden_markov_model import GaussianHMM

HMM = GaussianHMM(num_states=3, emission_dim=2)


def score(params, emissions):
    """Return the gradient of the likelihood with respect to the means, and the smoothed states."""

    def loss(means):
        moved = params._replace(emissions=params.emissions._replace(means=means))
        return -HMM.marginal_log_prob(moved, emissions) / emissions.shape[0]

    value, gradient = jax.value_and_grad(loss)(params.emissions.means)
    return gradient, value, HMM.smoother(params, emissions).smoothed_probs


@cache
def model():
    """Return the function and its arguments."""
    params, _ = HMM.initialize(jax.random.PRNGKey(0))
    emissions = jnp.sin(jnp.arange(24.0).reshape(12, 2))
    return score, (params, emissions)
