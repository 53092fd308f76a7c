"""Example arguments that travel with a function, so that its jaxpr can be shown without `--args`.

    @jaxprtool.example("{'w': f32[3,4]}", "f32[8,3]", training=jaxprtool.static(False))
    def forward(params, x, training): ...

A module that attaches examples does not import JAX for it: strings are read when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from jaxprtool.errors import ArgumentsError

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class Static:
    """An argument, or a part of one, that the function gets as a Python value and not traced."""

    value: object


@dataclass(frozen=True)
class Example:
    """The arguments of a call; a string anywhere in them is read as `--args` would read it."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


def static(value: object) -> Static:
    """Mark an argument, or a leaf of one, as a Python value that is not traced, such as a flag."""
    return Static(value)


def example(*args: object, **kwargs: object) -> Callable[[F], F]:
    """Return a decorator that gives a function example arguments, its attribute `example_args`.

    They are arrays, `jax.ShapeDtypeStruct`s, scalars, pytrees of them, strings in the notation of
    `--args` (`"f32[8,128]"`, also inside a pytree), or `static(...)`. A method's leave out `self`.
    Raises ArgumentsError if the decorated object does not take attributes.
    """

    def attach(fun: F) -> F:
        try:
            fun.example_args = Example(args, kwargs)  # type: ignore[attr-defined]
        except (AttributeError, TypeError) as error:
            inner = getattr(fun, "__wrapped__", None)  # of what Equinox jits, which is frozen
            if inner is not None:
                attach(inner)
                return fun
            kind = type(fun).__name__
            raise ArgumentsError(
                f"example arguments cannot be attached to an object of type {kind}",
                "wrap it in a function of your own, and attach them to that",
            ) from error
        return fun

    return attach
