"""The gradient of an inverse problem in Exponax: the initial state of Burgers' equation."""

from functools import cache

import exponax as ex
import jax
import jax.numpy as jnp

STEPPER = ex.stepper.Burgers(1, 1.0, 32, 0.05, diffusivity=0.01)
ADVANCE = ex.repeat(STEPPER, 4)


def step(start, target):
    """Return the initial state after one step of gradient descent, and the loss."""

    def loss(start):
        return jnp.mean((ADVANCE(start) - target) ** 2)

    value, gradient = jax.value_and_grad(loss)(start)
    return start - 0.1 * gradient, value


@cache
def model():
    """Return the step and its arguments."""
    grid = ex.make_grid(1, 1.0, 32)
    start = jnp.sin(2 * jnp.pi * grid)
    return step, (start, ADVANCE(start + 0.1 * jnp.cos(4 * jnp.pi * grid)))
