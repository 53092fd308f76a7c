"""Functions under `jax.jit`: their options, and JAX's information on a function and its call."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import api_util, traceback_util
from jax._src.state import types as state_types
from jax._src.tree_util import tracing_registry
from jax.experimental.layout import Format
from jax.extend.core import ClosedJaxpr
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.jaxprs import UNSPECIFIED, AnyJaxpr, replace_jaxpr

#: Raises TypeError for objects that JAX cannot transform: generators, static methods,
#: non-functions.
check_callable = api_util.check_callable

#: A view of a ref, such as `ref.at[0]`: a leaf that has no type.
RefView = state_types.TransformedRef

#: A context in which operations on arrays are evaluated immediately, even under an outer trace.
at_once = jax.core.eval_context

#: Make JAX hide a file's frames in the tracebacks that it shows, like its own.
hide_from_tracebacks = traceback_util.register_exclusion

#: The class of the results of `jax.jit`.
JITTED = type(jax.jit(lambda: ()))


class TracedOptions(NamedTuple):
    """The options of `jax.jit` for a call: for each flat argument and result, and for the whole.

    A placement is a sharding, a `Format` (a layout and a sharding), or None.
    """

    donated: tuple[bool, ...]
    in_placements: tuple[Any, ...]
    out_placements: tuple[Any, ...]
    compiler_options: tuple[tuple[str, Any], ...]
    keep_unused: bool
    inline: Any


def is_jitted(fun: object) -> bool:
    """Return True for a result of `jax.jit`."""
    return isinstance(fun, JITTED)


def jit_static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the static positions and names of a function under `jax.jit`."""
    info = jitted._jit_info
    return info.static_argnums, info.static_argnames


def static_values(info: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the static arguments of a call by name, from the `_jit_info` of the function."""
    names = [] if info.fun_signature is None else list(info.fun_signature.parameters.values())
    values = {}
    for i in (number + len(args) * (number < 0) for number in info.static_argnums):
        if 0 <= i < len(args):
            is_named = i < len(names) and names[i].kind is not inspect.Parameter.VAR_POSITIONAL
            values[names[i].name if is_named else f"args[{i}]"] = args[i]
    return values | {name: kwargs[name] for name in info.static_argnames if name in kwargs}


def jit_arguments(jitted: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function and the keyword arguments that `jax.jit` was called with."""
    info = jitted._jit_info
    keywords: dict[str, Any] = {
        "static_argnums": info.static_argnums,
        "static_argnames": info.static_argnames,
        "donate_argnums": info.donate_argnums,
        "donate_argnames": info.donate_argnames,
        "keep_unused": info.keep_unused,
        "inline": info.inline,
    }
    for place in ("in", "out"):
        tree = getattr(info, f"{place}_shardings_treedef")
        pairs = zip(
            getattr(info, f"{place}_shardings_leaves"),
            getattr(info, f"{place}_layouts_leaves"),
            strict=True,
        )
        placements = [_placement(*pair) for pair in pairs]
        if any(placement is not None for placement in placements):
            keywords[f"{place}_shardings"] = jax.tree.unflatten(tree, placements)
    if info.compiler_options_kvs:
        keywords["compiler_options"] = dict(info.compiler_options_kvs)
    for name in ("device", "backend"):
        if getattr(info, name) is not None:
            keywords[name] = getattr(info, name)
    return jitted._fun, keywords


def traced_options(traced: jax.stages.Traced) -> TracedOptions:
    """Return the options of a traced function, for the arguments that it is called with."""
    return options_of(traced._params, len(traced._consts))


def options_of(params: Mapping[str, Any], captured: int) -> TracedOptions:
    """Return the options of a call of `jit` from its parameters.

    Args:
        params: The parameters of the primitive.
        captured: The number of values that it closes over, which come before the arguments.
    """
    ins = zip(params["in_shardings"], params["in_layouts"], strict=True)
    outs = zip(params["out_shardings"], params["out_layouts"], strict=True)
    return TracedOptions(
        donated=tuple(params["donated_invars"])[captured:],
        in_placements=tuple(_placement(*pair) for pair in ins)[captured:],
        out_placements=tuple(_placement(*pair) for pair in outs),
        compiler_options=tuple(params["compiler_options_kvs"]),
        keep_unused=params["keep_unused"],
        inline=params["inline"],
    )


def captured_values(traced: jax.stages.Traced) -> list[Any]:
    """Return the values that a traced function closes over and takes before its arguments."""
    return list(traced._consts)


def with_constants(jaxpr: AnyJaxpr, places: Sequence[int], values: Sequence[Any]) -> ClosedJaxpr:
    """Return a closed jaxpr whose arguments at `places` are constants."""
    if not places:
        return jaxpr
    bound = [jaxpr.invars[i] for i in places]
    free = [v for v in jaxpr.invars if v not in bound]
    constvars, consts = [*jaxpr.constvars, *bound], [*jaxpr.consts, *values]
    return replace_jaxpr(jaxpr, constvars=constvars, consts=consts, invars=free)


def _placement(sharding: object, layout: object) -> Any:
    specified = None if sharding is UNSPECIFIED else sharding
    return specified if layout is None else Format(layout, specified)


def static_arguments(
    fun: Callable[..., Any], argnums: Any, argnames: Any
) -> tuple[tuple[int, ...], frozenset[str]]:
    """Return the static positions and names, inferred from each other as in `jax.jit`."""
    signature = api_util.fun_signature(fun)
    if signature is None:
        numbers = () if argnums is None else _indices(argnums)
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
    else:
        numbers, names = api_util.infer_argnums_and_argnames(signature, argnums, argnames)
    return tuple(numbers), frozenset(names)


def _indices(argnums: Any) -> tuple[int, ...]:
    """Return a position, or positions, as a tuple."""
    try:
        return (operator.index(argnums),)
    except TypeError:
        return tuple(map(operator.index, argnums))


def open_views(tree: PyTreeDef) -> tuple[Any, jax.tree_util.PyTreeDef]:
    """Return a tree of arguments with each view replaced by a list of its ref and traced indices.

    Its leaves are those that `jax.jit` traces; the structure rebuilds the arguments from them.
    """
    flatten = tracing_registry.flatten
    opened = jax.tree.map(lambda x: flatten(x)[0] if isinstance(x, RefView) else x, tree)
    return opened, flatten(tree)[1]


hide_from_tracebacks(__file__)
