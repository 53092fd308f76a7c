"""A short rollout of a linear policy in Gymnax's cart pole."""

from functools import cache

import gymnax
import jax
import jax.numpy as jnp

ENV, PARAMS = gymnax.make("CartPole-v1")


def rollout(carry, weights):
    """Return the state and the observation after four steps, and the rewards."""

    def one(carry, _):
        state, observation, key = carry
        key, act, move = jax.random.split(key, 3)
        action = jax.random.categorical(act, observation @ weights)
        observation, state, reward, *_ = ENV.step(move, state, action, PARAMS)
        return (state, observation, key), reward

    return jax.lax.scan(one, carry, length=4)


@cache
def model():
    """Return the rollout and its arguments."""
    observation, state = jax.jit(ENV.reset)(jax.random.key(0), PARAMS)
    return rollout, ((state, observation, jax.random.key(1)), jnp.ones((4, 2)) * 0.1)
