"""A result of `jax.jit` whose calls are observed. It is used like JAX's own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from jax._src import core

#: Calls a jitted function with arguments, and observes the call.
Around = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class ObservedJit:
    """A jitted function whose calls go through another function, unless JAX is tracing.

    Its attributes are those of the jitted function, and `isinstance` takes it for one.
    """

    def __init__(self, jitted: Any, around: Around) -> None:
        self._jitted, self._around = jitted, around
        functools.update_wrapper(self, jitted, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not core.trace_ctx.is_top_level():
            return self._jitted(*args, **kwargs)
        return self._around(self._jitted, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def __repr__(self) -> str:
        return repr(self._jitted)

    def __reduce__(self) -> Any:
        return self._jitted.__reduce__()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._jitted)
