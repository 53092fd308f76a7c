"""A multi-layer perceptron of Penzai, called on named arrays."""

from functools import cache

import jax
from penzai import pz
from penzai.models import simple_mlp


def call(mlp, x):
    """Return the output of the model."""
    return mlp(x)


@cache
def model():
    """Return the call and its arguments, the unbound model first."""
    mlp = simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[4, 16, 2]
    )
    x = pz.nx.wrap(jax.random.normal(jax.random.key(1), (3, 4))).tag("batch", "features")
    return call, (pz.select(mlp).at_instances_of(pz.Parameter).apply(lambda p: p.freeze()), x)
