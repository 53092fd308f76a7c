"""A TARGET and its arguments become a Program; here are the examples that functions carry.

    @jaxprtool.example("{'w': f32[3,4]}", "f32[8,3]", training=jaxprtool.static(False))
    def forward(params, x, training): ...

An example has the arguments with which the function's jaxpr is shown without `--args`. Attaching
one does not import JAX: strings are read when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from jaxprtool.errors import ArgumentsError

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class Static:
    """An argument, or a part of one, that is passed to the function as a Python value, untraced."""

    value: object


@dataclass(frozen=True)
class Example:
    """The arguments of a call; strings in them are in the notation of `--args`."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


def static(value: object) -> Static:
    """Mark an argument, or a leaf of an argument, as a Python value that is not traced.

    Args:
        value: The value that the function gets.
    """
    return Static(value)


def example(*args: object, **kwargs: object) -> Callable[[F], F]:
    """Return a decorator that attaches example arguments as the attribute `example_args`.

    Args:
        *args: The positional arguments, without `self` for a method: arrays,
            `jax.ShapeDtypeStruct`s, scalars, pytrees of these, strings in the notation of `--args`
            (`"f32[8,128]"`, also inside a pytree), or `static(...)`.
        **kwargs: The keyword arguments, in the same forms.

    Raises:
        ArgumentsError: From the decorator, if the object does not take attributes.
    """

    def attach(fun: F) -> F:
        try:
            fun.example_args = Example(args, kwargs)  # type: ignore[attr-defined]
        except (AttributeError, TypeError) as error:
            inner = getattr(fun, "__wrapped__", None)  # a function jitted by Equinox is frozen
            if inner is not None:
                attach(inner)
                return fun
            type_name = type(fun).__name__
            raise ArgumentsError(
                f"example arguments cannot be attached to an object of type {type_name}",
                "wrap it in a function, and attach them to the function",
            ) from error
        return fun

    return attach
