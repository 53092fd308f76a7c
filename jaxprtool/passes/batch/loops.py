"""Batching of scan and while.

Which carries are mapped is found by fixed point. Where they are mapped, and the other operands of
a loop, is a choice: a body that has to move values moves them on every trip. JAX maps a scan's
operands at one dimension for all. Here the body is also batched with operands that are mapped
where they come from, and with carries mapped where the body gives them, and what costs least is
taken, if it costs no more than JAX's choice in any respect (see `cost`).

A while loop whose predicate is mapped goes on until all lanes are done, with every carry mapped;
JAX's `while` primitive then keeps the carries of lanes that are done as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import Scan, While
from jaxprtool.jaxcompat import AbstractRef, Atom, JaxprEqn, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.cost import Cost, cheapest, cost_of, cost_of_moves
from jaxprtool.passes.batch.table import Rebuilt, structured_rules

Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class _Layout:
    """Where the operands of a body are mapped: those that stay the same, and the carries."""

    fixed: Dims
    carry: Dims


@dataclass(frozen=True)
class _Laid:
    """A batched body: where the operands are mapped, the results, and where the carries' new
    values would be if they were not moved to the carries' places."""

    layout: _Layout
    body: Any
    outs: Dims
    falls: Dims


@dataclass(frozen=True)
class _Loop:
    """A loop's body: `batch(layout, outs)` batches it. It gives the carries, and other results."""

    batch: Callable[[_Layout, Dims], tuple[Any, Dims]]
    num_outs: int

    def laid(self, layout: _Layout) -> _Laid:
        """The body for a layout of which more carries may have to be mapped: where they fall."""
        carry, k = layout.carry, len(layout.carry)
        while True:
            layout = _Layout(layout.fixed, carry)
            body, falls = self.batch(layout, (None,) * self.num_outs)
            more = tuple(_first(dim, fall) for dim, fall in zip(carry, falls[:k], strict=True))
            if more == carry:
                break
            carry = more
        outs = falls
        if falls[:k] != carry:
            body, outs = self.batch(layout, (*carry, *(None,) * (self.num_outs - k)))
        return _Laid(layout, body, outs, falls[:k])

    def laid_to_follow(self, laid: _Laid) -> _Laid:
        """The same, with carries mapped where the body gives them."""
        carry = map(_first, laid.falls, laid.layout.carry)
        return self.laid(_Layout(laid.layout.fixed, tuple(carry)))


def _first(dim: Dim, other: Dim) -> Dim:
    return other if dim is None else dim


def _at(dims: Iterable[Dim], target: int) -> Dims:
    """`target` for what is mapped."""
    return tuple(None if dim is None else target for dim in dims)


# --- scan ---------------------------------------------------------------------------------------


def _scan(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    scan = Scan.of(eqn)
    n, k = len(scan.consts), len(scan.carry)
    laid = _scan_body(scan, tuple(dims), axis)
    consts, xs = laid.layout.fixed[:n], laid.layout.fixed[n:]

    def build(operands: Sequence[Atom], results: Sequence[Var]) -> JaxprEqn:
        return scan.rebuild(
            consts=operands[:n],
            carry=operands[n : n + k],
            xs=operands[n + k :],
            carry_outs=results[:k],
            ys=results[k:],
            body=laid.body,
        )

    operand_dims = (*consts, *laid.layout.carry, *_stacked(xs))
    out_dims = (*laid.outs[:k], *_stacked(laid.outs[k:]))
    return Rebuilt(operand_dims, out_dims, build, strays=any(laid.outs))


structured_rules["scan"] = _scan


def _stacked(dims: Iterable[Dim]) -> Dims:
    """Where stacks are mapped whose slices are mapped at `dims`."""
    return tuple(None if dim is None else dim + 1 for dim in dims)


def _scan_body(scan: Scan, dims: Dims, axis: Axis) -> _Laid:
    """The batched body of a scan, of the layouts that are tried the best."""
    n, k = len(scan.consts), len(scan.carry)
    consts, carry, stacks = dims[:n], dims[n : n + k], dims[n + k :]
    held = [isinstance(atom.aval, AbstractRef) for atom in scan.eqn.invars]  # not to be moved
    if any(ref and dim == 0 for ref, dim in zip(held[n + k :], stacks, strict=True)):
        raise NotImplementedError("a scan over a ref that is mapped along its leading axis")
    # Slices are cut off along the leading dimension, which therefore cannot be the mapped one.
    xs = tuple(None if dim is None else max(dim - 1, 0) for dim in stacks)

    def batch(layout: _Layout, outs: Dims) -> tuple[Any, Dims]:
        own = (*layout.fixed[:n], *layout.carry, *layout.fixed[n:])
        return batch_body(scan.body, own, axis, outs)

    def in_front(dims: Dims, refs: Sequence[bool]) -> Dims:
        pairs = zip(dims, _at(dims, 0), refs, strict=True)
        return tuple(dim if ref else front for dim, front, ref in pairs)

    loop = _Loop(batch, k + len(scan.ys))
    natural = loop.laid(_Layout((*consts, *xs), carry))
    mapped = natural.layout.carry
    front = _Layout((*consts, *in_front(xs, held[n + k :])), _at(mapped, 0))
    all_front = _Layout((*in_front(consts, held[:n]), *front.fixed[n:]), front.carry)
    theirs = front if jaxcompat.SCAN_LEAVES_CONSTS else all_front
    if axis.plain:
        outs = _at(natural.outs, 0)
        return _Laid(theirs, batch(theirs, outs)[0], outs, outs[:k])
    types = [atom.aval for atom in scan.eqn.invars], [v.aval for v in scan.eqn.outvars]

    def costs(laid: _Laid) -> list[Cost]:
        own = laid.layout
        to = (*own.fixed[:n], *own.carry, *_stacked(own.fixed[n:]))
        outs = (*laid.outs[:k], *_stacked(laid.outs[k:]))
        theirs = (*_at(laid.outs[:k], 0), *_at(laid.outs[k:], 1))
        outside = cost_of_moves(types[0], dims, to, axis)
        outside += cost_of_moves(types[1], outs, theirs, axis)
        return [outside + cost_of(laid.body).times(scan.length)]

    if natural.layout == front == all_front and natural.falls == mapped:
        return natural
    if not costs(natural)[0].moved:
        return natural
    layouts = [natural, loop.laid_to_follow(natural)]
    layouts += [loop.laid(front), loop.laid(all_front)]
    layouts += [loop.laid_to_follow(laid) for laid in layouts[2:]]
    return cheapest(layouts, layouts[2 if jaxcompat.SCAN_LEAVES_CONSTS else 3], costs)


# --- while --------------------------------------------------------------------------------------


def _while(eqn: JaxprEqn, dims: Sequence[Dim], axis: Axis) -> Rebuilt:
    loop = While.of(eqn)
    c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
    laid, cond = _while_bodies(loop, tuple(dims), axis)

    def build(operands: Sequence[Atom], results: Sequence[Var]) -> JaxprEqn:
        return loop.rebuild(
            cond_consts=operands[:c],
            body_consts=operands[c:b],
            carry=operands[b:],
            outs=results,
            cond=cond,
            body=laid.body,
        )

    carry = laid.layout.carry
    rank = len(loop.cond.outvars[0].aval.shape)
    strays = not rank and any(carry)
    return Rebuilt((*dims[:b], *carry), carry, build, strays=strays)


structured_rules["while"] = _while


def _while_bodies(loop: While, dims: Dims, axis: Axis) -> tuple[_Laid, Any]:
    """The batched body of a while loop and its batched predicate.

    The predicate's shape, if it has one, must be a prefix of the shape of each carry.
    """
    c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
    effects = loop.cond.effects | loop.body.effects
    _require(jaxcompat.forbidden_in_loops(effects, masked=False))
    rank = len(loop.cond.outvars[0].aval.shape)

    def batch(layout: _Layout, outs: Dims) -> tuple[Any, Dims]:
        return batch_body(loop.body, (*layout.fixed, *layout.carry), axis, outs)

    def predicate(laid: _Laid, out: Dim = None) -> tuple[Any, Dims]:
        return batch_body(loop.cond, (*dims[:c], *laid.layout.carry), axis, (out,))

    body = _Loop(batch, len(loop.carry))
    natural = body.laid(_Layout(dims[c:b], dims[b:]))
    if predicate(natural)[1] != (None,):
        _require(jaxcompat.forbidden_in_loops(effects, masked=True))
        masked = body.laid(_Layout(dims[c:b], (0,) * len(loop.carry)))
        return masked, predicate(masked, 0)[0]
    front = _Layout(dims[c:b], _at(natural.layout.carry, rank))
    layouts = [body.laid(front)]
    if not rank and not (natural.layout == front and natural.falls == front.carry):
        layouts = [natural, body.laid_to_follow(natural), *layouts]
        layouts.append(body.laid_to_follow(layouts[-1]))
    types = [atom.aval for atom in loop.carry]

    def costs(laid: _Laid) -> list[Cost]:
        carry = laid.layout.carry
        inside = cost_of(laid.body) + cost_of(predicate(laid)[0])
        outside = cost_of_moves(types, dims[b:], carry, axis)
        outside += cost_of_moves(types, carry, front.carry, axis)
        return [inside, inside + outside]  # it may run for ever, or once

    theirs = layouts[0 if rank else min(2, len(layouts) - 1)]
    best = theirs if axis.plain else cheapest(layouts, theirs, costs)
    return best, predicate(best)[0]


def _require(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(reason)
