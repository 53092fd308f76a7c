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
    RowMatch,
    SimplifyRule,
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


ROWS += [
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
ROWS += [
    SimplifyRule("max(x, C)", "x", (_least,), exact=integers),
    SimplifyRule("min(x, C)", "x", (_greatest,), exact=integers),
    SimplifyRule("clamp(C, x, D)", "x", (_no_bounds,), exact=integers),
    SimplifyRule("max(x, x)", "x", exact=discrete),
    SimplifyRule("min(x, x)", "x", exact=discrete),
]

ROWS += [
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


ROWS += [
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


ROWS += [
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


ROWS += [
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


ROWS += [
    SimplifyRule("select_n(C, *xs)", "the case of xs", build=_constant_case),
    SimplifyRule("select_n(p, *xs)", "the case of xs", build=_equal_cases),
    SimplifyRule("select_n(not(p), x, y)", "select_n(p, y, x)", (_is_boolean,)),
    SimplifyRule("select_n(p, select_n(p, x, y), z)", "select_n(p, x, z)"),
    SimplifyRule("select_n(p, x, select_n(p, y, z))", "select_n(p, x, z)"),
    SimplifyRule("select_n(p, 0, 1)", "p", (_same_predicate_type,)),
    SimplifyRule("select_n(p, 1, 0)", "not(p)", (_same_predicate_type,)),
]
