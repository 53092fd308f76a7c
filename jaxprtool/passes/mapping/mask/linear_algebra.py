"""Masking of operations batched over leading axes, such as `fft`, and of matrix factorizations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules, refusal
from jaxprtool.passes.mapping.mask.values import Facts, Padded


@rule(mask_rules, "bitcast_convert_type")
def _bitcast(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    return context.bind(eqn, x)


@rule(
    mask_rules,
    *("eig", "eigh", "fft", "geev", "geqp3", "geqrf", "hessenberg", "householder_product", "qr"),
    *("schur", "svd", "tridiagonal"),
)
def _over_leading_axes(context: MaskContext, eqn: JaxprEqn, x: Padded, *more: Padded) -> Any:
    _check_unpadded(context, eqn, x, len(eqn.params.get("fft_lengths", (0, 0))))
    for each in more:
        _check_unpadded(context, eqn, each, 1)
    return context.bind(eqn, x, *more)


def _check_unpadded(context: MaskContext, eqn: JaxprEqn, x: Padded, rank: int) -> None:
    """Raise UnsupportedError for an operand that is padded along one of its last `rank` axes."""
    if any(axis >= x.ndim - rank for axis in context.axes(x)):
        raise refusal(eqn, "it mixes all elements of an axis, including padding")


# --- matrices with padding ------------------------------------------------------------------------


def _with_identity(context: MaskContext, x: Padded) -> Any:
    """Return square matrices padded with an identity matrix: `[[x, 0], [0, 1]]`."""
    rows, columns = x.ndim - 2, x.ndim - 1
    array = context.filled(x, {rows: 0, columns: 0})
    if not context.bounds.is_masked(x.shape[columns]):
        return array
    numbers = [lax.broadcasted_iota(np.int32, array.shape, axis) for axis in (rows, columns)]
    valid = lax.broadcast_in_dim(context.valid(x.shape[columns]), array.shape, (columns,))
    diagonal = (numbers[0] == numbers[1]) & ~valid
    return lax.select(diagonal, lax.full_like(array, 1), array)


@rule(mask_rules, "cholesky")
def _cholesky(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    made = context.bind(eqn, _with_identity(context, x))
    return context.isolate_cotangent(made, x.shape, (x.ndim - 2, x.ndim - 1), active=x.active)


@rule(mask_rules, "lu")
def _lu(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    rows, columns = x.ndim - 2, x.ndim - 1
    if x.shape[rows] != x.shape[columns]:
        _check_unpadded(context, eqn, x, 2)
    factors, pivots, permutation = context.bind(eqn, _with_identity(context, x))
    return (
        context.isolate_cotangent(factors, x.shape, (rows, columns), active=x.active),
        pivots,
        permutation,
    )


@rule(mask_rules, "lu_pivots_to_permutation")
def _permutation(context: MaskContext, eqn: JaxprEqn, pivots: Padded) -> Any:
    """Fill the padding with pivots that exchange each row with itself."""
    array, axis = pivots.array, pivots.ndim - 1
    if context.bounds.is_masked(pivots.shape[axis]):
        valid = context.valid(pivots.shape[axis])
        within = lax.broadcast_in_dim(valid, array.shape, (axis,))
        array = lax.select(within, array, lax.broadcasted_iota(array.dtype, array.shape, axis))
    return context.bind(eqn, array)


@rule(mask_rules, "triangular_solve")
def _triangular_solve(context: MaskContext, eqn: JaxprEqn, a: Padded, b: Padded) -> Any:
    rows, columns = b.ndim - 2, b.ndim - 1
    solved, free = (rows, columns) if eqn.params["left_side"] else (columns, rows)
    array = _with_identity(context, a)
    if a.active and context.bounds.is_masked(b.shape[free]):
        # Without rows the derivative is zero, but the solution in the padding may be NaN.
        ones = jnp.broadcast_to(jnp.eye(array.shape[-1], dtype=array.dtype), array.shape)
        array = lax.select(context.size(b.shape[free]) > 0, array, ones)
    matrices = Padded(array, Facts.unknown(a.shape, active=a.active))
    return context.apply(
        lambda a, b: context.bind(eqn, a, b),
        [matrices, b],
        b.shape,
        needed=[{}, {solved: 0}],
        derivative=[{}, {free: 0}],
        mixed=[rows, columns],
    )
