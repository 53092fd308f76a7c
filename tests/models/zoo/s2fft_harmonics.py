"""A low-pass filter on the sphere: s2fft's harmonic transform and its inverse."""

from functools import cache

import jax
import jax.numpy as jnp
import s2fft

BAND = 8


def filtered(field, width):
    """Return a smoothed field, and its power by degree."""
    coefficients = s2fft.forward_jax(field, BAND, reality=True)
    degrees = jnp.arange(BAND)
    coefficients = coefficients * jnp.exp(-width * degrees * (degrees + 1))[:, None]
    power = jnp.sum(jnp.abs(coefficients) ** 2, axis=1)
    return s2fft.inverse_jax(coefficients, BAND, reality=True).real, power


@cache
def model():
    """Return the function and its arguments."""
    return filtered, (jax.random.normal(jax.random.key(0), (BAND, 2 * BAND - 1)), jnp.array(0.02))
