"""The Lindblad equation of a driven cavity in dynamiqs, solved for a short time."""

from functools import cache

import dynamiqs as dq
import jax.numpy as jnp

dq.set_progress_meter(False)
LEVELS = 4


def step(state, drive):
    """Return the density matrix after a short time, and the number of photons."""
    a = dq.destroy(LEVELS)
    hamiltonian = drive * (a + a.dag())
    found = dq.mesolve(
        hamiltonian,
        [jnp.sqrt(0.1) * a],
        dq.asqarray(state),
        jnp.linspace(0.0, 0.2, 3),
        exp_ops=[a.dag() @ a],
        method=dq.method.Dopri5(max_steps=100),
    )
    return found.final_state.to_jax(), found.expects.real[0, -1]


@cache
def model():
    """Return the step and its arguments."""
    return step, (dq.coherent_dm(LEVELS, 0.5).to_jax(), jnp.array(1.0))
