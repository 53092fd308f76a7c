"""Rules that move an operation from both operands to the result, or remove a sign.

They write two equations for three or more, and so require that the inner ones have no other use.
"""

from __future__ import annotations

from jaxprtool.jaxcompat import Var
from jaxprtool.passes.cleanup.simplify.engine import (
    Outcome,
    Params,
    RowMatch,
    SimplifyRule,
    emit,
    equation,
    floats,
    real,
)


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

ROWS = [
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
