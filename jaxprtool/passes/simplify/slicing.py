"""Rules on parts of arrays: slices, concatenations, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxprtool.jaxcompat import Atom, Literal
from jaxprtool.passes.simplify.layout import is_unit
from jaxprtool.passes.simplify.pattern import Match, scalar_value
from jaxprtool.passes.simplify.row import Outcome, Params, Row, equation


def _known(*sizes: Any) -> bool:
    """Whether no size is symbolic."""
    return all(isinstance(size, int | np.integer) for size in sizes)


def _bounds(params: Params) -> list[tuple[int, int, int]] | None:
    """Start, limit and stride of a slice by dimension; None if one is symbolic."""
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    if not _known(*starts, *limits, *strides):
        return None
    return [(int(a), int(b), int(c)) for a, b, c in zip(starts, limits, strides, strict=True)]


def _slice(bounds: Sequence[tuple[int, int, int]]) -> Params:
    starts, limits, strides = zip(*bounds, strict=True) if bounds else ((), (), ())
    plain = all(stride == 1 for stride in strides)
    return {
        "start_indices": starts,
        "limit_indices": limits,
        "strides": None if plain else strides,
    }


# --- slices -----------------------------------------------------------------------------------


def _whole_slice(match: Match) -> bool:
    """x has the shape of the result"""
    return bool(match.aval("x").shape == match.out.shape)


def _slice_of_slice(match: Match) -> Params | None:
    outer, inner = (_bounds(eqn.params) for eqn in match.eqns)
    if outer is None or inner is None or 0 in match.out.shape:
        return None
    return _slice(
        [
            (start + first * stride, start + (last - 1) * stride + 1, stride * step)
            for (first, last, step), (start, _, stride) in zip(outer, inner, strict=True)
        ]
    )


def _slice_of_part(match: Match) -> Outcome:
    """the slice falls in one operand"""
    bounds, dim = _bounds(match.eqn.params), match.inner.params["dimension"]
    if bounds is None or match.out.shape[dim] == 0:
        return None
    first, last, stride = bounds[dim]
    for x in match["xs"]:
        size = x.aval.shape[dim]
        if not _known(size):
            return None
        if first >= 0 and last <= size:
            bounds[dim] = first, last, stride
            return equation(match, "slice", [x], _slice(bounds))
        first, last = first - size, last - size
    return None


def _slice_of_broadcast(match: Match) -> Params | None:
    """x is not sliced"""
    dims = match.inner.params["broadcast_dimensions"]
    was, now = match.inner.params["shape"], match.out.shape
    if match.inner.params["sharding"] is not None:
        return None
    for d, size in zip(dims, match.aval("x").shape, strict=True):
        if not (is_unit(size) and _known(now[d]) and now[d] > 0) and was[d] != now[d]:
            return None
    return {**match.inner.params, "shape": now}


def _slice_of_pad(match: Match) -> Params | None:
    """the slice falls in x"""
    bounds, padding = _bounds(match.eqn.params), match.inner.params["padding_config"]
    shape = match.aval("x").shape
    if bounds is None or not _known(*shape) or 0 in match.out.shape:
        return None
    shifted = []
    for (first, last, stride), (low, _, interior), size in zip(bounds, padding, shape, strict=True):
        if not _known(low) or interior != 0 or first < low or last > low + size:
            return None
        shifted.append((first - int(low), last - int(low), stride))
    return _slice(shifted)


def _constant_start(match: Match) -> Params | None:
    """the indices are constants"""
    sizes, shape = match.eqn.params["slice_sizes"], match.aval("x").shape
    if not _known(*sizes, *shape):
        return None
    bounds = []
    for index, size, whole in zip(match["i"], sizes, shape, strict=True):
        start = scalar_value(index, match.writer)
        if start is None:
            return None
        first = min(max(int(start), 0), whole - size)
        bounds.append((first, first + size, 1))
    return _slice(bounds)


def _whole_update(match: Match) -> bool:
    """y has the shape of x"""
    return bool(match.aval("y").shape == match.aval("x").shape)


ROWS = [
    Row("slice(x)", "x", (_whole_slice,)),
    Row("slice(slice(x))", "slice(x)", params=_slice_of_slice),
    Row("slice(concatenate(*xs))", "slice(x)", build=_slice_of_part),
    Row("slice(broadcast_in_dim(x))", "broadcast_in_dim(x)", params=_slice_of_broadcast),
    Row("slice(pad(x, y))", "slice(x)", params=_slice_of_pad),
    Row("dynamic_slice(x, *i)", "x", (_whole_slice,)),
    Row("dynamic_slice(x, *i)", "slice(x)", params=_constant_start),
    Row("dynamic_update_slice(x, y, *i)", "y", (_whole_update,)),
]


# --- concatenate and split --------------------------------------------------------------------


def _flattened(match: Match) -> Outcome:
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


def _without_empty(match: Match) -> Outcome:
    """an operand is empty"""
    dim = match.eqn.params["dimension"]
    operands = [x for x in match["xs"] if x.aval.shape[dim] != 0]
    if len(operands) == len(match["xs"]) or not operands:
        return None
    return equation(match, "concatenate", operands, match.eqn.params)


def _joined(match: Match) -> Outcome:
    """slices of one array follow one another"""
    dim, writer = match.eqn.params["dimension"], match.writer
    runs: list[tuple[Atom, list[tuple[int, int, int]] | None, Atom]] = []
    for x in match["xs"]:
        source, bounds = x, None
        if (eqn := writer.defined_by(x, "slice")) is not None:
            source, bounds = eqn.invars[0], _bounds(eqn.params)
        if runs and bounds is not None and runs[-1][0] is source:
            merged = _follow(runs[-1][1], bounds, dim)
            if merged is not None:
                runs[-1] = source, merged, x
                continue
        runs.append((source, bounds, x))
    source, bounds, _ = runs[0]
    if len(runs) > 1 or len(match["xs"]) == 1 or bounds is None:
        return None  # one slice, with the others beside it, would be an equation more
    return equation(match, "slice", [source], _slice(bounds))


def _follow(
    first: list[tuple[int, int, int]] | None, second: list[tuple[int, int, int]], dim: int
) -> list[tuple[int, int, int]] | None:
    """Both slices as one, if the second begins where the first ends."""
    if first is None:
        return None
    for d, (a, b) in enumerate(zip(first, second, strict=True)):
        if d != dim and a != b:
            return None
    (start, middle, stride), (begin, end, step) = first[dim], second[dim]
    if (stride, step) != (1, 1) or middle != begin:
        return None
    return [*first[:dim], (start, end, 1), *first[dim + 1 :]]


def _one_part(match: Match) -> bool:
    """there is one part"""
    return len(match.eqns[0].outvars) == 1


def _split_again(match: Match) -> Outcome:
    """they are all the parts of one split, in order"""
    first = match["xs"][0]
    eqn = None if type(first) is Literal else match.writer.definition.get(first)
    if eqn is None or eqn.primitive.name != "split":
        return None
    parts, xs = eqn.outvars, match["xs"]
    if len(parts) != len(xs) or any(a is not b for a, b in zip(parts, xs, strict=True)):
        return None
    return eqn.invars[0] if eqn.params["axis"] == match.eqn.params["dimension"] else None


ROWS += [
    Row("concatenate(x)", "x"),
    Row("concatenate(*xs)", "concatenate(*ys)", build=_without_empty),
    Row("concatenate(*xs)", "concatenate(*ys)", build=_flattened),
    Row("concatenate(*xs)", "slice(x)", build=_joined),
    Row("concatenate(*xs)", "x", build=_split_again),
    Row("split(x)", "x", (_one_part,)),
]


# --- pad --------------------------------------------------------------------------------------


def _no_padding(match: Match) -> bool:
    """nothing is added"""
    return all(_known(*sizes) and not any(sizes) for sizes in match.eqn.params["padding_config"])


def _padded_once(match: Match) -> Params | None:
    """both add the same, outside"""
    (outer, inner), y, z = (
        (eqn.params["padding_config"] for eqn in match.eqns),
        match["y"],
        match["z"],
    )
    if y is not z:
        a, b = (scalar_value(atom, match.writer) for atom in (y, z))
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
    Row("pad(x, y)", "x", (_no_padding,)),
    Row("pad(pad(x, y), z)", "pad(x, y)", params=_padded_once),
]
