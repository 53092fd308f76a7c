"""Batching of scan and while: which carries are mapped is found by fixed point.

A while loop whose predicate is mapped goes on until all lanes are done, with every carry mapped;
JAX's `while` primitive then keeps the carries of lanes that are done as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import Scan, While
from jaxprtool.jaxcompat import Atom, JaxprEqn, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.table import Rebuilt, structured_rules


def _scan(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    scan = Scan.of(eqn)
    n, k = len(scan.consts), len(scan.carry)
    # Slices are cut off along the leading dimension, which therefore cannot be the mapped one.
    xs = tuple(None if dim is None else max(dim - 1, 0) for dim in dims[n + k :])
    consts, carry = tuple(dims[:n]), tuple(dims[n : n + k])
    free = (None,) * len(scan.ys)
    while True:
        _, outs = batch_body(scan.body, (*consts, *carry, *xs), axis, (*carry, *free))
        if outs[:k] == carry:
            break
        carry = outs[:k]
    body, outs = batch_body(scan.body, (*consts, *carry, *xs), axis, (*carry, *free))
    ys = tuple(None if dim is None else dim + 1 for dim in outs[k:])

    def build(operands: Sequence[Atom], results: Sequence[Var]) -> JaxprEqn:
        return scan.rebuild(
            consts=operands[:n],
            carry=operands[n : n + k],
            xs=operands[n + k :],
            carry_outs=results[:k],
            ys=results[k:],
            body=body,
        )

    stacked = tuple(None if dim is None else dim + 1 for dim in xs)
    return Rebuilt((*consts, *carry, *stacked), (*carry, *ys), build)


structured_rules["scan"] = _scan


def _while(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    loop = While.of(eqn)
    c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
    effects = loop.cond.effects | loop.body.effects
    _require(jaxcompat.forbidden_in_loops(effects, masked=False))
    cond_dims, body_dims, carry = tuple(dims[:c]), tuple(dims[c:b]), tuple(dims[b:])
    rank = len(loop.cond.outvars[0].aval.shape)
    # The predicate's shape, if it has one, must be a prefix of the shape of each carry.
    carry = tuple(None if dim is None else rank for dim in carry)
    while True:
        _, outs = batch_body(loop.body, (*body_dims, *carry), axis, carry)
        if outs == carry:
            break
        carry = tuple(None if dim is None else rank for dim in outs)
    _, (masked,) = batch_body(loop.cond, (*cond_dims, *carry), axis)
    if masked is not None:
        _require(jaxcompat.forbidden_in_loops(effects, masked=True))
        carry = (0,) * len(carry)
    body, _ = batch_body(loop.body, (*body_dims, *carry), axis, carry)
    cond, _ = batch_body(loop.cond, (*cond_dims, *carry), axis, (None if masked is None else 0,))

    def build(operands: Sequence[Atom], results: Sequence[Var]) -> JaxprEqn:
        return loop.rebuild(
            cond_consts=operands[:c],
            body_consts=operands[c:b],
            carry=operands[b:],
            outs=results,
            cond=cond,
            body=body,
        )

    return Rebuilt((*dims[:b], *carry), carry, build)


structured_rules["while"] = _while


def _require(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(reason)
