"""Conditions on the type that an equation computes in."""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np

from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.simplify.pattern import RowMatch
from jaxprtool.passes.simplify.row import Condition

_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)


@cache
def _kind_of(dtype: np.dtype | None) -> type | None:
    return next((kind for kind in _KINDS if jnp.issubdtype(dtype, kind)), None)


def _computes_in(name: str, *kinds: type) -> Condition:
    def condition(match: RowMatch) -> bool:
        return _kind_of(match.eqn.invars[-1].aval.dtype) in kinds

    condition.__doc__ = name
    return condition


real = _computes_in("reals", jnp.floating, jnp.integer)
floats = _computes_in("floats", jnp.floating)
discrete = _computes_in("integers, booleans", jnp.integer, jnp.bool_)
integers = _computes_in("integers", jnp.integer)
booleans = _computes_in("booleans", jnp.bool_)

#: These never hold of floating-point or complex numbers.
NEVER_INEXACT = frozenset({discrete, integers, booleans})


def is_inexact(eqn: JaxprEqn) -> bool:
    """Return True if an equation computes in floating-point or complex numbers."""
    dtype = getattr(eqn.invars[-1].aval, "dtype", None) if eqn.invars else None
    return _kind_of(dtype) in (jnp.floating, jnp.complexfloating)
