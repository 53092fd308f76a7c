"""Find the user's function in the function of flat arrays that `jax.pmap` gives to `jax.jit`."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.tree_util import PyTreeDef


@dataclass(frozen=True)
class MappedCall:
    """A call of a function under `jax.pmap`.

    Attributes:
        fun: The user's function.
        tree: The tree of its arguments, `(args, kwargs)`, without those that are static.
        statics: The values of static arguments, by position.
    """

    fun: Callable[..., Any]
    tree: PyTreeDef
    statics: dict[int, object]


def mapped_call(fun: Any) -> MappedCall | None:
    """Return the user's call that `jax.pmap` gives to `jax.jit`, or None for another function."""
    inner = vars(fun).get("__wrapped__") if type(fun) is types.FunctionType else None
    if type(inner) is not types.FunctionType or inner.__module__ != "jax._src.pmap":
        return None
    cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    known: dict[str, Any] = {name: cell.cell_contents for name, cell in cells}
    wrapped, statics = known["fun"], dict[int, object]()
    for _, parameters in wrapped.transforms:
        dynamic, fixed = parameters
        places = set(range(len(dynamic) + len(fixed))) - set(dynamic)
        statics |= dict(zip(sorted(places), (each.val for each in fixed), strict=True))
    return MappedCall(wrapped.f, known["in_tree"], statics)
