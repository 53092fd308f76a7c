"""How Python is traced: one function for each topic of JAX's page "Understanding jaxprs".

Read a function, predict its jaxpr, and compare. The page is at
https://docs.jax.dev/en/latest/jaxpr.html; the functions here are in the order of its sections.

    jaxprtool show samples/understanding_jaxprs.py:elementwise
    jaxprtool show samples/understanding_jaxprs.py:layers --args "static(1), f32[3], [f32[3,3]]"
    jaxprtool show samples/understanding_jaxprs.py:nested_jit --format tree
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxprtool

PLACES = np.array([1000.0, 100.0, 10.0, 1.0], np.float32)


# --- what tracing leaves out ----------------------------------------------------------------------


@jaxprtool.example("f32[8]", "f32[8]")
def elementwise(x, y):
    """Elementwise equations, a broadcast scalar, and a reduction to a single number."""
    return jnp.sum(2.0 * jnp.cos(x) - y)


@jaxprtool.example("f32[4]", ["f32[4]", "f32[4]", "f32[4]"])
def python_control_flow(x, rows):
    """Python loops, functions and tests on shapes run during tracing."""

    def scaled(row):
        return row / len(rows) if row.ndim else row

    for row in rows:
        x = x * scaled(row)
    return x


@jaxprtool.example(jaxprtool.static(3), "f32[2,3]", ["f32[3,3]", "f32[3,3]"])
def layers(repeats, x, weights):
    """A static argument is a Python number, here the number of layers to trace."""
    for _ in range(repeats):
        for w in weights:
            x = jnp.tanh(x @ w)
    return x


@jaxprtool.example({"position": "f32[3]", "velocity": "f32[3]"}, 0.1)
def pytree(ball, seconds):
    """Dicts and tuples are flattened: a jaxpr takes and returns a list of arrays."""
    position = ball["position"] + seconds * ball["velocity"]
    return {"position": position, "velocity": ball["velocity"]}, jnp.linalg.norm(position)


@jaxprtool.example("f32[4]")
def captured_constant(x):
    """A captured array becomes a constant of the jaxpr, written before the semicolon."""
    return x @ PLACES


# --- branches and loops on traced values ----------------------------------------------------------


@jaxprtool.example("i32[]", "f32[3]")
def switch(which, x):
    """One body for each branch, and an index that is clamped to their number."""
    return lax.switch(which, [jnp.negative, jnp.exp, lambda x: x * x], x)


@jaxprtool.example("f32[3]")
def cond(x):
    """Two branches; the predicate is converted to the index 0 or 1."""
    return lax.cond(x.sum() > 0.0, lambda x: x + 1.0, lambda x: x - 1.0, x)


@jaxprtool.example("f32[3]", ("f32[3]", "f32[]"))
def cond_of_tuple(x, pair):
    """A tuple becomes several operands; a value that a branch captures becomes one more."""
    offset = x.min()
    return lax.cond(
        x[0] >= 0.0, lambda pair: pair[0] * pair[1], lambda pair: pair[0] + offset, pair
    )


@jaxprtool.example("f32[16]", "i32[]")
def fori_loop(x, steps):
    """If the number of steps is unknown during tracing, the loop is a `while` with a counter."""
    return lax.fori_loop(0, steps, lambda i, x: x + jnp.float32(i) * x.mean(), x)


@jaxprtool.example("f32[16]", "f32[16]")
def scan(xs, weights):
    """A carry and one output for each step; values that the body captures are constants."""
    scale = weights.sum()

    def step(total, pair):
        x, weight = pair
        total = total + weight / scale * x
        return total, jnp.tanh(total)

    return lax.scan(step, 0.0, (xs, weights))


# --- functions within functions -------------------------------------------------------------------


@jax.jit
def normalised(x):
    return x / jnp.sqrt(jnp.sum(x * x))


@jaxprtool.example("f32[4]", "f32[4]")
def nested_jit(x, y):
    """A jitted function stays a call: its jaxpr is printed once, and calls refer to it by name."""
    return normalised(x) - normalised(y)


@jaxprtool.example("f32[1,4]", "f32[]")
def pmap(rows, scale):
    """One row for each device; `psum` adds across devices. One row, to run on one device."""

    @partial(jax.pmap, axis_name="devices", in_axes=(0, None))
    def shares(row, scale):
        return scale * row / lax.psum(row.sum(), "devices")

    return shares(rows, scale)
