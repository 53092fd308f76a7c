"""A step of a fit of a signal over an uncertain background, a histogram model in pyhf."""

from functools import cache

import jax
import jax.numpy as jnp
import pyhf

pyhf.set_backend("jax", precision="32b")
HISTOGRAMS = pyhf.simplemodels.uncorrelated_background(
    signal=[12.0, 11.0, 8.0], bkg=[50.0, 52.0, 44.0], bkg_uncertainty=[3.0, 7.0, 5.0]
)


def step(parameters, data):
    """Return the parameters after one step, and the negative log likelihood."""

    def loss(parameters):
        return -HISTOGRAMS.logpdf(parameters, data)[0]

    value, gradient = jax.value_and_grad(loss)(parameters)
    return parameters - 1e-3 * gradient, value


@cache
def model():
    """Return the step and its arguments."""
    data = jnp.array([51.0, 48.0, 55.0, *HISTOGRAMS.config.auxdata], jnp.float32)
    return step, (jnp.array(HISTOGRAMS.config.suggested_init(), jnp.float32), data)
