"""Rules on what is computed element by element: neutral elements, signs, bits, comparisons."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxprtool.jaxcompat import Atom
from jaxprtool.passes.simplify.conditions import booleans, discrete, floats, integers, real
from jaxprtool.passes.simplify.pattern import Match
from jaxprtool.passes.simplify.row import Outcome, Row, equation, full

NEUTRAL = [
    Row("mul(x, 1)", "x", (real,)),
    Row("div(x, 1)", "x", (real,)),
    Row("sub(x, 0)", "x"),
    Row("add(x, -0)", "x", (floats,)),
    Row("add_any(x, -0)", "x", (floats,)),
    Row("add(x, 0)", "x", exact=integers),
    Row("add_any(x, 0)", "x", exact=False),
    Row("sub(x, -0)", "x", exact=False),
    Row("or(x, 0)", "x"),
    Row("xor(x, 0)", "x"),
    Row("and(x, ~0)", "x"),
    Row("shift_left(x, 0)", "x"),
    Row("shift_right_arithmetic(x, 0)", "x"),
    Row("shift_right_logical(x, 0)", "x"),
    Row("pow(x, 1)", "x", (floats,)),
]


def _first_power(match: Match) -> bool:
    """y is 1"""
    return bool(match.eqn.params["y"] == 1)


def _even_power(match: Match) -> bool:
    """y is even"""
    return bool(match.eqn.params["y"] % 2 == 0)


POWERS = [
    Row("integer_pow(x)", "x", (_first_power,)),
    Row("integer_pow(neg(x))", "integer_pow(x)", (_even_power, real)),
    Row("square(neg(x))", "square(x)", (real,)),
]


def _least(match: Match) -> bool:
    """C is the least number"""
    return _is_bound(match, "C", least=True)


def _greatest(match: Match) -> bool:
    """C is the greatest number"""
    return _is_bound(match, "C", least=False)


def _is_bound(match: Match, name: str, *, least: bool) -> bool:
    value = match.value(name)
    if jnp.issubdtype(value.dtype, jnp.floating):
        return bool(value == (-np.inf if least else np.inf))
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return False
    limits = jnp.iinfo(value.dtype)
    return int(value) == (limits.min if least else limits.max)


def _no_bounds(match: Match) -> bool:
    """C is the least number and D the greatest"""
    return _is_bound(match, "C", least=True) and _is_bound(match, "D", least=False)


# The derivative of a maximum is shared between equal operands, and none at NaN: of floating-point
# numbers it would change where x is infinite, or NaN.
BOUNDS = [
    Row("max(x, C)", "x", (_least,), exact=integers),
    Row("min(x, C)", "x", (_greatest,), exact=integers),
    Row("clamp(C, x, D)", "x", (_no_bounds,), exact=integers),
    Row("max(x, x)", "x", exact=discrete),
    Row("min(x, x)", "x", exact=discrete),
]

SIGNS = [
    Row("neg(neg(x))", "x"),
    Row("add(x, neg(y))", "sub(x, y)"),
    Row("add_any(x, neg(y))", "sub(x, y)"),
    Row("sub(x, neg(y))", "add(x, y)"),
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


def _same_method(match: Match) -> bool:
    """both round in the same way"""
    return bool(match.eqn.params == match.inner.params)


INVOLUTIONS = [
    Row("not(not(x))", "x"),
    Row("conj(conj(x))", "x"),
    Row("real(complex(x, y))", "x"),
    Row("imag(complex(y, x))", "x"),
    Row("complex(real(x), imag(x))", "x"),
    Row("real(conj(x))", "real(x)"),
    Row("floor(floor(x))", "floor(x)"),
    Row("ceil(ceil(x))", "ceil(x)"),
    Row("round(round(x))", "round(x)", (_same_method,)),
    Row("stop_gradient(stop_gradient(x))", "stop_gradient(x)"),
    Row("stop_gradient(x)", "x", (discrete,)),
]


def _all_bits(match: Match) -> Outcome:
    return full(match, ~np.zeros((), match.out.dtype))


BITS = [
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


def compares_discrete(match: Match) -> bool:
    """integers, booleans"""
    return not jnp.issubdtype(match.aval("x").dtype, jnp.inexact)


COMPARISONS = [
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


def _combined(primitive: str, operation: np.ufunc) -> Callable[[Match], Outcome]:
    """The equation with both constants made one."""

    def build(match: Match) -> Outcome:
        with np.errstate(all="ignore"):
            constant = operation(match.value("C"), match.value("D"))
        atom: Atom = match["D"]
        both = match.writer.constant(constant, atom.aval)
        return equation(match, primitive, [match["x"], both])

    return build


REASSOCIATED = [
    Row("add(add(x, C), D)", "add(x, C+D)", build=_combined("add", np.add), exact=integers),
    Row("sub(sub(x, C), D)", "sub(x, C+D)", build=_combined("sub", np.add), exact=integers),
    Row("sub(add(x, C), D)", "add(x, C-D)", build=_combined("add", np.subtract), exact=integers),
    Row("add(sub(x, C), D)", "sub(x, C-D)", build=_combined("sub", np.subtract), exact=integers),
    Row("mul(mul(x, C), D)", "mul(x, C*D)", build=_combined("mul", np.multiply), exact=integers),
    Row("and(and(x, C), D)", "and(x, C&D)", build=_combined("and", np.bitwise_and)),
    Row("or(or(x, C), D)", "or(x, C|D)", build=_combined("or", np.bitwise_or)),
    Row("xor(xor(x, C), D)", "xor(x, C^D)", build=_combined("xor", np.bitwise_xor)),
    Row(
        "div(div(x, C), D)",
        "div(x, C*D)",
        (floats,),
        build=_combined("div", np.multiply),
        exact=False,
    ),
]

INVERSES = [
    Row("log(exp(x))", "x", (real,), exact=False),
    Row("exp(log(x))", "x", (real,), exact=False),
    Row("log1p(expm1(x))", "x", (real,), exact=False),
    Row("expm1(log1p(x))", "x", (real,), exact=False),
    Row("mul(sqrt(x), sqrt(x))", "x", (real,), exact=False),
    Row("square(sqrt(x))", "x", (real,), exact=False),
    Row("sqrt(square(x))", "abs(x)", (real,), exact=False),
    Row("mul(div(x, y), y)", "x", (floats,), exact=False),
    Row("div(mul(x, y), y)", "x", (floats,), exact=False),
    Row("sub(add(x, y), y)", "x", exact=integers),
    Row("add(sub(x, y), y)", "x", exact=integers),
]

ROWS = [
    *NEUTRAL,
    *POWERS,
    *BOUNDS,
    *SIGNS,
    *INVOLUTIONS,
    *BITS,
    *COMPARISONS,
    *REASSOCIATED,
    *INVERSES,
]
