"""Sequences of different lengths, with one program for each bucket of lengths.

`loss` takes one sequence of any length. `mask` makes the length an argument: rows beyond it have no
weight in the softmax or the mean. JAX compiles `step` once for each bucket, whatever the lengths:
run `python samples/lengths.py`.

    jaxprtool opt samples/lengths.py:loss --args "f32[8,8], f32[n,8]" -p "mask(n=256)"
    jaxprtool run samples/lengths.py:loss --args "f32[8,8], f32[n,8]" -p "mask(n=256), grad"
"""

import jax
import jax.numpy as jnp

import jaxprtool


@jaxprtool.example("f32[8,8]", "f32[40,8]")
def loss(w, x):
    """The mean squared difference between the rows and their attention outputs."""
    scores = x @ w @ x.T
    return jnp.square(jax.nn.softmax(scores) @ x - x).mean()


step = jaxprtool.jit(jax.value_and_grad(loss), shapes={"n": (16, 64, 256)}, types={"x": "f32[n,8]"})

if __name__ == "__main__":
    w = jnp.zeros((8, 8))
    for length in (9, 12, 3, 200, 40, 250, 64, 1):
        value, gradient = step(w, jax.random.normal(jax.random.key(length), (length, 8)))
        w = w - gradient
        print(f"{length:3} rows: loss {value:.3f}")
