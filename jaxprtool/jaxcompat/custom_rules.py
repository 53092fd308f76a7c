"""The live rules of custom_jvp and custom_vjp: what they compute, and rules made of jaxprs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any

import jax
from jax._src import ad_util, core
from jax._src import linear_util as lu
from jax.extend.core import DebugInfo, JaxprEqn, jaxpr_as_fun

from jaxprtool.jaxcompat.tracing import attach_constants, detach_constants, setting_of, trace_flat


def custom_jvp_rule(eqn: JaxprEqn) -> tuple[str, Any, tuple[bool, ...]]:
    """A custom_jvp call's rule: its name, its closed jaxpr, and which tangents out are zero.

    The jaxpr takes the primals and all of their tangents, and gives the results and those of
    their tangents that are not symbolic zeros. Raises what the user's rule raises.
    """
    params = eqn.params
    rule = params["jvp_jaxpr_fun"]
    count = len(eqn.invars) - params["num_consts"]
    with setting_of(eqn):
        jaxpr, consts, out_zeros = rule.call_wrapped(*[False] * count)
    return rule.debug_info.func_name, attach_constants(jaxpr, consts), tuple(out_zeros)


def custom_jvp_rule_param(
    name: str, rule: Callable[[], tuple[Any, Sequence[bool]]]
) -> dict[str, Any]:
    """The parameter that makes a custom_jvp call follow a closed jaxpr.

    `rule()`, which is called when the call is differentiated, gives the jaxpr and the mask of
    `custom_jvp_rule`.
    """

    def jvp(*in_zeros: bool) -> tuple[Any, Sequence[Any], list[bool]]:
        jaxpr, out_zeros = rule()
        if not any(in_zeros):
            return *detach_constants(jaxpr), list(out_zeros)
        avals = [v.aval for v in jaxpr.invars]
        num_primals = len(avals) // 2
        tangents = avals[num_primals:]

        def with_zeros(*args: Any) -> Any:
            given = iter(args[num_primals:])
            pairs = zip(in_zeros, tangents, strict=True)
            full = [ad_util.zeros_like_aval(a) if zero else next(given) for zero, a in pairs]
            return jaxpr_as_fun(jaxpr)(*args[:num_primals], *full)

        given = [a for zero, a in zip(in_zeros, tangents, strict=True) if not zero]
        made = trace_flat(with_zeros, name, [*avals[:num_primals], *given])
        return *detach_constants(made), list(out_zeros)

    debug = DebugInfo("custom_jvp jvp", name, None, None)
    return {"jvp_jaxpr_fun": lu.wrap_init(jvp, debug_info=debug)}


def custom_vjp_rule(
    eqn: JaxprEqn,
) -> tuple[tuple[str, str], Any, Any, tuple[int | None, ...], tuple[bool, ...]]:
    """A custom_vjp call's rules: their names, fwd and bwd as closed jaxprs, and two masks.

    fwd takes the primals and gives the residuals, then the results. Residuals that are primals
    are left out of what it gives: the first mask has a primal's index for each of these, None
    for the others. bwd takes all residuals and the results' cotangents and gives the primals'
    cotangents, without the symbolic zeros that the second mask marks. Raises what the rules raise,
    and TypeError for a kind of rule that is more than a function of residuals and cotangents.
    """
    params = eqn.params
    fwd, bwd = params["fwd_jaxpr_thunk"], params["bwd"]
    primals = [v.aval for v in eqn.invars[params["num_consts"] :]]
    if getattr(bwd.f, "call_with_accums", None) is not None:
        raise TypeError("its backward rule accumulates into gradient buffers")
    with setting_of(eqn):
        forward = attach_constants(*fwd.call_wrapped(*[True] * len(primals)))
        _, res_tree, forwarded = params["out_trees"]()
        new = iter(v.aval for v in forward.outvars)
        residuals = [next(new) if i is None else primals[i] for i in forwarded]
        assert len(residuals) == res_tree.num_leaves
        cotangents = [v.aval.to_ct_aval() for v in eqn.outvars]
        zeros: list[bool] = []

        def backward(*args: Any) -> list[Any]:
            cts = bwd.call_wrapped(*args)
            if BWD_GIVES_LOGS:
                cts, logs = cts
                if logs is not None:
                    raise TypeError("its backward rule writes a log")
            zeros[:] = [isinstance(ct, ad_util.Zero | ad_util.SymbolicZero) for ct in cts]
            return [ct for ct, zero in zip(cts, zeros, strict=True) if not zero]

        made = trace_flat(backward, bwd.debug_info.func_name, [*residuals, *cotangents])
    names = fwd.debug_info.func_name, bwd.debug_info.func_name
    return names, forward, made, tuple(forwarded), tuple(zeros)


def custom_vjp_rule_params(
    names: tuple[str, str], rules: Callable[[], tuple[Any, ...]], primals: Sequence[Any]
) -> dict[str, Any]:
    """The parameters that make a custom_vjp call follow two closed jaxprs.

    `rules()`, which is called when the call is differentiated, gives the two jaxprs and the two
    masks of `custom_vjp_rule`. `primals` are the types of the operands that are no constants.
    """

    def fwd(*perturbed: bool) -> tuple[Any, Sequence[Any]]:
        return detach_constants(rules()[0])

    def bwd(*args: Any) -> Any:
        _, backward, forwarded, in_zeros = rules()
        residuals, cts = args[: len(forwarded)], args[len(forwarded) :]
        cotangents = [v.aval for v in backward.invars[len(forwarded) :]]
        full = [
            ad_util.zeros_like_aval(aval) if isinstance(ct, ad_util.SymbolicZero) else ct
            for ct, aval in zip(cts, cotangents, strict=True)
        ]
        given = iter(jaxpr_as_fun(backward)(*residuals, *full))
        result = [
            ad_util.Zero(aval.to_ct_aval()) if zero else next(given)
            for zero, aval in zip(in_zeros, primals, strict=True)
        ]
        return (result, None) if BWD_GIVES_LOGS else result

    def out_trees() -> tuple[Any, Any, list[int | None]]:
        _, backward, forwarded, _ = rules()
        num_residuals = len(forwarded)
        results, residuals = len(backward.invars) - num_residuals, num_residuals
        return _flat_tree(results), _flat_tree(residuals), list(forwarded)

    fwd_name, bwd_name = names
    fwd_debug = DebugInfo("custom_vjp fwd", fwd_name, None, None)
    bwd_debug = DebugInfo("custom_vjp bwd", bwd_name, None, None)
    return {
        "fwd_jaxpr_thunk": lu.wrap_init(fwd, debug_info=fwd_debug),
        "bwd": lu.wrap_init(bwd, debug_info=bwd_debug),
        "out_trees": out_trees,
    }


def _flat_tree(count: int) -> Any:
    return jax.tree.structure([0] * count)


class _Identity:
    """An object that equals nothing but itself, to be part of a key."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


#: What JAX makes anew for each call of a custom rule, and what the rule does not depend on.
_OF_ONE_CALL = (core.Trace, lu.Store, lu.EqualStore, lu.InitialResultPaths)


def live_key(value: Any) -> Hashable:
    """A key for a live rule: equal for two closures that JAX made around the same functions.

    JAX wraps a user's rule anew for each call of the custom function. The key is made of what the
    wrappers close over: the user's functions and static arguments, trees and types.
    """
    match value:
        case lu.WrappedFun():
            return live_key(value.f), live_key(tuple(value.transforms))
        case FunctionType() if (value.__module__ or "").startswith(("jax.", "jaxprtool.")):
            free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            # `_memoize` keeps its table, and a mark, beside the function.
            cells = [cell for name, cell in free if name not in ("cells", "sentinel")]
            return value.__code__, tuple(live_key(cell.cell_contents) for cell in cells)
        case tuple() | list():
            return tuple(map(live_key, value))
        case set():
            return frozenset(map(live_key, value))
        case _ if isinstance(value, _OF_ONE_CALL):
            return None
    value = getattr(value, "val", value)  # Hashable and Unhashable hold static arguments
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


#: Since 0.12 a backward rule gives its cotangents and a log, which is None for most.
BWD_GIVES_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")
