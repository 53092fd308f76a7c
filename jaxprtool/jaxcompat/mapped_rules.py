"""The live rules of custom_jvp and custom_vjp calls that are mapped over an axis.

JAX keeps these rules as functions that are traced when the call is differentiated. A mapped rule
then traces the old one, and maps its jaxpr by `batch(jaxpr, dims, outs)`, an argument of the
functions below. `batch` takes a closed jaxpr and the mapped dimensions of its operands, and returns
the new jaxpr and the mapped dimensions of its results, which are `outs` unless these are None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from jax._src import linear_util as lu
from jax._src.interpreters import batching
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, TraceTag
from jax.extend.linear_util import WrappedFun

from jaxprtool.jaxcompat.aliases import MappedAxis, Params
from jaxprtool.jaxcompat.batching import axis_mapped
from jaxprtool.jaxcompat.custom_rules import retraced
from jaxprtool.jaxcompat.tracing import attach_constants, detach_constants, setting_of

#: Since 0.12 a mapped backward rule also takes the number of its residuals.
BWD_TAKES_NUM_RESIDUALS = "num_res" in signature(batching.batch_custom_vjp_bwd).parameters

Dims = Sequence[int | None]
Batch = Callable[[ClosedJaxpr, Dims, Dims], tuple[ClosedJaxpr, Dims]]


# --- custom_jvp ---------------------------------------------------------------------------------


def mapped_jvp_params(
    params: Params, axis: MappedAxis, batch: Batch, dims: Dims, out_dims: Dims
) -> Params:
    """Return the rule of a custom_jvp call, as a parameter of the mapped call.

    `dims` are those of the operands that the rule takes, `out_dims` those of the results.
    """
    rule = params["jvp_jaxpr_fun"]

    def mapped_jvp(*in_zeros: bool) -> tuple[Jaxpr, Sequence[Any], Sequence[bool]]:
        mapped, given, out_zeros = _mapped_jvp(rule, axis, batch, dims, in_zeros, out_dims)
        _require_unmapped(rule, given, out_dims)
        nonzero = (dim for dim, zero in zip(out_dims, out_zeros, strict=True) if not zero)
        _require_unmapped(rule, given[len(out_dims) :], [*nonzero])
        return *detach_constants(mapped), list(out_zeros)

    return {"jvp_jaxpr_fun": lu.wrap_init(mapped_jvp, debug_info=rule.debug_info)}


def _mapped_jvp(
    rule: WrappedFun,
    axis: MappedAxis,
    batch: Batch,
    dims: Dims,
    in_zeros: Sequence[bool],
    out_dims: Dims,
) -> tuple[ClosedJaxpr, Dims, Sequence[bool]]:
    """Return a rule's mapped jaxpr, and the mapped dimensions of its results and their tangents.

    The last value is True for each tangent that is zero.
    """
    with axis_mapped(axis):
        jaxpr, consts, out_zeros = rule.call_wrapped(*in_zeros)
        tangents = [dim for dim, zero in zip(dims, in_zeros, strict=True) if not zero]
        outs = [dim for dim, zero in zip(out_dims, out_zeros, strict=True) if not zero]
        closed = attach_constants(jaxpr, consts)
        return *batch(closed, (*dims, *tangents), (*out_dims, *outs)), out_zeros


def jvp_result_dims(eqn: JaxprEqn, axis: MappedAxis, batch: Batch, dims: Dims) -> Dims:
    """Return the mapped dimensions of a custom_jvp rule's results, or of their tangents.

    Its operands are mapped at `dims`. Raises the exception of the rule.
    """
    rule, count = eqn.params["jvp_jaxpr_fun"], len(eqn.outvars)
    with setting_of(eqn):
        everything, free = (False,) * len(dims), (None,) * count
        _, given, out_zeros = _mapped_jvp(rule, axis, batch, dims, everything, free)
    tangents = iter(given[count:])
    pairs = zip(given, out_zeros, strict=False)
    both = [(dim, None if zero else next(tangents)) for dim, zero in pairs]
    return [tangent if dim is None else dim for dim, tangent in both]


# --- custom_vjp ---------------------------------------------------------------------------------


def mapped_vjp_params(
    params: Params, axis: MappedAxis, batch: Batch, dims: Dims, out_dims: Dims
) -> Params:
    """Return the rules of a custom_vjp call, as parameters of the mapped call.

    The arguments are those of `mapped_jvp_params`. JAX maps the backward rule itself: it sums the
    cotangents of unmapped operands.
    """
    fwd, bwd, out_trees = params["fwd_jaxpr_thunk"], params["bwd"], params["out_trees"]
    num_consts = params["num_consts"]
    residual_dims: list[int | None] = []

    def mapped_fwd(*perturbed: bool) -> tuple[Jaxpr, Sequence[Any]]:
        mapped, given = _mapped_fwd(fwd, axis, batch, dims, perturbed, out_dims)
        count = len(given) - len(out_dims)
        _require_unmapped(fwd, given[count:], out_dims)
        residual_dims[:] = given[:count]
        return detach_constants(mapped)

    def bwd_dims() -> Dims:
        own = iter(residual_dims)
        forwarded = [next(own) if i is None else dims[i - num_consts] for i in out_trees()[2]]
        return [*forwarded, *out_dims]

    more: tuple[Any, ...] = ()
    if BWD_TAKES_NUM_RESIDUALS:
        more = (lambda: len(out_trees()[2])), params["call_jaxpr"].debug_info.func_name
    backward = batching.batch_custom_vjp_bwd(bwd, TraceTag(), axis, bwd_dims, tuple(dims), *more)

    def mapped_bwd(*args: Any) -> Any:
        with axis_mapped(axis):
            return backward.call_wrapped(*args)

    return {
        "fwd_jaxpr_thunk": lu.wrap_init(mapped_fwd, debug_info=fwd.debug_info),
        "bwd": lu.wrap_init(mapped_bwd, debug_info=bwd.debug_info),
    }


def _mapped_fwd(
    fwd: WrappedFun,
    axis: MappedAxis,
    batch: Batch,
    dims: Dims,
    perturbed: Sequence[bool],
    out_dims: Dims,
) -> tuple[ClosedJaxpr, Dims]:
    """Return a forward rule's mapped jaxpr, and the mapped dimensions of all of its results."""
    with axis_mapped(axis):
        closed = attach_constants(*fwd.call_wrapped(*perturbed))
        residuals = (None,) * (len(closed.outvars) - len(out_dims))
        return batch(closed, dims, (*residuals, *out_dims))


def vjp_result_dims(eqn: JaxprEqn, axis: MappedAxis, batch: Batch, dims: Dims) -> Dims:
    """Return the mapped dimensions of the results of a custom_vjp's forward rule.

    Its operands are mapped at `dims`. Raises the exception of the rule.
    """
    fwd, count = eqn.params["fwd_jaxpr_thunk"], len(eqn.outvars)
    with setting_of(eqn), retraced(fwd):
        everything, free = (True,) * len(dims), (None,) * count
        _, given = _mapped_fwd(fwd, axis, batch, dims, everything, free)
    return given[len(given) - count :]


def _require_unmapped(rule: WrappedFun, given: Dims, wanted: Dims) -> None:
    """Refuse a rule that returns a mapped value for a result that is unmapped."""
    if any(dim is None and got is not None for dim, got in zip(wanted, given, strict=False)):
        raise NotImplementedError(
            f"under vmap, the rule {rule.debug_info.func_name} returns a mapped value for a result "
            "that is not mapped"
        )
