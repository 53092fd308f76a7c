"""The Python functions of a program: rules of custom derivatives, callbacks and policies.

JAX keeps these rules as Python closures. Here each is traced to a jaxpr, with all of the call's
differentiable operands perturbed, and a jaxpr becomes a rule that JAX can call.

A rule that was defined with `symbolic_zeros=True` is traced without any: its derivatives are the
same. If it raises for some of its operands, it is traced with derivatives of the others only.

The jaxpr of a rule may hold calls that have rules, recursively and without end. Code that follows
rules into their jaxprs does so in `rules_followed`, which bounds the recursion.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError, UserFunctionError, described
from jaxprtool.ir.backends import anchor
from jaxprtool.ir.equations import equations, holders, named, outer_first
from jaxprtool.ir.frames import source_place
from jaxprtool.ir.regions import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.rewrite import Memo, as_constants, map_equations, with_bodies
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, JaxprEqn, JVPRule, Params, Var, VJPRule

# --- custom rules ---------------------------------------------------------------------------------
# The rules of custom_jvp and custom_vjp calls as jaxprs, and calls made from such jaxprs.

R = TypeVar("R")


class RuleRaised(UserFunctionError):
    """The custom rule always raises when it is traced; `raised` is its exception."""

    def __init__(self, rule: str, raised: str):
        super().__init__(f"the rule {rule} raised {raised}")
        self.raised = raised


#: The rule of a custom_jvp call, or the two rules of a custom_vjp call.
CustomRule: TypeAlias = JVPRule | VJPRule

#: For each primitive of custom calls, the parameters that hold its live rules.
_LIVE = {"custom_jvp_call": ("jvp_jaxpr_fun",), "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd")}


def has_rule(eqn: JaxprEqn) -> bool:
    """Return True for a custom_jvp or custom_vjp call whose rules are known."""
    return eqn.primitive.name in _LIVE and not jaxcompat.is_opaque(eqn)


def custom_rule(eqn: JaxprEqn) -> CustomRule:
    """Return the rule of a custom call of either kind; see `jvp_rule` and `vjp_rule`."""
    return vjp_rule(eqn) if eqn.primitive.name == "custom_vjp_call" else jvp_rule(eqn)


def rule_jaxprs(rule: CustomRule) -> dict[str, ClosedJaxpr]:
    """Return the jaxprs of a rule, by field; a rule that only raises has none."""
    fields = ("fwd", "bwd") if isinstance(rule, VJPRule) else ("jaxpr",)
    return {name: jaxpr for name in fields if (jaxpr := getattr(rule, name)) is not None}


def map_rule(function: Callable[[ClosedJaxpr], Any], rule: CustomRule) -> CustomRule:
    """Apply a function to the jaxprs of a rule; return the same object if none changes."""
    changes = {
        name: new for name, old in rule_jaxprs(rule).items() if (new := function(old)) is not old
    }
    return replace(rule, **changes) if changes else rule


def jvp_rule(eqn: JaxprEqn) -> JVPRule:
    """Return the rule of a custom_jvp call.

    Raises:
        UnsupportedError: If the rule raises and takes symbolic zeros: for other tangents it might
            not raise.
    """
    return _followed(eqn, _jvp_rule)


def _jvp_rule(eqn: JaxprEqn) -> JVPRule:
    try:
        return _traced(jaxcompat.custom_jvp_rule, eqn)
    except Exception as error:  # the rule is the user's, and may raise anything
        if eqn.params["symbolic_zeros"]:
            raise untraceable_rule(eqn, error) from error
        name = eqn.params["jvp_jaxpr_fun"].debug_info.func_name
        zeros, everything = (False,) * len(eqn.outvars), (True,) * _num_primals(eqn)
        return JVPRule(name, None, zeros, everything, _raised(error))


def vjp_rule(eqn: JaxprEqn) -> VJPRule:
    """Return the rules of a custom_vjp call.

    Raises:
        UnsupportedError: If one of them raises and takes symbolic zeros, or the backward rule is
            not just a function from residuals and cotangents to cotangents.
    """
    return _followed(eqn, _vjp_rule)


def _vjp_rule(eqn: JaxprEqn) -> VJPRule:
    if not eqn.outvars:
        return _rule_without_results(eqn)
    try:
        return _traced(jaxcompat.custom_vjp_rule, eqn)
    except Exception as error:  # the rules are the user's, and may raise anything
        if eqn.params["symbolic_zeros"] or isinstance(error, jaxcompat.NoFunction):
            raise untraceable_rule(eqn, error) from error
        fwd, bwd = (eqn.params[name].debug_info.func_name for name in _LIVE[eqn.primitive.name])
        return vjp_rule_that_raises(fwd, bwd, _raised(error), _num_primals(eqn))


def vjp_rule_that_raises(fwd: str, bwd: str, raises: str, primals: int) -> VJPRule:
    """Return the rules of a custom_vjp call of so many primals, of which one always raises."""
    none, everything = (False,) * primals, (True,) * primals
    return VJPRule(fwd, bwd, None, None, (), none, everything, raises)


def _raised(error: Exception) -> str:
    """Return the exception of a user's rule, as at the end of a traceback."""
    return error.raised if isinstance(error, RuleRaised) else described(error)


def _rule_without_results(eqn: JaxprEqn) -> VJPRule:
    """Return the rule of a part of a split call that has nothing to compute.

    The rules in such an equation are those of the whole call.
    """
    primals = [v.aval for v in eqn.invars[eqn.params["num_consts"] :]]
    forward = jax.make_jaxpr(lambda *_: ())(*primals)
    backward = jax.make_jaxpr(lambda: ())()
    all_true = (True,) * len(primals)
    return VJPRule("fwd", "bwd", forward, backward, (), all_true, all_true)


@contextmanager
def rules_followed() -> Iterator[None]:
    """Trace each rule only once within this context, and refuse endless chains of rules.

    `jvp_rule` and `vjp_rule` then raise UnsupportedError, which names the program's own call.
    """
    if _rules.get() is not None:
        yield
        return
    token = _rules.set(_TracedRules())
    try:
        yield
    finally:
        _rules.reset(token)


#: The hint for a rule that cannot be followed. It is not needed after a gradient has applied it.
_WITHOUT_RULES = (
    "the pass inline(calls=('custom_jvp', 'custom_vjp')) removes the rules; to use them for a "
    "gradient, run grad before it"
)

#: The limits of `rules_followed`: the depth of rules in rules; and, from depth 3 on, the number of
#: rules, and of the equations in them. Finite chains of rules are short, or call few others.
MOST_WITHIN, MOST_RULES, MOST_EQUATIONS = 40, 100, 3000


@dataclass
class _TracedRules:
    """The rules that have been traced, and the origin of the calls in them.

    `origins` has, by `_origin_key`, the number of rules around such a call, and the program's own
    call, or the outermost one in the rules that has a source line.
    """

    traced: dict[Hashable, Any] = field(default_factory=dict)
    origins: dict[Hashable, tuple[int, JaxprEqn]] = field(default_factory=dict)
    count: int = 0
    equations: int = 0

    def rule(self, eqn: JaxprEqn, trace: Callable[[JaxprEqn], Any]) -> Any:
        key = rule_key(eqn)
        if key not in self.traced:
            within, origin = self.origins.setdefault(_origin_key(eqn), (0, eqn))
            if within == MOST_WITHIN or self.count > MOST_RULES or self.equations > MOST_EQUATIONS:
                raise UnsupportedError(
                    f"the rule of the {named(origin)} cannot be written as a jaxpr: its calls of "
                    "functions with custom rules never end",
                    hint=_WITHOUT_RULES,
                )
            self.traced[key] = traced = trace(eqn)
            self._note(traced, within, origin)
        return self.traced[key]

    def _note(self, rule: Any, within: int, origin: JaxprEqn) -> None:
        jaxprs = map(jaxcompat.open_jaxpr, rule_jaxprs(rule).values())
        inside = [eqn for jaxpr in jaxprs for eqn in equations(jaxpr)]
        if within >= 3:
            self.count += 1
            self.equations += len(inside)
        for eqn in inside:
            if traits(eqn).custom_derivative and not jaxcompat.is_opaque(eqn):
                source = origin if jaxcompat.user_frame(origin) else eqn
                self.origins.setdefault(_origin_key(eqn), (within + 1, source))


def _origin_key(eqn: JaxprEqn) -> Hashable:
    """Return the `rule_key` of a call, or the key of the hijax operation that it comes from.

    A rule contains the operation, but the call that it is lowered to (`ir.expansions`) is
    followed: both have the same key.
    """
    if eqn.primitive.name == jaxcompat.CALL_HIGH:
        return jaxcompat.high_key(eqn)
    return getattr(_made_from(eqn), "key", None) or rule_key(eqn)


_rules: ContextVar[_TracedRules | None] = ContextVar("rules", default=None)


def _followed(eqn: JaxprEqn, trace: Callable[[JaxprEqn], Any]) -> Any:
    if jaxcompat.is_opaque(eqn):
        raise eqn.primitive.refusal("differentiated")
    made_from = _made_from(eqn)

    def traced(eqn: JaxprEqn) -> Any:
        # In the jaxprs of a rule, arrays are not literals.
        return map_rule(as_constants, trace(eqn) if made_from is None else made_from())

    rules = _rules.get()
    return traced(eqn) if rules is None else rules.rule(eqn, traced)


def _traced(trace: Callable[[JaxprEqn, Sequence[bool]], R], eqn: JaxprEqn) -> R:
    """Return the result of `trace` for the operands for which the rule can be traced.

    Raises the rule's own exception if it raises when differentiated with respect to every operand,
    unless it takes symbolic zeros and does not raise with those for some tangents.
    """
    count = _num_primals(eqn)
    try:
        return trace(eqn, (True,) * count)
    except Exception:
        if not eqn.params["symbolic_zeros"]:
            raise
        working = set(_traceable(trace, eqn, range(count)))
        return trace(eqn, tuple(i in working for i in range(count)))


def _traceable(trace: Callable[..., Any], eqn: JaxprEqn, operands: Sequence[int]) -> Iterator[int]:
    """Yield the operands for which a rule does not raise, given that it raises for all together.

    They are searched by bisection: most rules refuse few of their operands, if any, and a rule may
    take long to trace.
    """
    middle = len(operands) // 2
    for half in (operands[:middle], operands[middle:]) if middle else ():
        try:
            trace(eqn, tuple(i in half for i in range(_num_primals(eqn))))
        except Exception:  # the rule is the user's, and may raise anything
            yield from _traceable(trace, eqn, half)
        else:
            yield from half


def _num_primals(eqn: JaxprEqn) -> int:
    return len(eqn.invars) - eqn.params["num_consts"]


def rule_key(eqn: JaxprEqn) -> Hashable:
    """Return a key that two custom calls share if they follow the same rules at the same types.

    A rule's own jaxpr often holds the call that the rule belongs to, since rules often call their
    function; that inner call has the key of the outer one. Code that follows rules into their
    jaxprs stops at a key that it has seen.
    """
    params = eqn.params
    live = [params[name] for name in _LIVE[eqn.primitive.name]]
    primals = tuple(v.aval for v in eqn.invars[params["num_consts"] :])
    results = tuple(v.aval for v in eqn.outvars)
    return primals, results, params["symbolic_zeros"], *map(jaxcompat.live_key, live)


def following(
    eqn: JaxprEqn,
    call_jaxpr: ClosedJaxpr,
    rule: Callable[[], Any],
    num_consts: int = 0,
    symbolic_zeros: bool = False,
) -> Params:
    """Return the parameters of a custom call like `eqn`, whose rules have the same names.

    See `jvp_params` and `vjp_params`.
    """
    names = [eqn.params[k].debug_info.func_name for k in _LIVE[eqn.primitive.name]]
    rest = rule, num_consts, symbolic_zeros
    if len(names) == 1:
        return jvp_params(call_jaxpr, names[0], *rest)
    return vjp_params(call_jaxpr, (names[0], names[1]), *rest)


def jvp_params(
    call_jaxpr: ClosedJaxpr,
    name: str,
    rule: Callable[[], JVPRule],
    num_consts: int = 0,
    symbolic_zeros: bool = False,
) -> Params:
    """Return the parameters of a custom_jvp call of the closed jaxpr `call_jaxpr`.

    Args:
        call_jaxpr: The body of the call, closed.
        name: The name of the rule.
        rule: Returns the rule. It is called when the call is differentiated, so a rule may contain
            calls that have the same rule. Calls with the same `rule` have the same `rule_key`, at
            the same types.
        num_consts: The number of leading operands that are constants, which the rule does not take.
        symbolic_zeros: Whether the rule takes symbolic zeros.
    """
    # Do not close over the jaxpr: what this closes over is part of the `rule_key`.
    function = jaxcompat.open_jaxpr(call_jaxpr).debug_info.func_name

    def checked_rule(perturbed: Sequence[bool]) -> JVPRule:
        traced = rule()
        if traced.raises is not None:
            raise RuleRaised(f"{traced.name} of {function}", traced.raises)
        _require(perturbed, traced.perturbed, traced.name)
        return traced

    rule_params = jaxcompat.custom_jvp_rule_param(name, checked_rule)
    return _params(call_jaxpr, num_consts, symbolic_zeros, rule, rule_params)


def vjp_params(
    call_jaxpr: ClosedJaxpr,
    names: tuple[str, str],
    rule: Callable[[], VJPRule],
    num_consts: int = 0,
    symbolic_zeros: bool = False,
) -> Params:
    """Return the parameters of a custom_vjp call of the closed jaxpr `call_jaxpr`.

    Args:
        call_jaxpr: The body of the call, closed.
        names: The names of the forward and the backward rule.
        rule: Returns the rules, as for `jvp_params`.
        num_consts: The number of leading operands that are constants, which the rules do not take.
        symbolic_zeros: Whether the rules take symbolic zeros.
    """
    function = jaxcompat.open_jaxpr(call_jaxpr).debug_info.func_name

    def checked_rule(perturbed: Sequence[bool]) -> VJPRule:
        traced = rule()
        if traced.raises is not None:
            raise RuleRaised(f"{traced.fwd_name} or {traced.bwd_name} of {function}", traced.raises)
        _require(perturbed, traced.perturbed, traced.fwd_name)
        return traced

    primals = [v.aval for v in call_jaxpr.invars[num_consts:]]
    rule_params = jaxcompat.custom_vjp_rule_params(names, checked_rule, primals, num_consts)
    return _params(call_jaxpr, num_consts, symbolic_zeros, rule, rule_params)


def _params(
    call_jaxpr: ClosedJaxpr,
    num_consts: int,
    symbolic_zeros: bool,
    rule: Any,
    rule_params: dict[str, Any],
) -> Params:
    params = {"call_jaxpr": call_jaxpr, "num_consts": num_consts, "symbolic_zeros": symbolic_zeros}
    params |= rule_params
    jaxcompat.live_function(params).made_from = rule
    return params


def _made_from(eqn: JaxprEqn) -> Any:
    """Return the `rule` that a call was made with by this module; None if JAX made the call."""
    return getattr(jaxcompat.live_function(eqn.params), "made_from", None)


def _require(wanted: Sequence[bool], perturbed: Sequence[bool], name: str) -> None:
    """Refuse to differentiate with respect to an operand for which a rule could not be traced."""
    for i, (asked, may) in enumerate(zip(wanted, perturbed, strict=False)):
        if asked and not may:
            raise UserFunctionError(
                f"the rule {name} does not differentiate with respect to operand {i}"
            )


def untraceable_rule(eqn: JaxprEqn, error: Exception) -> UnsupportedError:
    """Return the error for a rule that raises `error` when it is traced."""
    message = f"the rule of the {named(eqn)} cannot be written as a jaxpr: {described(error)}"
    return UnsupportedError(message, _WITHOUT_RULES)


# --- closed over ----------------------------------------------------------------------------------
# Rules of custom derivatives that close over values of the function that calls them.
#
#     def f(x, s):
#         @jax.custom_jvp
#         def noisy(x): ...
#         noisy.defjvp(lambda primals, tangents: ... s ...)
#
# `jax.grad` runs the rule while `f` is traced. A program is differentiated later, so the calls in
# it take such values as operands, where they are values of the jaxpr that holds the call.


def with_closed_over(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return a traced jaxpr whose custom calls take the values that their rules close over."""
    memo = Memo()
    for body in reversed(outer_first(jaxcompat.open_jaxpr(jaxpr))):  # for deep nesting
        for eqn, _ in holders(body):
            for _, held in sub_jaxprs(eqn):
                memo(partial(_taking, held, memo), held)
    return _taking(jaxpr, memo)


def _taking(jaxpr: AnyJaxpr, memo: Memo) -> AnyJaxpr:
    body = jaxcompat.open_jaxpr(jaxpr)
    in_scope: set[Var] = {*body.constvars, *body.invars}
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        new = eqn
        if eqn.params and holds_jaxpr(eqn.params.values()):
            new = with_bodies(eqn, lambda body: memo(partial(_taking, body, memo), body))
        eqns += jaxcompat.equations_with_closed_over(new, in_scope)
        in_scope.update(eqn.outvars)
    same = len(eqns) == len(body.eqns) and all(a is b for a, b in zip(eqns, body.eqns, strict=True))
    return jaxpr if same else jaxcompat.replace_jaxpr(jaxpr, eqns=eqns)


def holds_ended_tracer(jaxpr: AnyJaxpr) -> bool:
    """Return True if a rule in a jaxpr, at any depth, holds a tracer of a trace that has ended."""
    todo, seen = [jaxpr], {anchor(jaxpr)}
    for current in todo:
        if any(map(jaxcompat.has_ended, getattr(current, "consts", ()))):
            return True
        for eqn in jaxcompat.open_jaxpr(current).eqns:
            new = [body for _, body in sub_jaxprs(eqn) if anchor(body) not in seen]
            seen.update(map(anchor, new))
            todo += new
    return False


def refused(jaxpr: AnyJaxpr, what: str) -> UnsupportedError:
    """Return the error for a jaxpr with a rule that holds a value of a trace that has ended."""
    rule = _rule_with_ended_tracer(jaxpr, None) or "a custom derivative rule"
    return UnsupportedError(
        f"{what}: {rule} closes over a value of an enclosing trace",
        "pass the value to the function as an argument",
    )


def _rule_with_ended_tracer(jaxpr: AnyJaxpr, place: str | None) -> str | None:
    """Return the name of the first rule that holds such a value, and the source line of its call.

    Args:
        jaxpr: The jaxpr to search, at every depth.
        place: The source line of the equation that holds the jaxpr, for calls without one.
    """
    for eqn in jaxcompat.open_jaxpr(jaxpr).eqns:
        at = source_place(eqn) or place
        if jaxcompat.holds_ended(eqn):
            call = eqn.primitive.name + (f" at {at}" if at else "")
            return f"the rule of '{jaxcompat.custom_name(eqn)}', the {call},"
        for _, body in sub_jaxprs(eqn):
            if (name := _rule_with_ended_tracer(body, at)) is not None:
                return name
    return None


# --- callbacks ------------------------------------------------------------------------------------
# Callbacks: the Python functions that a program calls as it runs, and their stubs in files.

#: The hint for a program that cannot be written because of its callbacks.
HINT = "-p drop_checks removes checks and prints; --callbacks stub writes callbacks that raise"

#: The hint for a batching rule of `custom_vmap`. A rule cannot be written as a jaxpr, since it may
#: depend on the size of the axis: traced with a symbolic size, `size == 4` is silently False.
BATCHING_HINT = (
    "--callbacks stub writes a rule that raises; inline(calls=('custom_vmap',)) removes the "
    "rule, and the function's body is batched instead"
)


@dataclass(frozen=True)
class Stub:
    """A placeholder for a Python function, which raises when it is called.

    Attributes:
        name: The name of the function.
        source: A digest of its source without comments; "" if unknown.
    """

    name: str
    source: str = ""

    def __call__(self, *operands: Any) -> Any:
        raise RuntimeError(self.message)

    @property
    def message(self) -> str:
        """The message of the exception that a call raises."""
        return f"the function {self.name} was omitted when the program was written"


def are_stubs(callbacks: str) -> bool:
    """Return True for the option "stub" and False for "refuse"."""
    if callbacks not in ("refuse", "stub"):
        raise ValueError(f"callbacks must be 'refuse' or 'stub', not {callbacks!r}")
    return callbacks == "stub"


def callback_name(callback: object) -> str:
    """Return the module and qualified name of the function in a parameter `callback`."""
    if isinstance(callback, Stub):
        return callback.name
    function = _function(callback)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _function(callback: object) -> Any:
    """Return the user's function in a parameter `callback`."""
    function = jaxcompat.callback_function(callback)
    while isinstance(function, functools.partial):
        function = function.func
    return function


def stub(callback: object) -> Stub:
    """Return a stub of the function in a parameter `callback`."""
    if isinstance(callback, Stub):
        return callback
    return Stub(callback_name(callback), _source_digest(_function(callback)))


def _source_digest(function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    try:
        source = ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda in the middle of an expression
        source = source.strip()
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def batching_rule(eqn: JaxprEqn) -> str:
    """Describe the batching rule of a `custom_vmap` call, for a message."""
    return f"the batching rule {callback_name(eqn.params['rule'])}, a Python function"


def custom_vmap_params(body: ClosedJaxpr, rule: Stub, operands: int, results: int) -> Params:
    """Return the parameters of a `custom_vmap` call with a stub for its rule and flat pytrees."""
    return {"call": body, "rule": rule, **jaxcompat.flat_custom_vmap_trees(operands, results)}


def stubbed(eqn: JaxprEqn) -> JaxprEqn:
    """Replace the callback or batching rule of an equation, if it has one, by a stub."""
    if eqn.primitive.name == "custom_vmap_call":
        rule, counts = stub(eqn.params["rule"]), (len(eqn.invars), len(eqn.outvars))
        return eqn.replace(params=custom_vmap_params(eqn.params["call"], rule, *counts))
    callback = eqn.params.get("callback")
    if callback is None or not traits(eqn).callback or isinstance(callback, Stub):
        return eqn
    return eqn.replace(params={**eqn.params, "callback": stub(callback)})


def has_stubs(jaxpr: AnyJaxpr) -> bool:
    """Return True if a callback or a batching rule in a jaxpr, at any depth, is a stub."""
    return any(
        isinstance(value, Stub)
        for eqn in equations(jaxcompat.open_jaxpr(jaxpr))
        for value in (eqn.params.get("callback"), eqn.params.get("rule"))
    )


def with_stubs(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Replace each callback and batching rule of a jaxpr, at any depth, by a stub."""

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        new = stubbed(eqn)
        return None if new is eqn else [new]

    return map_equations(jaxpr, rule)


def is_check(eqn: JaxprEqn) -> bool:
    """Return True if an equation has no results, and only the effects of checks or debugging."""
    if eqn.outvars or not eqn.effects:
        return False
    return all(map(jaxcompat.is_check_effect, eqn.effects))


# --- checkpoint policies --------------------------------------------------------------------------
# The policies of `jax.checkpoint` by name: policies, and functions that return policies.

_MAKER_NAMES = (
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
)

#: The functions that return a policy, by name.
POLICY_FACTORIES: dict[str, Callable[..., Any]] = {
    name: getattr(jax.checkpoint_policies, name) for name in _MAKER_NAMES
}

#: The policies themselves, by name; JAX 0.11 also has classes of policies there.
POLICIES: dict[str, Callable[..., Any]] = {
    name: policy
    for name, policy in vars(jax.checkpoint_policies).items()
    if not (name in POLICY_FACTORIES or name.startswith("_") or isinstance(policy, type))
}
