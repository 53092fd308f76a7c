"""Rules for equations that only move elements: reshapes, broadcasts, transposes, converts."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.cleanup.simplify.engine import (
    Outcome,
    Params,
    RowMatch,
    SimplifyRule,
    equation,
    has_zero,
)


def is_unit(size: object) -> bool:
    """Return True if a size is 1; False for a symbolic one, whatever its value."""
    return isinstance(size, int | np.integer) and size == 1


def same_shape(match: RowMatch) -> bool:
    """x has the shape of the result"""
    return bool(match.aval("x").shape == match.out.shape)


# --- reshape and squeeze ----------------------------------------------------------------------


def _reshaped(match: RowMatch) -> Params:
    return {"new_sizes": match.out.shape, "dimensions": None, "sharding": None}


def _only_adds_units(eqn: JaxprEqn) -> bool:
    """Return True if a broadcast_in_dim only adds dimensions of size 1."""
    old, new = eqn.invars[0].aval.shape, eqn.params["shape"]
    kept = eqn.params["broadcast_dimensions"]
    return all(new[d] == size for d, size in zip(kept, old, strict=True)) and all(
        is_unit(size) for d, size in enumerate(new) if d not in kept
    )


def _adds_units(match: RowMatch) -> bool:
    """the broadcast only adds dimensions of size 1"""
    return _only_adds_units(match.inner)


ROWS = [
    SimplifyRule("resize(x)", "x", (same_shape,)),
    SimplifyRule("resize(resize(x))", "reshape(x)", params=_reshaped),
    SimplifyRule("resize(broadcast_in_dim(x))", "reshape(x)", (_adds_units,), params=_reshaped),
]


def _through(match: RowMatch) -> Outcome:
    """x has the shape of the result, and the function rounds the same way in every shape"""
    outer, unary, inner = match.eqns
    if not traits(unary).shape_exact:
        return None
    if unary.primitive.name == "div" and not any(map(_is_many, match.out.shape)):
        return None  # XLA divides one number, but multiplies many by the inverse
    if match.aval("x").shape != match.out.shape:
        return None
    if inner.primitive.name == "broadcast_in_dim" and not _only_adds_units(inner):
        return None
    operands = [match["x"] if v is inner.outvars[0] else v for v in unary.invars]
    return outer.replace(primitive=unary.primitive, invars=operands, params=unary.params)


def _is_many(size: object) -> bool:
    return isinstance(size, int | np.integer) and bool(size > 1)


ROWS += [
    SimplifyRule("resize(unary[accuracy](layout(x)))", "unary(x)", build=_through),
    SimplifyRule("resize(elementwise2(layout(x), C))", "elementwise2(x, C)", build=_through),
    SimplifyRule("resize(elementwise2(C, layout(x)))", "elementwise2(C, x)", build=_through),
]


# --- broadcasts -------------------------------------------------------------------------------


def _merged_broadcast(match: RowMatch) -> Params:
    outer, inner = (eqn.params["broadcast_dimensions"] for eqn in match.eqns)
    dims = tuple(int(outer[d]) for d in inner)
    return {**match.eqn.params, "broadcast_dimensions": dims}


def _broadcast_of_reshaped(match: RowMatch) -> Params | None:
    """the reshape only adds or drops dimensions of size 1"""
    old, new = match.aval("x").shape, match.inner.outvars[0].aval.shape
    outer = match.eqn.params["broadcast_dimensions"]
    kept = [(size, int(d)) for size, d in zip(new, outer, strict=True) if not is_unit(size)]
    if [size for size in old if not is_unit(size)] != [size for size, _ in kept]:
        return None
    dims = _placed(old, [d for _, d in kept], len(match.out.shape))
    return None if dims is None else {**match.eqn.params, "broadcast_dimensions": dims}


def _placed(sizes: Sequence[object], kept: Sequence[int], rank: int) -> tuple[int, ...] | None:
    """Return increasing dimensions: `kept` for sizes that are not 1, free ones for the rest."""
    dims: list[int] = []
    bounds = iter([*kept, rank])
    bound, units = next(bounds), 0
    for size in [*sizes, None]:
        if is_unit(size):
            units += 1
            continue
        first = dims[-1] + 1 if dims else 0
        if bound - first < units:
            return None
        dims += range(bound - units, bound)
        if size is not None:
            dims.append(bound)
            bound, units = next(bounds), 0
    return tuple(dims)


ROWS += [
    SimplifyRule("broadcast_in_dim(x)", "x", (same_shape,)),
    SimplifyRule(
        "broadcast_in_dim(broadcast_in_dim(x))", "broadcast_in_dim(x)", params=_merged_broadcast
    ),
    SimplifyRule(
        "broadcast_in_dim(resize(x))", "broadcast_in_dim(x)", params=_broadcast_of_reshaped
    ),
]


# --- broadcasts into equations that broadcast by themselves ----------------------------------


def _is_scalar(match: RowMatch) -> bool:
    """p is a scalar"""
    return bool(match.aval("p").shape == ())


def _broadcasts_itself(match: RowMatch) -> Outcome:
    """y is a scalar or has the rank of the result, and y is not a divisor"""
    eqn = match.eqn
    if eqn.primitive.name == "div" and eqn.invars[1] is match.inner.outvars[0]:
        return None  # XLA multiplies by the inverse of a broadcast divisor: other rounding
    return _absorbed(match, eqn.primitive.name, eqn.params)


def _sum_broadcasts_itself(match: RowMatch) -> Outcome:
    """y is a scalar or has the rank of the result"""
    if not jnp.issubdtype(match.out.dtype, jnp.number):
        return None  # a type with another tangent type
    if len({v.aval.weak_type for v in match.eqn.invars}) > 1:
        return None  # `add_any` takes the type of its first operand
    return _absorbed(match, "add", {})


def _absorbed(match: RowMatch, primitive: str, params: Params) -> Outcome:
    y, shape = match["y"], match.out.shape
    if y.aval.shape and len(y.aval.shape) != len(shape):
        return None
    broadcast = match.inner.outvars[0]
    operands = list(match.eqn.invars)
    operands[next(i for i, v in enumerate(operands) if v is broadcast)] = y
    if not _cover_shape(operands, shape):
        return None
    return equation(match, primitive, operands, params)


def _cover_shape(operands: Sequence[Atom], shape: Sequence[object]) -> bool:
    """Return True if operands, scalar or of the result's rank, together have its shape."""
    shapes = [v.aval.shape for v in operands if v.aval.shape != ()]
    if any(len(dims) != len(shape) for dims in shapes):
        return False
    return all(any(dims[d] == size for dims in shapes) for d, size in enumerate(shape))


ROWS += [
    SimplifyRule(
        "elementwise2(x, broadcast_in_dim(y))", "elementwise2(x, y)", build=_broadcasts_itself
    ),
    SimplifyRule("ordered2(broadcast_in_dim(y), x)", "ordered2(y, x)", build=_broadcasts_itself),
    SimplifyRule("add_any(x, broadcast_in_dim(y))", "add(x, y)", build=_sum_broadcasts_itself),
    SimplifyRule("select_n(broadcast_in_dim(p), *xs)", "select_n(p, *xs)", (_is_scalar,)),
]


# --- transpose and rev ------------------------------------------------------------------------


def _stays(match: RowMatch) -> bool:
    """the permutation is the identity"""
    permutation = tuple(match.eqn.params["permutation"])
    return permutation == tuple(range(len(permutation)))


def _composed(match: RowMatch) -> Params | None:
    outer, inner = (eqn.params["permutation"] for eqn in match.eqns)
    return {"permutation": tuple(int(inner[d]) for d in outer)}


def _permuted_broadcast(match: RowMatch) -> Params | None:
    """the permutation keeps the dimensions of x in order"""
    permutation = list(match.eqn.params["permutation"])
    dims = tuple(permutation.index(d) for d in match.inner.params["broadcast_dimensions"])
    if list(dims) != sorted(dims):
        return None
    return {**match.inner.params, "shape": match.out.shape, "broadcast_dimensions": dims}


def _nothing_to_reverse(match: RowMatch) -> bool:
    """only dimensions of size 1 are reversed"""
    return all(is_unit(match.out.shape[d]) for d in match.eqn.params["dimensions"])


def _reversed_once(match: RowMatch) -> Params | None:
    outer, inner = (set(map(int, eqn.params["dimensions"])) for eqn in match.eqns)
    return {"dimensions": tuple(sorted(outer ^ inner))}


ROWS += [
    SimplifyRule("transpose(x)", "x", (_stays,)),
    SimplifyRule("transpose(transpose(x))", "transpose(x)", params=_composed),
    SimplifyRule(
        "transpose(broadcast_in_dim(x))", "broadcast_in_dim(x)", params=_permuted_broadcast
    ),
    SimplifyRule("rev(x)", "x", (_nothing_to_reverse,)),
    SimplifyRule("rev(rev(x))", "rev(x)", params=_reversed_once),
]


# --- conversions ------------------------------------------------------------------------------


def _same_dtype(match: RowMatch) -> bool:
    """x has the dtype of the result"""
    return bool(match.aval("x").dtype == match.out.dtype)


#: Mantissa and exponent bits, which determine if a type can represent all values of another.
_FLOATS = {"bfloat16": (7, 8), "float16": (10, 5), "float32": (23, 8), "float64": (52, 11)}


def _holds_all(match: RowMatch) -> bool:
    """the inner dtype holds all values of x; both are floats, both integers, or x is boolean"""
    old, new, last = match.aval("x").dtype, match.inner.outvars[0].aval.dtype, match.out.dtype
    if jnp.issubdtype(old, jnp.bool_):
        numbers = jnp.issubdtype(new, jnp.number) and jnp.issubdtype(last, jnp.number)
        return numbers and has_zero(new)
    if old.name in _FLOATS and new.name in _FLOATS and last.name in _FLOATS:
        return all(a <= b for a, b in zip(_FLOATS[old.name], _FLOATS[new.name], strict=True))
    if not all(jnp.issubdtype(dtype, jnp.integer) for dtype in (old, new, last)):
        return False
    a, b = jnp.iinfo(old), jnp.iinfo(new)
    return bool(b.min <= a.min and a.max <= b.max)


ROWS += [
    SimplifyRule("convert_element_type(x)", "x", (_same_dtype,)),
    SimplifyRule(
        "convert_element_type(convert_element_type(x))", "convert_element_type(x)", (_holds_all,)
    ),
]
