"""What `jax.jit` knows of a function and of where it is called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src import api_util, core, traceback_util
from jax._src.state.types import TransformedRef
from jax._src.tree_util import tracing_registry
from jax.extend.core import DebugInfo


def check_callable(fun: Any) -> None:
    """Raise TypeError for what JAX does not transform: generators, static methods, no functions."""
    api_util.check_callable(fun)


def static_arguments(
    fun: Callable[..., Any], argnums: Any, argnames: Any
) -> tuple[tuple[int, ...], frozenset[str]]:
    """The positions and the names that are static, as `jax.jit` infers each from the other."""
    signature = api_util.fun_signature(fun)
    if signature is None:
        numbers = () if argnums is None else api_util._ensure_index_tuple(argnums)
        names = () if argnames is None else api_util._ensure_str_tuple(argnames)
    else:
        numbers, names = api_util.infer_argnums_and_argnames(signature, argnums, argnames)
    return tuple(numbers), frozenset(names)


def is_view(value: Any) -> bool:
    """Whether a value is a view of a ref, as `ref.at[0]` gives it: a leaf that has no type."""
    return isinstance(value, TransformedRef)


def open_views(tree: Any) -> tuple[Any, jax.tree_util.PyTreeDef]:
    """A tree of arguments with a list in the place of each view, of the ref and traced indices.

    Its leaves are those that `jax.jit` traces; the structure makes of them the arguments again.
    """
    opened = jax.tree.map(lambda x: tracing_registry.flatten(x)[0] if is_view(x) else x, tree)
    return opened, tracing_registry.flatten(tree)[1]


def jit_debug_info(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Collection[int],
    static_argnames: Collection[str],
    result_paths: Callable[[], tuple[str, ...]],
) -> DebugInfo:
    """What errors and jaxprs say of a function under `jax.jit`; `arg_names` are its paths."""
    return api_util.debug_info(
        "jit",
        fun,
        args,
        dict(kwargs),
        static_argnums=tuple(static_argnums),
        static_argnames=tuple(static_argnames),
    )._replace(result_paths=result_paths)


def at_once() -> AbstractContextManager[None]:
    """A context in which operations on arrays are evaluated, whatever is being traced around."""
    return core.eval_context()


def hide_from_tracebacks(path: str) -> None:
    """Have JAX leave a file's frames out of the tracebacks that it shows, as its own."""
    traceback_util.register_exclusion(path)


hide_from_tracebacks(__file__)
