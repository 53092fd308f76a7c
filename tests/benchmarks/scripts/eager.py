"""Run a power iteration without `jit`, and read a number after each step."""

import sys

import jax.numpy as jnp

matrix = jnp.arange(10000.0).reshape(100, 100) / 1e4
vector = jnp.ones(100)
for i in range(int(sys.argv[1]) if sys.argv[1:] else 20000):
    vector = matrix @ vector
    size = jnp.sqrt((vector * vector).sum())
    vector = vector / size
    if i % 10 == 0 and float(size) < 0:
        break
print(float(size))
