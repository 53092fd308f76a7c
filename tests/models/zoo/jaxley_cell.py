"""The gradient step of a conductance in Jaxley: Hodgkin and Huxley's neuron under a current."""

from functools import cache

import jax
import jax.numpy as jnp
import jaxley as jx
from jaxley.channels import HH


@cache
def model():
    """Return the step and its arguments."""
    cell = jx.Cell(jx.Branch(jx.Compartment(), ncomp=2), parents=[-1])
    cell.insert(HH())
    current = jx.step_current(i_delay=0.05, i_dur=0.2, i_amp=0.5, delta_t=0.025, t_max=0.5)
    cell.branch(0).loc(0.0).stimulate(current, verbose=False)
    cell.branch(0).loc(1.0).record(verbose=False)
    cell.make_trainable("HH_gNa", verbose=False)
    cell.to_jax()

    def step(params, target):
        """Return the conductance after one step, and the loss."""

        def loss(params):
            return jnp.mean(jnp.square(jx.integrate(cell, params=params) - target))

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 1e-7 * g, params, gradient), value

    return step, (cell.get_parameters(), jnp.array(-65.0))
