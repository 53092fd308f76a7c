"""Dtypes: their names and properties, for extended dtypes too.

An extended dtype is that of PRNG keys, or one of another package. JAX stores its elements in an
array of plain numbers, the physical array; it has neither `itemsize` nor `kind`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import DType

#: The dtypes that JAX narrows to 32 bits unless `jax_enable_x64` is set.
_WIDE = {"float64", "int64", "uint64", "complex128"}


def is_float0(value: object) -> bool:
    """Return True if a value, or a type, has dtype float0, such as the tangent of an integer."""
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


@cache
def array_dtypes() -> dict[str, DType]:
    """Return each dtype of a JAX array by its short name (`f32`, `f8_e4m3fn`) and its long one."""
    by_name: dict[str, DType] = {"float0": jax.dtypes.float0}
    for value in vars(jnp).values():
        if isinstance(value, type(jnp.float32)):
            dtype = np.dtype(value)
            by_name[jaxcompat.short_dtype_name(dtype)] = by_name[dtype.name] = dtype
    return by_name


def key_dtypes() -> dict[str, DType]:
    """Return each dtype of PRNG keys by its short name (`fry` in `key<fry>`) and its long one."""
    by_name: dict[str, DType] = {}
    for short, implementation in sorted(jaxcompat.key_implementations().items()):
        by_name[short] = by_name[implementation.name] = jaxcompat.KeyType(implementation)
    return by_name


def itemsize(dtype: DType) -> int:
    """Return the bytes of one element of a dtype, also of another package's dtype."""
    if not hasattr(dtype, "itemsize"):
        element = jaxcompat.physical_element(dtype)
        return math.prod(element.shape) * itemsize(element.dtype)
    return int(dtype.itemsize)


def is_extended(dtype: DType) -> bool:
    """Return True for the dtype of PRNG keys, or of another package's elements."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def is_foreign(dtype: DType) -> bool:
    """Return True if a dtype is another package's, so that its name and values are unknown here."""
    return is_extended(dtype) and not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def dtype_kind(dtype: DType) -> str:
    """Return NumPy's letter for the kind of a dtype; `E` for an extended one."""
    return dtype.kind if isinstance(dtype, np.dtype) or not is_extended(dtype) else "E"


def physical(value: object) -> Any:
    """Return an array of plain numbers: for an extended dtype, the array that stores it."""
    extended = hasattr(value, "dtype") and is_extended(value.dtype)
    return jaxcompat.physical_array(value) if extended else value


def as_array(value: object) -> Any:
    """Convert a value to a JAX array; return it as it is if it has an extended dtype."""
    extended = hasattr(value, "dtype") and is_extended(value.dtype)
    return value if extended else jnp.asarray(value)


def x64_enabled() -> bool:
    """Return True if 64-bit types are enabled."""
    return bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009  (made at run time)


def is_wide(dtype: DType) -> bool:
    """Return True if JAX narrows a dtype to 32 bits by default."""
    return getattr(dtype, "name", "") in _WIDE


def needs_x64(dtype: DType) -> bool:
    """Return True if JAX, as currently configured, would narrow a dtype to 32 bits."""
    return not x64_enabled() and is_wide(dtype)
