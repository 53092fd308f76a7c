"""An equivariant layer of e3nn-jax, and the forces that are its gradient."""

from functools import cache

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp


def energy(weights, positions):
    """Return a rotation-invariant number of a cloud of points."""
    differences = positions[:, None] - positions[None] + jnp.eye(len(positions))[..., None]
    vectors = e3nn.IrrepsArray("1o", differences)
    harmonics = e3nn.spherical_harmonics([0, 1, 2, 3], vectors, normalize=True)
    features = e3nn.tensor_product(harmonics, harmonics).filter("0e").array
    return jnp.sum(jnp.tanh(features @ weights))


@cache
def model():
    """Return the energy and the forces, and their arguments."""
    weights = jax.random.normal(jax.random.key(0), (4,))
    positions = jax.random.normal(jax.random.key(1), (4, 3))
    return jax.value_and_grad(energy, argnums=1), (weights, positions)
