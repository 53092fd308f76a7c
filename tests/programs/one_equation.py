"""Compare batching rules of one equation: ours, JAX's, and one batch element at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.jaxcompat import Literal
from jaxprtool.passes.mapping.batch import Axis, batch_rules, jaxs_rule
from jaxprtool.passes.mapping.batch.axes import Dim
from tests.programs.mapped import Cost, cost, stacked

Dims = tuple[Dim, ...]


def savings(fun: Callable[..., Any], *lanes: Any, size: int = 3) -> dict[Dims, Cost | None]:
    """Return how much our rule saves for the one equation of `fun`, by batch dimensions.

    If we have no rule, JAX's is used. None if JAX's rule fails and ours does not. Raises
    AssertionError if the rule returns other values than the batch elements one by one, or other
    types than JAX's, if it fails differently from JAX's or only ours fails, or if it costs more.
    """
    saved: dict[Dims, Cost | None] = {}
    pairs: list[Callable[[], tuple[Any, Any]]] = []
    for dims in product(*([None, *range(x.ndim + 1)] for x in lanes)):
        if all(dim is None for dim in dims):
            continue
        args = [x if d is None else stacked(x, d, size) for x, d in zip(lanes, dims, strict=True)]
        ours, theirs = (_batched(own, fun, lanes, dims, size, args) for own in (True, False))
        if isinstance(ours, Exception):
            assert type(theirs) is type(ours), f"{dims}: ours {ours!r}, JAX's {theirs!r}"
            continue
        function, our_cost, our_types = ours
        saved[dims] = None
        if not isinstance(theirs, Exception):
            _, their_cost, their_types = theirs
            assert our_types == their_types, f"{dims}: {our_types}, JAX's {their_types}"
            assert not our_cost.exceeds(their_cost), f"{dims}: {our_cost}, JAX's {their_cost}"
            saved[dims] = Cost(
                their_cost.equations - our_cost.equations, their_cost.moved - our_cost.moved
            )
        pairs.append((lambda f=function, a=args, d=dims: (f(*a), _one_by_one(fun, a, d, size))))
    _assert_same(jax.jit(lambda: [pair() for pair in pairs])())
    return saved


def _batched(
    own: bool, fun: Any, lanes: Sequence[Any], dims: Dims, size: int, args: Sequence[Any]
) -> Any:
    """Return the equation batched by a rule, or the error that the rule raises.

    It is a function that moves the batch dimension to the front, its cost, and its result types.
    """
    jaxpr = jax.make_jaxpr(fun)(*lanes)
    (eqn,) = jaxpr.eqns
    rule = batch_rules.get(eqn.primitive.name, jaxs_rule) if own else jaxs_rule
    places = {v: i for i, v in enumerate(jaxpr.jaxpr.invars)}
    consts = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    sources = [None if type(a) is Literal else places.get(a) for a in eqn.invars]
    operand_dims = [None if i is None else dims[i] for i in sources]
    out_dims: list[Dim] = []

    def batched(*values: Any) -> list[Any]:
        pairs = zip(sources, eqn.invars, strict=True)
        operands = [
            values[i] if i is not None else a.val if type(a) is Literal else consts[a]
            for i, a in pairs
        ]
        case = Axis(None, size), eqn.primitive, operands, operand_dims, eqn.params
        results, where = rule(*case) or jaxs_rule(*case)
        several = eqn.primitive.multiple_results
        out_dims[:] = where if several else [where]
        return list(results) if several else [results]

    def in_front(*values: Any) -> list[Any]:
        pairs = zip(batched(*values), out_dims, strict=True)
        return [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]

    try:
        types = jax.make_jaxpr(in_front)(*args).out_avals
    except (NotImplementedError, TypeError, ValueError) as error:
        return error
    return in_front, cost(jax.make_jaxpr(batched)(*args)), types


def example(shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Return an array whose neighbouring elements all differ."""
    values = 4 * np.sin(np.arange(1, 1 + np.prod(shape, dtype=int))).reshape(shape)
    return jnp.asarray(values > 0 if dtype is bool else abs(values), dtype)


def _one_by_one(fun: Any, args: Sequence[Any], dims: Dims, size: int) -> list[Any]:
    """Return the stacked results of all batch elements, computed one by one."""
    lanes = [
        jax.tree.leaves(
            fun(*(x if d is None else x.take(i, d) for x, d in zip(args, dims, strict=True)))
        )
        for i in range(size)
    ]
    return [jnp.stack(each) for each in zip(*lanes, strict=True)]


def _assert_same(pairs: Sequence[tuple[Any, Any]]) -> None:
    for ours, expected in pairs:
        assert len(ours) == len(expected)
        for got, each in zip(ours, expected, strict=True):
            np.testing.assert_array_equal(jnp.broadcast_to(got, each.shape), each)
