"""Lower marked calls.

Which marks can be used is known only at lowering. XLA cannot partition a unit: it gathers all of
its operands on each device, and crashes for some. If XLA partitions a program, and in exported
programs, which a partitioned one may call, a unit becomes a call that is not inlined. Whether a
backend supports the marks is tested once in a process, on a program of two additions; if it does
not, calls get the marks that it supports, or none. A call with a convolution gets none either, if
it cannot be a unit: XLA uses its fast convolutions for the CPU only at a module's top level.

Marked bodies are lowered differently from the same equations elsewhere if XLA would not share the
code of copies, or would not terminate: see `_draw` and `_body_module`.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax._src import config, pjit
from jax._src.interpreters.mlir import TracebackCaches
from jax._src.random import threefry2x32
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core.primitives import threefry2x32_p
from jax.interpreters import mlir

from jaxprtool.jaxcompat.marks import (
    MARKS,
    Mark,
    MarkedName,
    convolves,
    marked,
    metadata_for_xla,
    metadata_of,
)


def _weakest(*marks: Mark) -> Mark:
    return min(marks, key=MARKS.index)


# --- lowering -------------------------------------------------------------------------------------


def lower_marked_call(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Sequence[Any]:
    """Lower a marked call like a jit, with the strongest mark that is possible here."""
    name: MarkedName = params["name"]
    possible = _strongest(ctx)
    mark = _weakest(name.mark, possible)
    if mark == "call" and convolves(params["jaxpr"]):
        mark = "plain"
    ctx.jaxpr_eqn_ctx = marked(ctx.jaxpr_eqn_ctx, mark, name.body)
    if mark == "plain":
        return pjit._pjit_lowering(ctx, *args, **params)
    draws_in_units = possible == "unit" and _platforms(ctx) == ("cpu",)
    module = _body_module(ctx.module_context, mark, draws_in_units)
    inner = ctx.replace(module_context=module)
    with config.include_full_tracebacks_in_locations(True) if mark == "unit" else nullcontext():
        results = pjit._pjit_lowering(inner, *args, **params)
    if inner.tokens_out is not None:  # for ordered effects
        ctx.set_tokens_out(inner.tokens_out)
    return results


@contextmanager
def _unmarked() -> Iterator[None]:
    """Trace without metadata."""
    before = config.xla_metadata_context_manager.swap_local(None)
    try:
        yield
    finally:
        config.xla_metadata_context_manager.set_local(before)


def _body_module(
    module: mlir.ModuleContext, mark: Mark, draws_in_units: bool
) -> mlir.ModuleContext:
    """Return the module context in which marked bodies are lowered.

    It has its own caches: functions that are also called elsewhere are lowered twice. XLA compiles
    units in parallel, and merges the source frames of calls inlined in them into one table,
    without a lock (JAX 0.12): with frames, a compilation may never end. So a unit's equations have
    no source locations.
    """
    key = "marked bodies", mark, draws_in_units
    caches: Any = module.cached_primitive_lowerings.get(key)
    if caches is None:
        caches = {}, {}
        module.cached_primitive_lowerings[key] = caches[1][key] = caches
    module = module.replace(lowering_cache=caches[0], cached_primitive_lowerings=caches[1])
    rules = module.lowering_parameters.override_lowering_rules or ()
    if draws_in_units and _DRAW not in rules:
        parameters = replace(module.lowering_parameters, override_lowering_rules=(*rules, _DRAW))
        module = module.replace(lowering_parameters=parameters)
    if mark == "unit":
        with config.traceback_in_locations_limit(0):
            module = module.replace(traceback_caches=TracebackCaches())
    return module


@mlir.lower_fun
def _draw(*args: jax.Array) -> Sequence[jax.Array]:
    """Draw random bits in a unit of its own, and without a loop.

    For the CPU, JAX lowers a draw to a loop. XLA makes each small loop a function, and compiles it
    for every copy of a body. Without a loop, it is elementwise code, which copies share; but
    draws with keys from other draws must not be fused, which takes minutes for a dozen.
    """
    with set_xla_metadata(**metadata_of("unit", "threefry2x32-draw")):
        return _hash(*args)


@jax.jit
def _hash(*args: jax.Array) -> Sequence[jax.Array]:
    with _unmarked():
        return threefry2x32._threefry2x32_lowering(*args, use_rolled_loops=False)


_DRAW = threefry2x32_p, _draw


def _strongest(ctx: mlir.LoweringRuleContext) -> Mark:
    """Return the strongest mark that a call can have in the program that is being lowered."""
    module = ctx.module_context
    whole: Mark = "unit" if _has_one_device(module) else "call"
    return _weakest(whole, *map(_supported, _platforms(ctx)))


def _platforms(ctx: mlir.LoweringRuleContext) -> tuple[str, ...]:
    return tuple(ctx.platforms or ctx.module_context.platforms)


def _has_one_device(ctx: mlir.ModuleContext) -> bool:
    """Return True if XLA certainly has nothing to partition."""
    axes = ctx.axis_context
    if ctx.lowering_parameters.for_export:
        return False
    if isinstance(axes, mlir.SPMDAxisContext):
        return axes.mesh.size == 1 or axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices == 1


# --- backends -------------------------------------------------------------------------------------


@functools.cache
def _supported(platform: str) -> Mark:
    """Return the strongest mark that a platform's backend supports; "unit" without a backend."""
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return "unit"
    taken, reasons = MARKS[-1], []
    while taken != "plain" and (reason := _why_unsupported(taken, device)):
        reasons.append(reason)
        taken = MARKS[MARKS.index(taken) - 1]
    if reasons:
        warnings.warn(
            f"the backend '{platform}' does not support calls marked as '{MARKS[-1]}'; outlined "
            f"calls are marked as '{taken}' instead: {reasons[0]}",
            stacklevel=2,
        )
    return taken


def _why_unsupported(mark: Mark, device: jax.Device) -> str | None:
    """Return why a device does not support calls with this mark, in a line, or None if it does."""

    @jax.jit
    def body(x: jax.Array) -> jax.Array:
        return x + x

    def trial(x: jax.Array) -> jax.Array:
        with set_xla_metadata(**metadata_for_xla(mark, "trial")):
            return body(body(x))

    found: list[str | None] = []

    def run() -> None:
        try:
            with jax.default_device(device), jax.transfer_guard("allow"):
                x = jax.device_put(np.float32(1), device)
                result = float(jax.jit(trial).lower(x).compile()(x))
            found.append(None if result == 4 else f"it computes 2 * (1 + 1) as {result}")
        except Exception as error:  # the compiler's error for an unknown attribute
            found.append((str(error).strip() or type(error).__name__).splitlines()[0])

    # A new thread has none of the settings under which the program is being lowered.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]
