"""Simplify: algebraic rules, as rows of data, applied at every depth until none applies.

A rule is a `SimplifyRule`: a pattern, its replacement, and conditions, all readable:

    Row("add(x, neg(y))", "sub(x, y)")

A lower-case letter matches any value, a capital letter any constant, a number the constant of that
value (`0` is not `-0`; `~0` has all bits set), and `*xs` all other operands. `unary` and
`elementwise2` are elementwise primitives with one and two operands, `resize` is a reshape or
squeeze, `layout` is a reshape, squeeze or broadcast. A rule that is exact only under a condition
requires `fast` if the condition does not hold.

An option of a primitive, such as `out_dtype` of `mul`, may change what it computes. A rule applies
to an equation with an option that is not at its default only if its pattern names the option:
`cumsum[reverse](x)`. This includes options that a later JAX adds, and parameters of a plug-in's
primitive that its trait `parameters` does not list.

`simplify_rules` is the open list of rows; a plug-in appends its own, also for its own primitives
(`engine.py` defines rows and the syntax of patterns). Ours are below, by family; `jaxprtool explain
simplify` prints the list. By default only exact rules apply. They keep every bit of a result and of
its derivatives under IEEE arithmetic, including NaN, infinities and the sign of zero; a backend
that flushes subnormal numbers to zero may do so in fewer places. So `x * 0` stays, since x may be
NaN, and so does `x + 0`, since x may be -0.

Equations with a purpose besides their value stay: `copy`, `reduce_precision`,
`optimization_barrier`, and all that request a sharding of their result.

Based on tinygrad's symbolic rules (patterns as data) and XLA's algebraic simplifier.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool.ir.program import Program
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var
from jaxprtool.passes import Pass, notes_of_run
from jaxprtool.passes.cleanup.simplify.engine import (
    Condition,
    Outcome,
    Params,
    RowMatch,
    SettledEquations,
    SimplifyRule,
    booleans,
    discrete,
    emit,
    equation,
    floats,
    full,
    has_zero,
    integers,
    real,
    scalar_value,
    signed,
    simplified,
)

# --- elementwise ----------------------------------------------------------------------------------
# Rules for elementwise equations: arithmetic, bits, comparisons, selection.

ELEMENTWISE = [
    SimplifyRule("mul(x, 1)", "x", (real,)),
    SimplifyRule("div(x, 1)", "x", (real,)),
    SimplifyRule("add(x, -0)", "x", (floats,)),
    SimplifyRule("add_any(x, -0)", "x", (floats,)),
    SimplifyRule("add(x, 0)", "x", exact=integers),
    SimplifyRule("add_any(x, 0)", "x", exact=False),
    SimplifyRule("sub(x, -0)", "x", exact=False),
    SimplifyRule("sub(x, 0)", "x"),
    SimplifyRule("or(x, 0)", "x"),
    SimplifyRule("xor(x, 0)", "x"),
    SimplifyRule("and(x, ~0)", "x"),
    SimplifyRule("shift_left(x, 0)", "x"),
    SimplifyRule("shift_right_arithmetic(x, 0)", "x"),
    SimplifyRule("shift_right_logical(x, 0)", "x"),
    SimplifyRule("pow(x, 1)", "x", (floats,)),
]


def _first_power(match: RowMatch) -> bool:
    """y is 1"""
    return bool(match.eqn.params["y"] == 1)


def _even_power(match: RowMatch) -> bool:
    """y is even"""
    return bool(match.eqn.params["y"] % 2 == 0)


ELEMENTWISE += [
    SimplifyRule("integer_pow(x)", "x", (_first_power,)),
    SimplifyRule("integer_pow(neg(x))", "integer_pow(x)", (_even_power, real)),
    SimplifyRule("square(neg(x))", "square(x)", (real,)),
]


def _least(match: RowMatch) -> bool:
    """C is the least number"""
    return match.value("C") in _bounds(match)[:1]


def _greatest(match: RowMatch) -> bool:
    """C is the greatest number"""
    return match.value("C") in _bounds(match)[1:]


def _no_bounds(match: RowMatch) -> bool:
    """C is the least number and D the greatest"""
    return _bounds(match) == (match.value("C"), match.value("D"))


def _bounds(match: RowMatch) -> tuple[float, ...]:
    """Return the least and the greatest number of the type of C; empty if it is not ordered."""
    dtype = match.value("C").dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return (-np.inf, np.inf) if jnp.issubdtype(dtype, jnp.floating) else ()


# The derivative of a maximum is shared between equal operands, and zero at NaN: for floating-point
# numbers it would change where x is infinite, or NaN.
ELEMENTWISE += [
    SimplifyRule("max(x, C)", "x", (_least,), exact=integers),
    SimplifyRule("min(x, C)", "x", (_greatest,), exact=integers),
    SimplifyRule("clamp(C, x, D)", "x", (_no_bounds,), exact=integers),
    SimplifyRule("max(x, x)", "x", exact=discrete),
    SimplifyRule("min(x, x)", "x", exact=discrete),
]

ELEMENTWISE += [
    SimplifyRule("neg(neg(x))", "x", (signed,)),
    SimplifyRule("add(x, neg(y))", "sub(x, y)", (signed,)),
    SimplifyRule("add_any(x, neg(y))", "sub(x, y)", (signed,)),
    SimplifyRule("sub(x, neg(y))", "add(x, y)", (signed,)),
    SimplifyRule("mul(x, -1)", "neg(x)", (real,)),
    SimplifyRule("div(x, -1)", "neg(x)", (floats,)),
    SimplifyRule("mul(neg(x), C)", "mul(x, -C)", (real,)),
    SimplifyRule("div(neg(x), C)", "div(x, -C)", (floats,)),
    SimplifyRule("div(C, neg(x))", "div(-C, x)", (floats,)),
    SimplifyRule("neg(mul(x, C))", "mul(x, -C)", (real,)),
    SimplifyRule("neg(div(x, C))", "div(x, -C)", (floats,)),
    SimplifyRule("neg(div(C, x))", "div(-C, x)", (floats,)),
    SimplifyRule("mul(neg(x), neg(y))", "mul(x, y)", (real,)),
    SimplifyRule("div(neg(x), neg(y))", "div(x, y)", (floats,)),
    SimplifyRule("neg(sub(x, y))", "sub(y, x)", exact=integers),
    SimplifyRule("abs(neg(x))", "abs(x)", (real,)),
    SimplifyRule("abs(abs(x))", "abs(x)", (real,)),
    SimplifyRule("sign(sign(x))", "sign(x)", (real,)),
]


def _same_method(match: RowMatch) -> bool:
    """both use the same rounding method"""
    return bool(match.eqn.params == match.inner.params)


def _is_complex(match: RowMatch) -> bool:
    """x is complex"""
    return bool(jnp.issubdtype(match.aval("x").dtype, jnp.complexfloating))


ELEMENTWISE += [
    SimplifyRule("not(not(x))", "x"),
    SimplifyRule("conj(conj(x))", "x"),
    SimplifyRule("real(complex(x, y))", "x"),
    SimplifyRule("imag(complex(y, x))", "x"),
    SimplifyRule("complex(real(x), imag(x))", "x"),
    SimplifyRule("real(conj(x))", "real(x)", (_is_complex,)),
    SimplifyRule("floor(floor(x))", "floor(x)"),
    SimplifyRule("ceil(ceil(x))", "ceil(x)"),
    SimplifyRule("round(round(x))", "round(x)", (_same_method,)),
    SimplifyRule("stop_gradient(stop_gradient(x))", "stop_gradient(x)"),
    SimplifyRule("stop_gradient(x)", "x", (discrete,)),
]


def _all_bits(match: RowMatch) -> Outcome:
    return full(match, ~np.zeros((), match.out.dtype))


ELEMENTWISE += [
    SimplifyRule("and(x, x)", "x"),
    SimplifyRule("or(x, x)", "x"),
    SimplifyRule("xor(x, x)", "0"),
    SimplifyRule("and(x, 0)", "0"),
    SimplifyRule("or(x, ~0)", "~0", build=_all_bits),
    SimplifyRule("mul(x, 0)", "0", exact=integers),
    SimplifyRule("sub(x, x)", "0", exact=integers),
    SimplifyRule("rem(x, 1)", "0", (integers,)),
    SimplifyRule("div(x, x)", "1", (floats,), exact=False),
]


def compares_discrete(match: RowMatch) -> bool:
    """integers or booleans"""
    return not jnp.issubdtype(match.aval("x").dtype, jnp.inexact)


ELEMENTWISE += [
    SimplifyRule("eq(x, x)", "1", exact=discrete),
    SimplifyRule("ge(x, x)", "1", exact=discrete),
    SimplifyRule("le(x, x)", "1", exact=discrete),
    SimplifyRule("ne(x, x)", "0", exact=discrete),
    SimplifyRule("lt(x, x)", "0", (real,)),
    SimplifyRule("gt(x, x)", "0", (real,)),
    SimplifyRule("not(eq(x, y))", "ne(x, y)"),
    SimplifyRule("not(ne(x, y))", "eq(x, y)"),
    SimplifyRule("not(lt(x, y))", "ge(x, y)", exact=compares_discrete),
    SimplifyRule("not(le(x, y))", "gt(x, y)", exact=compares_discrete),
    SimplifyRule("not(gt(x, y))", "le(x, y)", exact=compares_discrete),
    SimplifyRule("not(ge(x, y))", "lt(x, y)", exact=compares_discrete),
    SimplifyRule("eq(x, ~0)", "x", (booleans,)),
    SimplifyRule("ne(x, 0)", "x", (booleans,)),
]


def _combined(outer: str, inner: str, sign: str, **conditions: Any) -> SimplifyRule:
    """Return the row that merges two constants: `outer(inner(x, C), D)` is `inner(x, C?D)`."""

    def build(match: RowMatch) -> Outcome:
        with np.errstate(all="ignore"):
            constant = _OPERATIONS[sign](match.value("C"), match.value("D"))
        both = match.writer.constant(constant, match.aval("D"))
        return equation(match, inner, [match["x"], both])

    pattern = f"{outer}({inner}(x, C), D)"
    return SimplifyRule(pattern, f"{inner}(x, C{sign}D)", build=build, **conditions)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **dict(zip("+-*", (operator.add, operator.sub, operator.mul), strict=True)),
    **dict(zip("&|^", (operator.and_, operator.or_, operator.xor), strict=True)),
}

ELEMENTWISE += [
    _combined("add", "add", "+", exact=integers),
    _combined("sub", "sub", "+", exact=integers),
    _combined("sub", "add", "-", exact=integers),
    _combined("add", "sub", "-", exact=integers),
    _combined("mul", "mul", "*", exact=integers),
    *(_combined(name, name, sign) for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))),
    _combined("div", "div", "*", when=(floats,), exact=False),
]

ELEMENTWISE += [
    *(
        SimplifyRule(pattern, "x", (real,), exact=False)
        for pattern in (
            *("log(exp(x))", "exp(log(x))", "log1p(expm1(x))", "expm1(log1p(x))"),
            *("mul(sqrt(x), sqrt(x))", "square(sqrt(x))"),
        )
    ),
    SimplifyRule("sqrt(square(x))", "abs(x)", (real,), exact=False),
    SimplifyRule("mul(div(x, y), y)", "x", (floats,), exact=False),
    SimplifyRule("div(mul(x, y), y)", "x", (floats,), exact=False),
    SimplifyRule("sub(add(x, y), y)", "x", exact=integers),
    SimplifyRule("add(sub(x, y), y)", "x", exact=integers),
]


# --- select_n ----------------------------------------------------------------------------------


def _constant_case(match: RowMatch) -> Outcome:
    """C selects the case"""
    index = int(match.value("C"))
    cases = match["xs"]
    return cases[index] if 0 <= index < len(cases) else None


def _equal_cases(match: RowMatch) -> Outcome:
    """all cases are the same value"""
    first, *others = match["xs"]
    return first if all(x is first or _is_same(match, first, x) for x in others) else None


def _is_same(match: RowMatch, a: Atom, b: Atom) -> bool:
    x, y = (_filling(match, atom) for atom in (a, b))
    return x is not None and y is not None and x.tobytes() == y.tobytes()


def _filling(match: RowMatch, atom: Atom) -> np.ndarray | None:
    """Return the scalar that fills a value; None if that is not known."""
    eqn = match.writer.defined_by(atom, "broadcast_in_dim")
    return scalar_value(atom if eqn is None else eqn.invars[0], match.writer)


def _is_boolean(match: RowMatch) -> bool:
    """p is boolean"""
    # An integer selects the case of its number: `~p` does not exchange the two.
    return bool(match.aval("p").dtype == jnp.bool_)


def _same_predicate_type(match: RowMatch) -> bool:
    """p is boolean and has the type of the result"""
    aval, out = match.aval("p"), match.out
    return _is_boolean(match) and aval.dtype == out.dtype and bool(aval.shape == out.shape)


ELEMENTWISE += [
    SimplifyRule("select_n(C, *xs)", "the case of xs", build=_constant_case),
    SimplifyRule("select_n(p, *xs)", "the case of xs", build=_equal_cases),
    SimplifyRule("select_n(not(p), x, y)", "select_n(p, y, x)", (_is_boolean,)),
    SimplifyRule("select_n(p, select_n(p, x, y), z)", "select_n(p, x, z)"),
    SimplifyRule("select_n(p, x, select_n(p, y, z))", "select_n(p, x, z)"),
    SimplifyRule("select_n(p, 0, 1)", "p", (_same_predicate_type,)),
    SimplifyRule("select_n(p, 1, 0)", "not(p)", (_same_predicate_type,)),
]


# --- layout ---------------------------------------------------------------------------------------
# Rules for equations that only move elements: reshapes, broadcasts, transposes, converts.


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


LAYOUT = [
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


LAYOUT += [
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


LAYOUT += [
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


LAYOUT += [
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


LAYOUT += [
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


LAYOUT += [
    SimplifyRule("convert_element_type(x)", "x", (_same_dtype,)),
    SimplifyRule(
        "convert_element_type(convert_element_type(x))", "convert_element_type(x)", (_holds_all,)
    ),
]


# --- slicing --------------------------------------------------------------------------------------
# Rules on parts of arrays: slices, concatenations, padding.


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


SLICING = [
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


SLICING += [
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


SLICING += [
    SimplifyRule("pad(x, y)", "x", (_no_padding,)),
    SimplifyRule("pad(pad(x, y), z)", "pad(x, y)", params=_padded_once),
]


# --- reductions -----------------------------------------------------------------------------------
# Rules for reductions, including cumulative ones, and for contractions.


def _unit_axes(match: RowMatch) -> Params | None:
    """all reduced dimensions have size 1"""
    axes, shape = match.eqn.params["axes"], match.aval("x").shape
    if not all(is_unit(shape[axis]) for axis in axes):
        return None
    return {"dimensions": tuple(sorted(map(int, axes)))}


def _unit_axis(match: RowMatch) -> bool:
    """the dimension has size 1"""
    return is_unit(match.out.shape[match.eqn.params["axis"]])


def _merged_axes(match: RowMatch) -> Params:
    inner = [int(axis) for axis in match.inner.params["axes"]]
    left = [d for d in range(match.aval("x").ndim) if d not in inner]
    outer = [left[axis] for axis in match.eqn.params["axes"]]
    return {**match.eqn.params, "axes": tuple(sorted(inner + outer))}


def _times_size(match: RowMatch) -> Outcome:
    """x is broadcast along exactly the summed dimensions"""
    axes, shape = match.eqn.params["axes"], match.inner.params["shape"]
    kept = [d for d in range(len(shape)) if d not in axes]
    if match.aval("x").shape != match.out.shape:
        return None
    if list(match.inner.params["broadcast_dimensions"]) != kept:
        return None
    if not all(isinstance(shape[d], int | np.integer) for d in axes):
        return None
    count = math.prod(int(shape[d]) for d in axes)
    scalar = jax.core.ShapedArray((), match.out.dtype)
    factor = match.writer.constant(count, scalar)
    return equation(match, "mul", [match["x"], factor])


_ORDERED = ("reduce_max", "reduce_min")
_BITWISE = ("reduce_and", "reduce_or")

# The derivative of a maximum is shared between equal elements, and zero at NaN: for floating-point
# numbers it would change. For XLA, a sum of one number is that number, even -0.
REDUCTIONS = [
    *(
        SimplifyRule(f"{name}(x)", "squeeze(x)", params=_unit_axes)
        for name in ("reduce_sum", "reduce_prod", *_BITWISE)
    ),
    *(
        SimplifyRule(f"{name}(x)", "squeeze(x)", params=_unit_axes, exact=discrete)
        for name in _ORDERED
    ),
    *(SimplifyRule(f"{name}({name}(x))", f"{name}(x)", params=_merged_axes) for name in _BITWISE),
    *(
        SimplifyRule(f"{name}({name}(x))", f"{name}(x)", params=_merged_axes, exact=discrete)
        for name in ("reduce_sum", *_ORDERED)
    ),
    SimplifyRule("reduce_sum(broadcast_in_dim(x))", "mul(x, n)", build=_times_size, exact=integers),
    # XLA combines the one number with 0, 1 or an infinity: -0 may become 0, a complex infinity NaN,
    # and a subnormal number 0.
    *(
        SimplifyRule(f"{name}[reverse](x)", "x", (_unit_axis,), exact=discrete)
        for name in ("cumsum", "cumprod", "cummax", "cummin")
    ),
    SimplifyRule("cumlogsumexp[reverse](x)", "x", (_unit_axis,), exact=False),
]


# --- dot_general -------------------------------------------------------------------------------
#
# A contraction can name any dimensions, so a transpose of its operand is redundant. But XLA sums in
# another order for operands with another memory layout, which rounds differently.


def _transpose_absorbed(match: RowMatch) -> Outcome:
    """the transpose keeps the order of the dimensions that remain in the result"""
    params, permutation = match.eqn.params, match.inner.params["permutation"]
    side = int(match["x"] is match.eqn.invars[0])
    contracted, batch = (list(dims) for dims in params["dimension_numbers"])
    used = {*contracted[side], *batch[side]}
    free = [permutation[d] for d in range(len(permutation)) if d not in used]
    if free != sorted(free):
        return None
    for dims in (contracted, batch):
        dims[side] = tuple(int(permutation[d]) for d in dims[side])
    numbers = (tuple(contracted), tuple(batch))
    operands = [match["x"], match["y"]]
    return equation(match, "dot_general", operands, {**params, "dimension_numbers": numbers})


def _swapped(match: RowMatch) -> Params | None:
    """the transpose exchanges the remaining dimensions of x and y"""
    params, permutation = match.inner.params, match.eqn.params["permutation"]
    (x_dims, y_dims), (x_batch, y_batch) = params["dimension_numbers"]
    batch = len(x_batch)
    x_free = match.aval("x").ndim - len(x_dims) - batch
    rank = len(permutation)
    order = [*range(batch), *range(batch + x_free, rank), *range(batch, batch + x_free)]
    if list(permutation) != order:
        return None
    numbers = ((y_dims, x_dims), (y_batch, x_batch))
    precision = params["precision"]
    if isinstance(precision, tuple):
        precision = precision[::-1]
    return {**params, "dimension_numbers": numbers, "precision": precision}


_DOT = "dot_general[precision, preferred_element_type]"

REDUCTIONS += [
    SimplifyRule(
        f"{_DOT}(transpose(x), y)", "dot_general(x, y)", build=_transpose_absorbed, exact=discrete
    ),
    SimplifyRule(
        f"{_DOT}(x, transpose(y))", "dot_general(x, y)", build=_transpose_absorbed, exact=discrete
    ),
    SimplifyRule(f"transpose({_DOT}(x, y))", "dot_general(y, x)", params=_swapped, exact=discrete),
]


# --- together -------------------------------------------------------------------------------------
# Rules that move an operation from both operands to the result, or remove a sign.
#
# They write two equations for three or more, and so require that the inner ones have no other use.


def _same_permutation(match: RowMatch) -> Outcome:
    """both transposes have the same permutation"""
    first, second = (tuple(eqn.params["permutation"]) for eqn in match.eqns[1:])
    return _moved(match, match.inner.params) if first == second else None


def _same_shapes(match: RowMatch) -> Outcome:
    """x and y have the same shape, and so do their reshapes"""
    first, second = (eqn.outvars[0].aval.shape for eqn in match.eqns[1:])
    return _moved(match, match.inner.params) if first == second else None


def _moved(match: RowMatch, params: Params) -> Outcome:
    x, y = match["x"], match["y"]
    if x.aval != y.aval or x.aval.dtype != match.out.dtype:
        return None
    first = match.inner.outvars[0]
    operands = [x, y] if match.eqn.invars[0] is first else [y, x]
    both = emit(match, match.eqn.primitive.name, operands, match.eqn.params, x.aval)
    return equation(match, match.inner.primitive.name, [both], params)


def _sign_to_constant(match: RowMatch) -> Outcome:
    """C is negated instead"""
    constant = match["C"]
    product = _without_sign(match)
    negated = match.writer.constant(-match.value("C"), constant.aval)
    return equation(match, match.eqn.primitive.name, [product, negated], match.eqn.params)


def _sign_to_sum(match: RowMatch) -> Outcome:
    """z - y replaces z + -y, and z + y replaces z - -y"""
    name = "add" if match.eqn.primitive.name == "sub" else "sub"
    return equation(match, name, [match["z"], _without_sign(match)], {})


def _without_sign(match: RowMatch) -> Var:
    """Write the inner product or quotient with x instead of -x, and return its result."""
    inner, negative = match.eqns[1], match.eqns[2].outvars[0]
    operands = [match["x"] if v is negative else v for v in inner.invars]
    name, aval = inner.primitive.name, inner.outvars[0].aval
    return emit(match, name, operands, inner.params, aval)


_BINARY = "add|add_any|sub|mul|div|max|min"

TOGETHER = [
    SimplifyRule(
        f"{_BINARY}(transpose(x), transpose(y))",
        "transpose(add|…(x, y))",
        build=_same_permutation,
        once=True,
    ),
    SimplifyRule(
        f"{_BINARY}(reshape(x), reshape(y))", "reshape(add|…(x, y))", build=_same_shapes, once=True
    ),
    SimplifyRule(
        "mul(mul(neg(x), y), C)", "mul(mul(x, y), -C)", (real,), build=_sign_to_constant, once=True
    ),
    SimplifyRule(
        "div(mul(neg(x), y), C)",
        "div(mul(x, y), -C)",
        (floats,),
        build=_sign_to_constant,
        once=True,
    ),
    SimplifyRule(
        "add|add_any(z, mul(neg(x), y))",
        "sub(z, mul(x, y))",
        (real,),
        build=_sign_to_sum,
        once=True,
    ),
    SimplifyRule(
        "sub(z, mul(neg(x), y))", "add(z, mul(x, y))", (real,), build=_sign_to_sum, once=True
    ),
]


__all__ = [
    "Condition",
    "RowMatch",
    "Simplify",
    "SimplifyRule",
    "emit",
    "equation",
    "full",
    "simplify_rules",
]

_FAMILIES = {
    "element by element": ELEMENTWISE,
    "shapes and types": LAYOUT,
    "parts of arrays": SLICING,
    "reductions and products": REDUCTIONS,
    "both operands at once": TOGETHER,
}

#: The open list: the first rule that applies to an equation is used.
simplify_rules: list[SimplifyRule] = [row for rows in _FAMILIES.values() for row in rows]


@dataclass(frozen=True)
class Simplify(Pass):
    """Apply algebraic rules until none applies; only exact rules unless `fast` is set.

    By default every bit of a result is preserved, including NaN, infinities and the sign of zero:
    `x * 0` is not replaced by 0, since x may be NaN, and `x + 0` is not replaced by x, since x may
    be -0. Plug-ins can add rules.

    Args:
        fast: Also apply rules that hold for real numbers but may change floating-point results.

    Note:
        Equations with a purpose besides their value stay: `copy`, `reduce_precision`,
        `optimization_barrier`, and equations that request a sharding of their result.

    Example:
        def f(x, y):
            return x + -y

        $ jaxprtool opt f.py:f --args "f32[3], f32[3]" -p "simplify, dce"
        { lambda ; a:f32[3] b:f32[3]. let c:f32[3] = sub a b in (c,) }
    """

    name: ClassVar[str] = "simplify"
    group: ClassVar[str] = "clean up"

    fast: bool = False

    @staticmethod
    def rules() -> list[dict[str, str]]:
        """Return the rules in words, for `jaxprtool explain`."""
        families = {row: name for name, rows in _FAMILIES.items() for row in rows}
        return [
            {
                "pattern": row.pattern,
                "replacement": row.replacement,
                "condition": row.condition,
                "exact": row.exactness,
                "family": families.get(row, ""),
            }
            for row in simplify_rules
        ]

    def __call__(self, program: Program) -> Program:
        notes = notes_of_run()
        if self not in notes:
            notes[self] = SettledEquations(simplify_rules)
        settled = notes[self]
        jaxpr = simplified(program.jaxpr, simplify_rules, fast=self.fast, settled=settled)
        return program.replace(jaxpr=jaxpr) if jaxpr is not program.jaxpr else program
