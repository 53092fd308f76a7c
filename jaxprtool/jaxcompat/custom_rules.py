"""The live rules of custom_jvp and custom_vjp: as jaxprs, closed over, mapped and retyped."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import CellType, FunctionType
from typing import Any
from weakref import WeakSet

import jax
from jax._src import core
from jax._src import linear_util as lu
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe
from jax._src.util import Hashable as HashableWrapper
from jax._src.util import Unhashable
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, TraceTag, Var
from jax.extend.linear_util import StoreException, WrappedFun
from jax.interpreters.ad import JVPTrace, Zero, zeros_like_aval
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.jaxprs import (
    AnyJaxpr,
    Aval,
    MappedAxis,
    Params,
    is_symbolic_dimension,
    open_jaxpr,
    replace_jaxpr,
)
from jaxprtool.jaxcompat.marks import jaxpr_as_fun
from jaxprtool.jaxcompat.tracing import (
    attach_constants,
    axis_mapped,
    detach_constants,
    setting_of,
    trace_flat,
)

# --- custom rules ---------------------------------------------------------------------------------
# The live rules of custom_jvp and custom_vjp: their jaxprs, and rules made from jaxprs.


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
        raises: The exception of rules of which one always raises, as at the end of a traceback.
            `fwd` and `bwd` are then None.
    """

    fwd_name: str
    bwd_name: str
    fwd: AnyJaxpr
    bwd: AnyJaxpr
    forwarded: tuple[int | None, ...]
    in_zeros: tuple[bool, ...]
    perturbed: tuple[bool, ...]
    raises: str | None = None


class NoFunction(TypeError):
    """A backward rule is more than a function of residuals and cotangents."""


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
        jvp_rule = rule([not zero for zero in in_zeros])
        jaxpr, out_zeros = jvp_rule.jaxpr, jvp_rule.out_zeros
        if not any(in_zeros):
            return *detach_constants(jaxpr), list(out_zeros)
        avals = [v.aval for v in jaxpr.invars]
        num_primals = len(avals) // 2
        tangents = avals[num_primals:]

        def with_zeros(*args: Any) -> Any:
            nonzero = iter(args[num_primals:])
            pairs = zip(in_zeros, tangents, strict=True)
            full = [zeros_like_aval(a) if zero else next(nonzero) for zero, a in pairs]
            return jaxpr_as_fun(jaxpr)(*args[:num_primals], *full)

        nonzero_avals = [a for zero, a in zip(in_zeros, tangents, strict=True) if not zero]
        traced = trace_flat(with_zeros, name, [*avals[:num_primals], *nonzero_avals])
        return *detach_constants(traced), list(out_zeros)

    debug = DebugInfo("custom_jvp jvp", name, None, None)
    return {"jvp_jaxpr_fun": lu.wrap_init(jvp, debug_info=debug)}


def custom_vjp_rule(eqn: JaxprEqn, perturbed: Sequence[bool]) -> VJPRule:
    """Return the rules of a custom_vjp call, for derivatives by the primals that are `perturbed`.

    Raises the exceptions of the rules, and NoFunction.
    """
    params, num_consts = eqn.params, eqn.params["num_consts"]
    fwd, bwd = params["fwd_jaxpr_thunk"], params["bwd"]
    if getattr(bwd.f, "call_with_accums", None) is not None:
        raise NoFunction("its backward rule accumulates into gradient buffers")
    with setting_of(eqn), rule_retraced(fwd):
        forward = attach_constants(*fwd.call_wrapped(*perturbed))
        _, res_tree, forwarded_operands = params["out_trees"]()
        forwarded = [None if i is None else i - num_consts for i in forwarded_operands]
        outs = iter(forward.outvars)
        operands = eqn.invars[num_consts:]
        res_atoms = [operands[i] if i is not None else next(outs) for i in forwarded]
        residuals = [atom.aval for atom in res_atoms]
        assert len(residuals) == res_tree.num_leaves
        cotangents = [v.aval.to_ct_aval() for v in eqn.outvars]
        zeros: list[bool] = []

        def backward(*args: Any) -> list[Any]:
            # A residual that fwd returns as a number is one for bwd too, which may branch on it.
            res = [
                atom.val if isinstance(atom, Literal) and i is None else arg
                for atom, i, arg in zip(res_atoms, forwarded, args, strict=False)
            ]
            cts = bwd.call_wrapped(*res, *args[len(res) :])
            if BWD_RETURNS_LOGS:
                cts, logs = cts
                if logs is not None:
                    raise NoFunction("its backward rule returns a log")
            zeros[:] = [isinstance(ct, Zero | SymbolicZero) for ct in cts]
            return [ct for ct, zero in zip(cts, zeros, strict=True) if not zero]

        bwd_jaxpr = trace_flat(backward, bwd.debug_info.func_name, [*residuals, *cotangents])
    names = fwd.debug_info.func_name, bwd.debug_info.func_name
    return VJPRule(*names, forward, bwd_jaxpr, tuple(forwarded), tuple(zeros), tuple(perturbed))


@contextmanager
def rule_retraced(fwd: WrappedFun) -> Iterator[None]:
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
        for name, cell in cells_of(rule).items():
            if name == "cells" and isinstance(cell, dict):
                cell.clear()
            else:
                _forget(cell)


def with_leading_consts(params: Params, count: int) -> Params:
    """Return the parameters of a custom call that change if it takes `count` more constants."""
    changed: Params = {"num_consts": params["num_consts"] + count}
    if "out_trees" not in params:
        return changed
    out_trees = params["out_trees"]

    def shifted() -> tuple[PyTreeDef, PyTreeDef, list[int | None]]:
        out_tree, res_tree, forwarded = out_trees()
        return out_tree, res_tree, [None if i is None else i + count for i in forwarded]

    return {**changed, "out_trees": shifted}


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
        rule = rules(())
        count = len(rule.forwarded)
        residuals, cts = args[:count], args[count:]
        cotangents = [v.aval for v in rule.bwd.invars[count:]]
        full = [
            zeros_like_aval(aval) if isinstance(ct, SymbolicZero) else ct
            for ct, aval in zip(cts, cotangents, strict=True)
        ]
        nonzero = iter(jaxpr_as_fun(rule.bwd)(*residuals, *full))
        result = [
            Zero(aval.to_ct_aval()) if zero else next(nonzero)
            for zero, aval in zip(rule.in_zeros, primals, strict=True)
        ]
        return (result, None) if BWD_RETURNS_LOGS else result

    def out_trees() -> tuple[PyTreeDef, PyTreeDef, list[int | None]]:
        rule = rules(())
        operands = [None if i is None else i + num_consts for i in rule.forwarded]
        count = len(operands)
        return _flat_tree(len(rule.bwd.invars) - count), _flat_tree(count), operands

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
            cells = cells_of(value)
            for name, what_counts in _COUNTS.get(value.__code__.co_name, {}).items():
                if name in cells:
                    cells[name] = what_counts(cells[name])
            return value.__code__, tuple(map(live_key, cells.values()))
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
    cells = cells_of(lifted.f)
    if cells.get("num_consts") != 0:
        return None
    return cells.get("jvp_jaxpr_fun", cells.get("fwd_jaxpr_thunk"))


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
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            cells[name] = cell.cell_contents
    return cells


#: Since 0.12 a backward rule returns its cotangents and a log, which is None for most.
BWD_RETURNS_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")


def custom_name(eqn: JaxprEqn) -> str:
    """Return the name of the function with the custom rule of a call."""
    return str(open_jaxpr(eqn.params["call_jaxpr"]).debug_info.func_name)


# --- closed over ----------------------------------------------------------------------------------
# Rules of custom_jvp and custom_vjp that close over values of the trace that calls them.
#
# `jax.vmap` runs a rule while the tracers that it closes over are live. If a call is staged first,
# its rule runs when the staged jaxpr is differentiated. The values that it closes over must then be
# operands of the call, like those that the function closes over.

_RULE_PARAMS = {"custom_jvp_call": "jvp_jaxpr_fun", "custom_vjp_call": "fwd_jaxpr_thunk"}


def derivatives_around(trace: Any) -> int:
    """Return how often a call under `trace` may be differentiated while its tracers live."""
    count = 0
    while trace is not None and type(trace) is not pe.DynamicJaxprTrace:
        count += isinstance(trace, JVPTrace | ad.LinearizeTrace)
        trace = getattr(trace, "parent_trace", None)
    return count


def unperturbed(value: object) -> Any:
    """Return the value, such that differentiating with respect to it is an error."""
    return _unperturbed(value)


@jax.custom_jvp
def _unperturbed(value: object) -> Any:
    return value


@_unperturbed.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise jax.errors.UnexpectedTracerError(
        "Detected differentiation of a custom_jvp or custom_vjp function with respect to a "
        "closed-over value, which its derivative rule does not take as an argument."
    )


@dataclass(frozen=True)
class ClosedOver:
    """The values that the rules of custom calls close over.

    Attributes:
        owned: Returns True if a constant of a rule is one of the closed-over values.
        depth: The number of times that a call is differentiated, since rules contain calls with
            rules.
    """

    owned: Callable[[Any], bool]
    depth: int

    def values(self, eqn: JaxprEqn) -> list[Any]:
        """Return the values that a call's rule closes over; [] for other equations.

        Raises:
            Exception: The exception of the user's rule.
        """
        if self.depth == 0 or eqn.primitive.name not in _RULE_PARAMS:
            return []
        inner = replace(self, depth=self.depth - 1)
        closed_over: list[Any] = []
        for rule in _traced(eqn):
            closed_over += filter(self.owned, rule.consts)
            closed_over += [value for rule_eqn in rule.eqns for value in inner.values(rule_eqn)]
        return list({id(value): value for value in closed_over}.values())

    def params(self, eqn: JaxprEqn, values: Sequence[Any]) -> Params:
        """Return the parameters of a call that takes `values` after its other operands.

        The call must not be differentiated with respect to them.
        """
        rule_params = self._jvp if "jvp_jaxpr_fun" in eqn.params else self._vjp
        body = self._taking(eqn.params["call_jaxpr"], values, len(eqn.invars))
        return {**eqn.params, "call_jaxpr": body, **rule_params(eqn, values)}

    def _jvp(self, eqn: JaxprEqn, values: Sequence[Any]) -> Params:
        rule, count = eqn.params["jvp_jaxpr_fun"], _num_primals(eqn)

        def jvp(*in_zeros: bool) -> tuple[Jaxpr, Sequence[Any], Sequence[bool]]:
            *traced, out_zeros = rule.call_wrapped(*in_zeros[:count])
            closed = self._taking(attach_constants(*traced), values, count)
            unused = [
                Var(jax.typeof(value).to_tangent_aval())
                for value, zero in zip(values, in_zeros[count:], strict=True)
                if not zero
            ]
            padded = _with_parts(closed, [*closed.invars, *unused], closed.eqns)
            return *detach_constants(padded), out_zeros

        return {"jvp_jaxpr_fun": lu.wrap_init(jvp, debug_info=rule.debug_info)}

    def _vjp(self, eqn: JaxprEqn, values: Sequence[Any]) -> Params:
        rule, count = eqn.params["fwd_jaxpr_thunk"], _num_primals(eqn)
        backward = eqn.params["bwd"]

        def fwd(*perturbed: bool) -> tuple[Jaxpr, Sequence[Any]]:
            closed = attach_constants(*rule.call_wrapped(*perturbed[:count]))
            return detach_constants(self._taking(closed, values, count))

        def bwd(*args: Any) -> Any:
            zeros = [Zero(jax.typeof(value).to_ct_aval()) for value in values]
            if not BWD_RETURNS_LOGS:
                return [*backward.call_wrapped(*args), *zeros]
            cotangents, logs = backward.call_wrapped(*args)
            return [*cotangents, *zeros], logs

        return {
            "fwd_jaxpr_thunk": lu.wrap_init(fwd, debug_info=rule.debug_info),
            "bwd": lu.wrap_init(bwd, debug_info=backward.debug_info),
        }

    def _taking(self, closed: ClosedJaxpr, values: Sequence[Any], place: int) -> ClosedJaxpr:
        """Return a closed jaxpr that takes `values`, which may be its constants, from `place` on.

        Its custom calls, which are differentiated once less, take them too, and also the values of
        this jaxpr that their rules close over.
        """
        by_id = {id(c): v for v, c in zip(closed.constvars, closed.consts, strict=True)}
        taken = {id(x): by_id.get(id(x)) or Var(jax.typeof(x)) for x in values}
        invars = [*closed.invars[:place], *taken.values(), *closed.invars[place:]]
        inner = replace(self, depth=self.depth - 1)

        def with_taken(eqn: JaxprEqn) -> JaxprEqn:
            closed_over = [value for value in inner.values(eqn) if id(value) in taken]
            if not closed_over:
                return eqn
            operands = [*eqn.invars, *(taken[id(value)] for value in closed_over)]
            return eqn.replace(invars=operands, params=inner.params(eqn, closed_over))

        in_scope = {*closed.constvars, *invars}
        eqns: list[JaxprEqn] = []
        for eqn in closed.eqns:
            eqns += equations_with_closed_over(with_taken(eqn), in_scope)
            in_scope.update(eqn.outvars)
        return _with_parts(closed, invars, eqns)


def _traced(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the rule of a call as closed jaxprs.

    A rule that requires symbolic zeros is traced for each operand separately.
    """
    thunk, count = eqn.params[_RULE_PARAMS[eqn.primitive.name]], _num_primals(eqn)
    perturbed_is = "fwd_jaxpr_thunk" in eqn.params

    def traced(places: Sequence[int]) -> ClosedJaxpr:
        flags = [(i in places) is perturbed_is for i in range(count)]
        return attach_constants(*thunk.call_wrapped(*flags)[:2])

    try:
        return [traced(range(count))]
    except Exception:
        if not eqn.params["symbolic_zeros"]:
            raise
    rules = []
    for i in range(count):
        with suppress(Exception):
            rules.append(traced([i]))
    return rules


def _num_primals(eqn: JaxprEqn) -> int:
    return len(eqn.invars) - eqn.params["num_consts"]


def _with_parts(
    closed: ClosedJaxpr, invars: Sequence[Var], eqns: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    """Return a closed jaxpr with other invars and equations; new invars are no longer constants."""
    taken = set(invars)
    pairs = zip(closed.constvars, closed.consts, strict=True)
    consts = {v: c for v, c in pairs if v not in taken}
    parts = {"constvars": [*consts], "consts": [*consts.values()], "invars": invars}
    return replace_jaxpr(closed, eqns=eqns, **parts)


# --- traces that have ended -----------------------------------------------------------------------

#: The number of times that a call may be differentiated if it takes the values that its rule closes
#: over.
_MOST_DERIVATIVES = 3

#: Traces that have ended, but whose tracers are still held by rules.
_ended: WeakSet[Any] = WeakSet()


def equations_with_closed_over(eqn: JaxprEqn, in_scope: Container[Var]) -> list[JaxprEqn]:
    """Return the equations that replace one of a traced jaxpr.

    A call whose rule closes over values of the jaxpr takes them as operands. JAX runs the rule when
    the jaxpr is differentiated, and the tracers of these values are dead by then.

    Args:
        eqn: The equation.
        in_scope: The variables that it may take.
    """
    if eqn.primitive.name not in _RULE_PARAMS or not (tracers := _tracers(eqn)):
        return [eqn]
    live = list(_traces_around())
    _ended.update(tracer._trace for tracer in tracers if tracer._trace not in live)
    rules = ClosedOver(
        lambda value: isinstance(value, DynamicJaxprTracer) and value.val in in_scope,
        _MOST_DERIVATIVES,
    )
    try:
        values = rules.values(eqn)
    except Exception:  # the rule is the user's, and may raise anything
        return [eqn]
    if not values:
        return [eqn]
    first, taken = [], []
    for value in values:
        body = jax.make_jaxpr(unperturbed)(jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype))
        out = Var(value.aval)
        (call,) = body.eqns
        first.append(call.replace(invars=[value.val], outvars=[out], source_info=eqn.source_info))
        taken.append(out)
    params = rules.params(eqn, values)
    return [*first, eqn.replace(invars=[*eqn.invars, *taken], params=params)]


def some_ended() -> bool:
    """Return True if any rule holds a tracer beyond the end of its trace."""
    return bool(_ended)


def has_ended(value: object) -> bool:
    """Return True for a tracer that a rule holds beyond the end of its trace."""
    return isinstance(value, DynamicJaxprTracer) and value._trace in _ended


def holds_ended(eqn: JaxprEqn) -> bool:
    """Return True for a call whose rule closes over a tracer of a trace that has ended."""
    return eqn.primitive.name in _RULE_PARAMS and any(map(has_ended, _tracers(eqn)))


def _traces_around() -> Iterator[Any]:
    trace = core.trace_ctx.trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def _tracers(eqn: JaxprEqn) -> list[Any]:
    """Return the tracers that the rules of a call, and the functions that they call, hold."""
    names = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")
    todo: list[Any] = [eqn.params[name] for name in names if name in eqn.params]
    seen: set[int] = set()
    tracers = []
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case DynamicJaxprTracer():
                tracers.append(value)
            case WrappedFun():
                todo += [value.f, *value.transforms]
            case FunctionType():
                todo += [*cells_of(value).values(), *(value.__defaults__ or ())]
            case partial():
                todo += [value.func, *value.args, *value.keywords.values()]
            case HashableWrapper() | Unhashable():
                todo.append(value.val)
            case jax.custom_jvp() | jax.custom_vjp():
                todo += vars(value).values()
            case tuple() | list():
                todo += value
            case dict():
                todo += value.values()
    return tracers


# --- mapped rules ---------------------------------------------------------------------------------
# The live rules of custom_jvp and custom_vjp calls that are mapped over an axis.
#
# JAX keeps these rules as functions that are traced when the call is differentiated. A mapped rule
# then traces the old one, and maps its jaxpr by `batch(jaxpr, dims, outs)`, an argument of the
# functions below. `batch` takes a closed jaxpr and the mapped dimensions of its operands, and
# returns the new jaxpr and the mapped dimensions of its results, which are `outs` unless these are
# None.

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
        mapped, rule_dims, out_zeros = _mapped_jvp(rule, axis, batch, dims, in_zeros, out_dims)
        _require_unmapped(rule, rule_dims, out_dims)
        nonzero = (dim for dim, zero in zip(out_dims, out_zeros, strict=True) if not zero)
        _require_unmapped(rule, rule_dims[len(out_dims) :], [*nonzero])
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
        _, rule_dims, out_zeros = _mapped_jvp(rule, axis, batch, dims, everything, free)
    tangents = iter(rule_dims[count:])
    pairs = zip(rule_dims, out_zeros, strict=False)
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
        mapped, rule_dims = _mapped_fwd(fwd, axis, batch, dims, perturbed, out_dims)
        count = len(rule_dims) - len(out_dims)
        _require_unmapped(fwd, rule_dims[count:], out_dims)
        residual_dims[:] = rule_dims[:count]
        return detach_constants(mapped)

    def bwd_dims() -> Dims:
        res_dims = iter(residual_dims)
        forwarded = [next(res_dims) if i is None else dims[i - num_consts] for i in out_trees()[2]]
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
    with setting_of(eqn), rule_retraced(fwd):
        everything, free = (True,) * len(dims), (None,) * count
        _, rule_dims = _mapped_fwd(fwd, axis, batch, dims, everything, free)
    return rule_dims[len(rule_dims) - count :]


def _require_unmapped(rule: WrappedFun, rule_dims: Dims, wanted: Dims) -> None:
    """Refuse a rule that returns a mapped value for a result that is unmapped."""
    if any(dim is None and got is not None for dim, got in zip(wanted, rule_dims, strict=False)):
        raise NotImplementedError(
            f"under vmap, the rule {rule.debug_info.func_name} returns a mapped value for a result "
            "that is not mapped"
        )


# --- retyped rules --------------------------------------------------------------------------------
# Live rules of custom derivatives, converted to calls of other types.
#
# JAX wraps a user's rule in functions that close over the types of the call. These functions are
# created again around the same user's function, with other types.

_RETYPED_PARAMS = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees")


def retyped_rules(params: Params, value: Callable[[Any], Any]) -> Params:
    """Return the live rules among the parameters of a custom call, for other types.

    Args:
        params: The parameters of the call.
        value: Maps a type, a size, or a container of these to the new one; anything else to itself.
    """
    retype = _Retyping(value)
    return {name: retype(params[name]) for name in _RETYPED_PARAMS if name in params}


def closes_over_sizes(params: Params) -> bool:
    """Return True if a user's rule, or a static argument of it, has a symbolic dimension itself."""
    todo: list[Any] = [params[name] for name in _RETYPED_PARAMS if name in params]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if is_symbolic_dimension(value):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case WrappedFun():
                todo += [value.f, value.transforms]
            case FunctionType():
                read = map(value.__globals__.get, value.__code__.co_names)
                todo += [*filter(is_symbolic_dimension, read), *cells_of(value).values()]
            case partial():
                todo += [value.func, *value.args, *value.keywords.values()]
            case HashableWrapper() | Unhashable():
                todo.append(value.val)
            case tuple() | list():
                todo += value
    return False


class _Retyping:
    """Creates objects again, each once, since the writers and readers of a store share it."""

    def __init__(self, value: Callable[[Any], Any]) -> None:
        self._value = value
        self._made: dict[int, tuple[Any, Any]] = {}  # with the old objects, to keep their ids

    def __call__(self, old: Any) -> Any:
        if id(old) not in self._made:
            new = self._new(old)
            self._made.setdefault(id(old), (old, new))
        return self._made[id(old)][1]

    def _new(self, old: Any) -> Any:
        match old:
            case WrappedFun():
                return self._wrapped(old)
            case lu.Store() | lu.EqualStore():
                return self._store(old)
            case FunctionType() if (old.__module__ or "").startswith(WRAPPERS):
                return self._function(old)
            case partial():
                keywords = {name: self(value) for name, value in old.keywords.items()}
                return partial(self(old.func), *map(self, old.args), **keywords)
            case JaxprEqn():
                params = {name: self(value) for name, value in old.params.items()}
                return old.replace(params=params)
            case HashableWrapper() | Unhashable():
                return type(old)(self(old.val))
            case tuple() | list() if not hasattr(old, "_fields"):
                return type(old)(map(self, old))
            case _:
                return self._value(old)

    def _wrapped(self, old: WrappedFun) -> WrappedFun:
        new = lu.wrap_init(self(old.f), dict(old.params), debug_info=old.debug_info)
        steps = list(zip(old.transforms, old.stores, strict=True))
        for (transform, args), store in reversed(steps):
            new = new.wrap(transform, self(args), self(store))
        return new

    def _store(self, old: lu.Store | lu.EqualStore) -> lu.Store | lu.EqualStore:
        new = type(old)()
        with suppress(StoreException):  # it may be empty
            new.store(self(old.val))
        return new

    def _function(self, old: FunctionType) -> FunctionType:
        cells = [CellType() for _ in old.__closure__ or ()]
        new = FunctionType(
            old.__code__, old.__globals__, old.__name__, old.__defaults__, tuple(cells)
        )
        new.__kwdefaults__ = old.__kwdefaults__
        self._made[id(old)] = old, new  # it may close over itself
        vars(new).update({name: self(value) for name, value in vars(old).items()})
        named = dict(zip(old.__code__.co_freevars, cells, strict=True))
        for name, content in cells_of(old).items():
            # Its cached traces are of the old types.
            memory = name == "cells" and isinstance(content, dict)
            named[name].cell_contents = {} if memory else self(content)
        return new
