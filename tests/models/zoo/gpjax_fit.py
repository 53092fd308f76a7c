"""A step of gradient descent on the marginal likelihood of a Gaussian process in GPJax."""

from functools import cache

import equinox as eqx
import gpjax
import jax
import jax.numpy as jnp
import paramax


@cache
def model():
    """Return the step and its arguments."""
    x = jnp.linspace(0.0, 3.0, 10)[:, None]
    data = gpjax.Dataset(X=x, y=jnp.sin(2.0 * x))
    prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Zero(), kernel=gpjax.kernels.RBF())
    posterior = prior * gpjax.likelihoods.Gaussian()
    held = paramax.NonTrainable
    params, rest = eqx.partition(
        posterior, eqx.is_inexact_array, is_leaf=lambda n: isinstance(n, held)
    )

    def step(params, data):
        """Return the parameters after one step, and the negative log likelihood."""

        def loss(params):
            return -gpjax.objectives.conjugate_mll(paramax.unwrap(eqx.combine(params, rest)), data)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 1e-2 * g, params, gradient), value

    return step, (params, data)
