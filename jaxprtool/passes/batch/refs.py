"""Batching of refs: a new one has room for all lanes, since any of them may write to it."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import Atom, JaxprEqn, Primitive, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.table import (
    Operands,
    Params,
    Rebuilt,
    batch_rules,
    jaxs_rule,
    structured_rules,
)


# A function that returns a ref cannot be traced: JAX's rule makes no template.
@rule(structured_rules, "new_ref")
def _new_ref(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    dims = tuple(0 if dim is None else dim for dim in dims)

    def build(operands: Sequence[Atom], outs: Sequence[Var]) -> JaxprEqn:
        return eqn.replace(invars=list(operands), outvars=list(outs))

    return Rebuilt(dims, dims, build)


@rule(batch_rules, "swap", "addupdate")
def _written(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[list[jax.Array], list[Dim]]:
    """What is written to a whole ref is mapped as the ref is; JAX's own rule relies on it."""
    ref, value, *others = operands
    dim = dims[0]
    if not others and dim is not None and dims[1] is not None:
        value = jaxcompat.match_axis(axis.data, dims[1], dim, value)
        dims = (dim, dim)
    return jaxs_rule(axis, primitive, (ref, value, *others), dims, params)
