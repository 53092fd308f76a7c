"""Types of parameters: texts in the notation of `--args`, given separately or in annotations.

    def loss(params, tokens: "i32[n]"): ...

Types of example arguments (`@jaxprtool.example`) with symbols are used as well. A parameter without
a type accepts any value.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.conversions import is_ref
from jaxprtool.ir.documents import plural
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.symbols import symbolic_sizes
from jaxprtool.jaxcompat import Aval
from jaxprtool.loading import argspec
from jaxprtool.loading.example import Example
from jaxprtool.loading.trace import (
    function_name,
    positional_names,
    require_parameters,
    shown_signature,
    signature,
)

#: Types as a user gives them.
TypesOption = str | Mapping[str, Any] | Sequence[Any] | None


@dataclass(frozen=True)
class TypedValue:
    """An array in the arguments of a call, its path, and its type in the parameter."""

    path: str
    value: Any
    type: jax.ShapeDtypeStruct | Aval

    @property
    def aval(self) -> Aval:
        """The abstract value of the type."""
        return jax.core.ShapedArray(self.type.shape, self.type.dtype)

    def check_dtype(self, name: str) -> None:
        """Raise ArgumentsError, which has the function's `name`, if the array has another dtype."""
        wanted = f"but its type is {type_of(self.aval)}"
        try:
            aval = jax.typeof(self.value)
        except TypeError:
            raise ArgumentsError(
                f"argument '{self.path}' of {name} is not an array, {wanted}"
            ) from None
        if jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True) != self.type.dtype:
            raise ArgumentsError(f"argument '{self.path}' of {name} is {type_of(aval)}, {wanted}")


@dataclass(frozen=True, eq=False)
class ParameterTypes:
    """Types of some parameters of a function; holds no reference to the function.

    Attributes:
        name: The name of the function.
        positions: The names of the positional parameters.
        by_name: A type, or a pytree of types, by the name of the parameter.
        are_given: Whether the user gave them; otherwise they are the function's own.
    """

    name: str
    positions: tuple[str, ...]
    by_name: Mapping[str, Any]
    are_given: bool = False

    @classmethod
    def read(cls, fun: Callable, option: TypesOption) -> ParameterTypes:
        """Return the types given for a function, or else its own.

        Its own are annotations, or the types with symbols in its example arguments.

        Args:
            fun: The function.
            option: The types in the notation of the command line's `--args`, `"tokens=i32[n]"`; or
                a dict by parameter name, or a sequence in parameter order with None for any type:
                texts, `jax.ShapeDtypeStruct`s or pytrees of these.

        Raises:
            ArgumentsError: For types that cannot be read, and for a parameter that the function
                lacks.
        """
        named: Mapping[str, Any] = {}
        positional: Sequence[Any] = ()
        are_given = option is not None
        if option is None:
            option = _annotations(fun)
        if not option:
            positional, named = _example(fun)
        elif isinstance(option, str):
            positional, named = argspec.read_args(option, what="types")
        elif isinstance(option, Mapping):
            named = argspec.read_strings(dict(option))
        else:
            argspec.require_sequence(option)
            positional = argspec.read_strings(list(option))
        require_parameters(fun, named, "types")
        _check_count(fun, len(positional))
        names = tuple(positional_names(fun, len(positional)))
        by_name = {**dict(zip(names, positional, strict=False)), **named}
        by_name = {name: tree for name, tree in by_name.items() if tree is not None}
        types = jax.tree.map(_type, by_name, is_leaf=lambda leaf: leaf is None)
        return cls(function_name(fun), names, types, are_given)

    def call(
        self, fun: Callable, static: Collection[int], static_names: Collection[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call of these types, if all required parameters have one.

        Static arguments are replaced by None.
        """
        sig = signature(fun)
        if not self.are_given or sig is None or _ANY in jax.tree.leaves(self.by_name):
            return None
        parameters = sig.parameters
        variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        for i, (name, parameter) in enumerate(parameters.items()):
            optional = parameter.default is not parameter.empty or parameter.kind in variadic
            if not (optional or name in self.by_name or i in static or name in static_names):
                return None
        used = [i for i, name in enumerate(self.positions) if name in self.by_name]
        count = max([*static, *used], default=-1) + 1
        names = positional_names(fun, count)[:count]
        if any(name not in self.by_name and i not in static for i, name in enumerate(names)):
            return None
        named = {name: tree for name, tree in self.by_name.items() if name not in names}
        return tuple(map(self.by_name.get, names)), named

    @property
    def leaves(self) -> list[jax.ShapeDtypeStruct]:
        """All types."""
        return [leaf for leaf in jax.tree.leaves(self.by_name) if leaf is not _ANY]

    def replaced(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        new: Callable[[list[TypedValue]], Sequence[Any]],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with typed arrays replaced by their entries in `new`.

        A single type for a pytree applies to all of its arrays.

        Raises:
            ArgumentsError: If the types of a parameter and the argument differ in structure.
        """
        arguments = self.given(args, kwargs)
        values = self.values(arguments)
        replacements = iter(new([value for value in values if value is not None]))
        leaves, tree = jax.tree.flatten(arguments)
        flat = [
            value if typed is None else next(replacements)
            for value, typed in zip(leaves, values, strict=True)
        ]
        return self.put(args, kwargs, jax.tree.unflatten(tree, flat))

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call whose parameters have types, by parameter name."""
        arguments = {name: args[i] for name, i in self._places.items() if i < len(args)}
        return arguments | {name: arg for name, arg in kwargs.items() if name in self.by_name}

    def put(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with those returned by `given` replaced."""
        placed = list(args)
        for name, i in self._places.items():
            if i < len(placed):
                placed[i] = arguments[name]
        return tuple(placed), {name: arguments.get(name, arg) for name, arg in kwargs.items()}

    @cached_property
    def _places(self) -> dict[str, int]:
        """The position of each positional parameter that has a type."""
        return {name: i for i, name in enumerate(self.positions) if name in self.by_name}

    def values(self, arguments: Mapping[str, Any]) -> list[TypedValue | None]:
        """Return each leaf of arguments by name with its type; None if any type is accepted.

        Raises:
            ArgumentsError: If the types of a parameter and the argument differ in structure.
        """
        types: list[Any] = []
        for name, value in sorted(arguments.items()):
            try:
                types += jax.tree.leaves(jax.tree.broadcast(self.by_name[name], value))
            except ValueError:
                raise ArgumentsError(
                    f"argument '{name}' of {self.name} has a different structure than its type: "
                    f"{jax.tree.structure(value)}, not {jax.tree.structure(self.by_name[name])}"
                ) from None
        leaves = jax.tree.leaves_with_path(dict(arguments))
        return [
            None if leaf_type is _ANY else TypedValue(_path(way), value, leaf_type)
            for (way, value), leaf_type in zip(leaves, types, strict=True)
        ]


#: Marks a place in a tree of types where any type is accepted.
_ANY: Any = type("AnyType", (), {"__repr__": lambda self: "None"})()


def _path(way: Sequence[Any]) -> str:
    return f"{way[0].key}{jax.tree_util.keystr(tuple(way[1:]))}"


def _type(leaf: Any) -> Any:
    if leaf is None:
        return _ANY
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ArgumentsError(f"{leaf!r} is not a type: write types as 'f32[n,128]'")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, is_ref=is_ref(leaf))


def _annotations(fun: Callable) -> Mapping[str, str]:
    """Return the annotations in the notation of `--args`, by parameter."""
    sig = signature(fun)
    dtypes = "|".join(map(re.escape, array_dtypes()))
    annotations = {}
    for parameter in sig.parameters.values() if sig else ():
        text = parameter.annotation
        if isinstance(text, str) and text[:1] in ("'", '"'):  # from __future__ import annotations
            text = ast.literal_eval(text)
        if isinstance(text, str) and re.search(rf"(?<!\w)(?:{dtypes}|key<\w+>)\[", text):
            annotations[parameter.name] = text
    return annotations


def _example(fun: Callable) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the example arguments of a function, with None for those without symbols."""
    example = getattr(inspect.unwrap(fun), "example_args", None)
    if not isinstance(example, Example):
        return (), {}
    module = sys.modules.get(getattr(fun, "__module__", None) or "")
    args, kwargs = argspec.read_strings((example.args, dict(example.kwargs)), module)

    def typed(argument: Any) -> Any:
        types = jax.tree.map(lambda x: x if symbolic_sizes([x]) else None, argument)
        return types if jax.tree.leaves(types) else None

    return list(map(typed, args)), {name: typed(argument) for name, argument in kwargs.items()}


def _check_count(fun: Callable, count: int) -> None:
    sig = signature(fun)
    names = positional_names(fun, 0)
    if sig is None or any(p.kind is p.VAR_POSITIONAL for p in sig.parameters.values()):
        return
    if count > len(names):
        takes = plural(len(names), "positional argument")
        raise ArgumentsError(
            f"types has {count}, but the function takes {takes}", shown_signature(fun)
        )
