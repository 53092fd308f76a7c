"""Several steps of each model, compiled by jaxprtool and by JAX, each on the last one's results.

The columns of the third table: five steps of `jaxprtool.jit(step, passes="-O3")`, the step that
`jax.pmap` maps over devices, and the program batched by `jaxprtool.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from tests.models.commands import Command, Model, arrays, require_equal

STEPS = 5


def _types(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def fed_place(results: Any, arguments: tuple[Any, ...]) -> tuple[int, bool] | None:
    """Return which argument the results replace, and whether by the first of them only."""
    first = results[0] if isinstance(results, tuple) and results else None
    for whole, state in ((False, first), (True, results)):
        for place, argument in enumerate(arguments):
            if jax.tree.leaves(argument) and _types(state) == _types(argument):
                return place, not whole
    return None


def _plain(model: Model) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that `jax.jit` takes, and its arguments: functions in modules are held."""
    function, arguments = model.call
    if all(isinstance(leaf, jax.typing.ArrayLike) for leaf in jax.tree.leaves(arguments)):
        return function, arguments
    leaves = map(jnp.asarray, model.program.matched(arguments, {}).leaves)
    return jax.extend.core.jaxpr_as_fun(model.program.jaxpr), tuple(leaves)


def _row(
    step: Callable[..., Any], arguments: tuple[Any, ...], fed: tuple[int, bool] | None
) -> list[Any]:
    """Return the results of each step."""
    found = []
    for _ in range(STEPS if fed else 1):
        found.append(step(*arguments))
        if fed:
            place, alone = fed
            state = found[-1][0] if alone else found[-1]
            arguments = (*arguments[:place], state, *arguments[place + 1 :])
    return found


def _compared(ours: Any, theirs: Any) -> str:
    """Return how well two trees of arrays agree. Raise AssertionError if they do not."""
    ours, theirs = arrays(ours), arrays(theirs)
    require_equal(ours, theirs)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))
    return "in bits" if same else "yes"


def steps(model: Model, folder: Path) -> str:
    """Five steps under `-O3` return the same as under `jax.jit`."""
    step, arguments = _plain(model)
    theirs = jax.jit(step)
    fed = fed_place(theirs(*arguments), arguments)
    ours = _row(jaxprtool.jit(step, passes="-O3"), arguments, fed)
    return _compared(ours, _row(theirs, arguments, fed)) + ("" if fed else ", one")


def _stacked(model: Model, lanes: int) -> list[Any]:
    leaves = map(jnp.asarray, model.program.matched(model.call[1], {}).leaves)
    floating = jnp.floating
    return [
        jnp.stack([leaf * (1 + 0.01 * lane) for lane in range(lanes)])
        if jnp.issubdtype(leaf.dtype, floating)
        else jnp.stack([leaf] * lanes)
        for leaf in leaves
    ]


def pmapped(model: Model, folder: Path) -> str:
    """The step that `jax.pmap` maps over all devices, rewritten by `-O3`, returns the same."""
    stacked = _stacked(model, jax.local_device_count())
    step = jax.pmap(jax.extend.core.jaxpr_as_fun(model.program.jaxpr))
    if not jax.sharding.get_abstract_mesh().empty:  # NetKet sets one for the process
        with pytest.raises(ValueError, match="should match the mesh passed to shard_map"):
            step(*stacked)
        return "not in JAX"
    return _compared(jaxprtool.jit(step, passes="-O3")(*stacked), step(*stacked))


def mapped(model: Model, folder: Path) -> str:
    """The step that `jaxprtool.vmap` maps over a batch of two returns JAX's values under `-O3`."""
    stacked = _stacked(model, 2)
    step = jax.extend.core.jaxpr_as_fun(model.program.jaxpr)
    ours = jaxprtool.jit(jaxprtool.vmap(step), passes="-O3")
    return _compared(ours(*stacked), jax.jit(jax.vmap(step))(*stacked))


#: The columns of the third table, and their commands.
ROWS: dict[str, Command] = {"steps": steps, "pmapped": pmapped, "vmapped, run": mapped}
