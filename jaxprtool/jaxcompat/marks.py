"""Calls that XLA is to keep: their marks, and what becomes of these when a program is lowered.

A call that is marked is not inlined by XLA. As a *unit* it is compiled by itself as well, once for
all calls of equal bodies. The marks are metadata of the equation, which JAX writes on the call as
attributes for XLA, and which stay with it under JAX's transformations.

What can be done with them is known when a program is lowered. XLA cannot partition a unit: it
gathers all of its operands on each device, and ends the process for some. Where it partitions a
program, and in exported ones, which may be called from such, a unit is a call that is not inlined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from jax._src import config, pjit, sharding_impls
from jax.extend.core import JaxprEqn
from jax.interpreters import mlir

from jaxprtool.jaxcompat.values import with_metadata

#: How a call is marked: as a unit, as a call that is not inlined, or not at all.
Mark = Literal["unit", "call", "plain"]

#: The key under which a marked call has its body's name, by which it is known for one of ours.
_OUTLINED = "outlined"

#: What XLA is told of a call with each mark.
_TOLD: dict[Mark, frozenset[str]] = {
    "unit": frozenset(("inlineable", "compilation_unit")),
    "call": frozenset(("inlineable",)),
    "plain": frozenset(),
}


def marked(context: Any, mark: Mark, name: str) -> Any:
    """The context of an equation as that of a call with this mark, of the body of this name.

    Bodies that call one another have different names; XLA tells bodies apart by what they compute.
    """
    told = {"inlineable": "false", "compilation_unit": name}
    ours = {key: told[key] if key in _TOLD[mark] else None for key in told}
    return with_metadata(context, {**ours, _OUTLINED: None if mark == "plain" else name})


def mark_of(eqn: JaxprEqn) -> Mark:
    """How `marked` has marked a call; "plain" for every other equation."""
    metadata = eqn.ctx.xla_metadata or {}
    if _OUTLINED not in metadata:
        return "plain"
    return "unit" if "compilation_unit" in metadata else "call"


# --- lowering -------------------------------------------------------------------------------------

#: The name of the marked body that is being lowered.
_within: ContextVar[str | None] = ContextVar("_within", default=None)


def _lower_call(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Sequence[Any]:
    """Lower a jit as JAX does, and leave of our marks what can be done with them here."""
    context = ctx.jaxpr_eqn_ctx
    name = context and (context.xla_metadata or {}).get(_OUTLINED)
    if name is None:
        return pjit._pjit_lowering(ctx, *args, **params)
    # JAX's transformations mark all equations within a call as they find the call.
    inherited = name == _within.get()
    if inherited:
        ctx.jaxpr_eqn_ctx = marked(context, "plain", name)
    elif "compilation_unit" in context.xla_metadata and not _by_one_device(ctx.module_context):
        ctx.jaxpr_eqn_ctx = marked(context, "call", name)
    with _lowering_body(name):
        return pjit._pjit_lowering(ctx, *args, **params)


@contextmanager
def _lowering_body(name: str) -> Iterator[None]:
    """Lower the body of a marked call: what JAX traces meanwhile is not marked with it."""
    before, token = config.xla_metadata_context_manager.swap_local(None), _within.set(name)
    try:
        yield
    finally:
        _within.reset(token)
        config.xla_metadata_context_manager.set_local(before)


def _by_one_device(ctx: mlir.ModuleContext) -> bool:
    """Whether XLA is certain to have nothing to partition."""
    axes = ctx.axis_context
    if ctx.lowering_parameters.for_export:
        return False
    if isinstance(axes, sharding_impls.SPMDAxisContext):
        return axes.mesh.size == 1 or axes.manual_axes == frozenset(axes.mesh.axis_names)
    return isinstance(axes, sharding_impls.ShardingContext) and axes.num_devices == 1


mlir.register_lowering(pjit.jit_p, _lower_call, cacheable=False)
