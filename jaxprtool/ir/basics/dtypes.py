"""Dtypes: their names, and what passes ask of any of them, extended dtypes included.

An extended dtype is that of random keys, or one of a package's own. JAX keeps its elements in an
array of plain numbers, the physical one; it has neither `itemsize` nor `kind`.
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

#: What JAX cuts to 32 bits unless `jax_enable_x64` is set.
_WIDE = {"float64", "int64", "uint64", "complex128"}


def is_float0(value: object) -> bool:
    """Return True for a value, or a type, of dtype float0: the tangent of an integer, say."""
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


@cache
def array_dtypes() -> dict[str, DType]:
    """Return each dtype of a JAX array by its short name (`f32`, `f8_e4m3fn`) and its long one."""
    found: dict[str, DType] = {"float0": jax.dtypes.float0}
    for value in vars(jnp).values():
        if isinstance(value, type(jnp.float32)):
            dtype = np.dtype(value)
            found[jaxcompat.short_dtype_name(dtype)] = found[dtype.name] = dtype
    return found


def key_dtypes() -> dict[str, DType]:
    """Each dtype of PRNG keys by the name between the brackets of `key<fry>`, and its long one."""
    found: dict[str, DType] = {}
    for short, implementation in sorted(jaxcompat.key_implementations().items()):
        found[short] = found[implementation.name] = jaxcompat.KeyType(implementation)
    return found


def itemsize(dtype: DType) -> int:
    """Return the bytes of one element of any dtype, a package's own among them."""
    if not hasattr(dtype, "itemsize"):
        element = jaxcompat.physical_element(dtype)
        return math.prod(element.shape) * itemsize(element.dtype)
    return int(dtype.itemsize)


def is_extended(dtype: DType) -> bool:
    """Return whether this is the dtype of keys, or of a package's own elements."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))


def is_foreign(dtype: DType) -> bool:
    """Whether a package has brought this dtype, which nothing here can spell or make values of."""
    return is_extended(dtype) and not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def kind(dtype: DType) -> str:
    """Return NumPy's letter for the kind of a dtype; `E` for an extended one."""
    return dtype.kind if isinstance(dtype, np.dtype) or not is_extended(dtype) else "E"


def physical(value: object) -> Any:
    """Return an array of plain numbers: of an extended dtype, the array that holds its elements."""
    extended = hasattr(value, "dtype") and is_extended(value.dtype)
    return jaxcompat.physical_array(value) if extended else value


def as_array(value: object) -> Any:
    """Return JAX's array of a value; of an extended dtype, which it may not know, the value."""
    extended = hasattr(value, "dtype") and is_extended(value.dtype)
    return value if extended else jnp.asarray(value)


def x64_enabled() -> bool:
    """Return whether 64-bit types are what they say."""
    return bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009  (made at run time)


def is_wide(dtype: DType) -> bool:
    """Return whether JAX cuts this dtype to 32 bits unless it is told not to."""
    return getattr(dtype, "name", "") in _WIDE


def needs_x64(dtype: DType) -> bool:
    """Return whether JAX, as it is configured now, would cut this dtype to 32 bits."""
    return not x64_enabled() and is_wide(dtype)
