"""Batching of custom_jvp and custom_vjp calls: the function, and its rules when they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import CustomJVP, CustomVJP
from jaxprtool.jaxcompat import Atom, JaxprEqn, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.table import Rebuilt, structured_rules


def _custom_derivative(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    jvp = eqn.primitive.name in CustomJVP.primitives
    call = (CustomJVP if jvp else CustomVJP).of(eqn)
    body, out_dims = batch_body(call.body, dims, axis)

    def batch(rule: Any, dims: Sequence[Dim], outs: Sequence[Dim]) -> Any:
        return batch_body(rule, dims, axis, outs)

    mapped = jaxcompat.mapped_jvp_params if jvp else jaxcompat.mapped_vjp_params
    own_dims = tuple(dims[eqn.params["num_consts"] :])
    rules = mapped(eqn.params, axis.data, batch, own_dims, out_dims)

    def build(operands: Sequence[Atom], outs: Sequence[Var]) -> JaxprEqn:
        new = call.rebuild(operands=operands, outs=outs, body=body)
        return new.replace(params={**new.params, **rules})

    return Rebuilt(tuple(dims), out_dims, build)


for _name in (*CustomJVP.primitives, *CustomVJP.primitives):
    structured_rules[_name] = _custom_derivative
