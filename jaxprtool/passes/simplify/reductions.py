"""Rules on reductions, of dimensions of size 1 above all, and on cumulative ones."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxprtool.passes.simplify.conditions import discrete, integers
from jaxprtool.passes.simplify.layout import is_unit, unasked
from jaxprtool.passes.simplify.pattern import Match
from jaxprtool.passes.simplify.row import Outcome, Row, equation

Params = dict[str, Any]


def _unit_axes(match: Match) -> Params | None:
    """over dimensions of size 1, or none"""
    axes, shape = match.eqn.params["axes"], match.aval("x").shape
    if not unasked(match.eqn) or not all(is_unit(shape[axis]) for axis in axes):
        return None
    return {"dimensions": tuple(sorted(map(int, axes)))}


def _unit_axis(match: Match) -> bool:
    """along a dimension of size 1"""
    return is_unit(match.out.shape[match.eqn.params["axis"]])


def _merged_axes(match: Match) -> Params | None:
    """no sharding is asked for"""
    if not all(map(unasked, match.eqns)):
        return None
    inner = [int(axis) for axis in match.inner.params["axes"]]
    left = [d for d in range(match.aval("x").ndim) if d not in inner]
    outer = [left[axis] for axis in match.eqn.params["axes"]]
    return {**match.eqn.params, "axes": tuple(sorted(inner + outer))}


def _times_size(match: Match) -> Outcome:
    """x is broadcast along what is summed, and only there"""
    axes, shape = match.eqn.params["axes"], match.inner.params["shape"]
    kept = [d for d in range(len(shape)) if d not in axes]
    if match.aval("x").shape != match.out.shape or not all(map(unasked, match.eqns)):
        return None
    if list(match.inner.params["broadcast_dimensions"]) != kept:
        return None
    if not all(isinstance(shape[d], int | np.integer) for d in axes):
        return None
    count = math.prod(int(shape[d]) for d in axes)
    scalar = jax.core.ShapedArray((), match.out.dtype)
    factor = match.writer.constant(count, scalar)
    return equation(match, "mul", [match["x"], factor])


_ORDERED = ("reduce_max", "reduce_min")
_BITWISE = ("reduce_and", "reduce_or")

# The derivative of a maximum is shared between equal elements, and none at NaN: of floating-point
# numbers it would change. A sum of one number is that number for XLA, -0 too.
ROWS = [
    *(
        Row(f"{name}(x)", "squeeze(x)", params=_unit_axes)
        for name in ("reduce_sum", "reduce_prod", *_BITWISE)
    ),
    *(Row(f"{name}(x)", "squeeze(x)", params=_unit_axes, exact=discrete) for name in _ORDERED),
    *(Row(f"{name}({name}(x))", f"{name}(x)", params=_merged_axes) for name in _BITWISE),
    *(
        Row(f"{name}({name}(x))", f"{name}(x)", params=_merged_axes, exact=discrete)
        for name in ("reduce_sum", *_ORDERED)
    ),
    Row("reduce_sum(broadcast_in_dim(x))", "mul(x, n)", build=_times_size, exact=integers),
    *(Row(f"{name}(x)", "x", (_unit_axis,)) for name in ("cumsum", "cumprod", "cummax", "cummin")),
    Row("cumlogsumexp(x)", "x", (_unit_axis,), exact=False),
]
