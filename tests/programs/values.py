"""Compare arrays, also with subnormal numbers as zeros, and move them between host and device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.execute.running import arrays
from jaxprtool.execute.running.arrays import (
    Comparison,
    ValueDifference,
    first_value_difference,
    value_difference,
    values_agree,
)

__all__ = [
    "Comparison",
    "ValueDifference",
    "bits_agree",
    "first_value_difference",
    "flushed_bits_agree",
    "on_device",
    "on_host",
    "special_values",
    "value_difference",
    "values_agree",
]


def special_values(dtype: Any) -> np.ndarray:
    """Return the numbers of a dtype that detect careless rules: all of them, if it has 8 bits."""
    if dtype == np.bool_:
        return np.array([False, True])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        tiny, most = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
        parts = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, tiny, -tiny, most]
        return np.array([complex(a, b) for a in parts for b in parts], dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        low, high = int(info.min), int(info.max)
        some = {low, low + 1, -7, -2, -1, 0, 1, 2, 3, 31, 100, high // 2, high - 1, high}
        few = sorted(n for n in some if low <= n <= high)
        return np.array(range(low, high + 1) if info.bits <= 8 else few, dtype)
    if dtype.itemsize == 1:
        return np.arange(2 ** jnp.finfo(dtype).bits, dtype=np.uint8).view(dtype)
    info = jnp.finfo(dtype)
    limits = [float(x) for x in (info.max, info.tiny, info.smallest_subnormal)]
    positive = [0.0, 0.3, 1.0, 2.5, np.inf, np.nan, *limits]
    return np.array([sign * x for x in positive for sign in (1, -1)]).astype(dtype)


def on_device(x: Any) -> Any:
    """Return a JAX array of a NumPy array, without the compilation of `asarray` in JAX 0.12."""
    return jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else jnp.asarray(x)


def on_host(x: Any) -> Any:
    """Convert a value to an array of its JAX type, without compilation, except for keys."""
    dtype = jax.typeof(x).dtype
    return x if jnp.issubdtype(dtype, jax.dtypes.extended) else np.asarray(x, dtype)


def bits_agree(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the bits are equal, as a `Comparison` that tolerates no error."""
    return arrays.bits_agree(a, b), np.zeros(a.shape)


def flushed_bits_agree(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the bits are equal after subnormal numbers are flushed to zero.

    The CPU flushes them in arithmetic, but not in moves.
    """
    return bits_agree(_flushed(a), _flushed(b))


def _flushed(x: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(x):
        flushed = np.empty_like(x)
        flushed.real, flushed.imag = _flushed(x.real), _flushed(x.imag)
        return flushed
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return np.where(np.abs(x) < jnp.finfo(x.dtype).tiny, np.copysign(np.zeros_like(x), x), x)
