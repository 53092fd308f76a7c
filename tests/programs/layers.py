"""Parameters of layers, as a tree among a program's arguments, and a training step for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tests.programs.gradients import NO_DERIVATIVE, reverse_with_aux
from tests.programs.plans import Stack

Values = list[Any]


def tree_of(stack: Stack, rows: Sequence[Values]) -> Any:
    """Return the argument tree with these arrays, one row per layer."""
    match stack.tree:
        case "list":
            return [dict(zip(_names(stack), row, strict=True)) for row in rows]
        case "dict":
            return {_key(i): tuple(row) for i, row in enumerate(rows)}
        case "tuple":
            return tuple(rows)
    return {name: [row[k] for row in rows] for k, name in enumerate(_names(stack))}


def layers_of(stack: Stack, tree: Any) -> list[Values]:
    """Return the arrays of an argument tree, one row per layer."""
    match stack.tree:
        case "list":
            return [[layer[name] for name in _names(stack)] for layer in tree]
        case "dict":
            return [list(tree[_key(i)]) for i in range(stack.count)]
        case "tuple":
            return list(map(list, tree))
    return [[tree[name][i] for name in _names(stack)] for i in range(stack.count)]


def _names(stack: Stack) -> list[str]:
    return [f"p{k}" for k in range(len(stack.types))]


def _key(i: int) -> str:
    """Return the name of a layer. Names sort in another order than layers."""
    return f"layer_{7 * i % 11}"


def trained(run: Callable[[Any], Values], args: Any) -> tuple[Any, Any]:
    """Return a function's results, and its arguments with each float moved by its gradient.

    An argument without a gradient is moved by itself.
    """
    leaves, structure = jax.tree.flatten(args)
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]

    def function(*xs: Any) -> tuple[Values, Values]:
        full = list(leaves)
        for i, x in zip(at, xs, strict=True):
            full[i] = x
        outs = run(jax.tree.unflatten(structure, full))
        return [x for x in map(jnp.asarray, outs) if jnp.issubdtype(x.dtype, jnp.inexact)], outs

    primals = [jnp.asarray(leaves[i]) for i in at]
    try:
        gradients, outs = reverse_with_aux(function, primals)
    except NO_DERIVATIVE:
        gradients, outs = primals, function(*primals)[1]
    for i, x, g in zip(at, primals, gradients, strict=True):
        leaves[i] = x - jnp.asarray(0.125, x.dtype) * g
    return tuple(outs), jax.tree.unflatten(structure, leaves)
