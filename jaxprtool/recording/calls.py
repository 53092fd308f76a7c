"""Wrap the calls of a function: count and time them, keep their arguments, stop after some."""

from __future__ import annotations

import json
import mmap
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jaxprtool.errors import ProgramFileError
from jaxprtool.files import file_written_whole
from jaxprtool.formats.npz import write_npz
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.jaxcompat.compile_hooks import unobserved
from jaxprtool.loading.argspec import load_arrays
from jaxprtool.recording.folder import KEPT
from jaxprtool.recording.libraries import user_result_paths

# --- watched calls --------------------------------------------------------------------------------
# Wrap the calls of a function for `--calls`, `--keep` and `--until`.

#: Names the option in the error that ends a script at a NaN.
UNTIL = "jaxprtool record --until"

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
            flags = list(map(bool, _have_nan([leaf for _, leaf in floats])))
        if not any(flags):
            return
        first = next(i for (i, _), is_nan in zip(floats, flags, strict=True) if is_nan)
        paths = [f"result{jax.tree_util.keystr(path)}" for path, _ in leaves]
        result = user_result_paths(jitted.__wrapped__, jax.tree.structure(results), paths)[first]
        event = {"function": self._name, "call": self._count, "result": result}
        self._write({"event": "until", **event})
        raise FloatingPointError(
            f"{result} of call {self._count} of {self._name} has a NaN ({UNTIL})"
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


# --- calls ----------------------------------------------------------------------------------------
# Count the calls of a function, and the time until their results are ready.
#
# A thread waits for one small result of each call, so that the script need not wait. All results of
# a call are ready at the same time.

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
        self._donated = {_type(array) for array in donated}
        self._steps: tuple[Any, ...] | None = None

    def of(self, results: Any) -> Any:
        """Return one array of the results of a call, or None if they have none."""
        if self._steps is not None:
            try:
                result = results
                for step in self._steps:
                    result = result[step[0]] if type(step) is tuple else getattr(result, step)
                if isinstance(result, jax.Array):
                    return result
            except (KeyError, IndexError, AttributeError, TypeError):
                pass  # the structure of the results has changed
        return self._searched(results)

    def _searched(self, results: Any) -> Any:
        leaves = jax.tree_util.tree_flatten_with_path(results)[0]
        arrays = [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.Array)]
        if not arrays:
            return None
        path, array = min(
            arrays, key=lambda pair: (_type(pair[1]) in self._donated, pair[1].nbytes)
        )
        self._steps = _steps(path)
        return array


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


# --- kept -----------------------------------------------------------------------------------------
# Keep the arguments of the last calls of a function on disk, so that a call can be replayed.
#
#     run/process-0/kept/step.000041.npz
#
# A file has the flat arguments of one call, as bytes, and their types, in `about`. It is written
# before the call, since the call may crash, and gets its name when it is complete.

_FILE = re.compile(r"(.+)\.(\d{6,})\.npz")


class StoredLeaf(NamedTuple):
    """A flat argument as stored.

    Attributes:
        dtype: The dtype of the stored array; for keys, the dtype of their data.
        shape: The shape of the argument.
        key: The implementation of keys, or "".
        weak: Whether its type is weak.
    """

    dtype: str
    shape: tuple[int, ...]
    key: str
    weak: bool


class KeptCall(NamedTuple):
    """A call whose arguments were kept.

    Attributes:
        function: The name of the function.
        number: The number of the call, from 1.
        path: The file.
    """

    function: str
    number: int
    path: str


def write_call(folder: str, function: str, number: int, leaves: Sequence[Any], last: int) -> None:
    """Write the arguments of a call, and keep only those of the `last` calls.

    Raises:
        OutputError: If they cannot be written.
    """
    about, arrays = [], {}
    for i, leaf in enumerate(leaves):
        array, leaf_type = _stored(leaf)
        about.append(leaf_type)
        arrays[str(i)] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    path = os.path.join(folder, KEPT)
    os.makedirs(path, exist_ok=True)
    with file_written_whole(os.path.join(path, f"{function}.{number:06}.npz")) as file:
        write_npz(file, arrays)
    old = os.path.join(path, f"{function}.{number - last:06}.npz")
    if number > last and os.path.exists(old):
        os.unlink(old)


def _stored(leaf: Any) -> tuple[np.ndarray, StoredLeaf]:
    """Return the values of a flat argument on the host, and its type."""
    key, weak = "", bool(getattr(leaf, "weak_type", not hasattr(leaf, "dtype")))
    shape = np.shape(leaf)
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        key, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array, StoredLeaf(str(array.dtype), shape, key, weak)


def kept_calls(process: str) -> list[KeptCall]:
    """Return the calls that a process kept, in order."""
    try:
        names = sorted(os.listdir(os.path.join(process, KEPT)))
    except OSError:
        return []
    matches = [(name, _FILE.fullmatch(name)) for name in names]
    return [
        KeptCall(match[1], int(match[2]), os.path.join(process, KEPT, name))
        for name, match in matches
        if match is not None
    ]


def kept_types(call: KeptCall) -> list[StoredLeaf]:
    """Return the types of the arguments of a call. Raises ProgramFileError."""
    with np.load(call.path) as file:
        return _about(file["about"])


def kept_arguments(call: KeptCall) -> list[Any]:
    """Return the flat arguments of a call: NumPy arrays, keys, and numbers of weak types.

    Raises:
        ProgramFileError: If the file is damaged.
    """
    arrays: Any = load_arrays(call.path)
    try:
        about = _about(arrays["about"])
        return [_restored(arrays[str(i)], leaf) for i, leaf in enumerate(about)]
    except (KeyError, ValueError, TypeError) as error:
        raise ProgramFileError(f"'{call.path}' is damaged: {error}") from None


def _about(data: np.ndarray) -> list[StoredLeaf]:
    return [StoredLeaf(d, tuple(s), k, w) for d, s, k, w in json.loads(data.tobytes())]


def _restored(data: np.ndarray, leaf: StoredLeaf) -> Any:
    dtypes = {str(np.dtype(dtype)): np.dtype(dtype) for dtype in array_dtypes().values()}
    dtype = dtypes.get(leaf.dtype) or np.dtype(leaf.dtype)
    array = np.frombuffer(data.tobytes(), dtype)
    if leaf.key:
        data_of_key = array.reshape(*leaf.shape, -1)
        return jax.random.wrap_key_data(jnp.asarray(data_of_key), impl=leaf.key)
    array = array.reshape(leaf.shape)
    return array.item() if leaf.weak and not leaf.shape else array


# --- counters -------------------------------------------------------------------------------------
# Counters in a file that is mapped into memory, so that they survive a crash of the process.
#
# Each counter is a row of numbers. An event in the process's events says what a row counts.

#: The numbers of a row: the count, the total seconds, the longest time in seconds, the bytes.
COLUMNS = 4
_ROW = 8 * COLUMNS
_ROWS = 1 << 14


class Counters:
    """The counters of a process, in a new file."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._rows = 0
        with open(path, "xb+") as file:
            file.truncate(_ROW * _ROWS)  # a sparse file: unused rows take no disk space
            self._map = mmap.mmap(file.fileno(), _ROW * _ROWS)
        self._numbers: Any = memoryview(self._map).cast("d")

    def new(self) -> int | None:
        """Return a new counter, or None if there are too many."""
        with self._lock:
            if self._rows == _ROWS:
                return None
            self._rows += 1
            return self._rows - 1

    def add(self, counter: int, seconds: float = 0.0, size: int = 0, count: int = 1) -> None:
        """Count an event of this duration, in seconds, and size, in bytes."""
        at, numbers = counter * COLUMNS, self._numbers
        with self._lock:
            numbers[at] += count
            numbers[at + 1] += seconds
            if seconds > numbers[at + 2]:
                numbers[at + 2] = seconds
            if size:
                numbers[at + 3] += size


def read_counters(path: str) -> list[tuple[float, ...]]:
    """Return the rows of a file of counters, without the empty rows at its end."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return []
    numbers = memoryview(data[: len(data) // _ROW * _ROW]).cast("d")
    rows = [tuple(numbers[i : i + COLUMNS]) for i in range(0, len(numbers), COLUMNS)]
    while rows and not any(rows[-1]):
        rows.pop()
    return rows
