"""Rules for linear algebra: what comes before the dimensions of a matrix stays where it is.

JAX's rules move the mapped dimension to the front. So do these where several results might all
have to be moved there later (see `placing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import lane_shape, result_sizes, rule_for, together

Params = dict[str, Any]

#: The rank of the first operand: a matrix, or a vector.
_RANKS = {
    **dict.fromkeys(["cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "lu", "qr"], 2),
    **dict.fromkeys(["householder_product", "ormqr", "schur", "svd", "symmetric_product"], 2),
    **dict.fromkeys(["triangular_solve", "tridiagonal"], 2),
    **dict.fromkeys(["lu_pivots_to_permutation", "tridiagonal_solve"], 1),
}


@rule_for(*_RANKS)
def _in_place(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    before = len(lane_shape(operands[0], dims[0])) - _RANKS[primitive.name]
    if any(dim is not None and dim > before for dim in dims):
        return None
    if primitive.name == "tridiagonal_solve" and all(dim is None for dim in dims[:3]):
        return None  # JAX has the right-hand sides of all lanes as columns of one
    sizes = result_sizes(axis, primitive, operands, dims, params)
    arrays, target = together(axis, operands, dims, sizes)
    results = primitive.bind(*arrays, **params)
    return results, [target] * len(results) if primitive.multiple_results else target


@rule_for("triangular_solve")
def _triangular_solve(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """With one matrix for all lanes, the right-hand sides of all are those of one equation.

    They are its columns, A X = B, or its rows, X A = B. Lanes next to these need no move. JAX's
    rule moves lanes of columns behind them; to solve for a single column as a row instead would
    spare that, but takes longer.
    """
    (a, b), (dim, b_dim) = operands, dims
    if dim is not None:
        return _in_place(axis, primitive, operands, dims, params)
    rows, columns = lane_shape(b, b_dim)[-2:]
    if b_dim == b.ndim - 3 and not params["left_side"]:
        flat = (axis.size * rows, columns)
    elif b_dim == b.ndim - 2 and params["left_side"]:
        flat = (rows, axis.size * columns)
    else:
        return None
    solved = primitive.bind(a, lax.reshape(b, (*b.shape[:-3], *flat)), **params)
    return lax.reshape(solved, b.shape), b_dim
