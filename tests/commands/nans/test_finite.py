"""Inputs for which results are finite, and non-finite results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.commands.nans.nans import count_nonfinite, finite_fill
from jaxprtool.execute.running.arrays import fill_arguments

X = jax.ShapeDtypeStruct((16,), "float32")


def filled(function, *types):
    program = jaxprtool.trace(function, *types or (X,))
    runs = []

    def run(arguments):
        runs.append(program(*arguments))
        return jax.tree.leaves(runs[-1])

    given = dict(zip(program.arg_names, types or (X,), strict=True))
    return finite_fill(program, given, run), runs


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sqrt(x),
        lambda x: jnp.log(-x),
        lambda x: jnp.arctanh(x),
        lambda x: jnp.sqrt(jnp.sinh(x)),  # without a known interval: found by running it
        lambda x: jnp.sqrt(-0.3 - jnp.sinh(x)),
    ],
)
def test_inputs_keep_the_results_finite(function):
    found, runs = filled(function)
    assert np.isfinite(runs[-1]).mean() > 0.5
    assert found.within
    assert "x " in found.domains_text()


def test_inputs_without_an_interval_are_drawn_as_usual():
    found, runs = filled(lambda x: jnp.sin(x))
    assert len(runs) == 1
    assert not found.within
    program = jaxprtool.trace(lambda x: jnp.sin(x), X)
    np.testing.assert_array_equal(
        found.arguments[0], fill_arguments(program, {"x": X}).arguments[0]
    )


def test_no_interval_is_found_for_a_function_that_is_never_finite():
    found, runs = filled(lambda x: jnp.sqrt(-1 - jnp.abs(x)))
    assert count_nonfinite(runs[0]) == 16
    assert all(count_nonfinite(each) == 16 for each in runs)
    assert not found.within


@pytest.mark.parametrize(
    ("function", "types", "within"),
    [
        (jnp.linalg.cholesky, [f32(5, 5)], "a is positive definite"),
        (jax.scipy.stats.multivariate_normal.logpdf, [f32(3), f32(3), f32(3, 3)], "cov"),
        (lambda x: jnp.sqrt(1 - (x**2).sum(-1)), [f32(9, 5)], "x is between"),
        (lambda x, y: jnp.log(x @ y), [f32(5, 9), f32(9, 5)], "x, y"),
        (jax.scipy.special.zeta, [f32(9), f32(9)], "x, q are above 1"),
    ],
)
def test_arguments_that_lead_to_a_nan_are_drawn_from_another_interval(function, types, within):
    found, runs = filled(function, *types)
    assert count_nonfinite(runs[0])
    assert within in found.domains_text()
    program = jaxprtool.trace(function, *types)
    assert not count_nonfinite(program(*found.arguments))


@pytest.mark.proof
def test_an_argument_that_does_not_lead_to_the_nan_is_drawn_as_usual():
    found, _ = filled(lambda a, x: jnp.linalg.cholesky(a) @ x, f32(4, 4), f32(4))
    assert found.within == {"a": "positive definite"}


def test_integers_under_a_logarithm_are_positive():
    found, _ = filled(jnp.log, jax.ShapeDtypeStruct((40,), "int32"))
    assert found.arguments[0].min() == 1


def test_each_trial_of_a_comparison_has_finite_inputs():
    cholesky = jaxprtool.trace(jnp.linalg.cholesky, f32(4, 4))
    found = jaxprtool.compare([cholesky, cholesky.apply("-O1")], trials=4)
    assert found.within
    assert found.unproven == []


def test_values_that_are_not_floats_are_finite():
    assert count_nonfinite(jax.random.key(0)) == count_nonfinite(np.arange(3)) == 0
    assert count_nonfinite(np.array([np.nan, np.inf, 1.0])) == 2


def never(m, v):
    return m / jnp.sqrt(-jnp.abs(v) - 1)


def test_verify_warns_of_non_finite_results():
    m, v = jnp.ones(3), jnp.ones(3)
    before = jaxprtool.trace(never, m, v)
    with pytest.warns(UserWarning, match="result is not finite in 3 of 3 elements"):
        jaxprtool.verify(before, before.apply("simplify"))


def test_compare_counts_non_finite_results():
    m, v = jnp.ones(3), jnp.ones(3)
    programs = [jaxprtool.trace(never, m, v), jaxprtool.trace(lambda m, v: 2 * never(m, v), m, v)]
    found = jaxprtool.compare(programs)
    assert found.unproven == ["result is not finite in 3 of 3 elements"]
    (result,) = found.variants[0].results
    assert (result.nans, result.nonfinite, result.is_proof) == ((3, 3), (3, 3), False)
