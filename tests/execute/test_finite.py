"""Inputs for which results are finite, and results that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.execute.fill import fill
from jaxprtool.execute.finite import finite_fill, nonfinite

X = jax.ShapeDtypeStruct((16,), "float32")


def filled(function):
    program = jaxprtool.trace(function, X)
    runs = []

    def run(arguments):
        runs.append(program(*arguments))
        return jax.tree.leaves(runs[-1])

    return finite_fill(program, {program.arg_names[0]: X}, run), runs


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sqrt(x),
        lambda x: jnp.log(-x),
        lambda x: jnp.arctanh(x),
        lambda x: jnp.sqrt(jnp.sinh(x)),  # of which nothing is known: found by running it
        lambda x: jnp.sqrt(-0.3 - jnp.sinh(x)),
    ],
)
def test_inputs_keep_the_results_finite(function):
    found, runs = filled(function)
    assert np.isfinite(runs[-1]).mean() > 0.5
    assert found.within
    assert "x " in found.said_within()


def test_inputs_that_need_no_interval_are_as_ever():
    found, runs = filled(lambda x: jnp.sin(x))
    assert len(runs) == 1
    assert not found.within
    program = jaxprtool.trace(lambda x: jnp.sin(x), X)
    np.testing.assert_array_equal(found.arguments[0], fill(program, {"x": X}).arguments[0])


def test_no_input_helps_what_is_never_finite():
    found, runs = filled(lambda x: jnp.sqrt(-1 - jnp.abs(x)))
    assert len(runs) == 4
    assert nonfinite(runs[0]) == 16
    assert not found.within


def test_what_is_no_float_is_finite():
    assert nonfinite(jax.random.key(0)) == nonfinite(np.arange(3)) == 0
    assert nonfinite(np.array([np.nan, np.inf, 1.0])) == 2


def never(m, v):
    return m / jnp.sqrt(-jnp.abs(v) - 1)


def test_verify_warns_of_results_that_are_not_finite():
    m, v = jnp.ones(3), jnp.ones(3)
    before = jaxprtool.trace(never, m, v)
    with pytest.warns(UserWarning, match="result is not finite in 3 of 3 elements"):
        jaxprtool.verify(before, before.apply("simplify"))


def test_compare_counts_what_is_not_finite():
    m, v = jnp.ones(3), jnp.ones(3)
    programs = [jaxprtool.trace(never, m, v), jaxprtool.trace(lambda m, v: 2 * never(m, v), m, v)]
    found = jaxprtool.compare(programs)
    assert found.unproven == ["result is not finite in 3 of 3 elements"]
    (result,) = found.variants[0].results
    assert (result.nans, result.nonfinite, result.is_proof) == ((3, 3), (3, 3), False)
