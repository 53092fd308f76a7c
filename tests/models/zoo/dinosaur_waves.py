"""A step of the shallow water equations on the sphere, of the dynamical core Dinosaur."""

from functools import cache

import jax.numpy as jnp
import numpy as np
from dinosaur import (
    coordinate_systems,
    layer_coordinates,
    shallow_water,
    spherical_harmonic,
    time_integration,
    units,
)

COORDS = coordinate_systems.CoordinateSystem(
    spherical_harmonic.Grid.construct(max_wavenumber=7, gaussian_nodes=6),
    layer_coordinates.LayerCoordinates(1),
)
EQUATION = shallow_water.ShallowWaterEquations(
    coords=COORDS,
    physics_specs=units.SimUnits.from_si(),
    orography=np.zeros(COORDS.horizontal.modal_shape),
    reference_potential=np.array([0.05]),
)
ADVANCE = time_integration.crank_nicolson_rk2(EQUATION, time_step=0.05)


def step(state):
    """Return the state after one step, and the mean square of its vorticity."""
    state = ADVANCE(state)
    return state, jnp.mean(COORDS.horizontal.to_nodal(state.vorticity) ** 2)


@cache
def model():
    """Return the step and its arguments."""
    longitude, sine = COORDS.horizontal.nodal_mesh
    wave = 0.05 * np.cos(2 * longitude) * (1 - sine**2)
    modal = COORDS.horizontal.to_modal(jnp.asarray(wave[None], jnp.float32))
    state = shallow_water.State(vorticity=modal, divergence=0 * modal, potential=0.1 * modal)
    return step, (state,)
