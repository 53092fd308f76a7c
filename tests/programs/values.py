"""Compare arrays, also with subnormal numbers as zeros, and move them between host and device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.execute.running.arrays import (
    Comparison,
    Difference,
    bits_agree,
    difference,
    value_difference,
    values_agree,
)

__all__ = [
    "Comparison",
    "Difference",
    "bits_agree",
    "difference",
    "flushed_bits_agree",
    "on_device",
    "on_host",
    "value_difference",
    "values_agree",
]


def on_device(x: Any) -> Any:
    """Return a JAX array of a NumPy array, without the compilation of `asarray` in JAX 0.12."""
    return jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else jnp.asarray(x)


def on_host(x: Any) -> Any:
    """Convert a value to an array of its JAX type, without compilation, except for keys."""
    dtype = jax.typeof(x).dtype
    return x if jnp.issubdtype(dtype, jax.dtypes.extended) else np.asarray(x, dtype)


def flushed_bits_agree(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where the bits are equal after subnormal numbers are flushed to zero.

    The CPU flushes them in arithmetic, but not in moves.
    """
    if np.iscomplexobj(a):
        return flushed_bits_agree(a.real, b.real) & flushed_bits_agree(a.imag, b.imag)
    return bits_agree(_flushed(a), _flushed(b))


def _flushed(x: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return np.where(np.abs(x) < jnp.finfo(x.dtype).tiny, np.copysign(np.zeros_like(x), x), x)
