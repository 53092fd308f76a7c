"""The caches of the process, and `clear_caches`, which empties all of them.

Values that passes compute for a jaxpr are kept as long as the jaxpr, so that each is computed once,
and passes map a shared jaxpr to a shared result. A cache may change how long a pass takes, never
its result. Every cache that outlives one run of a pass is created here; those of `jaxcompat` are
listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import AnyJaxpr


class Cache(Protocol):
    """An object that can be emptied."""

    def clear(self) -> None:
        """Drop all entries."""


C = TypeVar("C", bound=Cache)
S = TypeVar("S")
R = TypeVar("R")
A = ParamSpec("A")

_caches: list[Cache] = [*jaxcompat.CONVERTED]


def process_cache(cache: C) -> C:
    """Register `cache` with `clear_caches`, and return it."""
    _caches.append(cache)
    return cache


def clear_caches() -> None:
    """Drop all values that jaxprtool has cached for jaxprs and functions.

    Results are the same afterwards; they are computed again when needed. JAX's own caches stay:
    `jax.clear_caches` drops those.
    """
    for cache in _caches:
        cache.clear()


def anchor(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return the object that identifies a jaxpr.

    In JAX 0.10 each view of an open body closes it again. Only the open jaxpr stays the same
    object.
    """
    return jaxpr if getattr(jaxpr, "consts", ()) else jaxcompat.open_jaxpr(jaxpr)


def cached_method(method: Callable[Concatenate[S, A], R]) -> Callable[Concatenate[S, A], R]:
    """Decorate a method to cache its results, by its arguments, as long as its object lives."""
    name = f"results of {method.__name__}"

    @wraps(method)
    def cached(self: S, *args: A.args, **kwargs: A.kwargs) -> R:
        known: dict[Hashable, R] = vars(self).setdefault(name, {})
        key = (*args, *kwargs.items())
        if key not in known:
            known[key] = method(self, *args, **kwargs)
        return known[key]

    return cached


class JaxprCache:
    """Values by jaxpr and by request, each kept as long as its jaxpr.

    A value must not refer to its jaxpr, which would then never be freed.

    Args:
        most: The maximum number of requests cached for one jaxpr. If there are more, the values of
            that jaxpr are dropped.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._by_jaxpr: WeakKeyDictionary[AnyJaxpr, dict[Hashable, Any]] = WeakKeyDictionary()
        process_cache(self)

    def of(self, jaxpr: AnyJaxpr) -> dict[Hashable, Any]:
        """Return the values kept for a jaxpr, by request."""
        key = anchor(jaxpr)
        known = self._by_jaxpr.setdefault(key, {})
        if len(known) > self._most:  # the old dictionary may still be in use
            known = self._by_jaxpr[key] = {}
        return known

    def clear(self) -> None:
        self._by_jaxpr.clear()
