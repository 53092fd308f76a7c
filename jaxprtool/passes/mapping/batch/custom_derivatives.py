"""Batching of custom_jvp and custom_vjp calls: the function at once, its rules on demand.

A result that is the same in all batch elements may have a mapped derivative, by the user's rule.
Such a result is mapped too, as in `grad` of `jax.vmap`, so that the call has this derivative. To
find out, the rule is traced, but only where a mapped call has an unmapped result. Rules may contain
such calls, to any depth: only a few are traced, and results of calls nested deeper stay unmapped.

Results also stay unmapped if mapping them would map a result of the program that must be unmapped.
Such a call is refused if it is differentiated after all and its derivative is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.structured import CustomJVP, CustomVJP
from jaxprtool.ir.rewriting.custom_rules import rule_key
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn
from jaxprtool.passes.mapping.batch.axis import Axis, Dim
from jaxprtool.passes.mapping.batch.body import BatchBodyBuilder, batch_body
from jaxprtool.passes.mapping.batch.table import structured_rules
from jaxprtool.passes.mapping.domains import lifted


@rule(structured_rules, *CustomJVP.primitives, *CustomVJP.primitives)
def _custom_derivative(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    axis, dims = builder.domain.axis, [*map(builder.kind, eqn.invars)]
    jvp = eqn.primitive.name in CustomJVP.primitives
    call = (CustomJVP if jvp else CustomVJP).of(eqn)
    own_dims = tuple(dims[eqn.params["num_consts"] :])

    def batch(
        rule: ClosedJaxpr, dims: Sequence[Dim], outs: Sequence[Dim]
    ) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
        return batch_body(rule, dims, axis, outs)

    body, out_dims = batch_body(call.body, dims, axis)
    if axis.derivatives and None in out_dims and own_dims != (None,) * len(own_dims):
        more = _rule_dims(eqn, axis, batch, own_dims) or out_dims
        wanted = [b if a is None else a for a, b in zip(out_dims, more, strict=True)]
        body, out_dims = batch_body(call.body, dims, axis, wanted)
    mapped = jaxcompat.mapped_jvp_params if jvp else jaxcompat.mapped_vjp_params
    rules = mapped(eqn.params, axis.data, batch, own_dims, out_dims)
    body, consts = lifted(body)
    if consts:
        rules |= jaxcompat.with_leading_consts(eqn.params, len(consts))
    operands = [*map(builder.constant, consts), *map(builder.held, eqn.invars, dims)]
    new = call.rebuild(operands=operands, outs=builder.outs(eqn.outvars, out_dims), body=body)
    builder.add(new.replace(params={**new.params, **rules}), eqn, out_dims)
    return True


#: The maximum depth of nested rules to trace, and the maximum number of rules traced within one.
_MOST_WITHIN, _MOST_TRACED = 3, 16

#: The result dimensions of the rules traced within one; None while a rule is being traced.
_known: ContextVar[dict[Hashable, Sequence[Dim] | None] | None] = ContextVar("known", default=None)


def _rule_dims(
    eqn: JaxprEqn, axis: Axis, batch: Callable[..., Any], dims: Sequence[Dim]
) -> Sequence[Dim] | None:
    """Return where the rules of a call map results or their tangents; None if not known."""
    outer = _known.get()
    known = {} if outer is None else outer
    request = rule_key(eqn), tuple(dims)
    within = sum(found is None for found in known.values())
    if request in known or within == _MOST_WITHIN or len(known) == _MOST_TRACED:
        return known.get(request)
    jvp = eqn.primitive.name in CustomJVP.primitives
    asked = jaxcompat.jvp_result_dims if jvp else jaxcompat.vjp_result_dims
    token, known[request] = _known.set(known), None
    try:
        known[request] = asked(eqn, axis.data, batch, dims)
    except Exception:  # the user's rule may not support these operands
        known[request] = ()
    finally:
        _known.reset(token)
    return known[request]
