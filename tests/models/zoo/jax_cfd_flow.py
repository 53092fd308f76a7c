"""One step of JAX-CFD: the incompressible Navier-Stokes equations on a small torus."""

from functools import cache

import jax
import jax_cfd.base as cfd

GRID = cfd.grids.Grid((8, 8), domain=((0.0, 1.0), (0.0, 1.0)))
ADVANCE = cfd.equations.semi_implicit_navier_stokes(density=1.0, viscosity=1e-2, dt=1e-2, grid=GRID)


def step(velocity):
    """Return the velocity after one step, and the kinetic energy."""
    velocity = ADVANCE(velocity)
    return velocity, sum((component.data**2).mean() for component in velocity)


@cache
def model():
    """Return the step and its arguments."""
    velocity = cfd.initial_conditions.filtered_velocity_field(
        jax.random.PRNGKey(0), GRID, maximum_velocity=1.0, peak_wavenumber=2
    )
    return step, (jax.jit(ADVANCE)(velocity),)
