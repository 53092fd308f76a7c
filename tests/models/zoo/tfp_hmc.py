"""One step of Hamiltonian Monte Carlo in TensorFlow Probability's JAX substrate."""

from functools import cache

import jax
import jax.numpy as jnp
from tensorflow_probability.substrates import jax as tfp

tfd = tfp.distributions


def log_density(loc, log_scale):
    """Return the log density of a normal of unknown mean and scale, with three observations."""
    prior = tfd.Normal(0.0, 2.0).log_prob(loc) + tfd.Normal(0.0, 1.0).log_prob(log_scale)
    return prior + tfd.Normal(loc, jnp.exp(log_scale)).log_prob(jnp.array([0.5, 1.2, 0.9])).sum()


KERNEL = tfp.mcmc.HamiltonianMonteCarlo(log_density, step_size=0.2, num_leapfrog_steps=3)


def step(chain, key):
    """Return the chain after one step, and whether the proposal was taken."""
    position, results = KERNEL.one_step(*chain, seed=key)
    return (position, results), results.is_accepted


@cache
def model():
    """Return the step and its arguments."""
    start = [jnp.array(0.0), jnp.array(0.1)]
    # The results of a step have the types of its arguments.
    results = jax.jit(KERNEL.bootstrap_results)(start)
    key = jax.random.PRNGKey(0)
    return step, (jax.jit(step)((start, results), key)[0], key)
