"""Equations done lane by lane: masked, for examples that are padded, and batched over these.

Here, too, is how packed rows become padded lanes, and the other way round.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.templates import Template, signature, template_of_jaxpr
from jaxprtool.jaxcompat import Atom, JaxprEqn, Var, is_symbolic_dimension
from jaxprtool.passes.batch.axis import Axis
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.mask.values import Facts, fill, is_number
from jaxprtool.passes.ragged.table import Ragging, taken
from jaxprtool.passes.ragged.values import (
    Kind,
    Lanes,
    Packed,
    Pairs,
    Shared,
    Sizes,
    Stacked,
    Value,
)

if TYPE_CHECKING:
    from jaxprtool.passes.ragged.body import Run, Writing


class ByLanes(NamedTuple):
    """What an equation becomes: of the lengths of `symbols`, then its operands."""

    symbols: tuple[str, ...]
    template: Template
    kinds: tuple[Kind, ...]


def by_lanes(writing: Writing, eqn: JaxprEqn) -> None:
    """Write an equation that is done for each lane, padded, by its masking rule."""
    run = writing.run
    kinds = [_lane_kind(writing, atom) for atom in eqn.invars]
    facts = [
        kind.facts if isinstance(kind, Stacked) else Facts.of(atom, active=True)
        for atom, kind in zip(eqn.invars, kinds, strict=True)
    ]
    operands = [writing.held(atom, kind) for atom, kind in zip(eqn.invars, kinds, strict=True)]
    outs = tuple(v.aval for v in eqn.outvars)
    types = tuple(zip((a.aval for a in operands), kinds, facts, strict=True))
    key: Hashable = ByLanes, signature(eqn, (), run.with_floats), types, outs
    try:
        made = run.by_lanes.get(key)
    except TypeError:  # a parameter that cannot be hashed
        key, made = id(eqn), None
    if made is None:
        run.by_lanes[key] = made = _made(run, eqn, kinds, facts)
    lengths: list[Atom] = [writing.symbol(name) for name in made.symbols]
    results = writing.instantiate(made.template, [*lengths, *operands], eqn.source_info)
    for var, kind, atom in zip(eqn.outvars, made.kinds, results, strict=True):
        writing.bind(var, kind, atom)


def _made(run: Run, eqn: JaxprEqn, kinds: Sequence[Kind], facts: Sequence[Facts]) -> ByLanes:
    sizes = run.sizes
    operands, outs = [Var(a.aval) for a in eqn.invars], [Var(v.aval) for v in eqn.outvars]
    body = jaxcompat.replace_jaxpr(
        jaxcompat.trace_in_setting(list, [], None),
        invars=operands,
        outvars=outs,
        eqns=[eqn.replace(invars=operands, outvars=outs)],
    )
    masked = run.masks.body(body, facts)
    dims: list[int | None] = [0] * len(masked.symbols)
    dims += [None if isinstance(kind, Shared) else 0 for kind in kinds]
    axis = Axis(None, sizes.lanes)
    wanted: list[int | None] = [0 if _axes(sizes, var) else None for var in outs]
    batched, found = batch_body(masked.jaxpr, dims, axis, wanted)
    if any(dim not in (None, 0) for dim in found):
        wanted = [None if dim is None else 0 for dim in found]
        batched, found = batch_body(masked.jaxpr, dims, axis, wanted)
    results = [
        Stacked(known) if _axes(sizes, var) else Shared() if dim is None else Lanes()
        for var, dim, known in zip(outs, found, masked.facts, strict=True)
    ]
    return ByLanes(masked.symbols, template_of_jaxpr(batched, ()), tuple(results))


def _axes(sizes: Sizes, atom: Atom) -> tuple[int, ...]:
    return sizes.axes(getattr(atom.aval, "shape", ()))


def _lane_kind(writing: Writing, atom: Atom) -> Kind:
    """Return how an operand is held of which each lane is computed: stacked, if it is ragged."""
    kind = writing.kind(atom)
    if not isinstance(kind, Packed | Pairs):
        return kind
    stacked = [each for each in writing.forms[atom] if isinstance(each, Stacked)]
    return stacked[0] if stacked else Stacked(_zero_padded(atom, kind))


def _zero_padded(atom: Atom, kind: Packed | Pairs) -> Facts:
    shape = tuple(atom.aval.shape)
    zero = fill(0, atom.aval.dtype) if is_number(atom.aval) else None
    axes = (kind.axis,) if isinstance(kind, Packed) else kind.axes
    fills = tuple(zero if i in axes else None for i in range(len(shape)))
    return Facts(shape, fills, Facts.of(atom, active=True).active)


# --- one form made of another -----------------------------------------------------------------


def to_lanes(ragging: Ragging, x: Value) -> Any:
    """Return what is the same in all lanes once for each."""
    return lax.broadcast(x.array, (ragging.sizes.lanes,))


def stacked_lanes(ragging: Ragging, x: Value, padding: Any = 0) -> Any:
    """Return packed rows as padded lanes, with a number in the padding."""
    axis, size = x.axis, x.size
    bound = ragging.sizes.bounds.padded(size)
    numbers = jnp.arange(bound, dtype=jnp.int32)
    rows = ragging.starts(size)[:, None] + numbers
    found = taken(x.array, rows, axis)
    lanes = jnp.moveaxis(found, axis, 0)
    if not is_number(x.array):
        return lanes
    valid = numbers < ragging.lengths(size)[:, None]
    within = lax.broadcast_in_dim(valid, lanes.shape, (0, axis + 1))
    return lax.select(within, lanes, lax.full_like(lanes, padding))


def packed_rows(ragging: Ragging, x: Value) -> Any:
    """Return padded lanes as packed rows."""
    (axis,) = ragging.sizes.axes(x.shape)
    size = x.shape[axis]
    lanes = with_a_row(ragging, jnp.moveaxis(x.array, axis + 1, 1), 1)
    rows = lanes.at[ragging.lanes(size), ragging.positions(size)].get(mode="clip")
    return jnp.moveaxis(rows, 0, axis)


def with_a_row(ragging: Ragging, lanes: Any, axis: int) -> Any:
    """Return padded lanes with one more row, if there may be none at all: a look-up needs one."""
    bound = lanes.shape[axis]
    if bound != 0 and (not is_symbolic_dimension(bound) or bound in ragging.sizes.rows.values()):
        return lanes
    none = [(0, int(i == axis), 0) for i in range(lanes.ndim)]
    return lax.pad(lanes, jnp.zeros((), lanes.dtype), none)
