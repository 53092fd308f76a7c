"""One step of JAX MD: molecular dynamics at constant energy of soft spheres in a box."""

from functools import cache

import jax
from jax_md import energy, simulate, space

DISPLACEMENT, SHIFT = space.periodic(4.0)
ENERGY = energy.soft_sphere_pair(DISPLACEMENT, sigma=1.2)
START, APPLY = simulate.nve(ENERGY, SHIFT, dt=1e-2)


def step(state):
    """Return the state after one step, and the potential energy."""
    state = APPLY(state)
    return state, ENERGY(state.position)


@cache
def model():
    """Return the step and its arguments."""
    place, push = jax.random.split(jax.random.key(0))
    positions = 4.0 * jax.random.uniform(place, (12, 2))
    return step, (START(push, positions, kT=0.1),)
