"""One step of Blackjax's no-U-turn sampler."""

from functools import cache

import blackjax
import jax
import jax.numpy as jnp


def log_density(position):
    """Return the log density of a banana."""
    x, y = position["x"], position["y"]
    return -0.5 * (x**2 + (y - x**2) ** 2 / 0.5)


@cache
def model():
    """Return the step and its arguments."""
    sampler = blackjax.nuts(log_density, step_size=0.3, inverse_mass_matrix=jnp.ones(2))
    state = sampler.init({"x": jnp.array(0.5), "y": jnp.array(-0.2)})
    return sampler.step, (jax.random.key(0), state)
