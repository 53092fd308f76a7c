"""StableHLO's reference interpreter agrees with XLA, and does not abort the process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.programs import harness_programs
from tests.programs.interpreter import evaluate
from tests.programs.stablehlo_interpreter import interpret
from tests.programs.values import first_value_difference, values_agree

ONES = np.ones((3, 4), np.float32)
NUMBERS = np.array([[2, np.nan, -np.inf], [-0.0, 0, -np.nan]], np.float32)

#: Unsupported operations, and supported ones.
FUNCTIONS = {
    "a division by zero": (lambda x: lax.div(x, x - x), np.ones(3, np.int32)),
    "a remainder by zero": (lambda x: lax.rem(x, x - x), np.ones(3, np.int32)),
    "an empty product": (lambda x: x.T @ x, ONES[:0]),
    "an empty convolution": (
        lambda x, y: lax.conv(x, y, (1,), "VALID"),
        np.ones((1, 0, 5), np.float32),
        np.ones((3, 0, 2), np.float32),
    ),
    "a convolution that gives features before examples": (
        lambda x, y: lax.conv_general_dilated(
            x, y, (1,), "VALID", dimension_numbers=("HCN", "HIO", "HCN")
        ),
        np.ones((5, 2, 3), np.float32),
        np.ones((3, 2, 2), np.float32),
    ),
    "NaN in order": (lax.sort, NUMBERS),
    "complex numbers in order": (lax.sort, NUMBERS.astype(np.complex64)),
    "a call": (jnp.linalg.qr, ONES),
    "a product of two types": (
        lambda x: lax.dot(x, x, preferred_element_type=np.float32),
        np.ones((3, 3), np.int32),
    ),
    "a large array": (jnp.sin, np.ones((100, 100), np.float32)),
    "bfloat16": (lambda x: x + 1, ONES.astype(jnp.bfloat16)),
    "booleans": (lambda x: ~(x > 0), ONES),
    "keys": (lambda n: jax.random.uniform(jax.random.key(n), (3,)), np.int32(1)),
    "a scalar": (lambda x: x[0, 0] * 2, ONES),
    "what is of CHLO": (lax.erf_inv, ONES / 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_equal_those_of_xla(name):
    function, *args = FUNCTIONS[name]
    jaxpr = jax.make_jaxpr(function)(*args)
    assert (
        first_value_difference(
            evaluate(jaxpr, args), evaluate(jaxpr, args, interpret), values_agree
        )
        is None
    )


def test_interpreter_agrees_with_xla_on_jaxs_test_programs():
    interpreted = equations = 0

    def counted(eqn, operands):
        nonlocal interpreted, equations
        results = interpret(eqn, operands)
        equations += 1
        interpreted += all(isinstance(x, np.ndarray) for x in results)
        return results

    for case in harness_programs(1)[::200]:
        with case.setting():
            jaxpr, args = case.program().jaxpr, case.arguments()
            before, after = evaluate(jaxpr, args), evaluate(jaxpr, args, counted)
            assert first_value_difference(before, after, values_agree) is None, case.name
    assert interpreted > 0.8 * equations
