"""Batching of refs: a new one has room for all lanes, since any of them may write to it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool.jaxcompat import Atom, JaxprEqn, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.table import Rebuilt, structured_rules


def _new_ref(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    dims = tuple(0 if dim is None else dim for dim in dims)

    def build(operands: Sequence[Atom], outs: Sequence[Var]) -> JaxprEqn:
        return eqn.replace(invars=list(operands), outvars=list(outs))

    return Rebuilt(dims, dims, build)


# A function that gives a ref cannot be traced, so that JAX's rule makes no template.
structured_rules["new_ref"] = _new_ref
