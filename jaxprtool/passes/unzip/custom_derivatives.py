"""Splitting of calls with custom derivatives that declare variables inside.

The user's rules describe how the function depends on its operands, but not on its variables, which
were internal. In apply they are operands, and the derivative is the sum of two: with respect to the
operands by the user's rules, in which the variables are substituted as well, and with respect to
the variables as JAX differentiates the function's body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.dtypes import is_float0
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.structured import call, keep
from jaxprtool.ir.rewriting.custom_rules import (
    JVPRule,
    VJPRule,
    following,
    jvp_rule,
    rule_key,
    vjp_rule,
)
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.dce import dce_body
from jaxprtool.passes.unzip.binding_times import (
    READY,
    BindingTime,
    Context,
    Outcome,
    unzip_rules,
    whole,
)
from jaxprtool.passes.unzip.split import Split, split


@rule(unzip_rules, "custom_jvp_call", "custom_vjp_call")
def _custom(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    if not context.sows(eqn.params["call_jaxpr"]):
        return whole(eqn, times, context)
    part = split(jaxcompat.close_jaxpr(eqn.params["call_jaxpr"]), times, context)
    if any(v.mode != "strict" for v in part.variables):
        raise _refused(eqn, 'only mode "strict" is supported there')
    _check_independent(eqn, part)
    types = [v.aval for v in part.arguments]
    values, arguments = tuple(map(Var, types)), tuple(map(Var, types))
    given = keep(eqn.invars, [v.early for v in times])
    init = [call(part.init([False] * len(part.outs)), given, values, eqn)]
    ready = all(v.ready for v in part.outs)
    early = ready and all(v.early for v in times)
    apply = []
    if ready:
        params = _substituted_params(eqn, part, context)
        operands = keep(eqn.invars, [v.ready for v in times])
        apply.append(_equation(eqn, (*arguments, *operands), params))
        if early:
            init.append(_equation(eqn, (*values, *operands), params))
    outs = (BindingTime(early, ready),) * len(eqn.outvars)
    return Outcome(
        outs, tuple(init), tuple(apply), tuple(part.variables), values, arguments, parts=(part,)
    )


def _check_independent(eqn: JaxprEqn, part: Split) -> None:
    """Refuse variables that depend on differentiable operands which apply has.

    The user's rules include the derivative through the variable, from which it cannot be separated.
    """
    init = part.init([False] * len(part.outs))
    _, used = dce_body(init, [True] * len(init.outvars))
    early = [i for i, times in enumerate(part.ins) if times.early]
    for i in compress(early, used):
        atom = eqn.invars[i]
        constant = i < eqn.params["num_consts"] or isinstance(atom, Literal)
        if part.ins[i].ready and not (constant or is_float0(atom.aval.to_tangent_aval())):
            raise _refused(eqn, "one of them depends on an operand that is not a key")


def _equation(eqn: JaxprEqn, operands: Sequence[Atom], params: dict[str, Any]) -> JaxprEqn:
    effects = jaxcompat.operand_effects(params["call_jaxpr"], operands)
    return eqn.replace(invars=list(operands), params={**eqn.params, **params}, effects=effects)


def _substituted_params(eqn: JaxprEqn, part: Split, context: Context) -> dict[str, Any]:
    """Return the parameters of the call that takes variables, then the operands that are ready.

    Values that the call closes over are among its operands; its rules see them as constants, as in
    JAX. A rule that calls its own function holds the same call, which has the same rule.
    """
    request = rule_key(eqn), part.ins
    made = context.custom_calls.get(request)
    if made is None:
        rules: list[Any] = []
        body = part.apply([True] * len(part.outs))
        made = context.custom_calls[request] = following(eqn, body, lambda: rules[0])
        jvp = eqn.primitive.name == "custom_jvp_call"
        rules.append((_substituted_jvp if jvp else _substituted_vjp)(eqn, part, body, context))
        # With symbolic zeros, JAX passes which operands are differentiated.
        made["symbolic_zeros"] = not all(rules[0].perturbed)
    return made


class _SubstitutedRule:
    """A jaxpr of a rule, with the function's variables substituted where it declares them too."""

    def __init__(
        self,
        eqn: JaxprEqn,
        jaxpr: ClosedJaxpr,
        ins: Sequence[BindingTime],
        part: Split,
        context: Context,
    ):
        if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
            raise _refused(eqn, "its rule closes over traced values")
        self.part = split(jaxpr, ins, context)
        self.outs = [v.ready for v in self.part.outs]
        if self.part.stuck or self.part.early.effects:
            raise _refused(eqn, "its rule has an effect that needs a key")
        first = {v.path: i for i, v in enumerate(part.variables)}
        starts = np.cumsum([0, *(len(v.avals) for v in part.variables)])
        self.order: list[int] = []
        for variable in self.part.variables:
            number = first.get(variable.path)
            if number is None:
                raise _refused(
                    eqn, f"its rule declares '{variable.path[-1]}', but the function does not"
                )
            self.order += range(starts[number], starts[number + 1])

    def __call__(self, values: Sequence[Any], operands: Sequence[Any]) -> dict[int, Any]:
        """Return the results that are ready, by number; reads only the ready `operands`."""
        given = keep(operands, [v.ready for v in self.part.ins])
        apply = jaxcompat.jaxpr_as_fun(self.part.apply(self.outs))
        results = apply(*(values[i] for i in self.order), *given)
        numbers = (i for i, ready in enumerate(self.outs) if ready)
        return dict(zip(numbers, results, strict=True))


def _spread(values: Sequence[Any], marks: Sequence[bool], other: Any) -> list[Any]:
    """Return `values` at the marked positions, and `other` elsewhere."""
    given = iter(values)
    return [next(given) if mark else other for mark in marks]


def _substituted_jvp(eqn: JaxprEqn, part: Split, body: ClosedJaxpr, context: Context) -> JVPRule:
    rule = jvp_rule(eqn)
    count, num_values, n = len(eqn.outvars), len(part.arguments), eqn.params["num_consts"]
    if rule.raises is not None:
        everything = (True,) * len(body.invars)
        return JVPRule(rule.name, None, (False,) * count, everything, rule.raises)
    if not all(rule.perturbed):
        raise _refused(eqn, "its rule can differentiate only with respect to some of its operands")
    ins = part.ins[n:]
    substituted = _SubstitutedRule(eqn, rule.jaxpr, [*ins, *[READY] * len(ins)], part, context)
    if not all(substituted.outs):
        raise _refused(eqn, "its rule uses a key that does not pass through a variable")
    marks = [v.ready for v in part.ins]
    own = [i for i, zero in enumerate(rule.out_zeros) if not zero]

    def jvp(with_variables: bool, *args: Any) -> list[Any]:
        primals, tangents = args[: len(args) // 2], args[len(args) // 2 :]
        values, operands = primals[:num_values], primals[num_values:]
        # Operands that apply does not have get zero tangents.
        dots_in = [
            _zeros(v.aval.to_tangent_aval()) if t is None else t
            for v, t in zip(eqn.invars, _spread(tangents[num_values:], marks, None), strict=True)
        ]
        results = substituted(values, [*_spread(operands, marks, None)[n:], *dots_in[n:]])
        dots = {i: results[count + k] for k, i in enumerate(own)}
        if with_variables:
            _, by_values = jax.jvp(
                lambda *v: jaxcompat.jaxpr_as_fun(body)(*v, *operands),
                values,
                tangents[:num_values],
            )
            for i, dot in enumerate(by_values):
                times = dot.dtype != jax.dtypes.float0 and i in dots
                dots[i] = dots[i] + dot if times else dot
        return [*(results[i] for i in range(count)), *(dots[i] for i in sorted(dots))]

    avals = [v.aval for v in body.invars]
    types = [*avals, *(aval.to_tangent_aval() for aval in avals)]
    jaxpr, by_variables = _traced(eqn, jvp, rule.name, types)
    zeros = tuple(not (by_variables or i in own) for i in range(count))
    perturbed = (*[by_variables] * num_values, *[True] * (len(avals) - num_values))
    return JVPRule(rule.name, jaxpr, zeros, perturbed)


def _substituted_vjp(eqn: JaxprEqn, part: Split, body: ClosedJaxpr, context: Context) -> VJPRule:
    rule = vjp_rule(eqn)
    if not all(rule.perturbed):
        raise _refused(eqn, "its rules can differentiate only with respect to some of its operands")
    num_given, n = rule.forwarded.count(None), eqn.params["num_consts"]
    fwd = _SubstitutedRule(eqn, rule.fwd, part.ins[n:], part, context)
    if not all(fwd.outs):
        raise _refused(eqn, "its forward rule uses a key that does not pass through a variable")
    held = [READY if i is None else part.ins[n + i] for i in rule.forwarded]
    bwd = _SubstitutedRule(eqn, rule.bwd, [*held, *[READY] * len(eqn.outvars)], part, context)
    marks, num_values = [v.ready for v in part.ins], len(part.arguments)
    numbers = {i: k for k, i in enumerate(i for i, zero in enumerate(rule.in_zeros) if not zero)}
    wanted = [numbers.get(i) for i, ready in enumerate(marks, start=-n) if ready]
    if not all(k is None or bwd.outs[k] for k in wanted):
        raise _refused(eqn, "its backward rule uses a key that does not pass through a variable")
    avals = [v.aval for v in body.invars]
    discrete = [is_float0(aval.to_tangent_aval()) for aval in avals[:num_values]]

    def forward(*args: Any) -> list[Any]:
        values, operands = args[:num_values], args[num_values:]
        results = fwd(values, _spread(operands, marks, None)[n:])
        return [results[i] for i in range(len(results))]

    def backward(with_variables: bool, *args: Any) -> list[Any]:
        given, primals = iter(args[:num_given]), args[num_given : num_given + len(avals)]
        values, operands = primals[:num_values], primals[num_values:]
        cotangents = list(args[num_given + len(avals) :])
        full = _spread(operands, marks, None)
        residuals = [next(given) if i is None else full[n + i] for i in rule.forwarded]
        results = bwd(values, [*residuals, *cotangents])
        by_operands = [results[k] for k in wanted if k is not None]
        if not with_variables:
            return by_operands
        _, pull = jax.vjp(lambda *v: jaxcompat.jaxpr_as_fun(body)(*v, *operands), *values)
        by_values = zip(pull(cotangents), discrete, strict=True)
        return [*(ct for ct, zero in by_values if not zero), *by_operands]

    residual_types = [v.aval for v in rule.fwd.outvars[:num_given]]
    cotangent_types = [v.aval.to_ct_aval() for v in eqn.outvars]
    types = [*residual_types, *avals, *cotangent_types]
    with jaxcompat.setting_of(eqn):
        forward_jaxpr = jaxcompat.trace_flat(forward, rule.fwd_name, avals)
    backward_jaxpr, by_variables = _traced(eqn, backward, rule.bwd_name, types)
    zeros = discrete if by_variables else [True] * num_values
    return VJPRule(
        rule.fwd_name,
        rule.bwd_name,
        forward_jaxpr,
        backward_jaxpr,
        (*[None] * num_given, *range(len(avals))),
        (*zeros, *(k is None for k in wanted)),
        (*[by_variables] * num_values, *[True] * len(wanted)),
    )


def _traced(
    eqn: JaxprEqn, rule: Callable[..., list[Any]], name: str, avals: Sequence[Aval]
) -> tuple[ClosedJaxpr, bool]:
    """Trace `rule(True, *args)`, or `rule(False, *args)` if that raises, and return which."""
    with jaxcompat.setting_of(eqn):
        try:
            return jaxcompat.trace_flat(partial(rule, True), name, avals), True
        except Exception:  # JAX raises various errors for a body that it cannot differentiate
            return jaxcompat.trace_flat(partial(rule, False), name, avals), False


def _zeros(aval: Aval) -> Any:
    return (np if is_float0(aval) else jnp).zeros(aval.shape, aval.dtype)


def _refused(eqn: JaxprEqn, why: str) -> UnsupportedError:
    return UnsupportedError(f"variables are sown inside {named(eqn)}: {why}")
