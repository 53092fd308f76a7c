"""Summaries of arrays: the value of a small one, statistics of a large one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.execute.running.cluster import whole
from jaxprtool.ir.basics.dtypes import is_extended, physical

#: The maximum number of elements of an array that is given in full.
WHOLE = 16


@dataclass(frozen=True)
class Summary:
    """The value of a small array, or the statistics of a large one.

    Floats have min, max (without NaNs), mean (of finite elements), and the counts nan and inf.
    Complex numbers have the same, with min and max of the magnitude. Integers have min, max and
    mean, and booleans the counts true and false. Extended dtypes, such as PRNG keys, have no
    statistics. Arrays of dtype float0 have neither a value nor statistics.

    Attributes:
        value: The array if it is small, else None.
        statistics: The statistics by name, if it is large.
    """

    value: np.ndarray | None
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, Any]:
        """The statistics, also of a small array; empty for an empty one."""
        if self.value is not None and self.value.size:
            return statistics(self.value)
        return self.statistics

    @property
    def is_finite(self) -> bool:
        """Whether it has neither NaNs nor infinities."""
        if self.value is not None and self.value.dtype.kind in "fc":
            return bool(np.isfinite(self.value).all())
        return not (self.statistics.get("nan") or self.statistics.get("inf"))


def summarize(array: Any) -> Summary:
    """Return the summary of a NumPy or JAX array of any dtype."""
    values = plain(array)
    if values.dtype == jax.dtypes.float0:
        return Summary(None)
    has_numbers = not is_extended(getattr(array, "dtype", values.dtype))
    if np.size(array) <= WHOLE:
        return Summary(values)
    return Summary(None, statistics(values) if has_numbers else {})


@jax.transfer_guard("allow")
def plain(array: Any) -> np.ndarray:
    """Return an array in one of NumPy's own dtypes, with exactly the same values.

    bfloat16 and the 8-bit floats become float32, 2- and 4-bit integers int8 or uint8, PRNG keys
    their key data, and other extended dtypes their base arrays; float0 is unchanged.
    """
    values = np.asarray(whole(physical(array)))
    if values.dtype.isbuiltin == 1 or values.dtype == jax.dtypes.float0:
        return values
    if jnp.issubdtype(values.dtype, np.integer):
        return values.astype(
            np.uint8 if jnp.issubdtype(values.dtype, np.unsignedinteger) else np.int8
        )
    return values.astype(np.float32)


def statistics(values: np.ndarray) -> dict[str, Any]:
    """Return the statistics of a `Summary` for an array in one of NumPy's own dtypes."""
    if values.dtype == np.bool_:
        count = int(values.sum())
        return {"true": count, "false": values.size - count}
    if np.issubdtype(values.dtype, np.integer):
        return {
            "min": int(values.min()),
            "max": int(values.max()),
            "mean": float(values.mean(dtype=np.float64)),
        }
    wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    numbers, finite = wide[~np.isnan(wide)], wide[np.isfinite(wide)]
    sizes: np.ndarray = abs(numbers) if np.iscomplexobj(values) else numbers
    return {
        "min": float(sizes.min()) if sizes.size else None,
        "max": float(sizes.max()) if sizes.size else None,
        "mean": finite.mean().item() if finite.size else None,
        "nan": int(np.isnan(wide).sum()),
        "inf": int(np.isinf(wide).sum()),
    }
