"""Branches on values that are known only when the program runs: `cond` and `switch`.

Look at how all branches of a `cond` take the same operands, those that only one of them reads
included (the threshold in `nested`), and how `vmap` over the predicate leaves no branch at all:
both sides are computed, and a `select_n` picks.

    jaxprtool show samples/branches.py:huber
    jaxprtool show samples/branches.py:huber_batch
    jaxprtool opt  samples/branches.py:first_of_pair -p dce --print-after-all
"""

import jax
import jax.numpy as jnp
from jax import lax

import jaxprtool

ACTIVATIONS = (jax.nn.relu, jnp.tanh, jax.nn.silu)


@jaxprtool.example("f32[]")
def huber(error):
    """A loss that grows with the square of small errors and with large ones themselves."""
    return lax.cond(
        jnp.abs(error) < 1.0,
        lambda e: 0.5 * e**2,
        lambda e: jnp.abs(e) - 0.5,
        error,
    )


@jaxprtool.example("f32[16]")
def huber_batch(errors):
    """The same, each error for itself: the branch becomes a selection."""
    return jax.vmap(huber)(errors).sum()


@jaxprtool.example("f32[16]")
def grad_huber(errors):
    """The gradient of the whole batch."""
    return jax.grad(huber_batch)(errors)


@jaxprtool.example("i32[]", "f32[4,8]")
def activation(which, x):
    """One of several functions, chosen by number; `switch` clamps the number to those there are."""
    return lax.switch(which, ACTIVATIONS, x)


@jaxprtool.example("f32[8]", "f32[8]")
def first_of_pair(x, y):
    """Branches that return pairs of which only the first is used: dce empties half of each."""
    larger, _ = lax.cond(
        x.sum() > y.sum(),
        lambda x, y: (jnp.sin(x), jnp.cos(y)),
        lambda x, y: (jnp.sin(y), jnp.cos(x)),
        x,
        y,
    )
    return larger


@jaxprtool.example("f32[]", "f32[8]")
def nested(threshold, x):
    """A branch inside a branch, both over the same array."""

    def warm(x):
        return lax.cond(threshold > 1.0, jnp.exp, jnp.expm1, -jnp.abs(x))

    return lax.cond(threshold > 0.0, warm, jnp.negative, x)
