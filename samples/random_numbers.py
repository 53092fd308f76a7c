"""Random numbers: keys are values, and the same key gives the same numbers.

A key has a type of its own, `key<fry>[]`. Look at `random_bits` and `random_split`, which take and
give keys, and at the bits that become floats by shifting them into a mantissa.

    jaxprtool show samples/random_numbers.py:dropout
    jaxprtool show samples/random_numbers.py:generate --only 'random*,scan,argmax'
    jaxprtool run  samples/random_numbers.py:monte_carlo_pi --seed 1
"""

import jax
import jax.numpy as jnp

import jaxprtool


@jaxprtool.example("key<fry>[]", "f32[4,8]")
def dropout(key, x, rate=0.1):
    """Each value dropped with probability `rate`, the others scaled to keep the mean."""
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0)


@jaxprtool.example("key<fry>[]")
def independent(key):
    """One key split into two, for two draws that have nothing to do with each other."""
    noise_key, sign_key = jax.random.split(key)
    return jax.random.normal(noise_key, (4,)) * jax.random.rademacher(sign_key, (4,))


@jaxprtool.example("key<fry>[]", "f32[6,3]")
def noisy(key, x):
    """Every row with noise of its own: its number folded into the key."""

    def row(number, values):
        return values + jax.random.normal(jax.random.fold_in(key, number), values.shape)

    return jax.vmap(row)(jnp.arange(len(x)), x)


@jaxprtool.example("key<fry>[]", "f32[16,16]")
def generate(key, logits):
    """A sequence of ten tokens, each drawn from the logits that the one before it points to."""

    def step(token, key):
        token = jax.random.categorical(key, logits[token])
        return token, token

    _, tokens = jax.lax.scan(step, jnp.int32(0), jax.random.split(key, 10))
    return tokens


@jaxprtool.example("key<fry>[]")
def monte_carlo_pi(key):
    """Four times the share of points of a square that lie in the circle."""
    points = jax.random.uniform(key, (10_000, 2))
    return 4.0 * (jnp.square(points).sum(axis=-1) < 1.0).mean()
