"""Rules on parts of arrays: slices, concatenations, padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal
from jaxprtool.passes.cleanup.simplify.engine import (
    Outcome,
    Params,
    RowMatch,
    SimplifyRule,
    equation,
    scalar_value,
)
from jaxprtool.passes.cleanup.simplify.layout import is_unit, same_shape


def _known(*sizes: object) -> bool:
    """Return True if no size is symbolic."""
    return all(isinstance(size, int | np.integer) for size in sizes)


def _ranges(params: Params) -> list[range] | None:
    """Return the indices of a slice by dimension; None if one is symbolic."""
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    is_static = _known(*starts, *limits, *strides)
    return list(map(range, starts, limits, strides)) if is_static else None


def _slice(ranges: Sequence[range]) -> Params:
    return {
        "start_indices": tuple(r.start for r in ranges),
        "limit_indices": tuple(r.stop for r in ranges),
        "strides": (None if all(r.step == 1 for r in ranges) else tuple(r.step for r in ranges)),
    }


# --- slices -----------------------------------------------------------------------------------


def _slice_of_slice(match: RowMatch) -> Params | None:
    outer, inner = (_ranges(eqn.params) for eqn in match.eqns)
    if outer is None or inner is None or 0 in match.out.shape:
        return None
    both = [r[cut.start : cut.stop : cut.step] for cut, r in zip(outer, inner, strict=True)]
    return _slice([range(r.start, r[-1] + 1, r.step) for r in both])


def _slice_of_part(match: RowMatch) -> Outcome:
    """the slice lies within one operand"""
    ranges, dim = _ranges(match.eqn.params), match.inner.params["dimension"]
    if ranges is None or match.out.shape[dim] == 0:
        return None
    for x in match["xs"]:
        part, size = ranges[dim], x.aval.shape[dim]
        if not _known(size):
            return None
        if part.start >= 0 and part.stop <= size:
            return equation(match, "slice", [x], _slice(ranges))
        ranges[dim] = _shifted(part, size)
    return None


def _shifted(part: range, by: int) -> range:
    return range(part.start - by, part.stop - by, part.step)


def _slice_of_broadcast(match: RowMatch) -> Params | None:
    """x is not sliced"""
    dims = match.inner.params["broadcast_dimensions"]
    was, now = match.inner.params["shape"], match.out.shape
    for d, size in zip(dims, match.aval("x").shape, strict=True):
        if not (is_unit(size) and _known(now[d]) and now[d] > 0) and was[d] != now[d]:
            return None
    return {**match.inner.params, "shape": now}


def _slice_of_pad(match: RowMatch) -> Params | None:
    """the slice lies within x"""
    ranges, padding = _ranges(match.eqn.params), match.inner.params["padding_config"]
    shape = match.aval("x").shape
    if ranges is None or not _known(*shape) or 0 in match.out.shape:
        return None
    shifted = []
    for part, (low, _, interior), size in zip(ranges, padding, shape, strict=True):
        if not _known(low) or interior != 0 or part.start < low or part.stop > low + size:
            return None
        shifted.append(_shifted(part, int(low)))
    return _slice(shifted)


def _constant_start(match: RowMatch) -> Params | None:
    """the indices are constants"""
    sizes, shape = match.eqn.params["slice_sizes"], match.aval("x").shape
    if not _known(*sizes, *shape):
        return None
    ranges = []
    for index, size, whole in zip(match["i"], sizes, shape, strict=True):
        start = scalar_value(index, match.writer)
        if start is None:
            return None
        first = min(max(int(start), 0), whole - size)
        ranges.append(range(first, first + size))
    return _slice(ranges)


def _whole_update(match: RowMatch) -> bool:
    """y has the shape of x"""
    return bool(match.aval("y").shape == match.aval("x").shape)


ROWS = [
    SimplifyRule("slice(x)", "x", (same_shape,)),
    SimplifyRule("slice(slice(x))", "slice(x)", params=_slice_of_slice),
    SimplifyRule("slice(concatenate(*xs))", "slice(x)", build=_slice_of_part),
    SimplifyRule("slice(broadcast_in_dim(x))", "broadcast_in_dim(x)", params=_slice_of_broadcast),
    SimplifyRule("slice(pad(x, y))", "slice(x)", params=_slice_of_pad),
    SimplifyRule("dynamic_slice(x, *i)", "x", (same_shape,)),
    SimplifyRule("dynamic_slice(x, *i)", "slice(x)", params=_constant_start),
    SimplifyRule("dynamic_update_slice(x, y, *i)", "y", (_whole_update,)),
]


# --- concatenate and split --------------------------------------------------------------------


def _flattened(match: RowMatch) -> Outcome:
    """an operand is a concatenate along the same dimension"""
    dim, writer = match.eqn.params["dimension"], match.writer
    operands: list[Atom] = []
    for x in match["xs"]:
        inner = writer.defined_by(x, "concatenate")
        if inner is not None and inner.params["dimension"] == dim:
            operands += inner.invars
        else:
            operands.append(x)
    if len(operands) == len(match["xs"]):
        return None
    return equation(match, "concatenate", operands, match.eqn.params)


def _without_empty(match: RowMatch) -> Outcome:
    """an operand is empty"""
    dim = match.eqn.params["dimension"]
    operands = [x for x in match["xs"] if x.aval.shape[dim] != 0]
    if len(operands) == len(match["xs"]) or not operands:
        return None
    return equation(match, "concatenate", operands, match.eqn.params)


def _joined(match: RowMatch) -> Outcome:
    """the operands are consecutive slices of one array"""
    dim = match.eqn.params["dimension"]
    slices: list[JaxprEqn] = []
    for x in match["xs"]:
        eqn = match.writer.defined_by(x, "slice")
        if eqn is None or eqn.invars[0] is not (slices or [eqn])[0].invars[0]:
            return None
        slices.append(eqn)
    ranges = [_ranges(eqn.params) for eqn in slices]
    if len(slices) == 1 or None in ranges:
        return None
    joined = []
    for d, column in enumerate(zip(*ranges, strict=True)):
        last = column[-1].stop if d == dim else column[0].stop
        ends = all(a.stop == b.start and a.step == b.step == 1 for a, b in pairwise(column))
        if not (ends if d == dim else len(set(column)) == 1):
            return None
        joined.append(range(column[0].start, last, column[0].step))
    return equation(match, "slice", [slices[0].invars[0]], _slice(joined))


def _one_part(match: RowMatch) -> bool:
    """the split has one part"""
    return len(match.eqns[0].outvars) == 1


def _split_again(match: RowMatch) -> Outcome:
    """the operands are all the parts of one split, in order"""
    first = match["xs"][0]
    eqn = None if type(first) is Literal else match.writer.definition.get(first)
    if eqn is None or eqn.primitive.name != "split":
        return None
    parts, xs = eqn.outvars, match["xs"]
    if len(parts) != len(xs) or any(a is not b for a, b in zip(parts, xs, strict=True)):
        return None
    return eqn.invars[0] if eqn.params["axis"] == match.eqn.params["dimension"] else None


ROWS += [
    SimplifyRule("concatenate(x)", "x"),
    SimplifyRule("concatenate(*xs)", "concatenate(*ys)", build=_without_empty),
    SimplifyRule("concatenate(*xs)", "concatenate(*ys)", build=_flattened),
    SimplifyRule("concatenate(*xs)", "slice(x)", build=_joined),
    SimplifyRule("concatenate(*xs)", "x", build=_split_again),
    SimplifyRule("split(x)", "x", (_one_part,)),
]


# --- pad --------------------------------------------------------------------------------------


def _no_padding(match: RowMatch) -> bool:
    """the padding is empty"""
    return all(_known(*sizes) and not any(sizes) for sizes in match.eqn.params["padding_config"])


def _padded_once(match: RowMatch) -> Params | None:
    """both pads use the same value, and add it only at the edges"""
    outer, inner = (eqn.params["padding_config"] for eqn in match.eqns)
    if match["y"] is not match["z"]:
        a, b = (scalar_value(match[name], match.writer) for name in "yz")
        if a is None or b is None or a.tobytes() != b.tobytes():
            return None
    config = []
    for (a_low, a_high, a_inside), (b_low, b_high, b_inside) in zip(outer, inner, strict=True):
        sizes = (a_low, a_high, b_low, b_high)
        if not _known(*sizes) or min(sizes) < 0 or a_inside != 0 or b_inside != 0:
            return None
        config.append((a_low + b_low, a_high + b_high, 0))
    return {"padding_config": tuple(config)}


ROWS += [
    SimplifyRule("pad(x, y)", "x", (_no_padding,)),
    SimplifyRule("pad(pad(x, y), z)", "pad(x, y)", params=_padded_once),
]
