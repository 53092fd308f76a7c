"""The local energy of a small neural wave function, by folx's forward Laplacian."""

from functools import cache

import folx
import jax
import jax.numpy as jnp


def log_psi(params, positions):
    """Return the logarithm of the wave function of three electrons around a nucleus."""
    distances = jnp.linalg.norm(positions.reshape(3, 3), axis=-1)
    hidden = jnp.tanh(jnp.concatenate([positions, distances]) @ params["in"] + params["bias"])
    return hidden @ params["out"] - distances.sum()


def energies(params, walkers):
    """Return the mean and the variance of the local energies."""

    def local(positions):
        result = folx.forward_laplacian(lambda x: log_psi(params, x))(positions)
        kinetic = -0.5 * (result.laplacian + jnp.sum(result.dense_jacobian**2))
        return kinetic - jnp.sum(3.0 / jnp.linalg.norm(positions.reshape(3, 3), axis=-1))

    values = jax.vmap(local)(walkers)
    return values.mean(), values.var()


@cache
def model():
    """Return the function and its arguments."""
    first, second, third = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": 0.3 * jax.random.normal(first, (12, 8)),
        "bias": jnp.zeros(8),
        "out": 0.1 * jax.random.normal(second, (8,)),
    }
    return energies, (params, 1.0 + 0.2 * jax.random.normal(third, (4, 9)))
