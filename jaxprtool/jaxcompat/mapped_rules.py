"""The live rules of custom_jvp and custom_vjp calls that are mapped over an axis.

JAX keeps these rules as functions that are traced when the call is differentiated. A mapped rule
traces the old one then, and has the jaxpr mapped. `batch(jaxpr, dims, outs)`, which is given to
the functions below, does that: it takes a closed jaxpr and where its operands are mapped, and gives
the new one, with results that are mapped at `outs` (where these are None: as it comes), and where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core
from jax._src import linear_util as lu
from jax._src.interpreters import batching

from jaxprtool.jaxcompat.batching import axis_mapped
from jaxprtool.jaxcompat.custom_rules import BWD_GIVES_LOGS
from jaxprtool.jaxcompat.tracing import attach_constants, detach_constants

Dims = Sequence[int | None]
Batch = Callable[[Any, Dims, Dims], tuple[Any, Dims]]


def mapped_jvp_params(
    params: dict[str, Any], axis: Any, batch: Batch, dims: Dims, out_dims: Dims
) -> dict[str, Any]:
    """The rule of a custom_jvp call, as a parameter of the mapped call.

    `dims` are those of the operands that the rule takes, `out_dims` those of the results.
    """
    rule = params["jvp_jaxpr_fun"]

    def mapped_jvp(*in_zeros: bool) -> tuple[Any, Sequence[Any], Sequence[bool]]:
        with axis_mapped(axis):
            jaxpr, consts, out_zeros = rule.call_wrapped(*in_zeros)
            tangents = [dim for dim, zero in zip(dims, in_zeros, strict=True) if not zero]
            outs = [dim for dim, zero in zip(out_dims, out_zeros, strict=True) if not zero]
            wanted = (*out_dims, *outs)
            closed = attach_constants(jaxpr, consts)
            mapped, given = batch(closed, (*dims, *tangents), wanted)
        if tuple(given) != wanted:
            raise NotImplementedError(
                f"the rule {rule.debug_info.func_name}, under vmap, gives a tangent that is mapped "
                "of a result that is not"
            )
        return *detach_constants(mapped), list(out_zeros)

    return {"jvp_jaxpr_fun": lu.wrap_init(mapped_jvp, debug_info=rule.debug_info)}


def mapped_vjp_params(
    params: dict[str, Any], axis: Any, batch: Batch, dims: Dims, out_dims: Dims
) -> dict[str, Any]:
    """The rules of a custom_vjp call, as parameters of the mapped call; see above.

    Backwards, JAX maps the rule itself: it sums the cotangents of operands that are unmapped.
    """
    fwd, bwd, out_trees = params["fwd_jaxpr_thunk"], params["bwd"], params["out_trees"]
    residual_dims: list[int | None] = []

    def mapped_fwd(*perturbed: bool) -> tuple[Any, Sequence[Any]]:
        with axis_mapped(axis):
            closed = attach_constants(*fwd.call_wrapped(*perturbed))
            count = len(closed.outvars) - len(out_dims)
            mapped, given = batch(closed, dims, (*(None,) * count, *out_dims))
        residual_dims[:] = given[:count]
        return detach_constants(mapped)

    def bwd_dims() -> Dims:
        offset = params["num_consts"]
        own = iter(residual_dims)
        forwarded = [next(own) if i is None else dims[i - offset] for i in out_trees()[2]]
        return [*forwarded, *out_dims]

    more = ()
    if BWD_GIVES_LOGS:
        name = fwd.debug_info.func_name
        more = (lambda: len(out_trees()[2])), name
    mapped_bwd = batching.batch_custom_vjp_bwd(
        bwd, core.TraceTag(), axis, bwd_dims, tuple(dims), *more
    )
    return {
        "fwd_jaxpr_thunk": lu.wrap_init(mapped_fwd, debug_info=fwd.debug_info),
        "bwd": mapped_bwd,
    }
