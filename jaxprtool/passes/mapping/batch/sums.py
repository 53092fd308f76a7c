"""`sum_match`: sum mapped results whose `out_axes` entry is None over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import ClosedJaxpr, Literal
from jaxprtool.passes.mapping.batch.axis import Dim


def summed(
    body: ClosedJaxpr, dims: Sequence[Dim], outs: Sequence[Dim]
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    """Sum the mapped results of a batched jaxpr that were requested to be unmapped.

    The sum is that of the method `sum` of arrays, as in `jax.vmap`: small integers are widened. It
    has the source line of the equation that computes the result, if one does.

    Args:
        body: The batched jaxpr.
        dims: The batch dimensions of its results.
        outs: The requested ones.

    Returns:
        The jaxpr with the sums, and the batch dimensions of its results.
    """
    definition = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    eqns, results, left = list(body.eqns), list(body.outvars), list(dims)
    for i, (dim, out) in enumerate(zip(dims, outs, strict=True)):
        if dim is None or out is not None:
            continue
        var = body.outvars[i]
        eqn = definition.get(var)
        total = jaxcompat.trace_in_setting(partial(_sums, dim), [var.aval], eqn)
        (parameter,) = total.invars
        for added in total.eqns:
            bare = jaxcompat.source_info(None, added.source_info.name_stack)
            source = bare if eqn is None else eqn.source_info
            ins = [var if v is parameter else v for v in added.invars]
            eqns.append(added.replace(invars=ins, source_info=source))
        results[i], left[i] = total.outvars[0], None
        assert type(results[i]) is not Literal
    return jaxcompat.replace_jaxpr(body, eqns=eqns, outvars=results), tuple(left)


def _sums(dim: int, array: jax.Array) -> list[jax.Array]:
    return [array.sum(dim)]
