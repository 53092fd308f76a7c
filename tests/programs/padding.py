"""Arrays padded with junk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: What the padding consists of.
KINDS = ("numbers", "nan", "infinite")


def padded(x: Any, shape: Sequence[int], kind: str, rng: np.random.RandomState) -> Any:
    """Return a larger array with `x` in its corner and junk elsewhere."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        data = padded(data, (*shape, *data.shape[x.ndim :]), kind, rng)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if tuple(shape) == x.shape:
        return x
    full = junk(tuple(shape), x.dtype, kind, rng)
    full[tuple(map(slice, x.shape))] = np.asarray(x)
    return full


def junk(shape: tuple[int, ...], dtype: Any, kind: str, rng: np.random.RandomState) -> np.ndarray:
    """Return numbers, NaN or infinities; for integers random, maximal or minimal ones."""
    if dtype in (bool, jax.dtypes.float0):
        values = rng.randint(2, size=shape) if kind == "numbers" else np.full(shape, kind == "nan")
        return values.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        if kind == "numbers":
            return rng.randint(max(low, -9), min(high, 9) + 1, size=shape).astype(dtype)
        return np.full(shape, high if kind == "nan" else low).astype(dtype)
    parts = rng.normal(size=(2, *shape)) * 10
    if kind != "numbers":
        parts = np.where(parts < 0, -1.0, 1.0) * (np.nan if kind == "nan" else np.inf)
    values = parts[0].astype(np.complex128)
    values.imag = parts[1]
    return (values if jnp.issubdtype(dtype, jnp.complexfloating) else values.real).astype(dtype)


def cut(x: Any, shape: tuple[int, ...]) -> Any:
    """Return the corner of an array with this shape."""
    if x.shape == shape:
        return x
    assert len(x.shape) == len(shape) and all(map(int.__ge__, x.shape, shape)), (x.shape, shape)
    is_plain = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return (np.asarray(x) if is_plain else x)[tuple(map(slice, shape))]


def with_specials(x: Any, rng: np.random.RandomState) -> Any:
    """Return an array with NaN, infinities, zeros and ties among its numbers, if it has numbers."""
    if not (jnp.issubdtype(x.dtype, jnp.inexact) and x.size):
        return x
    values = np.array(x)
    chosen = rng.uniform(size=x.shape) < 0.3
    specials = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1, 1, values.flat[0]], values.dtype)
    values[chosen] = rng.choice(specials, size=chosen.sum())
    return values
