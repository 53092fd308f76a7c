"""One function, sequences of many lengths, and a compile for each bucket of them.

The example arguments say which axis varies; `def loss(params, x: "f32[n,64]")` would, too.
"""

import jax
import jax.numpy as jnp

import jaxprtool

BUCKETS = (16, 64, 256)


def attend(params, x):
    """What each row finds in the others."""
    query, key, value = (x @ params[name] for name in ("query", "key", "value"))
    return jax.nn.softmax(query @ key.T / 8.0) @ value


@jaxprtool.example("{'query': f32[64,64], 'key': f32[64,64], 'value': f32[64,64]}", "f32[n,64]")
def loss(params, x):
    """How far rows are from what attention makes of them, on average."""
    return jnp.square(attend(params, x) - x).mean()


def init(key):
    """Three matrices."""
    keys = jax.random.split(key, 3)
    names = "query", "key", "value"
    return {n: jax.random.normal(k, (64, 64)) / 8 for n, k in zip(names, keys, strict=True)}


step = jaxprtool.jit(jax.value_and_grad(loss), shapes={"n": BUCKETS})

if __name__ == "__main__":
    params = init(jax.random.key(0))
    for length in (9, 12, 3, 200, 40, 250, 64, 1):
        x = jax.random.normal(jax.random.key(length), (length, 64))
        value, gradient = step(params, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        print(f"{length:3} rows: loss {value:.3f}")
