"""Check the values that a program is called with against the types of its arguments.

The rules are those of a compiled function in JAX: shapes and dtypes must be equal, and weak types
may differ. A Python scalar or a NumPy array has the type that `jax.jit` gives it.
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

#: The NumPy dtypes that JAX may narrow to 32 bits.
_WIDE = "lqLQdDgG"


#: The types of Python scalars without and with 64-bit types. Some integers are too large for them.
_SCALARS = [
    {
        float: ShapedArray((), np.dtype(f"float{bits}"), weak_type=True),
        complex: ShapedArray((), np.dtype(f"complex{2 * bits}"), weak_type=True),
        bool: ShapedArray((), np.dtype(bool)),
    }
    for bits in (32, 64)
]


class TypeMismatch(Exception):
    """A value of another type than its argument: the argument's position, and the fault."""

    def __init__(self, position: int, fault: str):
        super().__init__(fault)
        self.position, self.fault = position, fault


def of_types(values: Sequence[Any], types: Sequence[Aval]) -> list[Any]:
    """Convert values to these types.

    A value that differs only in its weak type is converted, so that results have the types that the
    program states. Raises TypeMismatch for the first value of another shape or dtype.
    """
    made = list(values)
    scalars = _SCALARS[x64_enabled()]
    for i, (value, wanted) in enumerate(zip(values, types, strict=True)):
        # Recognize the most common types here, in less than a microsecond each.
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
    """The fault of a value."""


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
    with jax.transfer_guard("allow"):  # the guard is for the user's transfers
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
        raise _Fault(f"is {shown}, which is not a JAX array") from None


def _without_weak_type(aval: Aval) -> Any:
    """Return a key that two types share if a value of one is accepted for the other."""
    if isinstance(aval, ShapedArray | jaxcompat.AbstractRef):
        return type(aval), aval.shape, aval.dtype
    return aval
