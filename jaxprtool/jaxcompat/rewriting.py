"""Tracing a function apart inside of a jit's own tracing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

from jax._src import api_util, core, traceback_util
from jax._src import linear_util as lu
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import DebugInfo

from jaxprtool.jaxcompat.jaxprs import ONE_JAXPR_CLASS, new_jaxpr
from jaxprtool.jaxcompat.values import AbstractRef


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


def trace_lifted(
    fun: Callable[..., list[Any]], debug: DebugInfo, args: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """The closed jaxpr of a flat function, and what it takes before its arguments.

    These are the traced values and the refs that it closes over; arrays are constants.
    """
    avals = [core.typeof(arg) for arg in args]
    wrapped = lu.wrap_init(fun, debug_info=debug)
    wrapped.debug_info = debug  # the paths of results too, which JAX would leave out
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, avals)
    count = len(consts) if ONE_JAXPR_CLASS else 0
    constvars, invars = jaxpr.invars[:count] or jaxpr.constvars, jaxpr.invars[count:]
    lifted = [
        isinstance(c, core.Tracer) or isinstance(v.aval, AbstractRef)
        for c, v in zip(consts, constvars, strict=True)
    ]
    held = [not flag for flag in lifted]
    closed = new_jaxpr(
        list(compress(constvars, held)),
        list(compress(consts, held)),
        [*compress(constvars, lifted), *invars],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.debug_info._replace(arg_names=None),
    )
    return closed, list(compress(consts, lifted))


def at_once() -> AbstractContextManager[None]:
    """A context in which operations on arrays are evaluated, whatever is being traced around."""
    return core.eval_context()


def hide_from_tracebacks(path: str) -> None:
    """Have JAX leave a file's frames out of the tracebacks that it shows, as its own."""
    traceback_util.register_exclusion(path)


hide_from_tracebacks(__file__)
