"""States of arrays: finite, with infinities, with NaNs; and equations that can change them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.execute.running.summary import plain
from jaxprtool.ir.basics.dtypes import is_extended
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import AbstractRef, JaxprEqn, Literal

#: The states of an array as bits: all finite, has an infinity, has a NaN.
FINITE, INF, NAN = 0, 1, 2


def has_state(value: Any) -> bool:
    """Return True if a value is an array with an inexact dtype."""
    if isinstance(value, float | complex):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(jax.typeof(value), AbstractRef):
        return False
    return is_inexact(dtype)


def is_inexact(dtype: Any) -> bool:
    """Return True if a dtype has NaNs or infinities."""
    return not is_extended(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact))


def nonfinite(value: Any) -> tuple[Any, Any]:
    """Return whether an array has a NaN, and whether it has an infinity; it may be traced."""
    if not has_state(value):
        return False, False
    return jnp.isnan(value).any(), jnp.isinf(value).any()


@jax.jit
def _state(array: Any) -> Any:
    nan, inf = nonfinite(array)
    return NAN * nan.astype(np.uint8) + INF * inf.astype(np.uint8)


def state_of(value: Any) -> int:
    """Return the state of a value; values without numbers are finite."""
    if not has_state(value):
        return FINITE
    if isinstance(value, jax.Array) and not _is_on_host(value):
        return int(_state(value))
    # NumPy reads CPU memory directly without compiling.
    array = plain(value)
    if np.isfinite(array).all():
        return FINITE
    return NAN * bool(np.isnan(array).any()) + INF * bool(np.isinf(array).any())


def _is_on_host(array: jax.Array) -> bool:
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


def may_make(eqn: JaxprEqn) -> bool:
    """Return True if an equation may compute a NaN or an infinity from operands without any.

    A NaN in a literal or a constant counts as produced by the equation that reads it.
    """
    if not traits(eqn).keeps_finite:
        return True
    return any(type(atom) is Literal and state_of(atom.val) & NAN for atom in eqn.invars)


def moves_constants(eqn: JaxprEqn) -> bool:
    """Return True if an equation's results count as constants when its operands are constants."""
    like = traits(eqn)
    return bool(eqn.invars) and (like.moves or bool(like.gives))


def is_moving(eqn: JaxprEqn) -> bool:
    """Return True if the elements of an equation's results are elements of its operands."""
    like = traits(eqn)
    return like.moves or like.updates or like.gives in ("same", "layout", "part")
