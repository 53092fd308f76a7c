"""Rules for elementwise equations: arithmetic, bits, comparisons, selection."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.jaxcompat import Atom
from jaxprtool.passes.cleanup.simplify.engine import (
    Outcome,
    Row,
    RowMatch,
    booleans,
    discrete,
    equation,
    floats,
    full,
    integers,
    real,
    scalar_value,
    signed,
)

ROWS = [
    Row("mul(x, 1)", "x", (real,)),
    Row("div(x, 1)", "x", (real,)),
    Row("add(x, -0)", "x", (floats,)),
    Row("add_any(x, -0)", "x", (floats,)),
    Row("add(x, 0)", "x", exact=integers),
    Row("add_any(x, 0)", "x", exact=False),
    Row("sub(x, -0)", "x", exact=False),
    Row("sub(x, 0)", "x"),
    Row("or(x, 0)", "x"),
    Row("xor(x, 0)", "x"),
    Row("and(x, ~0)", "x"),
    Row("shift_left(x, 0)", "x"),
    Row("shift_right_arithmetic(x, 0)", "x"),
    Row("shift_right_logical(x, 0)", "x"),
    Row("pow(x, 1)", "x", (floats,)),
]


def _first_power(match: RowMatch) -> bool:
    """y is 1"""
    return bool(match.eqn.params["y"] == 1)


def _even_power(match: RowMatch) -> bool:
    """y is even"""
    return bool(match.eqn.params["y"] % 2 == 0)


ROWS += [
    Row("integer_pow(x)", "x", (_first_power,)),
    Row("integer_pow(neg(x))", "integer_pow(x)", (_even_power, real)),
    Row("square(neg(x))", "square(x)", (real,)),
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
ROWS += [
    Row("max(x, C)", "x", (_least,), exact=integers),
    Row("min(x, C)", "x", (_greatest,), exact=integers),
    Row("clamp(C, x, D)", "x", (_no_bounds,), exact=integers),
    Row("max(x, x)", "x", exact=discrete),
    Row("min(x, x)", "x", exact=discrete),
]

ROWS += [
    Row("neg(neg(x))", "x", (signed,)),
    Row("add(x, neg(y))", "sub(x, y)", (signed,)),
    Row("add_any(x, neg(y))", "sub(x, y)", (signed,)),
    Row("sub(x, neg(y))", "add(x, y)", (signed,)),
    Row("mul(x, -1)", "neg(x)", (real,)),
    Row("div(x, -1)", "neg(x)", (floats,)),
    Row("mul(neg(x), C)", "mul(x, -C)", (real,)),
    Row("div(neg(x), C)", "div(x, -C)", (floats,)),
    Row("div(C, neg(x))", "div(-C, x)", (floats,)),
    Row("neg(mul(x, C))", "mul(x, -C)", (real,)),
    Row("neg(div(x, C))", "div(x, -C)", (floats,)),
    Row("neg(div(C, x))", "div(-C, x)", (floats,)),
    Row("mul(neg(x), neg(y))", "mul(x, y)", (real,)),
    Row("div(neg(x), neg(y))", "div(x, y)", (floats,)),
    Row("neg(sub(x, y))", "sub(y, x)", exact=integers),
    Row("abs(neg(x))", "abs(x)", (real,)),
    Row("abs(abs(x))", "abs(x)", (real,)),
    Row("sign(sign(x))", "sign(x)", (real,)),
]


def _same_method(match: RowMatch) -> bool:
    """both use the same rounding method"""
    return bool(match.eqn.params == match.inner.params)


def _is_complex(match: RowMatch) -> bool:
    """x is complex"""
    return bool(jnp.issubdtype(match.aval("x").dtype, jnp.complexfloating))


ROWS += [
    Row("not(not(x))", "x"),
    Row("conj(conj(x))", "x"),
    Row("real(complex(x, y))", "x"),
    Row("imag(complex(y, x))", "x"),
    Row("complex(real(x), imag(x))", "x"),
    Row("real(conj(x))", "real(x)", (_is_complex,)),
    Row("floor(floor(x))", "floor(x)"),
    Row("ceil(ceil(x))", "ceil(x)"),
    Row("round(round(x))", "round(x)", (_same_method,)),
    Row("stop_gradient(stop_gradient(x))", "stop_gradient(x)"),
    Row("stop_gradient(x)", "x", (discrete,)),
]


def _all_bits(match: RowMatch) -> Outcome:
    return full(match, ~np.zeros((), match.out.dtype))


ROWS += [
    Row("and(x, x)", "x"),
    Row("or(x, x)", "x"),
    Row("xor(x, x)", "0"),
    Row("and(x, 0)", "0"),
    Row("or(x, ~0)", "~0", build=_all_bits),
    Row("mul(x, 0)", "0", exact=integers),
    Row("sub(x, x)", "0", exact=integers),
    Row("rem(x, 1)", "0", (integers,)),
    Row("div(x, x)", "1", (floats,), exact=False),
]


def compares_discrete(match: RowMatch) -> bool:
    """integers or booleans"""
    return not jnp.issubdtype(match.aval("x").dtype, jnp.inexact)


ROWS += [
    Row("eq(x, x)", "1", exact=discrete),
    Row("ge(x, x)", "1", exact=discrete),
    Row("le(x, x)", "1", exact=discrete),
    Row("ne(x, x)", "0", exact=discrete),
    Row("lt(x, x)", "0", (real,)),
    Row("gt(x, x)", "0", (real,)),
    Row("not(eq(x, y))", "ne(x, y)"),
    Row("not(ne(x, y))", "eq(x, y)"),
    Row("not(lt(x, y))", "ge(x, y)", exact=compares_discrete),
    Row("not(le(x, y))", "gt(x, y)", exact=compares_discrete),
    Row("not(gt(x, y))", "le(x, y)", exact=compares_discrete),
    Row("not(ge(x, y))", "lt(x, y)", exact=compares_discrete),
    Row("eq(x, ~0)", "x", (booleans,)),
    Row("ne(x, 0)", "x", (booleans,)),
]


def _combined(outer: str, inner: str, sign: str, **conditions: Any) -> Row:
    """Return the row that merges two constants: `outer(inner(x, C), D)` is `inner(x, C?D)`."""

    def build(match: RowMatch) -> Outcome:
        with np.errstate(all="ignore"):
            constant = _OPERATIONS[sign](match.value("C"), match.value("D"))
        both = match.writer.constant(constant, match.aval("D"))
        return equation(match, inner, [match["x"], both])

    pattern = f"{outer}({inner}(x, C), D)"
    return Row(pattern, f"{inner}(x, C{sign}D)", build=build, **conditions)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    **dict(zip("+-*", (operator.add, operator.sub, operator.mul), strict=True)),
    **dict(zip("&|^", (operator.and_, operator.or_, operator.xor), strict=True)),
}

ROWS += [
    _combined("add", "add", "+", exact=integers),
    _combined("sub", "sub", "+", exact=integers),
    _combined("sub", "add", "-", exact=integers),
    _combined("add", "sub", "-", exact=integers),
    _combined("mul", "mul", "*", exact=integers),
    *(_combined(name, name, sign) for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))),
    _combined("div", "div", "*", when=(floats,), exact=False),
]

ROWS += [
    *(
        Row(pattern, "x", (real,), exact=False)
        for pattern in (
            *("log(exp(x))", "exp(log(x))", "log1p(expm1(x))", "expm1(log1p(x))"),
            *("mul(sqrt(x), sqrt(x))", "square(sqrt(x))"),
        )
    ),
    Row("sqrt(square(x))", "abs(x)", (real,), exact=False),
    Row("mul(div(x, y), y)", "x", (floats,), exact=False),
    Row("div(mul(x, y), y)", "x", (floats,), exact=False),
    Row("sub(add(x, y), y)", "x", exact=integers),
    Row("add(sub(x, y), y)", "x", exact=integers),
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


ROWS += [
    Row("select_n(C, *xs)", "the case of xs", build=_constant_case),
    Row("select_n(p, *xs)", "the case of xs", build=_equal_cases),
    Row("select_n(not(p), x, y)", "select_n(p, y, x)", (_is_boolean,)),
    Row("select_n(p, select_n(p, x, y), z)", "select_n(p, x, z)"),
    Row("select_n(p, x, select_n(p, y, z))", "select_n(p, x, z)"),
    Row("select_n(p, 0, 1)", "p", (_same_predicate_type,)),
    Row("select_n(p, 1, 0)", "not(p)", (_same_predicate_type,)),
]
