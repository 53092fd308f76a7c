"""Masking of what treats each lane of leading axes by itself, and of factors of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mask.table import Masking, mask_rules, refusal
from jaxprtool.passes.mask.values import Facts, Padded


@rule(mask_rules, "bitcast_convert_type")
def _bitcast(masking: Masking, eqn: JaxprEqn, x: Padded) -> Any:
    return masking.bind(eqn, x)


@rule(
    mask_rules, *("eig", "eigh", "geev", "hessenberg", "householder_product", "lu", "qr", "schur")
)
@rule(mask_rules, *("svd", "tridiagonal", "geqrf", "geqp3", "lu_pivots_to_permutation", "fft"))
def _by_lane(masking: Masking, eqn: JaxprEqn, *operands: Padded) -> Any:
    rank = len(eqn.params["fft_lengths"]) if "fft_lengths" in eqn.params else 2
    for x in operands:
        own = (
            1 if eqn.primitive.name == "lu_pivots_to_permutation" or x is not operands[0] else rank
        )
        if any(axis >= x.ndim - own for axis in masking.axes(x)):
            raise refusal(
                eqn, "it mixes all rows and columns of a matrix, of which some are padding"
            )
    return masking.bind(eqn, *operands)


# --- matrices with padding ------------------------------------------------------------------------


def _with_identity(masking: Masking, x: Padded) -> Any:
    """Return square matrices whose padding is that of an identity: `[[x, 0], [0, 1]]`."""
    rows, columns = x.ndim - 2, x.ndim - 1
    array = masking.filled(x, {rows: 0, columns: 0})
    if not masking.bounds.is_masked(x.shape[columns]):
        return array
    numbers = [lax.broadcasted_iota(np.int32, array.shape, axis) for axis in (rows, columns)]
    valid = lax.broadcast_in_dim(masking.valid(x.shape[columns]), array.shape, (columns,))
    diagonal = (numbers[0] == numbers[1]) & ~valid
    return lax.select(diagonal, lax.full_like(array, 1), array)


@rule(mask_rules, "cholesky")
def _cholesky(masking: Masking, eqn: JaxprEqn, x: Padded) -> Any:
    made = masking.bind(eqn, _with_identity(masking, x))
    return masking.apart(made, x.shape, (x.ndim - 2, x.ndim - 1), active=x.active)


@rule(mask_rules, "triangular_solve")
def _triangular_solve(masking: Masking, eqn: JaxprEqn, a: Padded, b: Padded) -> Any:
    rows, columns = b.ndim - 2, b.ndim - 1
    solved, free = (rows, columns) if eqn.params["left_side"] else (columns, rows)
    matrices = Padded(_with_identity(masking, a), Facts.unknown(a.shape, active=a.active))
    return masking.apply(
        lambda a, b: masking.bind(eqn, a, b),
        [matrices, b],
        b.shape,
        needed=[{}, {solved: 0}],
        derivative=[{}, {free: 0}],
        mixed=[rows, columns],
    )
