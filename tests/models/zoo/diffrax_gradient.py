"""A neural ODE solved by Diffrax, and its gradient through the solver."""

from functools import cache

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp


def loss(field, start):
    """Return the squared distance of the end of the trajectory from one."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, field: field(y)),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.1,
        y0=start,
        args=field,
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        max_steps=64,
    )
    return jnp.sum((solution.ys[-1] - 1.0) ** 2)


@cache
def model():
    """Return the gradient with respect to the field, and its arguments."""
    field = eqx.nn.MLP(2, 2, 8, 1, jnp.tanh, key=jax.random.key(0))
    return eqx.filter_value_and_grad(loss), (field, jnp.array([0.1, -0.3]))
