"""Criteria for when intermediate values differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.execute.compare.measures import Tolerance
from jaxprtool.execute.running.arrays import as_numpy, bits_agree, wide
from jaxprtool.ir.basics.dtypes import is_extended
from jaxprtool.jaxcompat import AbstractRef

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
        relative, given = self.tolerance.relative(a.dtype, b.dtype), self.tolerance.atol or 0.0
        sizes = np.abs(wide(a))
        if not self.strict:
            rounding = _ROUNDINGS * max(float(jnp.finfo(x.dtype).eps) for x in (a, b))
            relative, sizes = max(relative, rounding), sizes[np.isfinite(sizes)].max(initial=0.0)
        with np.errstate(all="ignore"):
            errors = np.abs(wide(b) - wide(a))
            return np.asarray(np.isfinite(errors) & (errors <= given + relative * sizes))

    def differ(self, reference: Any, value: Any) -> bool:
        """Return True if some element differs."""
        return bool(self.wrong(reference, value).any())


def comparable(var: Any) -> bool:
    """Return True if the values of a variable can be compared: it is an array but not a ref."""
    aval = var.aval
    return not isinstance(aval, AbstractRef) and getattr(aval, "shape", None) is not None
