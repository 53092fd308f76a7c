"""A graph network of Jraph and Haiku, and the gradient of its loss."""

from functools import cache

import haiku as hk
import jax
import jax.numpy as jnp
import jraph


def network(graph):
    """Return the graph after one round of messages."""

    def update(width):
        return jraph.concatenated_args(hk.nets.MLP([width, width]))

    return jraph.GraphNetwork(update(8), update(8), update(4))(graph)


NET = hk.without_apply_rng(hk.transform(network))


def loss(params, graph):
    """Return the mean square of the graph's globals."""
    return jnp.mean(NET.apply(params, graph).globals ** 2)


@cache
def model():
    """Return the gradient and its arguments."""
    graph = jraph.GraphsTuple(
        n_node=jnp.array([3, 2]),
        n_edge=jnp.array([3, 1]),
        nodes=jax.random.normal(jax.random.key(0), (5, 4)),
        edges=jax.random.normal(jax.random.key(1), (4, 2)),
        globals=jnp.ones((2, 1)),
        senders=jnp.array([0, 1, 2, 3]),
        receivers=jnp.array([1, 2, 0, 4]),
    )
    return jax.value_and_grad(loss), (jax.jit(NET.init)(jax.random.key(2), graph), graph)
