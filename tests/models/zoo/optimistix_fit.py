"""A least-squares fit by Optimistix's Levenberg-Marquardt."""

from functools import cache

import jax
import jax.numpy as jnp
import optimistix as optx


def residuals(parameters, data):
    """Return the residuals of an exponential decay."""
    times, values = data
    return parameters["scale"] * jnp.exp(-parameters["rate"] * times) - values


def fit(start, times, values):
    """Return the parameters that fit best."""
    solver = optx.LevenbergMarquardt(rtol=1e-5, atol=1e-5)
    return optx.least_squares(residuals, solver, start, args=(times, values), max_steps=64).value


@cache
def model():
    """Return the fit and its arguments."""
    times = jnp.linspace(0.0, 2.0, 12)
    values = 2.5 * jnp.exp(-1.3 * times)
    return jax.jit(fit), ({"scale": jnp.array(1.0), "rate": jnp.array(0.5)}, times, values)
