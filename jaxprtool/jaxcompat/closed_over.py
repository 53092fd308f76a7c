"""Rules of custom_jvp and custom_vjp that close over values of the trace that calls them.

`jax.vmap` runs a rule while the tracers that it closes over are live. If a call is staged first,
its rule runs when the staged jaxpr is differentiated. The values that it closes over must then be
operands of the call, like those that the function closes over.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakSet

import jax
from jax._src import core
from jax._src import linear_util as lu
from jax._src.interpreters import ad
from jax._src.interpreters import partial_eval as pe
from jax._src.util import Hashable, Unhashable
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.linear_util import WrappedFun
from jax.interpreters.ad import JVPTrace, Zero
from jax.interpreters.partial_eval import DynamicJaxprTracer

from jaxprtool.jaxcompat.aliases import Params
from jaxprtool.jaxcompat.custom_rules import BWD_RETURNS_LOGS, cells_of
from jaxprtool.jaxcompat.jaxprs import replace_jaxpr
from jaxprtool.jaxcompat.tracing import attach_constants, detach_constants

_RULES = {"custom_jvp_call": "jvp_jaxpr_fun", "custom_vjp_call": "fwd_jaxpr_thunk"}


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
        if self.depth == 0 or eqn.primitive.name not in _RULES:
            return []
        inner = replace(self, depth=self.depth - 1)
        found: list[Any] = []
        for rule in _traced(eqn):
            found += filter(self.owned, rule.consts)
            found += [value for each in rule.eqns for value in inner.values(each)]
        return list({id(value): value for value in found}.values())

    def params(self, eqn: JaxprEqn, values: Sequence[Any]) -> Params:
        """Return the parameters of a call that takes `values` after its other operands.

        The call must not be differentiated with respect to them.
        """
        made = self._jvp if "jvp_jaxpr_fun" in eqn.params else self._vjp
        body = self._taking(eqn.params["call_jaxpr"], values, len(eqn.invars))
        return {**eqn.params, "call_jaxpr": body, **made(eqn, values)}

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
            made = _with_parts(closed, [*closed.invars, *unused], closed.eqns)
            return *detach_constants(made), out_zeros

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
        known = {id(c): v for v, c in zip(closed.constvars, closed.consts, strict=True)}
        taken = {id(x): known.get(id(x)) or Var(jax.typeof(x)) for x in values}
        invars = [*closed.invars[:place], *taken.values(), *closed.invars[place:]]
        inner = replace(self, depth=self.depth - 1)

        def with_taken(eqn: JaxprEqn) -> JaxprEqn:
            held = [value for value in inner.values(eqn) if id(value) in taken]
            if not held:
                return eqn
            operands = [*eqn.invars, *(taken[id(value)] for value in held)]
            return eqn.replace(invars=operands, params=inner.params(eqn, held))

        in_scope = {*closed.constvars, *invars}
        eqns: list[JaxprEqn] = []
        for eqn in closed.eqns:
            eqns += with_closed_over(with_taken(eqn), in_scope)
            in_scope.update(eqn.outvars)
        return _with_parts(closed, invars, eqns)


def _traced(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the rule of a call as closed jaxprs.

    A rule that requires symbolic zeros is traced for each operand separately.
    """
    thunk, count = eqn.params[_RULES[eqn.primitive.name]], _num_primals(eqn)
    perturbed_is = "fwd_jaxpr_thunk" in eqn.params

    def traced(places: Sequence[int]) -> ClosedJaxpr:
        flags = [(i in places) is perturbed_is for i in range(count)]
        return attach_constants(*thunk.call_wrapped(*flags)[:2])

    try:
        return [traced(range(count))]
    except Exception:
        if not eqn.params["symbolic_zeros"]:
            raise
    found = []
    for i in range(count):
        with suppress(Exception):
            found.append(traced([i]))
    return found


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


def with_closed_over(eqn: JaxprEqn, in_scope: Container[Var]) -> list[JaxprEqn]:
    """Return the equations that replace one of a traced jaxpr.

    A call whose rule closes over values of the jaxpr takes them as operands. JAX runs the rule when
    the jaxpr is differentiated, and the tracers of these values are dead by then.

    Args:
        eqn: The equation.
        in_scope: The variables that it may take.
    """
    if eqn.primitive.name not in _RULES or not (held := _tracers(eqn)):
        return [eqn]
    live = list(_traces_around())
    _ended.update(each._trace for each in held if each._trace not in live)
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
        made = jax.make_jaxpr(unperturbed)(jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype))
        out = Var(value.aval)
        (call,) = made.eqns
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
    return eqn.primitive.name in _RULES and any(map(has_ended, _tracers(eqn)))


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
    found = []
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case DynamicJaxprTracer():
                found.append(value)
            case WrappedFun():
                todo += [value.f, *value.transforms]
            case FunctionType():
                todo += [*cells_of(value).values(), *(value.__defaults__ or ())]
            case partial():
                todo += [value.func, *value.args, *value.keywords.values()]
            case Hashable() | Unhashable():
                todo.append(value.val)
            case jax.custom_jvp() | jax.custom_vjp():
                todo += vars(value).values()
            case tuple() | list():
                todo += value
            case dict():
                todo += value.values()
    return found
