"""Comparing arrays: to the last bit, or by the tolerance of their dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Relative tolerance by the width of the mantissa: a few dozen roundings, not one.
_ROUNDINGS = 64

Comparison = Callable[[np.ndarray, np.ndarray], np.ndarray]


def difference(
    before: Sequence[Any], after: Sequence[Any], agree: Callable[[Any, Any], np.ndarray]
) -> str | None:
    """The first difference between two lists of values, in words; None if there is none.

    `agree` says elementwise which of two arrays of one shape and dtype agree.
    """
    if len(before) != len(after):
        return f"{len(before)} values before, {len(after)} after"
    for i, pair in enumerate(zip(before, after, strict=True)):
        # A literal among the results is a Python number that bears a dtype.
        a, b = (x if hasattr(x, "shape") else jnp.asarray(x) for x in pair)
        if (types := (_type(a), _type(b)))[0] != types[1]:
            return f"value {i} is {types[0]} before, {types[1]} after"
        a, b = _as_numpy(a), _as_numpy(b)
        wrong = ~agree(a, b)
        if wrong.any():
            where = tuple(int(k) for k in np.argwhere(wrong)[0])
            return (
                f"value {i} ({types[0]}) differs in {wrong.sum()} of {wrong.size} elements: "
                f"at {list(where)} {a[where]!r} before, {b[where]!r} after"
            )
    return None


def bits_agree(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where the bits are equal, any NaN being equal to any NaN."""
    if np.iscomplexobj(a):
        return bits_agree(a.real, b.real) & bits_agree(a.imag, b.imag)
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a == b
    return (np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))


def values_agree(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where the values are equal but for rounding, measured by the largest finite element."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return a == b
    tolerance = _ROUNDINGS * float(jnp.finfo(a.dtype).eps)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    sizes = np.abs(a[np.isfinite(a)])
    scale = max(1.0, float(sizes.max())) if sizes.size else 1.0
    return np.isclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _type(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _as_numpy(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
