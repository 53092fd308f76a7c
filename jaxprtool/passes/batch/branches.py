"""Batching of cond and switch: one branch for all lanes if the index is unmapped; otherwise every
branch is computed and each lane selects its own.

Operands are selected too: where a branch is not taken, its derivative must not be (a NaN of a
branch not taken would spoil the gradient, jax-ml/jax#1052). Those need not be that have no
derivative, or that a branch only passes on as results, which are selected themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import Cond
from jaxprtool.jaxcompat import Atom, JaxprEqn, Primitive, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.cost import Cost, cheapest, cost_of, cost_of_moves, either
from jaxprtool.passes.batch.table import Rebuilt, batch_rules, jaxs_rule, structured_rules

Dims = tuple[Dim, ...]


def _cond(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt | None:
    cond = Cond.of(eqn)
    effects = set().union(*(branch.effects for branch in cond.branches))
    if (reason := jaxcompat.forbidden_in_branches(effects)) is not None:
        raise NotImplementedError(reason)
    if dims[0] is not None:
        return None
    own, outs = _layout(cond.branches, tuple(dims[1:]), axis)
    branches = tuple(batch_body(branch, own, axis, outs)[0] for branch in cond.branches)

    def build(operands: Sequence[Atom], results: Sequence[Var]) -> JaxprEqn:
        return cond.rebuild(
            index=operands[0], operands=operands[1:], outs=results, branches=branches
        )

    return Rebuilt((None, *own), outs, build, strays=outs != _at(outs, 0))


structured_rules["cond"] = _cond


def _layout(
    branches: Sequence[Any], dims: Dims, axis: Axis, selected: Sequence[bool] | None = None
) -> tuple[Dims, Dims]:
    """Where the operands of branches are best mapped, which are now at `dims`, and the results.

    If the index is mapped, `selected` are the operands that are to be selected by it; then every
    result is mapped. JAX has all at 0, and no choice here costs more (see `cost`).
    """
    types = [v.aval for v in branches[0].invars], [v.aval for v in branches[0].outvars]
    natural = _common(batch_body(branch, dims, axis)[1] for branch in branches)
    if selected is not None:
        natural = tuple(0 if dim is None else dim for dim in natural)
    front = _at(dims, 0), _at(natural, 0)
    choices = [(dims, natural), (dims, front[1]), front]
    if choices[0] == front or axis.plain:
        return front

    def costs(choice: tuple[Dims, Dims]) -> list[Cost]:
        ins, outs = choice
        inside = either([cost_of(batch_body(branch, ins, axis, outs)[0]) for branch in branches])
        outside = cost_of_moves(types[0], dims, ins, axis)
        outside += cost_of_moves(types[1], outs, front[1], axis)
        if selected is None:
            return [inside + outside]
        pairs = [
            *compress(zip(types[0], ins, strict=True), selected),
            *zip(types[1], outs, strict=True),
        ]
        index = jnp.bool_ if len(branches) == 2 else jnp.int32
        shapes = {(aval.shape, dim): aval.update(dtype=index) for aval, dim in pairs}
        indices = cost_of_moves([*shapes.values()], [None] * len(shapes), [0] * len(shapes), axis)
        return [inside + outside + indices]

    return cheapest(choices, front, costs)


def _common(each: Iterable[Dims]) -> Dims:
    """Where results are mapped, by most of the branches that give them mapped."""
    dims = ([dim for dim in out if dim is not None] for out in zip(*each, strict=True))
    return tuple(max(mapped, key=mapped.count) if mapped else None for mapped in dims)


def _at(dims: Dims, target: int) -> Dims:
    return tuple(None if dim is None else target for dim in dims)


# --- a mapped index -----------------------------------------------------------------------------


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
    branches = [*map(jaxcompat.close_jaxpr, params["branches"])]
    index = jaxcompat.match_axis(axis.data, dims[0], 0, operands[0])
    if len(branches) == 2:
        index = lax.gt(index, lax.full_like(index, 0, shape=()))  # a quarter of the bytes
    selected = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands[1:]]
    pairs = zip(dims[1:], selected, strict=True)
    ins = tuple(0 if dim is None and flag else dim for dim, flag in pairs)
    ins, outs = _layout(branches, ins, axis, selected)
    triples = zip(operands[1:], dims[1:], ins, strict=True)
    values = [_moved(axis, x, dim, to) for x, dim, to in triples]
    fixed = [lax.stop_gradient(x) if flag else x for x, flag in zip(values, selected, strict=True)]
    given = []
    for i, branch in enumerate(branches):
        own = [
            x if x is still else _of_branch(i, len(branches), index, dim, x, still)
            for x, still, dim in zip(values, fixed, ins, strict=True)
        ]
        body, _ = batch_body(branch, ins, axis, outs)
        given.append(jaxcompat.jaxpr_as_fun(body)(*own))
    results = []
    for r, (dim, cases) in enumerate(zip(outs, zip(*given, strict=True), strict=True)):
        passed_on = [_passed_on(branch, r) for branch in branches]
        cases = tuple(
            x if k is None else _moved(axis, values[k], ins[k], dim)
            for x, k in zip(cases, passed_on, strict=True)
        )
        same = passed_on[0] is not None and len(set(passed_on)) == 1
        results.append(cases[0] if same else _chosen(index, dim, *cases))
    return results, list(outs)


batch_rules["cond"] = _select


def _moved(axis: Axis, x: Any, dim: Dim, to: Dim) -> Any:
    return x if to is None or to == dim else jaxcompat.match_axis(axis.data, dim, to, x)


def _of_branch(i: int, count: int, index: Any, dim: Dim, x: Any, fixed: Any) -> Any:
    """`x` in the lanes that take branch `i`, and `fixed` in the others."""
    if count == 2:
        return _chosen(index, dim, *((x, fixed) if i == 0 else (fixed, x)))
    return _chosen(lax.eq(index, lax.full_like(index, i, shape=())), dim, fixed, x)


def _passed_on(branch: Any, result: int) -> int | None:
    """The number of the operand that a branch gives as this result, if it is one."""
    atom = branch.outvars[result]
    return branch.invars.index(atom) if atom in branch.invars else None


def _chosen(which: Any, dim: Dim, *cases: Any) -> Any:
    """`cases[which]` in each lane; the lanes are along `dim`."""
    shape = cases[0].shape
    if which.ndim != len(shape):
        which = lax.broadcast_in_dim(which, shape, (dim,))
    return lax.select_n(which, *cases)
