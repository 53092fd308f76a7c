"""The live rules of custom_jvp and custom_vjp: their jaxprs, and rules made from jaxprs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import jax
from jax._src import linear_util as lu
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, TraceTag
from jax.extend.linear_util import WrappedFun
from jax.interpreters.ad import Zero, zeros_like_aval
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.aliases import AnyJaxpr, Aval, Params
from jaxprtool.jaxcompat.jaxprs import open_jaxpr
from jaxprtool.jaxcompat.marked_calls import jaxpr_as_fun
from jaxprtool.jaxcompat.tracing import attach_constants, detach_constants, setting_of, trace_flat


@dataclass(frozen=True, eq=False)
class JVPRule:
    """The jaxpr of a custom_jvp call's rule.

    The primals are the call's operands after its first `num_consts`.

    Attributes:
        name: The name of the rule.
        jaxpr: A closed jaxpr that takes (*primals, *tangents). It returns the results, then the
            tangents of the results that have False in `out_zeros`. It is None for a rule that
            always raises.
        out_zeros: Whether the tangent of each result is zero.
        perturbed: Whether each primal may have a tangent that is not zero.
        raises: The exception of a rule that always raises, as at the end of a traceback.
    """

    name: str
    jaxpr: AnyJaxpr
    out_zeros: tuple[bool, ...]
    perturbed: tuple[bool, ...]
    raises: str | None = None


@dataclass(frozen=True, eq=False)
class VJPRule:
    """The jaxprs of a custom_vjp call's two rules.

    The primals are the call's operands after its first `num_consts`.

    Attributes:
        fwd_name: The name of the forward rule.
        bwd_name: The name of the backward rule.
        fwd: A closed jaxpr that takes the primals and returns residuals, then the results.
        bwd: A closed jaxpr that takes (*residuals, *cotangents of the results) and returns the
            cotangents of those primals that have False in `in_zeros`.
        forwarded: For each residual, the index of the primal that it is; None if `fwd` returns it.
        in_zeros: Whether the cotangent of each primal is zero.
        perturbed: The primals that the rules may be differentiated with respect to.
    """

    fwd_name: str
    bwd_name: str
    fwd: ClosedJaxpr
    bwd: ClosedJaxpr
    forwarded: tuple[int | None, ...]
    in_zeros: tuple[bool, ...]
    perturbed: tuple[bool, ...]


def custom_jvp_rule(eqn: JaxprEqn, perturbed: Sequence[bool]) -> JVPRule:
    """Return the rule of a custom_jvp call, with tangents for the primals that are `perturbed`.

    The other tangents are symbolic zeros for the rule, and unused. Raises the exception of the
    user's rule.
    """
    params = eqn.params
    rule = params["jvp_jaxpr_fun"]
    with setting_of(eqn):
        traced = rule.call_wrapped(*[not p for p in perturbed])
        *_, out_zeros = traced
        jaxpr = attach_constants(*traced[:2])
        if not all(perturbed):
            jaxpr = _with_all_tangents(jaxpr, rule.debug_info.func_name, perturbed, eqn)
    return JVPRule(rule.debug_info.func_name, jaxpr, tuple(out_zeros), tuple(perturbed))


def _with_all_tangents(
    jaxpr: AnyJaxpr, name: str, perturbed: Sequence[bool], eqn: JaxprEqn
) -> ClosedJaxpr:
    """Extend a rule's jaxpr, which takes the tangents of `perturbed` primals, to all tangents."""
    count = len(perturbed)
    primals = [v.aval for v in eqn.invars[eqn.params["num_consts"] :]]

    def rule(*args: Any) -> Any:
        tangents = [t for t, p in zip(args[count:], perturbed, strict=True) if p]
        return jaxpr_as_fun(jaxpr)(*args[:count], *tangents)

    return trace_flat(rule, name, [*primals, *(aval.to_tangent_aval() for aval in primals)])


def custom_jvp_rule_param(name: str, rule: Callable[[Sequence[bool]], JVPRule]) -> Params:
    """Return the parameter that makes a custom_jvp call follow `rule(perturbed)`.

    `rule` is called when the call is differentiated with respect to those primals. It may raise.
    """

    def jvp(*in_zeros: bool) -> tuple[Jaxpr, Sequence[Any], list[bool]]:
        found = rule([not zero for zero in in_zeros])
        jaxpr, out_zeros = found.jaxpr, found.out_zeros
        if not any(in_zeros):
            return *detach_constants(jaxpr), list(out_zeros)
        avals = [v.aval for v in jaxpr.invars]
        num_primals = len(avals) // 2
        tangents = avals[num_primals:]

        def with_zeros(*args: Any) -> Any:
            given = iter(args[num_primals:])
            pairs = zip(in_zeros, tangents, strict=True)
            full = [zeros_like_aval(a) if zero else next(given) for zero, a in pairs]
            return jaxpr_as_fun(jaxpr)(*args[:num_primals], *full)

        given = [a for zero, a in zip(in_zeros, tangents, strict=True) if not zero]
        made = trace_flat(with_zeros, name, [*avals[:num_primals], *given])
        return *detach_constants(made), list(out_zeros)

    debug = DebugInfo("custom_jvp jvp", name, None, None)
    return {"jvp_jaxpr_fun": lu.wrap_init(jvp, debug_info=debug)}


def custom_vjp_rule(eqn: JaxprEqn, perturbed: Sequence[bool]) -> VJPRule:
    """Return the rules of a custom_vjp call, for derivatives by the primals that are `perturbed`.

    Raises the exceptions of the rules, and TypeError for a rule that is more than a function of
    residuals and cotangents.
    """
    params, num_consts = eqn.params, eqn.params["num_consts"]
    fwd, bwd = params["fwd_jaxpr_thunk"], params["bwd"]
    if getattr(bwd.f, "call_with_accums", None) is not None:
        raise TypeError("its backward rule accumulates into gradient buffers")
    with setting_of(eqn), retraced(fwd):
        forward = attach_constants(*fwd.call_wrapped(*perturbed))
        _, res_tree, forwarded_operands = params["out_trees"]()
        forwarded = [None if i is None else i - num_consts for i in forwarded_operands]
        given = iter(forward.outvars)
        operands = eqn.invars[num_consts:]
        held = [operands[i] if i is not None else next(given) for i in forwarded]
        residuals = [atom.aval for atom in held]
        assert len(residuals) == res_tree.num_leaves
        cotangents = [v.aval.to_ct_aval() for v in eqn.outvars]
        zeros: list[bool] = []

        def backward(*args: Any) -> list[Any]:
            # A residual that fwd returns as a number is one for bwd too, which may branch on it.
            known = [
                atom.val if isinstance(atom, Literal) and i is None else arg
                for atom, i, arg in zip(held, forwarded, args, strict=False)
            ]
            cts = bwd.call_wrapped(*known, *args[len(known) :])
            if BWD_RETURNS_LOGS:
                cts, logs = cts
                if logs is not None:
                    raise TypeError("its backward rule returns a log")
            zeros[:] = [isinstance(ct, Zero | SymbolicZero) for ct in cts]
            return [ct for ct, zero in zip(cts, zeros, strict=True) if not zero]

        made = trace_flat(backward, bwd.debug_info.func_name, [*residuals, *cotangents])
    names = fwd.debug_info.func_name, bwd.debug_info.func_name
    return VJPRule(*names, forward, made, tuple(forwarded), tuple(zeros), tuple(perturbed))


@contextmanager
def retraced(fwd: WrappedFun) -> Iterator[None]:
    """Make JAX trace a forward rule again, in this context and on its next call.

    JAX caches the rule's jaxpr for every set of perturbed operands, but the trees of its residuals
    only for the set that it traced last.
    """
    _forget(fwd)
    try:
        yield
    finally:
        _forget(fwd)


def _forget(rule: object) -> None:
    """Clear the `_memoize` caches of a function, and of those that it closes over."""
    if isinstance(rule, WrappedFun):
        _forget(rule.f)
    elif _is_wrapper(rule):
        for name, held in cells_of(rule).items():
            if name == "cells" and isinstance(held, dict):
                held.clear()
            else:
                _forget(held)


def with_leading_consts(params: Params, count: int) -> Params:
    """Return the parameters of a custom call that change if it takes `count` more constants."""
    made: Params = {"num_consts": params["num_consts"] + count}
    if "out_trees" not in params:
        return made
    out_trees = params["out_trees"]

    def shifted() -> tuple[PyTreeDef, PyTreeDef, list[int | None]]:
        out_tree, res_tree, forwarded = out_trees()
        return out_tree, res_tree, [None if i is None else i + count for i in forwarded]

    return {**made, "out_trees": shifted}


def custom_vjp_rule_params(
    names: tuple[str, str],
    rules: Callable[[Sequence[bool]], VJPRule],
    primals: Sequence[Aval],
    num_consts: int,
) -> Params:
    """Return the parameters that make a custom_vjp call follow `rules(perturbed)`.

    `rules` is called when the call is differentiated with respect to those primals. It may raise.
    `primals` are the types of the operands after the first `num_consts`.
    """

    def fwd(*perturbed: bool) -> tuple[Jaxpr, Sequence[Any]]:
        return detach_constants(rules(perturbed).fwd)

    def bwd(*args: Any) -> Any:
        found = rules(())
        count = len(found.forwarded)
        residuals, cts = args[:count], args[count:]
        cotangents = [v.aval for v in found.bwd.invars[count:]]
        full = [
            zeros_like_aval(aval) if isinstance(ct, SymbolicZero) else ct
            for ct, aval in zip(cts, cotangents, strict=True)
        ]
        given = iter(jaxpr_as_fun(found.bwd)(*residuals, *full))
        result = [
            Zero(aval.to_ct_aval()) if zero else next(given)
            for zero, aval in zip(found.in_zeros, primals, strict=True)
        ]
        return (result, None) if BWD_RETURNS_LOGS else result

    def out_trees() -> tuple[PyTreeDef, PyTreeDef, list[int | None]]:
        found = rules(())
        operands = [None if i is None else i + num_consts for i in found.forwarded]
        count = len(operands)
        return _flat_tree(len(found.bwd.invars) - count), _flat_tree(count), operands

    fwd_name, bwd_name = names
    fwd_debug = DebugInfo("custom_vjp fwd", fwd_name, None, None)
    bwd_debug = DebugInfo("custom_vjp bwd", bwd_name, None, None)
    return {
        "fwd_jaxpr_thunk": lu.wrap_init(fwd, debug_info=fwd_debug),
        "bwd": lu.wrap_init(bwd, debug_info=bwd_debug),
        "out_trees": out_trees,
    }


def _flat_tree(count: int) -> PyTreeDef:
    return jax.tree.structure([0] * count)


def live_function(params: Params) -> Any:
    """Return the Python function of a custom call's rule; the backward rule's if it has two."""
    return params["jvp_jaxpr_fun" if "jvp_jaxpr_fun" in params else "bwd"].f


class _Identity:
    """An object that equals only itself, as a part of a key."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


#: The modules of the functions that wrap a user's rule.
WRAPPERS = ("jax.", "jaxprtool.")

#: Objects that JAX creates for each call of a custom rule, and on which the rule does not depend.
OF_ONE_CALL = (jax.core.Trace, TraceTag, lu.Store, lu.EqualStore, lu.InitialResultPaths)


_AFTER_DCE: dict[str, Callable[[Any], Any]] = {
    "eqn": lambda eqn: eqn.params["symbolic_zeros"],
    "call_jaxpr": lambda call_jaxpr: tuple(v.aval for v in call_jaxpr.outvars),
}

#: For JAX's functions that close over more than they use: the values that they use.
_COUNTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "memoized": {"cells": lambda table: None, "sentinel": lambda mark: None},
    "mapped_fwd": {"residual_dims": lambda dims: None},
    "bwd_dims": {"residual_dims": lambda dims: None},
    "rule": {"traced": lambda traced: None},
    "dce_jvp_jaxpr_thunk": _AFTER_DCE,
    "dce_fwd_jaxpr_thunk": _AFTER_DCE,
    "dce_bwd": _AFTER_DCE,
    "wrapped_fwd": {"debug_fun": lambda debug: None, "debug_fwd": lambda debug: None},
}


def live_key(value: object) -> Hashable:
    """Return a key for a live rule, equal for closures that JAX made around the same functions.

    JAX wraps a user's rule for each call of the custom function. The key consists of the values
    that the wrappers close over: the user's functions and static arguments, trees and types.
    """
    match value:
        case WrappedFun():
            if (passed_on := _forwarded_rule(value)) is not None:
                return live_key(passed_on)
            return live_key(value.f), live_key(tuple(filter(_counts, value.transforms)))
        case FunctionType() if _is_wrapper(value):
            held = cells_of(value)
            for name, what_counts in _COUNTS.get(value.__code__.co_name, {}).items():
                if name in held:
                    held[name] = what_counts(held[name])
            return value.__code__, tuple(map(live_key, held.values()))
        case tuple() | list():
            return tuple(map(live_key, value))
        case set():
            return frozenset(map(live_key, value))
        case _ if isinstance(value, OF_ONE_CALL):
            return None
    value = getattr(value, "val", value)  # Hashable and Unhashable hold static arguments
    try:
        hash(value)
    except TypeError:
        return _unhashable_key(value)
    return value


def _unhashable_key(value: object) -> Hashable:
    """Return the structure and the keys of a container's elements; for others, their identity."""
    leaves, tree = jax.tree.flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return _Identity(value)
    try:
        hash(tree)
    except TypeError:
        return _Identity(value)
    return tree, tuple(map(live_key, leaves))


def _forwarded_rule(rule: WrappedFun) -> WrappedFun | None:
    """Return the rule that a rule only forwards to, or None.

    When a jaxpr is evaluated, JAX binds its custom calls again, with rules that call the old ones.
    """
    thunk = cells_of(cells_of(rule.f).get("fn"))
    lifted = thunk.get("jvp", thunk.get("fwd"))
    if not isinstance(lifted, WrappedFun) or lifted.transforms:
        return None
    held = cells_of(lifted.f)
    if held.get("num_consts") != 0:
        return None
    return held.get("jvp_jaxpr_fun", held.get("fwd_jaxpr_thunk"))


def _counts(transform: tuple[Any, ...]) -> bool:
    """Return True if a transformation has an effect; one that handles no constants has none."""
    function, args = transform[0], transform[1]
    return function.__name__ != "_handle_consts_in_bwd" or any(map(len, args))


def _is_wrapper(function: object) -> bool:
    """Return True for a function of JAX or ours, though `functools.wraps` names another module."""
    if not isinstance(function, FunctionType):
        return False
    return str(function.__globals__.get("__name__", "")).startswith(WRAPPERS)


def cells_of(function: object) -> dict[str, Any]:
    """Return the values that a function closes over, by name."""
    if not isinstance(function, FunctionType):
        return {}
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            held[name] = cell.cell_contents
    return held


#: Since 0.12 a backward rule returns its cotangents and a log, which is None for most.
BWD_RETURNS_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")


def custom_name(eqn: JaxprEqn) -> str:
    """Return the name of the function with the custom rule of a call."""
    return str(open_jaxpr(eqn.params["call_jaxpr"]).debug_info.func_name)
