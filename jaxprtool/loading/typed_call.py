"""Find the types to trace a function with if `--args` are for the program after the passes.

A pass may add arguments, as `ragged` adds lengths, or change their types. The function is then
traced with the given types, those of its parameters, or those of its example arguments. An argument
without a type has the type of its value in `--args`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Unpack

from jaxprtool.ir.shapes.ragged import ragged_parts
from jaxprtool.loading.parameter_types import ParameterTypes
from jaxprtool.loading.trace import StaticArguments, positional_names, signature, static_places

#: Positional and keyword arguments.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def typed_call(
    fun: Callable,
    types: ParameterTypes,
    own: Arguments | None,
    given: Arguments,
    **static: Unpack[StaticArguments],
) -> tuple[Arguments, Arguments]:
    """Return the arguments to trace a function with, and those of the program after the passes.

    Args:
        fun: The function.
        types: The known types of its parameters.
        own: Its example arguments, or those of a factory.
        given: The arguments of the program, including the function's static ones. A parameter with
            a default and no type must be given by name, because passes add positional arguments.
        static: The static arguments, as in options of `jax.jit`.
    """
    args, kwargs = given
    positions, names = static_places(fun, args, kwargs, **static)
    after = (
        tuple(arg for i, arg in enumerate(args) if i not in positions),
        {name: arg for name, arg in kwargs.items() if name not in names},
    )
    own = types.call(fun, positions, names) or own
    if own is None:
        call = _of_the_function(fun, types, given, positions)
    else:
        call = (
            tuple(
                args[i] if i in positions and i < len(args) else arg for i, arg in enumerate(own[0])
            ),
            own[1] | {name: arg for name, arg in kwargs.items() if name in names},
        )
    traced = types.replaced(*_with_rows(types, *call), lambda values: [v.type for v in values])
    return traced, after


def _of_the_function(
    fun: Callable, types: ParameterTypes, given: Arguments, static: set[int]
) -> Arguments:
    """Return the arguments that the function takes, without those that passes add."""
    args, kwargs = given
    known = signature(fun)
    parameters: Mapping[str, inspect.Parameter] = known.parameters if known else {}
    needed = {name for name, p in parameters.items() if p.default is p.empty} | {*types.by_name}
    positional = positional_names(fun, len(types.positions))
    last = max([*static, *(i for i, name in enumerate(positional) if name in needed)], default=-1)
    return args[: last + 1], {
        name: arg for name, arg in kwargs.items() if name in parameters or name in types.by_name
    }


def _with_rows(types: ParameterTypes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return a call with examples of different lengths replaced by rows."""
    names = [*types.positions, *[""] * len(args)]
    return (
        tuple(_rows(types.by_name.get(name), arg) for name, arg in zip(names, args, strict=False)),
        {name: _rows(types.by_name.get(name), arg) for name, arg in kwargs.items()},
    )


def _rows(type_: Any, arg: Any) -> Any:
    """Return an argument with each Ragged replaced by rows where an array type is expected."""
    if isinstance(type_, dict) and type(arg) is dict:
        return {name: _rows(type_.get(name), part) for name, part in arg.items()}
    if isinstance(type_, list | tuple) and type(arg) is type(type_) and len(arg) == len(type_):
        return type(arg)(map(_rows, type_, arg))
    parts = ragged_parts(arg) if hasattr(type_, "shape") else None
    return parts[0] if parts else arg
