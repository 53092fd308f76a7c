"""A tree search of mctx: Gumbel MuZero over a learned model of one layer."""

from functools import cache

import jax
import jax.numpy as jnp
import mctx


def search(params, key, embedding):
    """Return the action that the search takes, and its weights."""

    def recurrent(params, key, action, embedding):
        new = jnp.tanh(embedding @ params["dynamics"] + jax.nn.one_hot(action, 4) @ params["act"])
        output = mctx.RecurrentFnOutput(
            reward=new.mean(-1),
            discount=jnp.full(new.shape[:1], 0.9),
            prior_logits=new @ params["policy"],
            value=new.sum(-1),
        )
        return output, new

    root = mctx.RootFnOutput(
        prior_logits=embedding @ params["policy"], value=embedding.sum(-1), embedding=embedding
    )
    output = mctx.gumbel_muzero_policy(params, key, root, recurrent, num_simulations=6)
    return output.action, output.action_weights


@cache
def model():
    """Return the search and its arguments."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"dynamics": (8, 8), "act": (4, 8), "policy": (8, 4)}
    params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}
    return search, (params, jax.random.key(1), jax.random.normal(keys[3], (2, 8)))
