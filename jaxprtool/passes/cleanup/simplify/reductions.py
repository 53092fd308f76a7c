"""Rules for reductions, including cumulative ones, and for contractions."""

from __future__ import annotations

import math

import jax
import numpy as np

from jaxprtool.passes.cleanup.simplify.engine import (
    Outcome,
    Params,
    RowMatch,
    SimplifyRule,
    discrete,
    equation,
    integers,
)
from jaxprtool.passes.cleanup.simplify.layout import is_unit


def _unit_axes(match: RowMatch) -> Params | None:
    """all reduced dimensions have size 1"""
    axes, shape = match.eqn.params["axes"], match.aval("x").shape
    if not all(is_unit(shape[axis]) for axis in axes):
        return None
    return {"dimensions": tuple(sorted(map(int, axes)))}


def _unit_axis(match: RowMatch) -> bool:
    """the dimension has size 1"""
    return is_unit(match.out.shape[match.eqn.params["axis"]])


def _merged_axes(match: RowMatch) -> Params:
    inner = [int(axis) for axis in match.inner.params["axes"]]
    left = [d for d in range(match.aval("x").ndim) if d not in inner]
    outer = [left[axis] for axis in match.eqn.params["axes"]]
    return {**match.eqn.params, "axes": tuple(sorted(inner + outer))}


def _times_size(match: RowMatch) -> Outcome:
    """x is broadcast along exactly the summed dimensions"""
    axes, shape = match.eqn.params["axes"], match.inner.params["shape"]
    kept = [d for d in range(len(shape)) if d not in axes]
    if match.aval("x").shape != match.out.shape:
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

# The derivative of a maximum is shared between equal elements, and zero at NaN: for floating-point
# numbers it would change. For XLA, a sum of one number is that number, even -0.
ROWS = [
    *(
        SimplifyRule(f"{name}(x)", "squeeze(x)", params=_unit_axes)
        for name in ("reduce_sum", "reduce_prod", *_BITWISE)
    ),
    *(
        SimplifyRule(f"{name}(x)", "squeeze(x)", params=_unit_axes, exact=discrete)
        for name in _ORDERED
    ),
    *(SimplifyRule(f"{name}({name}(x))", f"{name}(x)", params=_merged_axes) for name in _BITWISE),
    *(
        SimplifyRule(f"{name}({name}(x))", f"{name}(x)", params=_merged_axes, exact=discrete)
        for name in ("reduce_sum", *_ORDERED)
    ),
    SimplifyRule("reduce_sum(broadcast_in_dim(x))", "mul(x, n)", build=_times_size, exact=integers),
    # XLA combines the one number with 0, 1 or an infinity: -0 may become 0, a complex infinity NaN,
    # and a subnormal number 0.
    *(
        SimplifyRule(f"{name}[reverse](x)", "x", (_unit_axis,), exact=discrete)
        for name in ("cumsum", "cumprod", "cummax", "cummin")
    ),
    SimplifyRule("cumlogsumexp[reverse](x)", "x", (_unit_axis,), exact=False),
]


# --- dot_general -------------------------------------------------------------------------------
#
# A contraction can name any dimensions, so a transpose of its operand is redundant. But XLA sums in
# another order for operands with another memory layout, which rounds differently.


def _absorbed(match: RowMatch) -> Outcome:
    """the transpose keeps the order of the dimensions that remain in the result"""
    params, permutation = match.eqn.params, match.inner.params["permutation"]
    side = int(match["x"] is match.eqn.invars[0])
    contracted, batch = (list(dims) for dims in params["dimension_numbers"])
    used = {*contracted[side], *batch[side]}
    free = [permutation[d] for d in range(len(permutation)) if d not in used]
    if free != sorted(free):
        return None
    for dims in (contracted, batch):
        dims[side] = tuple(int(permutation[d]) for d in dims[side])
    numbers = (tuple(contracted), tuple(batch))
    operands = [match["x"], match["y"]]
    return equation(match, "dot_general", operands, {**params, "dimension_numbers": numbers})


def _swapped(match: RowMatch) -> Params | None:
    """the transpose exchanges the remaining dimensions of x and y"""
    params, permutation = match.inner.params, match.eqn.params["permutation"]
    (x_dims, y_dims), (x_batch, y_batch) = params["dimension_numbers"]
    batch = len(x_batch)
    x_free = match.aval("x").ndim - len(x_dims) - batch
    rank = len(permutation)
    order = [*range(batch), *range(batch + x_free, rank), *range(batch, batch + x_free)]
    if list(permutation) != order:
        return None
    numbers = ((y_dims, x_dims), (y_batch, x_batch))
    precision = params["precision"]
    if isinstance(precision, tuple):
        precision = precision[::-1]
    return {**params, "dimension_numbers": numbers, "precision": precision}


_DOT = "dot_general[precision, preferred_element_type]"

ROWS += [
    SimplifyRule(f"{_DOT}(transpose(x), y)", "dot_general(x, y)", build=_absorbed, exact=discrete),
    SimplifyRule(f"{_DOT}(x, transpose(y))", "dot_general(x, y)", build=_absorbed, exact=discrete),
    SimplifyRule(f"transpose({_DOT}(x, y))", "dot_general(y, x)", params=_swapped, exact=discrete),
]
