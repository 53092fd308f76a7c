"""Translate the calls that Equinox and Flax NNX pass to `jax.jit` to those of their users.

`equinox.filter_jit` makes JAX compile a function of Equinox, which takes flat arrays, and all else
as one static argument. `nnx.jit` passes a graph and the variables of each module. Neither library
is imported here.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from jaxprtool.recording.values import ObjectNumbers, ValueTexts, attributes, shortened

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
