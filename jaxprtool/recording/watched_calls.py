"""Wrap the calls of a function for `--calls`, `--keep` and `--until`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool.jaxcompat.compile_hooks import unobserved
from jaxprtool.recording.calls import CallClock, TimedResult
from jaxprtool.recording.libraries import result_paths

#: Writes an event.
Write = Callable[[dict[str, Any]], None]


class CountedCalls:
    """Counts the calls of a function, and times them.

    Args:
        clock: Waits for results.
        counter: The counter of the function.
    """

    def __init__(self, clock: CallClock, counter: int) -> None:
        self._clock, self._counter = clock, counter
        self._result: TimedResult | None = None

    def __call__(self, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._result is None:
            self._result = TimedResult(_donated(jitted, args, kwargs))
        start = time.perf_counter()
        results = jitted(*args, **kwargs)
        self._clock.called(self._counter, start, self._result.of(results))
        return results


class KeptCalls:
    """Keeps the arguments of the last calls of a function.

    Args:
        call: Calls the function.
        folder: The folder of the process.
        name: The name of the function in the run.
        last: The number of calls to keep.
        limit: The maximum size of the kept arguments, in bytes. A call with more is not kept, and
            an event reports it.
        until: "nan" to end the script at a NaN in the results, or "".
        write: Writes an event.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        folder: str,
        name: str,
        last: int,
        limit: int,
        until: str,
        write: Write,
    ) -> None:
        self._call, self._folder, self._name = call, folder, name
        self._last, self._limit, self._until, self._write = last, limit, until, write
        self._count = 0
        self._too_large = False

    def __call__(self, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._count += 1
        self._keep(dynamic_leaves(jitted, args, kwargs))
        results = self._call(jitted, args, kwargs)
        if self._until:
            self._require_no_nan(jitted, results)
        return results

    def _keep(self, leaves: Sequence[Any]) -> None:
        size = self._last * sum(getattr(leaf, "nbytes", 8) for leaf in leaves)
        if size > self._limit:
            if not self._too_large:
                self._too_large = True
                self._write({"event": "not_kept", "function": self._name, "bytes": size})
            return
        from jaxprtool.recording.kept import write_call  # only --keep needs it

        with unobserved(), jax.transfer_guard("allow"):
            write_call(self._folder, self._name, self._count, leaves, self._last)

    def _require_no_nan(self, jitted: Any, results: Any) -> None:
        leaves = jax.tree_util.tree_flatten_with_path(results)[0]
        floats = [
            (i, leaf)
            for i, (_, leaf) in enumerate(leaves)
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        with unobserved(), jax.transfer_guard("allow"):
            found = list(map(bool, _have_nan([leaf for _, leaf in floats])))
        if not any(found):
            return
        first = next(i for (i, _), is_nan in zip(floats, found, strict=True) if is_nan)
        paths = [f"result{jax.tree_util.keystr(path)}" for path, _ in leaves]
        result = result_paths(jitted.__wrapped__, jax.tree.structure(results), paths)[first]
        event = {"function": self._name, "call": self._count, "result": result}
        self._write({"event": "until", **event})
        raise FloatingPointError(
            f"{result} of call {self._count} of {self._name} has a NaN (jaxprtool record --until)"
        )


@jax.jit
def _have_nan(values: list[jax.Array]) -> list[jax.Array]:
    return [jnp.isnan(value).any() for value in values]


def dynamic_leaves(jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the flat arguments of a call without the static ones, in the order of the jaxpr."""
    info = jitted._jit_info
    static = {
        number % len(args) for number in info.static_argnums if -len(args) <= number < len(args)
    }
    dynamic = [arg for i, arg in enumerate(args) if i not in static]
    dynamic += [kwargs[name] for name in sorted(kwargs) if name not in info.static_argnames]
    return jax.tree.leaves(dynamic)


def _donated(jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the flat arguments of a call that are donated."""
    info = jitted._jit_info
    values = [args[i] for i in info.donate_argnums if -len(args) <= i < len(args)]
    values += [kwargs[name] for name in info.donate_argnames if name in kwargs]
    return jax.tree.leaves(values)
