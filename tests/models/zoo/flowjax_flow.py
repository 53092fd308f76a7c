"""A step of maximum likelihood of a masked autoregressive flow in FlowJAX, by optax's Adam."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import paramax
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow

OPTIMIZER = optax.adam(1e-2)


@cache
def model():
    """Return the step and its arguments."""
    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(2)), flow_layers=2, nn_width=8
    )
    held = paramax.NonTrainable
    weights, rest = eqx.partition(flow, eqx.is_inexact_array, is_leaf=lambda n: isinstance(n, held))

    def step(training, batch):
        """Return the weights and the optimizer's state after one step, and the loss."""
        weights, state = training

        def loss(weights):
            return -paramax.unwrap(eqx.combine(weights, rest)).log_prob(batch).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        updates, state = OPTIMIZER.update(gradient, state)
        return (optax.apply_updates(weights, updates), state), value

    batch = jax.random.normal(jax.random.key(1), (8, 2)) @ jnp.array([[1.0, 0.5], [0.0, 0.3]])
    return step, ((weights, OPTIMIZER.init(weights)), batch)
