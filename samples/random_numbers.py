"""Random numbers: keys are values, and the same key gives the same numbers.

A key has its own type, `key<fry>[]`. The listings show `random_bits` and `random_split`, which take
keys, and how bits become floats: they are shifted into a mantissa.

    jaxprtool show samples/random_numbers.py:dropout
    jaxprtool show samples/random_numbers.py:generate --only 'random*,scan,argmax'
    jaxprtool run  samples/random_numbers.py:monte_carlo_pi --seed 1
"""

import jax
import jax.numpy as jnp

import jaxprtool


@jaxprtool.example("key<fry>[]", "f32[4,8]")
def dropout(key, x, rate=0.1):
    """Drop each value with probability `rate`, and scale the others to keep the mean."""
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0)


@jaxprtool.example("key<fry>[]")
def independent(key):
    """Split a key into two, for two independent draws."""
    noise_key, sign_key = jax.random.split(key)
    return jax.random.normal(noise_key, (4,)) * jax.random.rademacher(sign_key, (4,))


@jaxprtool.example("key<fry>[]", "f32[6,3]")
def noisy(key, x):
    """Add independent noise to each row, with the row's number folded into the key."""

    def row(number, values):
        return values + jax.random.normal(jax.random.fold_in(key, number), values.shape)

    return jax.vmap(row)(jnp.arange(len(x)), x)


@jaxprtool.example("key<fry>[]", "f32[16,16]")
def generate(key, logits):
    """Draw ten tokens, each from the row of logits of the token before it."""

    def step(token, key):
        token = jax.random.categorical(key, logits[token])
        return token, token

    _, tokens = jax.lax.scan(step, jnp.int32(0), jax.random.split(key, 10))
    return tokens


@jaxprtool.example("key<fry>[]")
def monte_carlo_pi(key):
    """Estimate pi: four times the share of random points of a square inside the circle."""
    points = jax.random.uniform(key, (10_000, 2))
    return 4.0 * (jnp.square(points).sum(axis=-1) < 1.0).mean()
