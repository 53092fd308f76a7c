"""Measures of the difference of two arrays, and criteria for when values differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.nans import count_nonfinite, is_mostly_nonfinite
from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.running.arrays import as_numpy, bits_agree, wide
from jaxprtool.ir.documents import AnyFloat, document
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.equations import type_of
from jaxprtool.jaxcompat import AbstractRef

# --- measures -------------------------------------------------------------------------------------
# Measures of the difference of two arrays: bits, errors, units in the last place, angle, NaNs.

#: Returns a mask of the elements of a value that agree with the reference, and tolerated errors.
Explain: TypeAlias = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Tolerance:
    """The tolerated errors, given or by default.

    A given tolerance is |b - a| <= atol + rtol |a|, where a is the reference; the one that is not
    given is 0. By default, the error is relative to the element, or to the root mean square of its
    array if that is larger. (`execute.running.rounding` has the default for results of programs.)

    Attributes:
        rtol: The relative error.
        atol: The absolute error.
        dtype: The dtype whose tolerance in JAX's own tests is the default; None for the dtypes of
            the values.
    """

    rtol: float | None = None
    atol: float | None = None
    dtype: Any = None

    def __post_init__(self) -> None:
        """Raise ArgumentsError for a tolerance that is negative or not a number."""
        for name, error in (("rtol", self.rtol), ("atol", self.atol)):
            if error is not None and not error >= 0:
                raise ArgumentsError(f"{name} must be a number of at least 0, not {error}")

    @property
    def is_given(self) -> bool:
        """Whether any tolerance is given."""
        return not (self.rtol is None and self.atol is None)

    def relative(self, *dtypes: Any) -> float:
        """Return the relative tolerance for values of these dtypes."""
        if any(map(_is_exact, dtypes)):
            return 0.0
        if self.is_given:
            return self.rtol or 0.0
        return max(map(jaxcompat.default_tolerance, dtypes if self.dtype is None else [self.dtype]))

    def tolerated(self, reference: np.ndarray, dtype: Any) -> np.ndarray:
        """Return the tolerated error of each element of a value of some dtype."""
        if any(map(_is_exact, (reference.dtype, dtype))):
            return np.zeros(reference.shape)
        relative = self.relative(reference.dtype, dtype)
        sizes = np.abs(wide(reference))
        if self.is_given:
            return (self.atol or 0.0) + relative * sizes
        finite = sizes[np.isfinite(sizes)]
        largest = float(finite.max(initial=0.0))  # whose square may overflow
        scale = largest * float(np.sqrt(np.mean(np.square(finite / largest)))) if largest else 0.0
        return relative * np.fmax(sizes, scale)


def _is_exact(dtype: Any) -> bool:
    """Return True for dtypes without errors: booleans, keys, and float0."""
    return is_extended(dtype) or dtype in (np.dtype(bool), jax.dtypes.float0)


@document(
    without=("nans", "nonfinite"),
    names={"own_nans": "nans", "is_proof": "proof"},
    also=("own_nans", "reference_nans", "infinities", "reference_infinities", "is_proof"),
)
@dataclass(frozen=True)
class Measure:
    """The difference between a value and its reference.

    Elements that are not finite in either array have no error.

    Attributes:
        name: The path of the result.
        reference_type: The type of the reference.
        type: The type of the value.
        equal: Whether types and bits are equal. All NaNs count as equal.
        within: Whether each element is within tolerance. NaNs and infinities must match.
        rtol: The relative tolerance, if given.
        atol: The absolute tolerance, if given.
        tolerated: The tolerated absolute error at `position`, or the largest one.
        error: The largest error relative to the tolerated one; infinite where none is tolerated.
        differing: The number of elements whose bits differ.
        beyond: The number of elements outside of the tolerance.
        size: The number of elements.
        position: The position of the first element outside of the tolerance, or else of the largest
            error; None if no element differs.
        absolute: The largest absolute error; None for values without numbers.
        relative: The largest error relative to the reference, where the reference is not zero.
        ulps: The largest error in units in the last place; None if the dtypes are not the same
            floating-point dtype.
        cosine: The cosine of the angle between the two; None for fewer than two elements.
        nans: The number of NaNs in the reference and in the value.
        nonfinite: The number of NaNs and infinities in the reference and in the value.
    """

    name: str
    reference_type: str
    type: str
    equal: bool
    within: bool
    rtol: float | None
    atol: float | None
    tolerated: float
    error: AnyFloat
    differing: int
    beyond: int
    size: int
    position: tuple[int, ...] | None
    absolute: float | None
    relative: float | None
    ulps: int | None
    cosine: float | None
    nans: tuple[int, int]
    nonfinite: tuple[int, int]

    @property
    def own_nans(self) -> int:
        """The number of NaNs in the value."""
        return self.nans[1]

    @property
    def reference_nans(self) -> int:
        """The number of NaNs in the reference."""
        return self.nans[0]

    @property
    def infinities(self) -> int:
        """The number of infinities in the value."""
        return self.nonfinite[1] - self.nans[1]

    @property
    def reference_infinities(self) -> int:
        """The number of infinities in the reference."""
        return self.nonfinite[0] - self.nans[0]

    @property
    def is_proof(self) -> bool:
        """Whether most elements are finite. Otherwise equality proves little."""
        return not any(is_mostly_nonfinite(count, self.size) for count in self.nonfinite)


@jax.transfer_guard("allow")
def measured(
    name: str, reference: Any, value: Any, tolerance: Tolerance, explain: Explain | None = None
) -> Measure:
    """Return the measure of a value relative to a reference of the same shape.

    Args:
        name: The name of the value.
        reference: The reference.
        value: The value.
        tolerance: The tolerance, if given; otherwise it is the default without `explain`.
        explain: Returns the errors that rounding explains.
    """
    types = type_of(jax.typeof(reference)), type_of(jax.typeof(value))
    limits = tolerance.rtol, tolerance.atol
    if not all(hasattr(x, "dtype") for x in (reference, value)):  # tokens have no data
        reference = value = np.zeros(0, bool)
    extended = any(is_extended(x.dtype) for x in (reference, value) if hasattr(x, "dtype"))
    a, b = as_numpy(reference), as_numpy(value)
    same = _same_bits(a, b)
    inexact = not extended and all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (a, b))
    if extended:
        within, tolerated = same, np.zeros(a.shape)
    elif explain is not None and not tolerance.is_given and inexact:
        within, tolerated = explain(a, b)
    else:
        tolerated = tolerance.tolerated(a, b.dtype)
        is_exact = tolerance.is_given and not tolerated.any()
        within = same if is_exact else same | _within(a, b, tolerated)
    absolute, relative, place = _errors(a, b, same)
    if not within.all():
        place = tuple(map(int, np.argwhere(~within)[0]))
    return Measure(
        name,
        *types,
        equal=bool(same.all()) and types[0] == types[1],
        within=bool(within.all()),
        rtol=limits[0],
        atol=limits[1],
        tolerated=float(tolerated.max(initial=0.0) if place is None else tolerated[place]),
        error=_error_ratio(a, b, same, within, tolerated),
        differing=int((~same).sum()),
        beyond=int((~within).sum()),
        size=a.size,
        position=place,
        absolute=None if extended else absolute,
        relative=None if extended else relative,
        ulps=None if extended else _ulps(a, b),
        cosine=None if extended else _cosine(a, b),
        nans=(_nans(a), _nans(b)),
        nonfinite=(count_nonfinite(a), count_nonfinite(b)),
    )


def _error_ratio(
    a: np.ndarray, b: np.ndarray, same: np.ndarray, within: np.ndarray, tolerated: np.ndarray
) -> float:
    """Return the largest error of an element relative to the tolerated one.

    It is infinite where NaNs or infinities do not match, or no error is tolerated.
    """
    if same.all():
        return 0.0
    if jax.dtypes.float0 in (a.dtype, b.dtype) or same.shape != a.shape:
        return float("inf")
    with np.errstate(all="ignore"):
        ratios = np.abs(wide(b)[~same] - wide(a)[~same]) / tolerated[~same]
    ratio = float(np.where(np.isnan(ratios), np.inf, ratios).max())
    return ratio if within.all() else max(ratio, 1.0)


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype == jax.dtypes.float0 or b.dtype == jax.dtypes.float0:
        return np.full(a.shape, a.dtype == b.dtype)
    if a.dtype != b.dtype:  # compare both in double precision
        return bits_agree(wide(a), wide(b))
    return bits_agree(a, b)


def _within(a: np.ndarray, b: np.ndarray, tolerated: np.ndarray) -> np.ndarray:
    if jax.dtypes.float0 in (a.dtype, b.dtype):
        return np.zeros(a.shape, bool)
    with np.errstate(all="ignore"):
        errors = np.abs(wide(b) - wide(a))
    return np.asarray(np.isfinite(errors) & (errors <= tolerated))


def _errors(
    a: np.ndarray, b: np.ndarray, same: np.ndarray
) -> tuple[float | None, float | None, tuple[int, ...] | None]:
    """Return the largest absolute and relative error, and the position of the absolute one."""
    if jax.dtypes.float0 in (a.dtype, b.dtype) or bool in (a.dtype, b.dtype):
        wrong = np.argwhere(~same)
        return None, None, tuple(map(int, wrong[0])) if len(wrong) else None
    if same.all():
        return 0.0, 0.0, None
    a, b = wide(a), wide(b)
    finite = np.isfinite(a) & np.isfinite(b)
    if not (finite & ~same).any():
        return 0.0, 0.0, tuple(map(int, np.argwhere(~same)[0]))
    errors = np.zeros(a.shape)
    errors[finite] = np.abs(b[finite] - a[finite])
    sizes = np.abs(a)
    nonzero = finite & (sizes > 0)
    relative = float((errors[nonzero] / sizes[nonzero]).max()) if nonzero.any() else None
    place = np.unravel_index(int(errors.argmax()), errors.shape)
    return float(errors.max()), relative, tuple(map(int, place))


def _ulps(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the largest difference in units in the last place among elements finite in both."""
    if a.dtype != b.dtype or not jnp.issubdtype(a.dtype, jnp.inexact):
        return None
    if np.iscomplexobj(a):
        return max(_ulps(a.real, b.real) or 0, _ulps(a.imag, b.imag) or 0)
    info = jnp.finfo(a.dtype)
    if info.bits != 8 * a.dtype.itemsize or float(info.min) >= 0:
        return None
    finite = np.isfinite(a) & np.isfinite(b)
    (sign_a, size_a), (sign_b, size_b) = (_sign_and_size(x[finite]) for x in (a, b))
    distance = np.where(
        sign_a == sign_b,
        np.maximum(size_a, size_b) - np.minimum(size_a, size_b),
        size_a + size_b,
    )
    return int(distance.max(initial=0))


def _sign_and_size(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sign of floats, and their magnitude as the number of floats below it."""
    bits = 8 * x.dtype.itemsize
    whole = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign = whole >> np.uint64(bits - 1)
    return sign, whole & np.uint64((1 << (bits - 1)) - 1)


def _cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.size < 2 or not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (a, b)):
        return None
    a, b = wide(a).ravel(), wide(b).ravel()
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    sizes = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.vdot(a, b).real) / sizes if sizes else None


def _nans(x: np.ndarray) -> int:
    return int(np.isnan(x).sum()) if jnp.issubdtype(x.dtype, jnp.inexact) else 0


# --- comparator -----------------------------------------------------------------------------------
# Criteria for when intermediate values differ.

#: The number of accumulated rounding errors that do not count as a difference, unless no other
#: difference is found.
_ROUNDINGS = 64


@dataclass(frozen=True)
class Comparator:
    """Determines which elements of two arrays differ.

    Attributes:
        tolerance: The tolerance of results.
        strict: Whether the tolerance applies to each element. Otherwise errors are relative to the
            largest element, at least 64 rounding errors are tolerated, and masks may differ, since
            the values that they select are compared. This ignores differences from cancellation of
            rounding errors.
        exact: Whether instead all bits must be equal. All NaNs count as equal.
    """

    tolerance: Tolerance
    strict: bool = False
    exact: bool = False

    @jax.transfer_guard("allow")
    def wrong(self, reference: Any, value: Any) -> np.ndarray:
        """Return a mask of the elements of an array that differ from the reference."""
        if not (hasattr(reference, "dtype") and hasattr(value, "dtype")):
            return np.zeros((), bool)  # tokens
        if np.shape(reference) != np.shape(value):
            return np.ones(np.shape(value), bool)
        extended = is_extended(reference.dtype)
        a, b = as_numpy(reference), as_numpy(value)
        if jax.dtypes.float0 in (a.dtype, b.dtype):
            return np.zeros(a.shape, bool)
        inexact = jnp.issubdtype(a.dtype, jnp.inexact) and jnp.issubdtype(b.dtype, jnp.inexact)
        if extended or not inexact:
            if a.dtype == bool and a.ndim and not (self.strict or self.exact):
                return np.zeros(a.shape, bool)
            wrong = a != b
            while wrong.ndim > np.ndim(reference):  # the base array of keys has one more axis
                wrong = wrong.any(-1)
            return wrong
        same = bits_agree(wide(a), wide(b))
        return ~same if self.exact else ~(same | self._near(a, b))

    def _near(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        relative, atol = self.tolerance.relative(a.dtype, b.dtype), self.tolerance.atol or 0.0
        sizes = np.abs(wide(a))
        if not self.strict:
            rounding = _ROUNDINGS * max(float(jnp.finfo(x.dtype).eps) for x in (a, b))
            relative, sizes = max(relative, rounding), sizes[np.isfinite(sizes)].max(initial=0.0)
        with np.errstate(all="ignore"):
            errors = np.abs(wide(b) - wide(a))
            return np.asarray(np.isfinite(errors) & (errors <= atol + relative * sizes))

    def differ(self, reference: Any, value: Any) -> bool:
        """Return True if some element differs."""
        return bool(self.wrong(reference, value).any())


def is_comparable(var: Any) -> bool:
    """Return True if the values of a variable can be compared: it is an array but not a ref."""
    aval = var.aval
    return not isinstance(aval, AbstractRef) and getattr(aval, "shape", None) is not None
