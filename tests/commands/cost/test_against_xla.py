"""Compare costs with XLA's count before optimization, over JAX's test programs.

If JAX lowers a primitive to one XLA operation, both counts agree. If it lowers one to many, or XLA
expands it, XLA counts the arithmetic of the expansion, and we count the documented operation. The
page `docs/cost.md` lists these primitives.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import cost, jaxcompat, trace
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program
from tests.programs import harness_programs
from tests.sweep.corpora import Harnesses
from tests.sweep.parts import Part

#: Primitives that become many XLA operations, by the reason.
EXPANDED = {
    "compares positions": "argmax argmin eq_to le_to lt_to sort top_k approx_top_k",
    "windows of cumulative operations": "cumlogsumexp cummax cummin cumprod cumsum",
    "approximations": "acosh asin acos asinh atanh bessel_i0e bessel_i1e cosh digamma erf erf_inv "
    "erfc exp2 igamma igamma_grad_a igammac lgamma log2 logistic polygamma "
    "regularized_incomplete_beta sinh tan zeta integer_pow pow random_gamma random_gamma_grad atan",
    "random bits": "random_bits random_fold_in random_seed random_split random_unwrap threefry2x32 "
    "rng_bit_generator rng_uniform",
    "factors of matrices": "cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd "
    "triangular_solve tridiagonal tridiagonal_solve lu_pivots_to_permutation",
    "indices that are clamped": "dynamic_slice dynamic_update_slice gather scatter scatter-add "
    "scatter-max scatter-min scatter-mul scatter-sub scatter_sub",
    "a selected element": "select_and_gather_add select_and_scatter_add",
    "numbers from bits": "bitcast_convert_type iota_2x32_shape nextafter reduce_precision round "
    "clz population_count",
    "select of several cases": "select_n clamp sign",
    "fft": "fft",
    "rounds of loops": "scan while cond",
    "solves": "custom_linear_solve linear_solve",
}

_REASON = {name: reason for reason, names in EXPANDED.items() for name in names.split()}


def compared(program: Program, lowered: Any) -> str:
    """Return how a program's FLOPs compare, in a word. Raise if they differ without a reason."""
    try:
        theirs = lowered.cost_analysis()
    except Exception:  # XLA has none for some
        return "XLA says nothing"
    if not theirs:
        return "XLA says nothing"
    found = cost(program)
    ours = found.total.work
    assert not found.unknown, f"the cost of {found.unknown} is not known"
    for name, mine in (("flops", ours.flops), ("transcendentals", ours.transcendentals)):
        expected = theirs.get(name, 0)
        if abs(mine - expected) <= 0.01 * max(mine, expected):
            continue
        reason = _reason(program)
        assert reason, f"{name}: {mine}, of XLA {expected}"
        return f"differs: {reason}"
    return "agrees"


def _reason(program: Program) -> str | None:
    eqns = list(equations(jaxcompat.open_jaxpr(program.jaxpr)))
    for eqn in eqns:
        if eqn.primitive.name in _REASON:
            return _REASON[eqn.primitive.name]
    dtypes = [getattr(v.aval, "dtype", None) for eqn in eqns for v in (*eqn.invars, *eqn.outvars)]
    if any(dtype in (np.complex64, np.complex128) for dtype in dtypes):
        return "complex numbers"
    if any(jnp.issubdtype(d, jnp.floating) and d.itemsize < 4 for d in dtypes if d is not None):
        return "narrow floats that are computed as f32"
    operands = {v.aval.dtype for eqn in eqns if eqn.primitive.name in _PRODUCTS for v in eqn.invars}
    return "operands that are cast for a product" if len(operands) > 1 else None


_PRODUCTS = {"dot_general", "conv_general_dilated"}


def prove(number: int, case: Any) -> str:
    """Compare the cost of a case with XLA's."""
    del number
    try:
        program = trace(case.fun, *case.args)
    except JaxprToolError:
        return "refused to trace"
    return compared(program, jax.jit(case.fun).lower(*case.args))


SWEEP = [
    Part(
        "cost: harnesses",
        Harnesses(),
        prove,
        expected=lambda n: n["agrees"] > 0.75 * n.total(),
    )
]

X = np.ones((6, 8), np.float32)

PLAIN = {
    "product": lambda x: x @ x.T,
    "batched": lambda x: jnp.einsum("bij,bkj->bik", x[None] * 2, x[None]),
    "convolution": lambda x: lax.conv_general_dilated(
        x[None, None], x[None, None, :3, :3], (2, 1), "SAME"
    ),
    "dilated": lambda x: lax.conv_general_dilated(
        x[None, None], x[None, None, :2, :3], (1, 1), [(1, 2), (0, 1)], (2, 1), (1, 2)
    ),
    "reduction": lambda x: x.sum(0) + x.max(),
    "layer norm": lambda x: (
        (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5)
    ),
    "pooling": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    "elementwise": lambda x: jnp.tanh(jnp.exp(x) / (1 + x)) - jnp.sqrt(x),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_programs_cost_the_same_as_in_xla(name):
    fun = PLAIN[name]
    assert compared(trace(fun, X), jax.jit(fun).lower(X)) == "agrees"


@pytest.mark.proof
def test_harnesses_cost_the_same_as_in_xla():
    found = Counter(prove(0, case) for case in harness_programs(1)[::80])
    assert found["agrees"] > 30, found
