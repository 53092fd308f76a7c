"""The gradient of an orbit's end in galax, with respect to its start in the Milky Way."""

from functools import cache

import galax.potential as gp
import jax
import jax.numpy as jnp
import unxt as u

POTENTIAL = gp.MilkyWayPotential()


def step(position, velocity):
    """Return position and velocity after a leapfrog step, and the tidal tensor's trace."""
    time = u.Quantity(0.0, "Myr")

    def acceleration(position):
        return POTENTIAL.acceleration(u.Quantity(position, "kpc"), time).ustrip("kpc / Myr2")

    half = velocity + 0.5 * acceleration(position)
    position = position + half
    return (position, half + 0.5 * acceleration(position)), jax.jacfwd(acceleration)(position)


@cache
def model():
    """Return the step and its arguments."""
    return step, (jnp.array([8.0, 0.1, 0.2]), jnp.array([0.01, 0.22, 0.0]))
