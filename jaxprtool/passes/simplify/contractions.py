"""Rules on `dot_general` between transposes: a contraction can name any dimensions.

XLA sums in another order for operands that lie otherwise in memory, which rounds otherwise.
"""

from __future__ import annotations

from typing import Any

from jaxprtool.passes.simplify.conditions import discrete
from jaxprtool.passes.simplify.pattern import Match
from jaxprtool.passes.simplify.row import Outcome, Row, equation


def _left(match: Match) -> Outcome:
    """the dimensions of x that stay do so in order"""
    return _absorbed(match, 0)


def _right(match: Match) -> Outcome:
    """the dimensions of y that stay do so in order"""
    return _absorbed(match, 1)


def _absorbed(match: Match, side: int) -> Outcome:
    params, permutation = match.eqn.params, match.inner.params["permutation"]
    if params.get("out_sharding") is not None:
        return None
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


def _swapped(match: Match) -> dict[str, Any] | None:
    """the transpose exchanges what stays of x with what stays of y"""
    params, permutation = match.inner.params, match.eqn.params["permutation"]
    (x_dims, y_dims), (x_batch, y_batch) = params["dimension_numbers"]
    if params.get("out_sharding") is not None:
        return None
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


ROWS = [
    Row("dot_general(transpose(x), y)", "dot_general(x, y)", build=_left, exact=discrete),
    Row("dot_general(x, transpose(y))", "dot_general(x, y)", build=_right, exact=discrete),
    Row("transpose(dot_general(x, y))", "dot_general(y, x)", params=_swapped, exact=discrete),
]
