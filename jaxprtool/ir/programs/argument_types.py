"""The types of what a program is called with, held against those of its arguments.

The rules are those of a compiled function of JAX: shapes and dtypes are the same, and weak types
may differ. A Python scalar, or an array of NumPy's, has the type that `jax.jit` gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.dtypes import x64_enabled
from jaxprtool.ir.core.equations import type_of
from jaxprtool.jaxcompat import Aval

#: The dtypes of NumPy's that JAX may cut to 32 bits.
_WIDE = "lqLQdDgG"


#: The types of Python scalars without and with 64-bit types. Of integers, some are too large.
_SCALARS = [
    {
        float: ShapedArray((), np.dtype(f"float{bits}"), weak_type=True),
        complex: ShapedArray((), np.dtype(f"complex{2 * bits}"), weak_type=True),
        bool: ShapedArray((), np.dtype(bool)),
    }
    for bits in (32, 64)
]


class TypeMismatch(Exception):
    """A value of another type than an argument: the position of that, and what is wrong."""

    def __init__(self, position: int, fault: str):
        super().__init__(fault)
        self.position, self.fault = position, fault


def of_types(values: Sequence[Any], types: Sequence[Aval]) -> list[Any]:
    """Return values as values of these types.

    A value whose weak type alone differs is converted, so that results have the types that the
    program says. Raises TypeMismatch for the first value of another shape or dtype.
    """
    made = list(values)
    scalars = _SCALARS[x64_enabled()]
    for i, (value, wanted) in enumerate(zip(values, types, strict=True)):
        # What most are is recognized here, in less than a microsecond each.
        given = value if type(value) is np.ndarray else getattr(value, "aval", None)
        if given is None:
            given = scalars.get(type(value))
        if (
            given is not None
            and type(wanted) is ShapedArray
            and given.shape == wanted.shape
            and given.dtype == wanted.dtype
            and getattr(given, "weak_type", False) == wanted.weak_type
            and (given is not value or given.dtype.char not in _WIDE)
            and not isinstance(given, jaxcompat.AbstractRef)
        ):
            continue
        try:
            made[i] = _of_type(value, wanted)
        except _Fault as fault:
            raise TypeMismatch(i, str(fault)) from None
    return made


class _Fault(Exception):
    """What is wrong with a value."""


def _of_type(value: Any, wanted: Aval) -> Any:
    if (given := getattr(value, "aval", None)) is None:
        if hasattr(value, "__jax_array__"):
            value = value.__jax_array__()
        given = _type_of_value(value)
    if _without_weak_type(given) != _without_weak_type(wanted):
        raise _Fault(f"is {type_of(given)}")
    weak = getattr(wanted, "weak_type", False)
    if weak == getattr(given, "weak_type", False):
        return value
    with jax.transfer_guard("allow"):  # it is about what the user transfers
        return jaxcompat.with_weak_type(value, given.dtype, weak)


def _type_of_value(value: Any) -> Aval:
    """Return the type that `jax.jit` gives a value that is neither JAX's array nor a tracer."""
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.AbstractValue):
        raise _Fault("is a type, not an array")
    try:
        return jax.api_util.shaped_abstractify(value)
    except OverflowError:
        raise _Fault(f"is {value}, too large for its type") from None
    except TypeError:
        dtype = getattr(value, "dtype", None)
        shown = type(value).__name__ if dtype is None else f"an array of dtype {dtype}"
        raise _Fault(f"is {shown}, which is no array of JAX's") from None


def _without_weak_type(aval: Aval) -> Any:
    """Return what two types have in common if values of one can be taken for the other."""
    if isinstance(aval, ShapedArray | jaxcompat.AbstractRef):
        return type(aval), aval.shape, aval.dtype
    return aval
