"""Trace flat functions to closed jaxprs, in the context that an equation was traced in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import compress
from typing import Any

import jax
from jax._src import config, core, pjit
from jax._src import linear_util as lu
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import jit_p
from jax.interpreters.partial_eval import trace_to_jaxpr_dynamic

from jaxprtool.jaxcompat.aliases import AnyJaxpr, Aval, Params
from jaxprtool.jaxcompat.jaxprs import (
    ONE_JAXPR_CLASS,
    axes_bound,
    close_jaxpr,
    new_jaxpr,
    open_jaxpr,
)
from jaxprtool.jaxcompat.marked_calls import from_jax
from jaxprtool.jaxcompat.values import UNSPECIFIED, AbstractRef


@contextmanager
def setting_of(eqn: JaxprEqn) -> Iterator[None]:
    """Enter the context that an equation was traced in, with its manual axes bound.

    Types are checked for variation over these axes if a value of the equation varies.
    """
    mesh = eqn.ctx.cur_abstract_mesh
    sizes = [] if mesh.empty else [(name, mesh.shape[name]) for name in mesh.manual_axes]
    types = (getattr(v.aval, "mat", None) for v in (*eqn.invars, *eqn.outvars)) if sizes else ()
    varies = any(manual is not None and manual.varying for manual in types)
    with eqn.ctx.manager, axes_bound(sizes), config._check_vma(varies):
        yield


#: The settings that determine how JAX's functions are traced, with the defaults of JAX's releases.
_DEFAULTS = {
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False,
    "jax_enable_custom_prng": False,
    "jax_high_dynamic_range_gumbel": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_random_seed_offset": 0,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_partitionable": True,
}


@contextmanager
def default_settings(x64: bool) -> Iterator[None]:
    """Trace with JAX's default configuration, and 64-bit types if `x64`."""
    metadata = config.xla_metadata_context_manager.swap_local(None)
    try:
        with ExitStack() as stack:
            for name, value in {**_DEFAULTS, "jax_enable_x64": x64}.items():
                if name in config.config_states:  # not every release has every setting
                    stack.enter_context(config.config_states[name](value))
            yield
    finally:
        config.xla_metadata_context_manager.set_local(metadata)


@contextmanager
def double_precision() -> Iterator[None]:
    """Enable 64-bit types."""
    with config.config_states["jax_enable_x64"](True):
        yield


def trace_flat(fun: Callable[..., Any], name: str, avals: Sequence[Aval]) -> ClosedJaxpr:
    """Return the closed jaxpr of a function of flat arguments of the given types.

    Calls and loops become equations also under `jax_disable_jit`.
    """
    wrapped = lu.wrap_init(fun, debug_info=DebugInfo("custom rule", name, None, None))
    with jax.disable_jit(False):
        jaxpr, _, consts = trace_to_jaxpr_dynamic(wrapped, list(avals))
    return attach_constants(jaxpr, consts)


def trace_in_setting(
    fun: Callable[..., Any], avals: Sequence[Aval], eqn: JaxprEqn | None
) -> ClosedJaxpr:
    """Return the closed jaxpr of a flat function, in the context that an equation was traced in."""
    if eqn is None:
        return trace_flat(fun, "rule", avals)
    with setting_of(eqn):
        return trace_flat(fun, "rule", avals)


def attach_constants(jaxpr: AnyJaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """Return a closed jaxpr from the result of JAX's tracing: an open one and its constants."""
    jaxpr = from_jax(jaxpr)
    if not ONE_JAXPR_CLASS:
        return ClosedJaxpr(jaxpr, consts)
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    count = len(consts)
    constvars, invars = jaxpr.invars[:count], jaxpr.invars[count:]
    return jaxpr.replace(constvars=constvars, consts=consts, invars=invars, debug_info=names)


def detach_constants(closed: ClosedJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Return an open jaxpr and its constants: the inverse of `attach_constants`."""
    if not ONE_JAXPR_CLASS:
        return closed.jaxpr, closed.consts
    return pe.convert_constvars_jaxpr(closed), closed.consts


def traced_like(eqn: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Var]) -> ClosedJaxpr:
    """Return the closed jaxpr of `fun` on flat values of `operands`' types, in `eqn`'s context."""
    return trace_in_setting(fun, [v.aval for v in operands], eqn)


def trace_lifted(
    fun: Callable[..., list[Any]], debug: DebugInfo, args: Sequence[Any]
) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the closed jaxpr of a flat function, and the values it takes before its arguments.

    These are the traced values and the refs that it closes over; arrays are constants. They have no
    names in the jaxpr's `debug_info`.
    """
    avals = [jax.typeof(arg) for arg in args]
    wrapped = lu.wrap_init(fun, debug_info=debug)
    wrapped.debug_info = debug  # with the paths of results, which JAX would leave out
    jaxpr, _, consts = trace_to_jaxpr_dynamic(wrapped, avals)
    jaxpr = from_jax(jaxpr)
    if not consts:
        return close_jaxpr(jaxpr), []
    count = len(consts) if ONE_JAXPR_CLASS else 0
    constvars, invars = jaxpr.invars[:count] or jaxpr.constvars, jaxpr.invars[count:]
    lifted = [
        isinstance(const, jax.core.Tracer) or isinstance(var.aval, AbstractRef)
        for const, var in zip(consts, constvars, strict=True)
    ]
    held = [not flag for flag in lifted]
    known = debug.arg_names
    names = None if known is None else (*[""] * sum(lifted), *known)
    closed = new_jaxpr(
        list(compress(constvars, held)),
        list(compress(consts, held)),
        [*compress(constvars, lifted), *invars],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.debug_info._replace(arg_names=names),
    )
    return closed, list(compress(consts, lifted))


def bind_jit(
    fun: Callable[..., list[Any]], name: str, debug: DebugInfo, args: Sequence[Any]
) -> list[Any]:
    """Return `fun(*args)`, called by a jit equation of this name, for flat values.

    Traced values that it closes over become operands, arrays stay constants of its jaxpr. This
    takes a fifth of the time of `jax.jit`, which handles signatures, caches and options.
    """
    closed, lifted = trace_lifted(fun, debug, args)
    args = *lifted, *args
    ins, outs = len(args), len(open_jaxpr(closed).outvars)
    return jit_p.bind(
        *args,
        jaxpr=closed,
        name=name,
        ctx_mesh=pjit.get_ctx_mesh(False),
        in_shardings=(UNSPECIFIED,) * ins,
        out_shardings=(UNSPECIFIED,) * outs,
        in_layouts=(None,) * ins,
        out_layouts=(None,) * outs,
        donated_invars=(False,) * ins,
        **_other_jit_params(),
    )


@cache
def _other_jit_params() -> Params:
    """Return the parameters that all jits without options share."""
    params = jax.make_jaxpr(jax.jit(list))().eqns[0].params
    return {k: params[k] for k in ("keep_unused", "inline", "compiler_options_kvs")}


def is_staging() -> bool:
    """Return True if the current operations become a jaxpr, also under other JAX transformations.

    Our own `vmap` does not count: some operations become a jaxpr, but it is evaluated immediately.
    """
    trace = core.trace_ctx.trace
    while trace is not None and type(trace) is not pe.DynamicJaxprTrace:
        trace = getattr(trace, "parent_trace", None)
    return trace is not None
