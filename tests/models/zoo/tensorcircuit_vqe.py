"""A step of a variational quantum eigensolver in TensorCircuit: an Ising chain of four spins."""

from functools import cache

import jax
import jax.numpy as jnp
import tensorcircuit as tc

tc.set_backend("jax")


def energy(angles):
    """Return the energy of the state that two layers of gates prepare."""
    circuit = tc.Circuit(4)
    for layer in range(2):
        for i in range(3):
            circuit.rzz(i, i + 1, theta=angles[layer, 0, i])
        for i in range(4):
            circuit.rx(i, theta=angles[layer, 1, i])
    fields = sum(circuit.expectation_ps(x=[i]) for i in range(4))
    bonds = sum(circuit.expectation_ps(z=[i, i + 1]) for i in range(3))
    return jnp.real(bonds - fields)


def step(angles):
    """Return the angles after one step, and the energy."""
    value, gradient = jax.value_and_grad(energy)(angles)
    return angles - 0.1 * gradient, value


@cache
def model():
    """Return the step and its arguments."""
    return step, (0.1 * jax.random.normal(jax.random.key(0), (2, 2, 4)),)
