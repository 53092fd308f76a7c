"""Bounds hold for every value that is computed, and what they decide is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jaxprtool_intervals import Intervals, bounds

import jaxprtool
from jaxprtool import errors

X = jnp.linspace(-2, 2, 6, dtype=jnp.float32)
W = jnp.full((6, 6), 0.25, jnp.float32)


def bounded(function, *args, **arguments):
    """The bounds of the one result of a function."""
    (found,) = bounds(jaxprtool.trace(function, *args), arguments).values()
    return found.low, found.high


def names(program):
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


def test_bounds_follow_arithmetic():
    low, high = bounded(lambda x: jnp.tanh(x) * 2 + 1, X)
    assert low == pytest.approx(-1, abs=1e-4) and high == pytest.approx(3, abs=1e-4)
    low, high = bounded(lambda x: jnp.abs(x @ W), X, x=(-1, 1))
    assert low <= 0 and 1.5 <= high < 1.6


def test_a_carry_that_stays_within_bounds_has_them():
    def decayed(x):
        return lax.scan(lambda c, _: (jnp.tanh(c) * 0.5 + 0.25, None), x, None, length=9)[0]

    low, high = bounded(decayed, X, x=(-0.25, 0.75))
    assert low == pytest.approx(-0.25, abs=1e-3) and high == pytest.approx(0.75, abs=1e-3)


def test_a_carry_that_grows_is_widened():
    def grown(x):
        return lax.fori_loop(0, 1000, lambda _, c: c * 2 + 1, x)

    assert bounded(grown, X, x=(0, 1))[1] == np.inf
    assert bounded(lambda n: lax.while_loop(lambda c: c < 9, lambda c: c + 1, n), 1)[0] == -np.inf


def test_either_branch_may_be_taken():
    def either(flag, x):
        return lax.cond(flag, lambda x: jnp.exp(x), lambda x: x - 1, x)

    low, high = bounded(either, True, X, x=(0, 1))
    assert low == pytest.approx(-1, abs=1e-3) and high == pytest.approx(np.e, abs=1e-3)


def test_a_maximum_whose_outcome_is_known_goes_in_a_loop_too():
    def clipped(x):
        def step(c, row):
            c = jnp.maximum(jnp.tanh(c + row), -2.0)
            return c, jnp.minimum(jnp.exp(c), 0.1)

        return lax.scan(step, jnp.float32(0), x)

    program = jaxprtool.trace(clipped, X)
    after = program.apply(Intervals())
    jaxprtool.verify(program, after, (X,))
    assert "max" not in str(after) and "min" in str(after)


def test_ties_and_nans_keep_a_maximum():
    assert "max" in names(jaxprtool.trace(lambda x: jnp.maximum(x, -1.0), X).apply(Intervals()))
    tied = jaxprtool.trace(lambda x: jnp.maximum(jnp.abs(x), 0.0), X)
    assert "max" in names(tied.apply(Intervals({"x": (-1, 1)})))


def test_derivatives_stay():
    @jax.custom_jvp
    def f(x):
        return jnp.maximum(jnp.tanh(x), -3.0)

    f.defjvp(lambda p, t: (f(*p), 3 * jnp.maximum(jnp.cos(p[0]), -3.0) * t[0]))
    program = jaxprtool.trace(lambda x: jax.jit(f)(x).sum(), X)
    after = program.apply(Intervals())
    assert "max" not in str(after)
    np.testing.assert_allclose(jax.grad(after)(X), jax.grad(program)(X))


def test_integers_wrap():
    n = np.int8(1)
    low, high = bounded(lambda n: n + n, n, n=(100, 120))
    assert low <= -56 and high >= -16
    assert bounded(lambda n: n + n, n, n=(-8, 9)) == (-16, 18)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (jax.nn.sigmoid, np.float32([-60, -50])),
        (jnp.exp, np.float64([705, 706])),
        (lambda x: x * 0 + np.array([2**53 + 1]) - 2**53, np.array([1])),
        (lambda x: x + 2**53 - 2**53, np.array([1])),
        (lambda x: x.astype(jnp.float8_e4m3fn), np.float32([0, 1000])),
        (lambda x: lax.optimization_barrier((x, x + 7))[1], np.float32([0, 1])),
    ],
    ids=["small", "large", "constant", "integer", "float8", "barrier"],
)
def test_bounds_hold_at_the_limits_of_a_dtype_and_of_each_result(function, x):
    with jax.enable_x64(True):
        program = jaxprtool.trace(function, x)
        (found,) = bounds(program, {program.arg_names[0]: (x.min(), x.max())}).values()
        result = np.asarray(program(x))
    within = (found.low <= result) & (result <= found.high)
    assert np.all(within | (np.isnan(result.astype(float)) & found.nan))


def test_sizes_may_be_symbolic():
    (found,) = bounds(jaxprtool.load("jax.nn:sigmoid", "f32[n]"), {"x": (-1, 1)}).values()
    assert 0.2 < found.low < found.high < 0.8
    (found,) = bounds(jaxprtool.load("jax.numpy:sum", "f32[n]"), {"a": (0, 1)}).values()
    assert found.high == np.inf


@pytest.mark.proof
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_bounds_hold(seed):
    """Random programs of elementwise operations stay within their bounds."""
    random = np.random.default_rng(seed)
    unary = [jnp.tanh, jnp.exp, jnp.abs, jnp.square, jnp.negative, jnp.sin, jax.nn.sigmoid, jnp.sum]
    binary = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum]

    def function(x):
        values = [x, jnp.float32(0.5)]
        for i in random.integers(len(unary) + len(binary), size=6):
            picked = (values[k] for k in random.integers(len(values), size=2))
            more = unary[i](next(picked)) if i < len(unary) else binary[i - len(unary)](*picked)
            values.append(more)
        return values[-1]

    program = jaxprtool.trace(function, X)
    (found,) = bounds(program, {"x": (-2, 2)}).values()
    result = np.asarray(program(X), np.float64)
    within = (found.low <= result) & (result <= found.high)
    assert np.all(within | (np.isnan(result) & found.nan))
    np.testing.assert_array_equal(program.apply(Intervals({"x": (-2, 2)}))(X), program(X))


def test_an_argument_that_is_not_there_is_named():
    with pytest.raises(errors.ArgumentsError, match="no argument y"):
        jaxprtool.trace(jnp.sin, X).apply(Intervals({"y": (0, 1)}))
