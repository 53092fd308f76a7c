"""Comparison of arrays, bit by bit or within the tolerance of their dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.errors import Details
from jaxprtool.ir.basics.dtypes import physical

#: The relative tolerance by width of the mantissa: some dozen rounding errors.
_ROUNDINGS = 64

#: Returns a mask of the elements that agree, and the tolerated error of each.
Comparison = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Difference:
    """A description of a difference, and further details."""

    text: str
    details: Details = ()

    def __str__(self) -> str:
        return self.text


def difference(
    before: Sequence[object],
    after: Sequence[object],
    agree: Comparison,
    names: Sequence[str] | None = None,
) -> Difference | None:
    """Return the first difference between two lists of values; None if there is none.

    `agree` compares two arrays of the same shape and dtype elementwise. The values are called
    `names`, or by their position.
    """
    if len(before) != len(after):
        return Difference(f"{len(before)} values before, {len(after)} after")
    for i, pair in enumerate(zip(before, after, strict=True)):
        fault = value_difference(names[i] if names else f"value {i}", *pair, agree)
        if fault is not None:
            return fault
    return None


def value_difference(
    name: str, before: object, after: object, agree: Comparison
) -> Difference | None:
    """Return the difference of two values: in type, or the positions and errors."""
    # A literal among the results is a Python number with a dtype.
    a, b = (x if hasattr(x, "shape") else jnp.asarray(x) for x in (before, after))
    if (types := (type_of(a), type_of(b)))[0] != types[1]:
        return Difference(f"{name} is {types[0]} before, {types[1]} after")
    a, b = as_numpy(a), as_numpy(b)
    same, tolerated = agree(a, b)
    wrong = ~same
    if not wrong.any():
        return None
    where = tuple(int(k) for k in np.argwhere(wrong)[0])
    count = f"{wrong.sum():,} of {wrong.size:,} elements"
    details = [
        ("result", f"{name}, {types[0]}"),
        ("differs in", f"{count}, the first at {list(where)}" if where else count),
        ("before", str(a[where])),
        ("after", str(b[where])),
        *_by_how_much(a, b, wrong, tolerated),
    ]
    return Difference(f"{name} differs in {count}", details)


def _by_how_much(a: np.ndarray, b: np.ndarray, wrong: np.ndarray, tolerated: np.ndarray) -> Details:
    """Return the largest errors of wrong finite elements, and the tolerance of the first one."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return []
    a, b = wide(a), wide(b)
    finite = wrong & np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return []
    errors, sizes = np.abs(a[finite] - b[finite]), np.abs(a[finite])
    most = f"{errors.max():.3g} absolute"
    if sizes.any():
        most += f", {(errors[sizes > 0] / sizes[sizes > 0]).max():.3g} relative"
    tolerance = f"{tolerated[finite][0]:.3g} absolute"
    if sizes[0]:
        tolerance += f", {tolerated[finite][0] / sizes[0]:.3g} relative"
    return [("largest error", most), ("tolerance", f"{tolerance}, for the first")]


def bits_agree(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a mask of elements with equal bits; all NaNs are equal."""
    if np.iscomplexobj(a):
        return bits_agree(a.real, b.real) & bits_agree(a.imag, b.imag)
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a == b
    return (np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))


def values_agree(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask of elements that are equal up to rounding errors of the largest one."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return a == b, np.zeros(a.shape)
    relative = _ROUNDINGS * float(jnp.finfo(a.dtype).eps)
    a, b = wide(a), wide(b)
    sizes = np.abs(a[np.isfinite(a)])
    absolute = relative * float(sizes.max(initial=0.0))
    return np.isclose(a, b, rtol=0, atol=absolute, equal_nan=True), np.full(a.shape, absolute)


def wide(x: np.ndarray) -> np.ndarray:
    """Return numbers in double precision, real or complex."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def type_of(x: Any) -> str:
    """Return the dtype and shape of an array, as one word."""
    return f"{x.dtype}{list(x.shape)}"


def as_numpy(x: Any) -> np.ndarray:
    """Return the array on the host; for an extended dtype, such as of keys, its base array."""
    return np.asarray(physical(x))
