"""Branches on values that are known only when the program runs: `cond` and `switch`.

All branches of a `cond` take the same operands, including those that only one of them reads (the
threshold in `nested`). `vmap` over the predicate replaces the `cond`: the program computes both
branches, and a `select_n` chooses a result.

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
    """The Huber loss: quadratic for small errors, linear for large ones."""
    return lax.cond(
        jnp.abs(error) < 1.0,
        lambda e: 0.5 * e**2,
        lambda e: jnp.abs(e) - 0.5,
        error,
    )


@jaxprtool.example("f32[16]")
def huber_batch(errors):
    """The sum of the losses of a batch: `vmap` turns the branch into a `select_n`."""
    return jax.vmap(huber)(errors).sum()


@jaxprtool.example("f32[16]")
def grad_huber(errors):
    """The gradient of the whole batch."""
    return jax.grad(huber_batch)(errors)


@jaxprtool.example("i32[]", "f32[4,8]")
def activation(which, x):
    """Apply one of several functions, chosen by an index that `switch` clamps to its range."""
    return lax.switch(which, ACTIVATIONS, x)


@jaxprtool.example("f32[8]", "f32[8]")
def first_of_pair(x, y):
    """Branches that return pairs of which only the first is used: dce removes the second."""
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
