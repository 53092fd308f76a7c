"""Conditions on the type that an equation computes in."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.simplify.pattern import Match


@cache
def _kind_of(dtype: np.dtype) -> Any:
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)


def _kind(match: Match) -> Any:
    return _kind_of(match.eqn.invars[-1].aval.dtype)


def real(match: Match) -> bool:
    """reals"""
    return _kind(match) in (jnp.floating, jnp.integer)


def floats(match: Match) -> bool:
    """floats"""
    return _kind(match) is jnp.floating


def discrete(match: Match) -> bool:
    """integers, booleans"""
    return _kind(match) in (jnp.integer, jnp.bool_)


def integers(match: Match) -> bool:
    """integers"""
    return _kind(match) is jnp.integer


def booleans(match: Match) -> bool:
    """booleans"""
    return _kind(match) is jnp.bool_


#: These never hold of floating-point or complex numbers.
NEVER_INEXACT = frozenset({discrete, integers, booleans})


def is_inexact(eqn: JaxprEqn) -> bool:
    """Whether an equation computes in floating-point or complex numbers."""
    dtype = getattr(eqn.invars[-1].aval, "dtype", None) if eqn.invars else None
    return _kind_of(dtype) in (jnp.floating, jnp.complexfloating)
