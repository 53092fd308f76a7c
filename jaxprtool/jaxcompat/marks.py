"""Calls that XLA is to keep: their marks, and what becomes of these when a program is lowered.

A call that is marked is not inlined by XLA. As a *unit* it is compiled by itself as well, once for
all calls of equal bodies. The marks are metadata of the equation, which JAX writes on the call as
attributes for XLA, and which stay with it under JAX's transformations.

What can be done with them is known when a program is lowered. XLA cannot partition a unit: it
gathers all of its operands on each device, and ends the process for some. Where it partitions a
program, and in exported ones, which may be called from such, a unit is a call that is not inlined.
Whether a backend takes the marks is tried once in a process, on a program of two additions; where
it does not, calls have those that it takes, or none. A call with a convolution has none either, if
it cannot be a unit: XLA's fast ones for the CPU are for where a module begins, not for calls in it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import jax
import numpy as np
from jax._src import config, core, pjit, sharding_impls
from jax._src.interpreters.mlir import TracebackCaches
from jax._src.lax import convolution
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import JaxprEqn
from jax.interpreters import mlir

from jaxprtool.jaxcompat.aliases import AnyJaxpr
from jaxprtool.jaxcompat.values import with_metadata

#: How a call is marked: not at all, as one that is not inlined, or as a unit.
Mark = Literal["plain", "call", "unit"]

#: From least to most: of each XLA is told one thing more.
_MARKS: tuple[Mark, ...] = ("plain", "call", "unit")

#: The key under which a marked call has its body's name, by which it is known for one of ours.
_OUTLINED = "outlined"


def marked(context: Any, mark: Mark, name: str) -> Any:
    """The context of an equation as that of a call with this mark, of the body of this name.

    Bodies that call one another have different names; XLA tells bodies apart by what they compute.
    """
    return with_metadata(
        context, {**_told(mark, name), _OUTLINED: None if mark == "plain" else name}
    )


def mark_of(eqn: JaxprEqn) -> Mark:
    """How `marked` has marked a call; "plain" for one that it has not, and for what is no jit.

    JAX's transformations mark what they write within a call like the call.
    """
    return _mark(eqn.ctx) if eqn.primitive is pjit.jit_p else "plain"


def marked_name(eqn: JaxprEqn) -> str | None:
    """The name of the body that `marked` has marked an equation with; None for one without."""
    return _name(eqn.ctx)


def convolves(jaxpr: AnyJaxpr, *, in_units: bool = True) -> bool:
    """Whether a body holds a convolution, at any depth; or at any but within units."""
    return any(
        eqn.primitive is convolution.conv_general_dilated_p
        or any(convolves(body, in_units=in_units) for body in core.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
        if in_units or mark_of(eqn) != "unit"
    )


def _name(context: Any) -> str | None:
    return (context.xla_metadata or {}).get(_OUTLINED)


def _told(mark: Mark, name: str) -> dict[str, str | None]:
    """What XLA is told of a call with this mark; None for what it is not."""
    told = ("inlineable", "false"), ("compilation_unit", name)
    count = _MARKS.index(mark)
    return {key: value if i < count else None for i, (key, value) in enumerate(told)}


def _mark(context: Any) -> Mark:
    if _name(context) is None:
        return "plain"
    return "unit" if "compilation_unit" in context.xla_metadata else "call"


def _least(*marks: Mark) -> Mark:
    return min(marks, key=_MARKS.index)


# --- lowering -------------------------------------------------------------------------------------

#: The name of the marked body that is being lowered.
_within: ContextVar[str | None] = ContextVar("_within", default=None)


def _lower_call(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Sequence[Any]:
    """Lower a jit as JAX does, and leave of our marks what can be done with them here."""
    context = ctx.jaxpr_eqn_ctx
    name = context and _name(context)
    if name is None:
        return pjit._pjit_lowering(ctx, *args, **params)
    # JAX's transformations mark all equations within a call as they find the call.
    inherited = name == _within.get()
    mark: Mark = "plain" if inherited else _least(_mark(context), _possible(ctx))
    if mark == "call" and convolves(params["jaxpr"]):
        mark = "plain"
    ctx.jaxpr_eqn_ctx = marked(context, mark, name)
    with _lowering_body(name):
        if mark == "unit":
            return _lower_without_frames(ctx, *args, **params)
        return pjit._pjit_lowering(ctx, *args, **params)


def _lower_without_frames(
    ctx: mlir.LoweringRuleContext, *args: Any, **params: Any
) -> Sequence[Any]:
    """Lower a jit whose equations are to come from no place in the source.

    XLA compiles units side by side, and joins the source frames of what it inlines in them in one
    table, without a lock (JAX 0.12): where there are frames, a compilation may go on for ever.
    """
    with config.traceback_in_locations_limit(0):
        caches = TracebackCaches()
    inner = ctx.replace(module_context=ctx.module_context.replace(traceback_caches=caches))
    with config.include_full_tracebacks_in_locations(True):
        results = pjit._pjit_lowering(inner, *args, **params)
    if inner.tokens_out is not None:  # of ordered effects
        ctx.set_tokens_out(inner.tokens_out)
    return results


@contextmanager
def _lowering_body(name: str) -> Iterator[None]:
    """Lower the body of a marked call: what JAX traces meanwhile is not marked with it."""
    before, token = config.xla_metadata_context_manager.swap_local(None), _within.set(name)
    try:
        yield
    finally:
        _within.reset(token)
        config.xla_metadata_context_manager.set_local(before)


def _possible(ctx: mlir.LoweringRuleContext) -> Mark:
    """The most that a call can be marked as in the program that is being lowered."""
    module = ctx.module_context
    whole: Mark = "unit" if _by_one_device(module) else "call"
    return _least(whole, *map(_taken_by, ctx.platforms or module.platforms))


def _by_one_device(ctx: mlir.ModuleContext) -> bool:
    """Whether XLA is certain to have nothing to partition."""
    axes = ctx.axis_context
    if ctx.lowering_parameters.for_export:
        return False
    if isinstance(axes, sharding_impls.SPMDAxisContext):
        return axes.mesh.size == 1 or axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, sharding_impls.ShardingContext) and axes.num_devices == 1


mlir.register_lowering(pjit.jit_p, _lower_call, cacheable=False)


# --- backends -------------------------------------------------------------------------------------


@functools.cache
def _taken_by(platform: str) -> Mark:
    """The most that the backend of a platform takes; all, if this machine has no such backend."""
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return "unit"
    taken, reasons = _MARKS[-1], []
    while taken != "plain" and (reason := _refusal(taken, device)):
        reasons.append(reason)
        taken = _MARKS[_MARKS.index(taken) - 1]
    if reasons:
        warnings.warn(
            f"the backend '{platform}' does not take calls marked as '{_MARKS[-1]}', and outlined "
            f"calls are marked as '{taken}' for it: {reasons[0]}",
            stacklevel=2,
        )
    return taken


def _refusal(mark: Mark, device: jax.Device) -> str | None:
    """Why a device does not take calls with this mark, in a line; None if it does."""
    told = {key: value for key, value in _told(mark, "trial").items() if value is not None}

    @jax.jit
    def body(x: jax.Array) -> jax.Array:
        return x + x

    def trial(x: jax.Array) -> jax.Array:
        with set_xla_metadata(**told):
            return body(body(x))

    found: list[str | None] = []

    def run() -> None:
        try:
            with jax.default_device(device), jax.transfer_guard("allow"):
                x = jax.device_put(np.float32(1), device)
                result = float(jax.jit(trial).lower(x).compile()(x))
            found.append(None if result == 4 else f"1 + 1, doubled, is {result} there")
        except Exception as error:  # what a compiler raises for what it does not know
            found.append((str(error).strip() or type(error).__name__).splitlines()[0])

    # In a thread of its own none of the settings hold in which the program is being lowered.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]
