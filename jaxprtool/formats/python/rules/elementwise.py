"""Elementwise arithmetic: operators, and functions of `jnp` and `lax`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxprtool.formats.python.expressions import Infix, Name, Prefix, Proposal, call, method
from jaxprtool.formats.python.rules.table import python_rules
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import JaxprEqn

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "and": "&",
    "or": "|",
    "xor": "^",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "shift_left": "<<",
    "shift_right_arithmetic": ">>",
    "shift_right_logical": ">>",
}

#: The functions that a primitive is known by, beside `lax`'s of its own name.
FUNCTIONS = {
    "abs": ["jnp.abs"],
    "acos": ["jnp.arccos"],
    "acosh": ["jnp.arccosh"],
    "add": ["lax.add"],
    "and": ["lax.bitwise_and"],
    "asin": ["jnp.arcsin"],
    "asinh": ["jnp.arcsinh"],
    "atan": ["jnp.arctan"],
    "atan2": ["jnp.arctan2"],
    "atanh": ["jnp.arctanh"],
    "cbrt": ["jnp.cbrt"],
    "ceil": ["jnp.ceil"],
    "clamp": ["lax.clamp"],
    "conj": ["jnp.conj"],
    "cos": ["jnp.cos"],
    "cosh": ["jnp.cosh"],
    "exp": ["jnp.exp"],
    "exp2": ["jnp.exp2"],
    "expm1": ["jnp.expm1"],
    "floor": ["jnp.floor"],
    "imag": ["jnp.imag"],
    "is_finite": ["jnp.isfinite"],
    "log": ["jnp.log"],
    "log1p": ["jnp.log1p"],
    "logistic": ["jax.nn.sigmoid"],
    "max": ["jnp.maximum"],
    "min": ["jnp.minimum"],
    "neg": ["jnp.negative"],
    "nextafter": ["jnp.nextafter"],
    "not": ["jnp.logical_not", "lax.bitwise_not"],
    "or": ["lax.bitwise_or"],
    "population_count": ["jnp.bitwise_count"],
    "pow": ["jnp.power"],
    "real": ["jnp.real"],
    "regularized_incomplete_beta": ["lax.betainc"],
    "sign": ["jnp.sign"],
    "sin": ["jnp.sin"],
    "sinh": ["jnp.sinh"],
    "sqrt": ["jnp.sqrt"],
    "square": ["jnp.square"],
    "tan": ["jnp.tan"],
    "tanh": ["jnp.tanh"],
    "xor": ["lax.bitwise_xor"],
    "add_any": ["add_any"],
    "copy": ["jnp.copy"],
}

#: Primitives whose function in `lax` bears their name and takes their operands.
_LAX = """
    abs acos acosh add asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag is_finite le lgamma log log1p logistic lt max min mul mulhi ne
    neg nextafter polygamma population_count pow random_gamma_grad real rem rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh zeta optimization_barrier dce_sink
"""
_BY_NAME = frozenset(_LAX.split())


def _elementwise(eqn: JaxprEqn, *operands: Any) -> Iterator[Proposal]:
    name = eqn.primitive.name
    if name in INFIX:
        yield Infix(INFIX[name], *operands)
    for path in FUNCTIONS.get(name, ()):
        yield call(path, *operands)
    if name in _BY_NAME:
        yield call(f"lax.{name}", *operands)
        extra = {k: v for k, v in eqn.params.items() if v is not None}
        if extra:
            yield call(f"lax.{name}", *operands, **extra)


rule(python_rules, *INFIX, *FUNCTIONS, *_BY_NAME)(_elementwise)


@rule(python_rules, "neg")
def _negative(eqn: JaxprEqn, x: Any) -> Iterator[Proposal]:
    yield Prefix("-", x)
    yield call("lax.neg", x)


@rule(python_rules, "not")
def _not(eqn: JaxprEqn, x: Any) -> Iterator[Proposal]:
    yield Prefix("~", x)
    yield call("lax.bitwise_not", x)


@rule(python_rules, "integer_pow")
def _integer_pow(eqn: JaxprEqn, x: Any) -> Iterator[Proposal]:
    yield Infix("**", x, eqn.params["y"])
    yield call("lax.integer_pow", x, eqn.params["y"])


@rule(python_rules, "pow")
def _pow(eqn: JaxprEqn, x: Any, y: Any) -> Iterator[Proposal]:
    yield Infix("**", x, y)
    yield call("lax.pow", x, y)


@rule(python_rules, "round")
def _round(eqn: JaxprEqn, x: Any) -> Iterator[Proposal]:
    yield call("jnp.round", x)
    yield call("lax.round", x, eqn.params["rounding_method"])


@rule(python_rules, "convert_element_type")
def _convert(eqn: JaxprEqn, x: Any) -> Iterator[Proposal]:
    kind = dtype_name(eqn.params["new_dtype"])
    if eqn.invars[0].aval.shape:  # a scalar may be a number of Python
        yield method(x, "astype", kind)
    yield call("jnp.astype", x, kind)
    yield call("lax.convert_element_type", x, kind)
    yield call("jnp.asarray", x, kind)
    python = {"b": "bool", "i": "int", "f": "float", "c": "complex"}
    if eqn.params["weak_type"]:
        yield call("lax.convert_element_type", x, Name(python[eqn.params["new_dtype"].kind]))


@rule(python_rules, "bitcast_convert_type")
def _bitcast(eqn: JaxprEqn, x: Any) -> Iterator[Proposal]:
    yield call("lax.bitcast_convert_type", x, dtype_name(eqn.params["new_dtype"]))


@rule(python_rules, "reduce_precision")
def _reduce_precision(eqn: JaxprEqn, x: Any) -> Iterator[Proposal]:
    yield call("lax.reduce_precision", x, **eqn.params)


@rule(python_rules, "select_n")
def _select(eqn: JaxprEqn, which: Any, *cases: Any) -> Iterator[Proposal]:
    if len(cases) == 2:
        yield call("jnp.where", which, cases[1], cases[0])
        yield call("lax.select", which, cases[1], cases[0])
    yield call("lax.select_n", which, *cases)
