"""Live rules of custom derivatives, converted to calls of other types.

JAX wraps a user's rule in functions that close over the types of the call. These functions are
created again around the same user's function, with other types.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any

from jax._src import linear_util as lu
from jax._src.util import Hashable, Unhashable
from jax.extend.core import JaxprEqn
from jax.extend.linear_util import StoreException, WrappedFun

from jaxprtool.jaxcompat.aliases import Params
from jaxprtool.jaxcompat.custom_rules import WRAPPERS, cells_of
from jaxprtool.jaxcompat.shapes import is_symbolic_dimension

_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees")


def retyped_rules(params: Params, value: Callable[[Any], Any]) -> Params:
    """Return the live rules among the parameters of a custom call, for other types.

    Args:
        params: The parameters of the call.
        value: Maps a type, a size, or a container of these to the new one; anything else to itself.
    """
    made = _Retyping(value)
    return {name: made(params[name]) for name in _RULES if name in params}


def closes_over_sizes(params: Params) -> bool:
    """Return True if a user's rule, or a static argument of it, has a symbolic dimension itself."""
    todo: list[Any] = [params[name] for name in _RULES if name in params]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if is_symbolic_dimension(value):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case WrappedFun():
                todo += [value.f, value.transforms]
            case FunctionType():
                read = map(value.__globals__.get, value.__code__.co_names)
                todo += [*filter(is_symbolic_dimension, read), *cells_of(value).values()]
            case partial():
                todo += [value.func, *value.args, *value.keywords.values()]
            case Hashable() | Unhashable():
                todo.append(value.val)
            case tuple() | list():
                todo += value
    return False


class _Retyping:
    """Creates objects again, each once, since the writers and readers of a store share it."""

    def __init__(self, value: Callable[[Any], Any]) -> None:
        self._value = value
        self._made: dict[int, tuple[Any, Any]] = {}  # with the old objects, to keep their ids

    def __call__(self, old: Any) -> Any:
        if id(old) not in self._made:
            new = self._new(old)
            self._made.setdefault(id(old), (old, new))
        return self._made[id(old)][1]

    def _new(self, old: Any) -> Any:
        match old:
            case WrappedFun():
                return self._wrapped(old)
            case lu.Store() | lu.EqualStore():
                return self._store(old)
            case FunctionType() if (old.__module__ or "").startswith(WRAPPERS):
                return self._function(old)
            case partial():
                keywords = {name: self(each) for name, each in old.keywords.items()}
                return partial(self(old.func), *map(self, old.args), **keywords)
            case JaxprEqn():
                params = {name: self(each) for name, each in old.params.items()}
                return old.replace(params=params)
            case Hashable() | Unhashable():
                return type(old)(self(old.val))
            case tuple() | list() if not hasattr(old, "_fields"):
                return type(old)(map(self, old))
            case _:
                return self._value(old)

    def _wrapped(self, old: WrappedFun) -> WrappedFun:
        new = lu.wrap_init(self(old.f), dict(old.params), debug_info=old.debug_info)
        steps = list(zip(old.transforms, old.stores, strict=True))
        for (transform, args), store in reversed(steps):
            new = new.wrap(transform, self(args), self(store))
        return new

    def _store(self, old: lu.Store | lu.EqualStore) -> lu.Store | lu.EqualStore:
        new = type(old)()
        with suppress(StoreException):  # it may be empty
            new.store(self(old.val))
        return new

    def _function(self, old: FunctionType) -> FunctionType:
        cells = [CellType() for _ in old.__closure__ or ()]
        new = FunctionType(
            old.__code__, old.__globals__, old.__name__, old.__defaults__, tuple(cells)
        )
        new.__kwdefaults__ = old.__kwdefaults__
        self._made[id(old)] = old, new  # it may close over itself
        vars(new).update({name: self(each) for name, each in vars(old).items()})
        named = dict(zip(old.__code__.co_freevars, cells, strict=True))
        for name, held in cells_of(old).items():
            # Its cached traces are of the old types.
            memory = name == "cells" and isinstance(held, dict)
            named[name].cell_contents = {} if memory else self(held)
        return new
