"""Calls of the user's Python functions from a program, and debugging effects."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax._src import callback, checkify, custom_batching, debugging
from jax._src.lib import xla_client
from jax.extend.core import JaxprEqn

from jaxprtool.jaxcompat.aliases import Effect, Params

Traceback = xla_client.Traceback

#: The object in `pure_callback` and `io_callback`: a function, and the tree of its arguments.
FlatCallback = callback._FlatCallback

DEBUG_EFFECTS = {
    "DebugEffect": debugging.debug_effect,
    "OrderedDebugEffect": debugging.ordered_debug_effect,
}

_OF_CHECKS = (*map(type, DEBUG_EFFECTS.values()), checkify.ErrorEffect)


#: The registry for the structure of a custom_vmap call's operands.
_OPERANDS = getattr(custom_batching, "tracing_registry", jax.tree_util.default_registry)


def flat_custom_vmap_trees(operands: int, results: int) -> Params:
    """Return the structures among the parameters of a custom_vmap call, for flat operands."""
    in_tree = _OPERANDS.flatten((0,) * operands)[1]
    return {"in_tree": in_tree, "out_tree": jax.tree_util.tree_structure((0,) * results)}


def is_check_effect(effect: Effect) -> bool:
    """Return True for the effect of a debugging callback or print, or of a `checkify.check`."""
    return isinstance(effect, _OF_CHECKS)


def checked_errors(eqn: JaxprEqn) -> tuple[tuple[str, ...], ...] | None:
    """Return the type and the texts of each error that a `checkify.check` may raise.

    Returns None for a check that was read from a file, which has only a description of the errors.
    """
    cls, errors = eqn.params["err_tree"].node_data()
    if cls is not checkify.Error:
        return None
    found = []
    for _, tree in sorted(errors.items()):
        cls, data = tree.node_data()
        texts = [str(each) for each in jax.tree.leaves(data) if not isinstance(each, Traceback)]
        found.append((cls.__name__, *texts))
    return tuple(found)


def numbered_errors(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the operands of an equation; of a `checkify.check`, with errors numbered from 0.

    JAX 0.10 numbers all errors of the process, so that each trace has other numbers.
    """
    if "err_tree" not in eqn.params or checked_errors(eqn) is None:
        return list(operands)
    error = jax.tree.unflatten(eqn.params["err_tree"], operands)
    codes = jax.tree.map(lambda code: np.searchsorted(sorted(error._metadata), code), error._code)
    return jax.tree.leaves((error._pred, codes, error._payload))


def callback_function(held: object) -> Any:
    """Return the user's function in an equation's parameter `callback`, or custom_vmap's `rule`."""
    if isinstance(held, custom_batching.ClosedRule):
        return held.rule
    if isinstance(held, FunctionType) and held.__module__ == custom_batching.__name__:
        closed = inspect.getclosurevars(held).nonlocals.get("rule")  # for its derivative
        return held if closed is None else callback_function(closed)
    if isinstance(held, FlatCallback):
        return held.callback_func
    if isinstance(held, FunctionType) and held.__module__ == debugging.__name__:
        cells = zip(held.__code__.co_freevars, held.__closure__ or (), strict=True)
        return next((c.cell_contents for name, c in cells if name == "callback"), held)
    return held
