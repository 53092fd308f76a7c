"""Rules for operators, functions without parameters, and conversions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from jaxprtool.formats.python.expressions import Infix, Name, Prefix, Proposal, Slot, call, method
from jaxprtool.formats.python.rules.table import python_rules
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "pow": "**",
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
_PREFIX = {"neg": "-", "not": "~"}

#: Primitives with a function of the same name and operands in `jnp`, in `lax`, and in other
#: modules.
_JNP = """
    abs cbrt ceil conj copy cos cosh exp exp2 expm1 floor imag log log1p nextafter real sign sin
    sinh sqrt square tan tanh
"""
_LAX = """
    abs acos acosh add asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag is_finite le lgamma log log1p logistic lt max min mul mulhi ne
    neg nextafter polygamma population_count pow random_gamma_grad real rem rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh zeta optimization_barrier dce_sink reduce_precision
"""
_LINALG = """
    eig svd qr lu schur hessenberg tridiagonal tridiagonal_solve householder_product
    lu_pivots_to_permutation cholesky_update symmetric_product
"""

#: The functions of each primitive, most readable first.
_FUNCTIONS: dict[str, list[str]] = defaultdict(list)
for _home, _names in (("jnp", _JNP), ("lax", _LAX), ("lax.linalg", _LINALG)):
    for _name in _names.split():
        _FUNCTIONS[_name].append(f"{_home}.{_name}")

#: Primitives whose functions have other names.
for _name, _path in {
    "acos": "jnp.arccos",
    "acosh": "jnp.arccosh",
    "add_any": "add_any",
    "and": "lax.bitwise_and",
    "asin": "jnp.arcsin",
    "asinh": "jnp.arcsinh",
    "atan": "jnp.arctan",
    "atan2": "jnp.arctan2",
    "atanh": "jnp.arctanh",
    "free_ref": "jax.ref.free_ref",
    "freeze": "jax.ref.freeze",
    "is_finite": "jnp.isfinite",
    "logistic": "jax.nn.sigmoid",
    "max": "jnp.maximum",
    "min": "jnp.minimum",
    "new_ref": "jax.new_ref",
    "not": "lax.bitwise_not",
    "or": "lax.bitwise_or",
    "population_count": "jnp.bitwise_count",
    "random_clone": "jax.random.clone",
    "random_fold_in": "jax.random.fold_in",
    "random_unwrap": "jax.random.key_data",
    "regularized_incomplete_beta": "lax.betainc",
    "threefry2x32": "rng.threefry2x32_p.bind",
    "xor": "lax.bitwise_xor",
}.items():
    _FUNCTIONS[_name].insert(0, _path)


@rule(python_rules, *_INFIX, *_PREFIX, *_FUNCTIONS)
def _function(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    name = eqn.primitive.name
    if name in _INFIX:
        yield Infix(_INFIX[name], *operands)
    if name in _PREFIX:
        yield Prefix(_PREFIX[name], operands[0])
    for path in _FUNCTIONS[name]:
        yield call(path, *operands)
    if extra := {k: v for k, v in eqn.params.items() if v is not None}:
        yield call(_FUNCTIONS[name][-1], *operands, **extra)


@rule(python_rules, "integer_pow")
def _integer_pow(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield Infix("**", x, eqn.params["y"])
    yield call("lax.integer_pow", x, eqn.params["y"])


@rule(python_rules, "round")
def _round(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("jnp.round", x)
    yield call("lax.round", x, eqn.params["rounding_method"])


@rule(python_rules, "convert_element_type")
def _convert(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    dtype = dtype_name(eqn.params["new_dtype"])
    if eqn.invars[0].aval.shape:  # a scalar may be a Python number
        yield method(x, "astype", dtype)
    yield call("jnp.astype", x, dtype)
    yield call("lax.convert_element_type", x, dtype)
    yield call("jnp.asarray", x, dtype)
    python = {"b": "bool", "i": "int", "f": "float", "c": "complex"}
    if eqn.params["weak_type"]:
        yield call("lax.convert_element_type", x, Name(python[eqn.params["new_dtype"].kind]))


@rule(python_rules, "bitcast_convert_type")
def _bitcast(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("lax.bitcast_convert_type", x, dtype_name(eqn.params["new_dtype"]))


@rule(python_rules, "select_n")
def _select(eqn: JaxprEqn, which: Slot, *cases: Slot) -> Iterator[Proposal]:
    if len(cases) == 2:
        yield call("jnp.where", which, cases[1], cases[0])
        yield call("lax.select", which, cases[1], cases[0])
    yield call("lax.select_n", which, *cases)
