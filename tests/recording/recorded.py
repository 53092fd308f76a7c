"""Keys of real calls of functions under `jax.jit`, as made by the hook of `jaxprtool record`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxprtool.recording import describe
from jaxprtool.recording.describe import CacheKey
from jaxprtool.recording.recorded_run import Argument
from jaxprtool.recording.values import ObjectNumbers, array_type_text


class Calls:
    """Calls of functions in one process."""

    def __init__(self) -> None:
        self.numbers = ObjectNumbers()

    def call(
        self, fun: Callable, *args: Any, static: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[describe.DescribedCall, tuple[Any, ...]]:
        """Describe a call. `static` are its static arguments, all of them keyword arguments."""
        traced = jax.jit(fun, static_argnames=list(static or {})).trace(
            *args, **kwargs, **(static or {})
        )
        names = _debug_info(traced).arg_names
        tree = jax.tree.structure((args, kwargs))
        found = describe.described_call(
            fun, tree, names, static or {}, self.numbers, None, "train.py:9"
        )
        return found, tuple(jax.tree.leaves((args, kwargs)))

    def key(self, fun: Callable, *args: Any, **kwargs: Any) -> CacheKey:
        """Return the key of a call."""
        found, leaves = self.call(fun, *args, **kwargs)
        return key_of(found, leaves)


def key_of(call: describe.DescribedCall, leaves: tuple[Any, ...]) -> CacheKey:
    """Return the key of a call with these flat arguments."""
    arguments = map(_argument, call.names, leaves)
    return CacheKey(
        function=call.function.object,
        structure=call.structure,
        arguments=tuple(arguments),
        statics=call.statics,
        options={},
        context={"enable_x64": str(jax.config.jax_enable_x64)},
        line="train.py:20",
    )


def _argument(path: str, leaf: Any) -> Argument:
    aval = jax.core.get_aval(leaf) if hasattr(jax.core, "get_aval") else jax.typeof(leaf)
    dtype = array_type_text(aval).partition("[")[0]
    host = "python" if isinstance(leaf, int | float) else ""
    return Argument(path, dtype, tuple(aval.shape), bool(aval.weak_type), host=host)


def _debug_info(traced: Any) -> Any:
    jaxpr = traced.jaxpr
    return (jaxpr if hasattr(jaxpr, "debug_info") else jaxpr.jaxpr).debug_info
