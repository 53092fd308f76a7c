"""Copies of JAX's functions in which some global names have other values.

JAX's rules for a call bind JAX's own primitive, which they name as a global, and its type checker
calls itself by a global name. A copy with another value for that name is the same rule for another
primitive, or the same checker that visits each body once. JAX's own function does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any


def rebound(function: Any, **names: Any) -> Any:
    """Return a copy of a function in which global names have other values.

    Functions that it calls are not copied.

    Args:
        function: A function, or a `functools.partial` of functions. Other objects are returned.
        names: The values by name.

    Returns:
        The copy; the function itself if it mentions none of the names.
    """
    if isinstance(function, partial):
        inner, *args = (rebound(each, **names) for each in (function.func, *function.args))
        return partial(inner, *args, **function.keywords)
    if not isinstance(function, FunctionType):
        return function
    if names.keys().isdisjoint(_names(function.__code__)):
        return function
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and the functions defined in it, look up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
