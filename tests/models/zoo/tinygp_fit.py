"""A step of gradient descent on the likelihood of a Gaussian process in tinygp."""

from functools import cache

import jax
import jax.numpy as jnp
from tinygp import GaussianProcess, kernels


def step(params, x, y):
    """Return the parameters after one step, and the negative log likelihood."""

    def loss(params):
        kernel = jnp.exp(params["amplitude"]) * kernels.ExpSquared(jnp.exp(params["scale"]))
        kernel = kernel + kernels.Matern32(jnp.exp(params["rough"]))
        return -GaussianProcess(kernel, x, diag=jnp.exp(params["noise"])).log_probability(y)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 1e-2 * g, params, gradient), value


@cache
def model():
    """Return the step and its arguments."""
    x = jnp.linspace(0.0, 3.0, 12)
    params = {n: jnp.array(v) for n, v in zip(("amplitude", "scale"), (0.1, 0.2), strict=True)}
    params |= {"rough": jnp.array(-0.5), "noise": jnp.array(-2.0)}
    return step, (params, x, jnp.sin(2.0 * x))
