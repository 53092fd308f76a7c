"""Batching of scan and while.

Which carries are mapped is found by fixed point. Batch dimensions are where JAX's rules have them:
in front, and for a while loop whose predicate has dimensions, behind these.

A while loop whose predicate is mapped runs until all lanes are done, with every carry mapped; JAX's
`while` primitive then keeps the carries of lanes that are done as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jaxprtool import jaxcompat
from jaxprtool.ir.rules import rule
from jaxprtool.ir.structured import Scan, While
from jaxprtool.jaxcompat import AbstractRef, ClosedJaxpr, JaxprEqn
from jaxprtool.passes.batch.axis import Axis, Dim, at_bdim
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.table import Rebuilt, rebuilt, refusal, structured_rules

Dims = tuple[Dim, ...]


def _batched_loop_body(
    batch: Callable[[Dims, Dims | None], tuple[ClosedJaxpr, Dims]], carry: Dims, target: int
) -> tuple[ClosedJaxpr, Dims, Dims]:
    """Batch a loop's body with every carry that differs by lane mapped at `target`.

    Args:
        batch: Batches the body for the batch dimensions of its carries, and those asked for of its
            results, of which the carries' new values are the first.
        carry: The batch dimensions of the initial carries.
        target: Where mapped carries are to have the batch dimension.

    Returns:
        The body and the batch dimensions of its carries and of its other results.
    """
    k, carry = len(carry), at_bdim(carry, target)
    while True:
        body, outs = batch(carry, None)
        pairs = zip(carry, at_bdim(outs[:k], target), strict=True)
        grown = tuple(after if before is None else before for before, after in pairs)
        if grown == carry:
            break
        carry = grown
    wanted = (*carry, *at_bdim(outs[k:], 0))
    if outs != wanted:
        body, _ = batch(carry, wanted)
    return body, carry, wanted[k:]


@rule(structured_rules, "scan")
def _scan(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    scan = Scan.of(eqn)
    n, k = len(scan.consts), len(scan.carry)
    is_ref = [isinstance(atom.aval, AbstractRef) for atom in eqn.invars]  # not to be moved
    if any(ref and dim == 0 for ref, dim in zip(is_ref[n + k :], dims[n + k :], strict=True)):
        raise refusal(eqn, "it runs over a ref that is mapped along its leading axis")
    # Slices are cut off along the leading dimension, which therefore cannot be the batch dimension.
    slices = [None if dim is None else max(dim - 1, 0) for dim in dims[n + k :]]
    consts = tuple(dims[:n])
    if not jaxcompat.SCAN_LEAVES_CONSTS:
        consts = _unless(is_ref[:n], consts)
    xs = _unless(is_ref[n + k :], slices)

    def batch(carry: Dims, outs: Dims | None) -> tuple[ClosedJaxpr, Dims]:
        return batch_body(scan.body, (*consts, *carry, *xs), axis, outs)

    body, carry, ys = _batched_loop_body(batch, tuple(dims[n : n + k]), 0)
    operand_dims = (*consts, *carry, *_stacked(xs))
    return rebuilt(scan, operand_dims, (*carry, *_stacked(ys)), body=body)


def _unless(is_ref: Sequence[bool], dims: Iterable[Dim]) -> Dims:
    """Return batch dimensions moved to the front, except those of refs."""
    return tuple(dim if ref or dim is None else 0 for ref, dim in zip(is_ref, dims, strict=True))


def _stacked(dims: Iterable[Dim]) -> Dims:
    """Return the batch dimensions of stacks from those of their slices."""
    return tuple(None if dim is None else dim + 1 for dim in dims)


@rule(structured_rules, "while")
def _while(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    """The predicate's shape, if it has one, must be a prefix of the shape of each carry."""
    loop = While.of(eqn)
    c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
    effects = loop.cond.effects | loop.body.effects
    if reason := jaxcompat.forbidden_in_loops(effects, masked=False):
        raise refusal(eqn, reason)

    def batch(carry: Dims, outs: Dims | None) -> tuple[ClosedJaxpr, Dims]:
        return batch_body(loop.body, (*dims[c:b], *carry), axis, outs)

    def predicate(carry: Dims, out: Dim = None) -> tuple[ClosedJaxpr, Dims]:
        return batch_body(loop.cond, (*dims[:c], *carry), axis, (out,))

    rank = len(loop.cond.outvars[0].aval.shape)
    body, carry, _ = _batched_loop_body(batch, tuple(dims[b:]), rank)
    cond, (mapped,) = predicate(carry)
    if mapped is not None:
        if reason := jaxcompat.forbidden_in_loops(effects, masked=True):
            raise refusal(eqn, reason)
        body, carry, _ = _batched_loop_body(batch, (0,) * len(carry), 0)
        cond, _ = predicate(carry, 0)
    return rebuilt(loop, (*dims[:b], *carry), carry, cond=cond, body=body)
