"""Batching of cond and switch.

If the index is unmapped, all batch elements take the same branch. Otherwise every branch is
computed, and each batch element selects its own.

Operands are selected too, so that a NaN in the derivative of a branch that a batch element does not
take does not reach its gradient (jax-ml/jax#1052). Operands without a derivative need not be
selected, nor those that a branch only returns, since results are selected. If a branch has an
effect, every operand is mapped: its effects happen once for each batch element.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.structured import Cond
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, Params, Primitive, jaxpr_as_fun
from jaxprtool.passes.mapping.batch.axis import Axis, Dim
from jaxprtool.passes.mapping.batch.body import BatchBodyBuilder, batch_body
from jaxprtool.passes.mapping.batch.table import (
    Operands,
    batch_rules,
    jaxs_rule,
    refusal,
    structured_rules,
)
from jaxprtool.passes.mapping.domains import by_edges


@rule(structured_rules, "cond")
def _cond(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    effects = set().union(*(branch.effects for branch in Cond.of(eqn).branches))
    if reason := jaxcompat.forbidden_in_branches(effects):
        raise refusal(eqn, reason)
    return by_edges(builder, eqn)


# --- a mapped index -----------------------------------------------------------------------------


@rule(batch_rules, "cond")
def _select(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[list[jax.Array], list[Dim]]:
    """Compute every branch. Batch elements that do not take it get operands without gradient."""
    if "branches_platforms" in params:
        return jaxs_rule(axis, primitive, operands, dims, params)
    branches = [*map(jaxcompat.close_jaxpr, params["branches"])]
    index = jaxcompat.match_axis(axis.data, dims[0], 0, operands[0])
    if len(branches) == 2:
        index = lax.gt(index, lax.full_like(index, 0, shape=()))  # a quarter of the bytes
    selected = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands[1:]]
    seen = any(not jaxcompat.is_removable_effect(e) for branch in branches for e in branch.effects)
    ins = [
        0 if dim is not None or flag or seen else None
        for dim, flag in zip(dims[1:], selected, strict=True)
    ]
    triples = zip(operands[1:], dims[1:], ins, strict=True)
    values = [
        x if to is None else jaxcompat.match_axis(axis.data, dim, to, x) for x, dim, to in triples
    ]
    fixed = [lax.stop_gradient(x) if flag else x for x, flag in zip(values, selected, strict=True)]

    @cache
    def mask(shape: tuple[int, ...], i: int | None = None) -> jax.Array:
        """Return the index, or a mask that is True where it is `i`, broadcast to a shape."""
        which = index if i is None else lax.eq(index, lax.full_like(index, i, shape=()))
        return which if which.ndim == len(shape) else lax.broadcast_in_dim(which, shape, (0,))

    def in_branch(i: int, x: jax.Array, other: jax.Array) -> jax.Array:
        """Return `x` in the batch elements that take branch `i`, and `other` in the rest."""
        if len(branches) > 2:
            return lax.select_n(mask(x.shape, i), other, x)
        return lax.select_n(mask(x.shape), *((x, other) if i == 0 else (other, x)))

    @cache
    def whole(k: int) -> jax.Array:
        """Return an operand with a batch dimension, broadcast once for all results."""
        return jaxcompat.match_axis(axis.data, ins[k], 0, values[k])

    outs: list[Dim] = [0] * len(branches[0].outvars)
    given = []
    for i, branch in enumerate(branches):
        pairs = zip(values, fixed, strict=True)
        own = [x if x is still else in_branch(i, x, still) for x, still in pairs]
        body, _ = batch_body(branch, ins, axis, outs)
        given.append(jaxpr_as_fun(body)(*own))
    results = []
    for r, cases in enumerate(zip(*given, strict=True)):
        passed_on = [_passed_on(branch, r) for branch in branches]
        cases = tuple(x if k is None else whole(k) for x, k in zip(cases, passed_on, strict=True))
        same = passed_on[0] is not None and len(set(passed_on)) == 1
        results.append(cases[0] if same else lax.select_n(mask(cases[0].shape), *cases))
    return results, outs


def _passed_on(branch: ClosedJaxpr, result: int) -> int | None:
    """Return the number of the operand that a branch forwards as this result; None for others."""
    atom = branch.outvars[result]
    return branch.invars.index(atom) if atom in branch.invars else None
