"""One generation of evosax's CMA-ES on Rosenbrock's function."""

from functools import cache

import jax
import jax.numpy as jnp
from evosax.algorithms import CMA_ES

STRATEGY = CMA_ES(population_size=8, solution=jnp.zeros(3))


def rosenbrock(x):
    """Return the function's value at a point."""
    return jnp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def step(state, params, key):
    """Return the state after one generation, and the best value in it."""
    ask, tell = jax.random.split(key)
    population, state = STRATEGY.ask(ask, state, params)
    values = jax.vmap(rosenbrock)(population)
    state, _ = STRATEGY.tell(tell, population, values, state, params)
    return state, values.min()


@cache
def model():
    """Return the step and its arguments."""
    params = STRATEGY.default_params
    state = STRATEGY.init(jax.random.key(0), jnp.zeros(3), params)
    key = jax.random.key(1)
    return step, (jax.jit(step)(state, params, key)[0], params, key)
