"""The calls of functions: count, time, keep and stop them, and translate those of libraries."""

from __future__ import annotations

import inspect
import json
import mmap
import os
import queue
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, PyTreeDef, SequenceKey

from jaxprtool.errors import ProgramFileError
from jaxprtool.files import file_written_whole
from jaxprtool.ir.array_files import write_npz
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.jaxcompat.compile_hooks import unobserved
from jaxprtool.loading.argspec import load_arrays
from jaxprtool.recording.folder import KEPT
from jaxprtool.recording.values import ObjectNumbers, ValueTexts, attributes, shortened

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
    used = len(data.rstrip(b"\0"))  # the file has room for many more
    numbers = memoryview(data[: min(-(-used // _ROW), len(data) // _ROW) * _ROW]).cast("d")
    return [tuple(numbers[i : i + COLUMNS]) for i in range(0, len(numbers), COLUMNS)]


# --- calls of libraries ---------------------------------------------------------------------------
# Translate the calls that Equinox and Flax NNX pass to `jax.jit` to those of their users.
#
# `equinox.filter_jit` makes JAX compile a function of Equinox, which takes flat arrays, and all
# else as one static argument. `nnx.jit` passes a graph and the variables of each module. Neither
# library is imported here.

#: The maximum number of frames between the call of `jax.jit` and the frame of Equinox that holds
#: the user's function.
_MOST_FRAMES = 20

#: A result of the function that `nnx.jit` passes to `jax.jit`.
_GRAPH_RESULT = re.compile(
    r"result(?:\[0\]\[(?P<position>\d+)\]|\[1\]\['(?P<keyword>\w+)'\]|\[2\])(?P<rest>.*)"
)

_JITTED = type(jax.jit(lambda: ()))


def wrapper(fun: object) -> str:
    """Return the name of the library function that made a callable for `jax.jit`, or ""."""
    return "nnx.jit" if _package(type(fun)).startswith("flax.nnx") else ""


def wrapped_function(fun: Any) -> Callable[..., Any] | None:
    """Return the function that a callable object wraps, or None."""
    kind = type(fun)
    if kind is _JITTED or (_package(kind).startswith("equinox") and hasattr(kind, "__wrapped__")):
        return fun.__wrapped__  # type: ignore[no-any-return]
    if isinstance(fun, type):
        return None
    inner = referent(attributes(fun).get("__wrapped__"))
    return inner if callable(inner) else None


def call_method(kind: type) -> Any:
    """Return the method `__call__` of a class, or None."""
    if _is_equinox(kind):  # which wraps methods
        return kind.__call__  # type: ignore[operator]
    return inspect.getattr_static(kind, "__call__", None)


def referent(value: Any) -> Any:
    """Return the function behind a weak proxy, None if it is gone; other values unchanged."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__call__.__self__
    except ReferenceError:
        return None


def _package(kind: type) -> str:
    return kind.__module__ if isinstance(kind.__module__, str) else ""


def user_result_paths(fun: Any, tree: PyTreeDef, paths: Sequence[str]) -> list[str]:
    """Return the user's paths of the flat results of a function passed to `jax.jit`.

    Args:
        fun: The function, which may be a function of a library that calls the user's.
        tree: The tree of its results.
        paths: JAX's paths of its results.
    """
    if _is_filtered(fun):
        return [*map(_filtered_result, paths)]
    return _graph_results(fun, tree, paths) if wrapper(fun) == "nnx.jit" else list(paths)


# --- Equinox --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilteredCall:
    """A call of a function under `equinox.filter_jit`.

    Attributes:
        fun: The user's function, which takes `callee` first if that is a module.
        name: The name of the module's class; "" for a function.
        callee: The tree of the function; a single leaf unless it is a module.
        first: The tree of the first argument.
        rest: The tree of the other arguments, `(args, kwargs)`.
        count: The number of positional arguments.
        leaves: The leaves of "fun", "first" and "rest" that are not arrays, with None for arrays.
    """

    fun: Callable[..., Any]
    name: str
    callee: PyTreeDef
    first: PyTreeDef
    rest: PyTreeDef
    count: int
    leaves: dict[str, Sequence[object]]


def filtered_call(fun: Any, statics: Mapping[str, object]) -> FilteredCall | None:
    """Return the user's call behind Equinox's function, or None for any other function."""
    if not _is_filtered(fun) or len(statics) != 1:
        return None
    static: Any = next(iter(statics.values()))
    callee, first, rest = static
    leaves = {"fun": callee[0], "first": first[0], "rest": rest[0]}
    tree: PyTreeDef = callee[1]
    data = tree.node_data()
    name = ""
    if data is None:
        [user] = callee[0]
    elif data[0].__name__ == "BoundMethod":
        [user] = static_fields(*data)
        [tree] = tree.children()
    else:
        user, name = data[0].__call__, data[0].__name__
    # Equinox adds a None after the positional arguments.
    count = len(rest[1].children()[0].children())
    return FilteredCall(user, name, tree, first[1], rest[1], count, leaves)


def _is_filtered(fun: Any) -> bool:
    """Return True for the function that Equinox passes to `jax.jit`."""
    if type(fun) is not types.FunctionType or fun.__code__.co_name != "fun_wrapped":
        return False
    return bool(fun.__module__ == "equinox._jit")


def _filtered_result(path: str) -> str:
    """Return the user's path of a result; Equinox's function returns `(marker, arrays, rest)`."""
    if path.startswith("result[1]"):
        return f"result{path.removeprefix('result[1]')}"
    return path.replace("result[0]", "marker", 1)


def behind_jit(fun: Any) -> Any:
    """Return the user's function for Equinox's function, while that is passed to `jax.jit`.

    Equinox's function gets the user's function only as an argument of each call. It is therefore
    read from the frame of the caller.
    """
    if type(fun) is not types.FunctionType or fun.__module__ != "equinox._jit":
        return fun
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name == "wrapped_cacheable_fn":
            return frame.f_locals.get("user_fn", fun)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return fun


def renamed(names: Sequence[str], paths: Mapping[tuple[str, int], str]) -> tuple[str, ...]:
    """Return the user's paths of the flat arguments of Equinox's function.

    Args:
        names: Their paths in JAX's debug information: `dynamic_nodonate['first'][2]`.
        paths: The user's path for each of "fun", "first" and "rest" and a number.
    """
    user_paths = []
    for name in names:
        _, _, place = name.partition("['")
        part, _, number = place.partition("'][")
        key = part, int(number[:-1]) if number[:-1].isdecimal() else -1
        user_paths.append(paths.get(key, name))
    return tuple(user_paths)


def static_fields(kind: type, aux: Any) -> Sequence[Any]:
    """Return the values of the static fields of a node of JAX's tree, from its auxiliary data."""
    if type(aux) is not tuple:
        return (aux,)
    # Equinox puts the attributes of `functools.wraps` first.
    return aux[1:] if _is_equinox(kind) else aux


@lru_cache(1000)
def _is_equinox(kind: type) -> bool:
    """Return True for a module of Equinox."""
    return any(_package(base) == "equinox._module._module" for base in kind.__mro__)


# --- Flax NNX -------------------------------------------------------------------------------------


def is_node_states(kind: type) -> bool:
    """Return True for the type of a module of Flax NNX in the arguments of `nnx.jit`."""
    return kind.__name__ == "NodeStates" and _package(kind).startswith("flax.")


def add_graph(tree: PyTreeDef, path: str, texts: dict[str, str], values: ValueTexts) -> list[str]:
    """Add the texts of a module's submodules and static attributes, and return its variables.

    Args:
        tree: The node of the tree that has the module.
        path: The path of the module.
        texts: The texts, by path.
        values: The texts of values.

    Returns:
        The paths of the variables, in the order of the leaves; empty if they are unknown.
    """
    graph, states = tree.children()
    definition: Any = graph.node_data()[1]  # type: ignore[index]
    try:
        module = _ModuleGraph(definition, values)
        module.add(next(module.nodes), path)
    except Exception:
        text = repr(definition)
        texts[f"{path}.<graph>"] = f"={shortened(text)}"
        return []
    texts |= module.texts
    return module.leaves if len(states.children()) == 1 else []


def _graph_results(fun: Any, tree: PyTreeDef, paths: Sequence[str]) -> list[str]:
    """Return the user's paths of the results of `nnx.jit`.

    The function of NNX returns `(positional arguments, keyword arguments, result)`. The arguments
    are the modules that the user's function has changed: `updated.model.up.kernel`.
    """
    inner = wrapped_function(fun)

    def outside(path: str) -> str:
        match = _GRAPH_RESULT.fullmatch(path)
        if match is None:
            return path
        root = f"updated.{match['keyword']}" if match["keyword"] else "result"
        if match["position"]:
            parameter = _parameter(inner, int(match["position"]))
            if not parameter:
                return path
            root = f"updated.{parameter}"
        return f"{root}{match['rest']}"

    leaves = [outside(path) for path in paths]
    values, start, todo = ValueTexts(ObjectNumbers()), 0, [tree]
    while todo:
        node = todo.pop()
        data = node.node_data()
        if data is not None and is_node_states(data[0]):
            stop = start + node.num_leaves
            root = leaves[start].partition(".states[")[0] if node.num_leaves else ""
            inside = add_graph(node, root, {}, values)
            if len(inside) == node.num_leaves:
                leaves[start:stop] = inside
            start = stop
        elif data is None:
            start += 1
        else:
            todo += reversed(node.children())
    return leaves


def _parameter(fun: Any, position: int) -> str:
    """Return the name of a positional argument, `models[1]` for one of `*models`; "" if unknown."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return ""
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - i}]"
        if i == position:
            return parameter.name
    return ""


class _ModuleGraph:
    """The graph of a module: its nodes in depth-first order, and all their attributes."""

    def __init__(self, definition: Any, values: ValueTexts):
        self.nodes: Iterator[Any] = iter(definition.nodes)
        self.texts: dict[str, str] = {}
        self.leaves: list[str] = []
        self._attributes: Iterator[tuple[Any, Any]] = iter(definition.attributes)
        self._paths: dict[int, str] = {}
        self._values = values

    def add(self, node: Any, path: str) -> None:
        kind = type(node).__name__
        if kind == "NodeRef":
            self.texts[path] = f"={self._paths[node.index]}"
            return
        if node.index is not None:
            self._paths[node.index] = path
        if kind == "NodeDef":
            self._add_node(node, path)
            return
        if kind == "VariableDef":
            metadata = ", ".join(f"{k}={self._text(v)}" for k, v in node.metadata.items())
            self.texts[f"{path}.metadata"] = f"={node.type.__name__}({metadata})"
            if (ref := node.array_refdef) is not None:
                if type(ref).__name__ == "NodeRef":
                    return
                self._paths[ref.index] = path
        elif kind != "ArrayRefDef":
            raise TypeError(kind)
        self.leaves.append(path)

    def _add_node(self, node: Any, path: str) -> None:
        if not path.endswith("._pytree__state"):
            self.texts[path] = node.type.__name__
        for _ in range(node.num_attributes):
            key, attribute = next(self._attributes)
            identifier = isinstance(key, str) and key.isidentifier()
            child = f"{path}.{key}" if identifier else f"{path}[{key!r}]"
            kind = type(attribute).__name__
            if kind == "NodeAttr":
                self.add(next(self.nodes), child)
            elif kind == "Static":
                if not str(key).startswith("_pytree__"):
                    self.texts[child] = f"={self._text(attribute.value)}"
            elif kind == "LeafAttr":
                self.leaves.append(child)
            else:
                raise TypeError(kind)

    def _text(self, value: object) -> str:
        return repr(value) if type(value) in (bool, int, type(None)) else self._values(value)
