"""Batching of cond and switch: one branch for all lanes if the index is unmapped; otherwise every
branch is computed and each lane selects its own.

Operands are selected too: where a branch is not taken, its derivative must not be (a NaN of a
branch not taken would spoil the gradient, jax-ml/jax#1052).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import Cond
from jaxprtool.jaxcompat import Atom, JaxprEqn, Primitive, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.table import Rebuilt, batch_rules, jaxs_rule, structured_rules


def _cond(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt | None:
    cond = Cond.of(eqn)
    effects = set().union(*(branch.effects for branch in cond.branches))
    if (reason := jaxcompat.forbidden_in_branches(effects)) is not None:
        raise NotImplementedError(reason)
    if dims[0] is not None:
        return None
    each = [batch_body(branch, dims[1:], axis)[1] for branch in cond.branches]
    outs = tuple(_common(dims) for dims in zip(*each, strict=True))
    branches = tuple(batch_body(branch, dims[1:], axis, outs)[0] for branch in cond.branches)

    def build(operands: Sequence[Atom], results: Sequence[Var]) -> JaxprEqn:
        return cond.rebuild(
            index=operands[0], operands=operands[1:], outs=results, branches=branches
        )

    return Rebuilt(tuple(dims), outs, build)


structured_rules["cond"] = _cond


def _common(dims: Sequence[Dim]) -> Dim:
    """Where a result is mapped that branches give mapped at these dimensions."""
    mapped = [dim for dim in dims if dim is not None]
    return max(mapped, key=mapped.count) if mapped else None


def _select(
    axis: Axis,
    primitive: Primitive,
    operands: Sequence[Any],
    dims: Sequence[Dim],
    params: dict[str, Any],
) -> tuple[Any, Any]:
    """Every branch, of operands that are as they were in those lanes that take it."""
    if "branches_platforms" in params:
        return jaxs_rule(axis, primitive, operands, dims, params)
    index = jaxcompat.match_axis(axis.data, dims[0], 0, operands[0])
    values, value_dims = [], []
    for x, dim in zip(operands[1:], dims[1:], strict=True):
        differentiable = lax.stop_gradient(x) is not x
        lead = 0 if differentiable or dim is not None else None
        values.append(x if lead == dim else jaxcompat.match_axis(axis.data, dim, 0, x))
        value_dims.append(lead)
    given = []
    for i, branch in enumerate(map(jaxcompat.close_jaxpr, params["branches"])):
        taken = lax.eq(index, lax.full_like(index, i, shape=()))
        own = [
            x if (fixed := lax.stop_gradient(x)) is x else _chosen(taken, fixed, x) for x in values
        ]
        body, _ = batch_body(branch, value_dims, axis, [0] * len(branch.outvars))
        given.append(jaxcompat.jaxpr_as_fun(body)(*own))
    results = [_chosen(index, *each) for each in zip(*given, strict=True)]
    return results, [0] * len(results)


batch_rules["cond"] = _select


def _chosen(which: Any, *cases: Any) -> Any:
    """`cases[which]` in each lane; the lanes lead."""
    shape = cases[0].shape
    if which.ndim != len(shape):
        which = lax.broadcast_in_dim(which, shape, range(which.ndim))
    return lax.select_n(which, *cases)
