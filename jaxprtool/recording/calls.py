"""Count the calls of a function, and the time until their results are ready.

A thread waits for one small result of each call, so that the script need not wait. All results of a
call are ready at the same time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jaxprtool.recording.counters import Counters

#: The maximum wait for the results of the last calls at the end of the script, in seconds.
_PATIENCE = 5.0


class CallClock:
    """Waits for results in a separate thread, and adds the times to counters."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="jaxprtool record", daemon=True)
        self._thread.start()

    def called(self, counter: int, start: float, result: Any) -> None:
        """Note a call that began at `start`, by `time.perf_counter`, and returned this array."""
        if result is None:
            self._counters.add(counter)
        elif result.is_deleted() or not result.is_ready():
            self._queue.put((counter, start, result))
        else:  # as after a short call on the CPU: the thread need not wake
            self._counters.add(counter, time.perf_counter() - start, size=1)

    def stop(self) -> None:
        """Wait for the results of the last calls."""
        self._queue.put(None)
        self._thread.join(_PATIENCE)

    def _wait(self) -> None:
        while (item := self._queue.get()) is not None:
            counter, start, result = item
            try:
                result.block_until_ready()
            except Exception:  # it was donated to a later call, or its computation failed
                self._counters.add(counter)
            else:
                self._counters.add(counter, time.perf_counter() - start, size=1)
            del item, result


class TimedResult:
    """Finds the result to wait for: the smallest array that is not donated to a later call."""

    def __init__(self, donated: Sequence[Any] = ()) -> None:
        self._donated = {_type(each) for each in donated}
        self._steps: tuple[Any, ...] | None = None

    def of(self, results: Any) -> Any:
        """Return one array of the results of a call, or None if they have none."""
        if self._steps is not None:
            try:
                found = results
                for step in self._steps:
                    found = found[step[0]] if type(step) is tuple else getattr(found, step)
                if isinstance(found, jax.Array):
                    return found
            except (KeyError, IndexError, AttributeError, TypeError):
                pass  # the structure of the results has changed
        return self._searched(results)

    def _searched(self, results: Any) -> Any:
        leaves = jax.tree_util.tree_flatten_with_path(results)[0]
        arrays = [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.Array)]
        if not arrays:
            return None
        path, found = min(
            arrays, key=lambda each: (_type(each[1]) in self._donated, each[1].nbytes)
        )
        self._steps = _steps(path)
        return found


def _steps(path: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the keys, each as a tuple of one, and attributes on a path; None for other nodes."""
    steps: list[Any] = []
    for key in path:
        match key:
            case DictKey(key=name) | SequenceKey(idx=name):
                steps.append((name,))
            case GetAttrKey(name=name):
                steps.append(name)
            case FlattenedIndexKey() | _:
                return None
    return tuple(steps)


def _type(value: Any) -> Any:
    return getattr(value, "shape", ()), getattr(value, "dtype", None)
