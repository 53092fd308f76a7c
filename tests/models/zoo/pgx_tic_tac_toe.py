"""A move of a random player in Pgx's tic-tac-toe."""

from functools import cache

import jax
import jax.numpy as jnp
import pgx

GAME = pgx.make("tic_tac_toe")


def step(state, key):
    """Return the state after a legal move at random, and the rewards."""
    logits = jnp.where(state.legal_action_mask, 0.0, -1e9)
    state = GAME.step(state, jax.random.categorical(key, logits))
    return state, state.rewards


@cache
def model():
    """Return the step and its arguments."""
    return step, (jax.jit(GAME.init)(jax.random.PRNGKey(0)), jax.random.PRNGKey(1))
