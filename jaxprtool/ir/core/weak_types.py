"""Give the results of a rule the weak types of the equation's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import Aval, JaxprEqn


def is_weak(aval: Aval) -> bool:
    """Return True for a weak type, that of a Python number."""
    return bool(getattr(aval, "weak_type", False))


def as_weak_as(array: Any, aval: Aval) -> Any:
    """Return an array with the weak type of `aval`; the array itself if it has it already."""
    weak = is_weak(aval)
    if is_weak(jax.typeof(array)) == weak:
        return array
    return jaxcompat.with_weak_type(array, array.dtype, weak)


def strongly_typed(array: Any) -> Any:
    """Return an array without its weak type. Its gradient keeps the weak type."""
    return jaxcompat.with_weak_type(array, array.dtype, False) if _is_weak(array) else array


def keep_weak_types(
    compute: Callable[..., list[Any] | None],
    arrays: Sequence[Any],
    avals: Sequence[Aval],
    eqn: JaxprEqn,
) -> list[Any] | None:
    """Return the results of a rule with the weak types of the equation's results.

    If the rule would lose or add a weak type, it is called with strongly typed arrays, and its
    results are cast. Gradients then have the weak types of the values that they are taken with
    respect to. The same is done for an equation that moves elements, whose rule may use gathers,
    slices or pads: their transposes in JAX return strongly typed gradients.

    Args:
        compute: Returns a list of arrays, or None.
        arrays: Its arguments.
        avals: The types of the results of the equation.
        eqn: The equation.
    """
    if not (traits(eqn).moves and any(map(_is_weak, arrays))):
        outs = compute(*arrays)
        if outs is None or [*map(_is_weak, outs)] == [*map(is_weak, avals)]:
            return outs
    outs = compute(*map(strongly_typed, arrays))
    if outs is None:
        return None
    return [as_weak_as(out, aval) for out, aval in zip(outs, avals, strict=True)]


def _is_weak(array: Any) -> bool:
    return is_weak(jax.typeof(array))
