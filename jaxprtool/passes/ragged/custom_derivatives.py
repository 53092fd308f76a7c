"""Structured rules for `custom_jvp` and `custom_vjp` calls.

The function is rewritten at once, its derivative rules when JAX first asks for them. The lengths
become operands of the call, since the derivative rules need them too; they have no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.custom_rules import jvp_params, jvp_rule, vjp_params, vjp_rule
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import CustomJVP, CustomVJP
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, JVPRule, Params, Var, VJPRule
from jaxprtool.passes.ragged.body import Run, Writing, structured_ragged_rules
from jaxprtool.passes.ragged.calls import held, kinds_of, lengths, with_lengths
from jaxprtool.passes.ragged.pairs import without_others
from jaxprtool.passes.ragged.table import Ragging, select
from jaxprtool.passes.ragged.values import Kind, Packed, Pairs, Shared, Stacked


@rule(structured_ragged_rules, *CustomJVP.primitives)
def _custom_jvp(writing: Writing, eqn: JaxprEqn) -> bool:
    run, consts = writing.run, eqn.params["num_consts"]
    names, kinds = tuple(run.sizes.bounds), kinds_of(writing, eqn.invars)
    outs = [run.sizes.canonical(v.aval) for v in eqn.outvars]

    @cache
    def ragged_rule() -> JVPRule:
        found = jvp_rule(eqn)
        if found.jaxpr is None:
            return found
        primals = kinds[consts:]
        moving = [kind for kind, zero in zip(outs, found.out_zeros, strict=True) if not zero]
        given = [*primals, *map(_unknown, primals)]
        body = with_all_lengths(run, found.jaxpr, given, [*outs, *moving])
        zeros = [Var(var.aval.to_tangent_aval()) for var in body.invars[: len(names)]]
        at = len(names) + len(primals)
        new = jaxcompat.replace_jaxpr(body, invars=[*body.invars[:at], *zeros, *body.invars[at:]])
        return replace(found, jaxpr=new, perturbed=(*(True for _ in names), *found.perturbed))

    body = with_all_lengths(run, CustomJVP.of(eqn).body, kinds, outs)
    name = eqn.params["jvp_jaxpr_fun"].debug_info.func_name
    symbolic_zeros = eqn.params["symbolic_zeros"]
    after = _after_consts(body, len(names), consts)
    _add(writing, eqn, kinds, outs, jvp_params(after, name, ragged_rule, consts, symbolic_zeros))
    return True


@rule(structured_ragged_rules, *CustomVJP.primitives)
def _custom_vjp(writing: Writing, eqn: JaxprEqn) -> bool:
    run, consts = writing.run, eqn.params["num_consts"]
    names, kinds = tuple(run.sizes.bounds), kinds_of(writing, eqn.invars)
    outs = [run.sizes.canonical(v.aval) for v in eqn.outvars]

    @cache
    def ragged_rule() -> VJPRule:
        found, primals = vjp_rule(eqn), kinds[consts:]
        new = sum(i is None for i in found.forwarded)
        fwd = run.body(found.fwd, primals, [*(None,) * new, *outs])
        given = iter(fwd.kinds)
        residuals = [next(given) if i is None else primals[i] for i in found.forwarded]
        moving = [kind for kind, zero in zip(primals, found.in_zeros, strict=True) if not zero]
        shifted = [None if i is None else i + len(names) for i in found.forwarded]
        more = (True,) * len(names)
        return replace(
            found,
            fwd=with_lengths(fwd, names, run.sizes),
            bwd=_backward(run, found.bwd, [*residuals, *outs], moving),
            forwarded=(*range(len(names)), *shifted),
            in_zeros=(*more, *found.in_zeros),
            perturbed=(*more, *found.perturbed),
        )

    body = with_all_lengths(run, CustomVJP.of(eqn).body, kinds, outs)
    functions = tuple(eqn.params[k].debug_info.func_name for k in ("fwd_jaxpr_thunk", "bwd"))
    symbolic_zeros = eqn.params["symbolic_zeros"]
    after = _after_consts(body, len(names), consts)
    params = vjp_params(after, functions, ragged_rule, consts, symbolic_zeros)
    _add(writing, eqn, kinds, outs, params)
    return True


def _backward(
    run: Run, bwd: ClosedJaxpr, kinds: Sequence[Kind], primals: Sequence[Kind]
) -> ClosedJaxpr:
    """Return the rewritten backward rule.

    The cotangent of a shared primal is summed over the lanes. In spare rows and invalid pairs it is
    zero.

    Args:
        run: The rewriting of the program.
        bwd: The backward rule of one lane.
        kinds: The layouts of its arguments, the residuals and the cotangents.
        primals: The layouts of the primals whose cotangents it returns.
    """
    sizes = run.sizes
    wanted = [
        sizes.canonical(var.aval) if isinstance(kind, Shared) else _unknown(kind)
        for var, kind in zip(bwd.outvars, primals, strict=True)
    ]
    body = with_all_lengths(run, bwd, kinds, wanted)
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def fun(*args: Any) -> list[Any]:
        names = list(sizes.bounds)
        ragging = Ragging(sizes, dict(zip(names, args, strict=False)), {})
        results = []
        for kind, cotangent in zip(primals, evaluate(*args), strict=True):
            if isinstance(kind, Shared):
                cotangent = cotangent.sum(0)
            elif isinstance(kind, Packed) and not sizes.is_exact(kind.size):
                cotangent = select(ragging.real(kind.size), kind.axis, cotangent, 0)
            elif isinstance(kind, Pairs):
                cotangent = without_others(ragging, cotangent, kind, kind.axes[1])
            results.append(cotangent)
        return results

    return jaxcompat.trace_in_setting(fun, [v.aval for v in body.invars], None)


def with_all_lengths(
    run: Run, body: ClosedJaxpr, kinds: Sequence[Kind], wanted: Sequence[Kind | None]
) -> ClosedJaxpr:
    """Return a rewritten body that takes the lengths of all ragged symbols first."""
    return with_lengths(run.body(body, kinds, wanted), tuple(run.sizes.bounds), run.sizes)


def _add(
    writing: Writing, eqn: JaxprEqn, kinds: Sequence[Kind], outs: Sequence[Kind], params: Params
) -> None:
    consts = params["num_consts"]
    operands = held(writing, eqn.invars, kinds)
    first = lengths(writing, tuple(writing.run.sizes.bounds))
    new = eqn.replace(
        invars=[*operands[:consts], *first, *operands[consts:]],
        outvars=writing.outs(eqn.outvars, outs),
        params={**eqn.params, **params},
    )
    writing.add(new, eqn, outs)


def _after_consts(body: ClosedJaxpr, count: int, consts: int) -> ClosedJaxpr:
    """Return a body with its arguments reordered: constants, lengths, then the rest."""
    invars = body.invars
    first, own, rest = invars[:count], invars[count : count + consts], invars[count + consts :]
    return jaxcompat.replace_jaxpr(body, invars=[*own, *first, *rest])


def _unknown(kind: Kind) -> Kind:
    """Return a kind with unknown padding."""
    if not isinstance(kind, Stacked):
        return kind
    facts = kind.facts
    return Stacked(type(facts)(facts.shape, (None,) * len(facts.shape), active=True))
