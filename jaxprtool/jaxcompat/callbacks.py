"""Calls of the user's Python functions from a program, and what is there for debugging alone."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from jax._src import callback, checkify, debugging

#: What `pure_callback` and `io_callback` hold: a function, and the tree of its arguments.
FlatCallback = callback._FlatCallback

DEBUG_EFFECTS = {
    "DebugEffect": debugging.debug_effect,
    "OrderedDebugEffect": debugging.ordered_debug_effect,
}

_OF_CHECKS = (*map(type, DEBUG_EFFECTS.values()), checkify.ErrorEffect)


def is_check_effect(effect: Any) -> bool:
    """Whether an effect is that of a debugging callback or print, or of a `checkify.check`."""
    return isinstance(effect, _OF_CHECKS)


def callback_function(held: Any) -> Any:
    """The user's function in the parameter `callback` of an equation."""
    if isinstance(held, FlatCallback):
        return held.callback_func
    if isinstance(held, FunctionType) and held.__module__ == debugging.__name__:
        cells = zip(held.__code__.co_freevars, held.__closure__ or (), strict=True)
        return next((c.cell_contents for name, c in cells if name == "callback"), held)
    return held
