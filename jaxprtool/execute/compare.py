"""Comparing arrays: to the last bit, or by the tolerance of their dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.ir.dtypes import physical

#: Relative tolerance by the width of the mantissa: a few dozen roundings, not one.
_ROUNDINGS = 64

Comparison = Callable[[np.ndarray, np.ndarray], np.ndarray]


def difference(
    before: Sequence[object],
    after: Sequence[object],
    agree: Comparison,
    names: Sequence[str] | None = None,
) -> str | None:
    """The first difference between two lists of values, in words; None if there is none.

    `agree` says elementwise which of two arrays of one shape and dtype agree. The values are
    called `names`, or by their position.
    """
    if len(before) != len(after):
        return f"{len(before)} values before, {len(after)} after"
    for i, pair in enumerate(zip(before, after, strict=True)):
        fault = value_difference(*pair, agree)
        if fault is not None:
            return f"{names[i] if names else f'value {i}'} {fault}"
    return None


def value_difference(before: object, after: object, agree: Comparison) -> str | None:
    """How two values differ, in words: their types, or where, and by how much."""
    # A literal among the results is a Python number that bears a dtype.
    a, b = (x if hasattr(x, "shape") else jnp.asarray(x) for x in (before, after))
    if (types := (type_of(a), type_of(b)))[0] != types[1]:
        return f"is {types[0]} before, {types[1]} after"
    a, b = as_numpy(a), as_numpy(b)
    wrong = ~agree(a, b)
    if not wrong.any():
        return None
    where = tuple(int(k) for k in np.argwhere(wrong)[0])
    return (
        f"({types[0]}) differs in {wrong.sum()} of {wrong.size} elements: "
        f"at {list(where)} {a[where]} before, {b[where]} after{_by_how_much(a, b, wrong)}"
    )


def _by_how_much(a: np.ndarray, b: np.ndarray, wrong: np.ndarray) -> str:
    """The largest difference between finite elements, and what is tolerated."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return ""
    a, b = _wide(a), _wide(b)
    finite = wrong & np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return ""
    return f"; by {np.abs(a[finite] - b[finite]).max():.3g} at most"


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
    a, b = _wide(a), _wide(b)
    sizes = np.abs(a[np.isfinite(a)])
    scale = max(1.0, float(sizes.max())) if sizes.size else 1.0
    return np.isclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def type_of(x: Any) -> str:
    """The dtype and shape of an array, as one word."""
    return f"{x.dtype}{list(x.shape)}"


def as_numpy(x: Any) -> np.ndarray:
    """The array on the host; of an extended dtype, as keys have one, the numbers that hold it."""
    return np.asarray(physical(x))
