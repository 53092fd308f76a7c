"""Derivatives of masked programs, in reverse mode twice, with NaN in all padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import trace
from tests.programs.case import Case
from tests.programs.masking import prove_masked
from tests.programs.symbolic import symbolic_program
from tests.share import first_and_proofs, shared_proofs


def product(w, x):
    """Sum derivatives by w over rows, some of which are padding."""
    return jnp.tanh(x @ w) * w.sum()


def rounds(w, x):
    """Iterate over rows, some of which are padding."""
    return lax.scan(lambda s, row: (jnp.tanh(s @ w + row @ w),) * 2, jnp.zeros(3), x)


def held(x, y):
    """Iterate over rows, with other rows that are loop-invariant."""
    return lax.scan(lambda s, row: (s + (row[:, None] * y).sum(), (y * row[0]).sum()), 0.0, x)


def layers(w, x):
    """Iterate a fixed number of times, with padding inside."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), (x * x).sum()), x, jnp.stack([w, w]))


CASES = [(product, {(1, 0): "n"}), (rounds, {(1, 0): "n"}), (held, {(0, 0): "n", (1, 0): "n"})]


@pytest.mark.parametrize(("function", "axes"), shared_proofs([*CASES, (layers, {(1, 0): "n"})]))
def test_padding_does_not_affect_second_derivatives(function, axes):
    draw = np.random.RandomState(0).normal
    args = [jnp.asarray(draw(size=(3, 3)), jnp.float32) for _ in range(2)]
    if function is held:
        args[1] = args[1][0]
    found = prove_masked(symbolic_program(Case(function.__name__, function, tuple(args)), axes), 1)
    assert found["reverse, twice"] == 1, found


@pytest.mark.parametrize("stride", first_and_proofs([2, 1, 3]))
@pytest.mark.parametrize("select, first", [(lax.max, -np.inf), (lax.min, np.inf), (lax.add, 0.0)])
def test_a_pool_whose_windows_leave_rows_over_is_differentiated_after_masking(
    select, first, stride
):
    def f(x):
        return (lax.reduce_window(x, first, select, (2,), (stride,), "VALID") ** 2).sum()

    (n,) = jax.export.symbolic_shape("n")
    masked = trace(f, jax.ShapeDtypeStruct((n,), np.float32)).apply("mask(n=6)")
    x = np.float32([3, 1, 4, 1, 5, 9])
    gradient, expected = (
        jax.jit(jax.grad(lambda x, length: masked(x, length))),
        jax.jit(jax.grad(f)),
    )
    for length in range(2, 7):
        found = np.asarray(gradient(x, length))
        np.testing.assert_array_equal(found[:length], expected(x[:length]))
        assert not found[length:].any()


@pytest.mark.parametrize("left", [True, False])
def test_a_singular_matrix_has_no_derivative_unless_it_meets_no_rows(left):
    def f(a, b):
        return lax.linalg.triangular_solve(a, b, left_side=left).sum()

    (m,) = jax.export.symbolic_shape("m")
    types = [(3, 3), (3, m) if left else (m, 3)]
    program = trace(f, *(jax.ShapeDtypeStruct(shape, np.float32) for shape in types))
    masked = program.apply("mask(m=2)")
    singular, b = jnp.zeros((3, 3)), jnp.ones((3, 2) if left else (2, 3))
    gradient = jax.jit(jax.grad(lambda a, rows: masked(a, b, rows)))
    assert not np.any(gradient(singular, 0))
    assert np.isnan(gradient(singular, 1)).any()


def test_the_rule_of_a_primitive_without_derivative_is_not_called():
    def f(x):
        return jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2).sum()

    (n,) = jax.export.symbolic_shape("n")
    masked = trace(f, jax.ShapeDtypeStruct((n,), np.float32)).apply("mask(n=3)")
    x = np.float32([0.5, 1.5, np.nan])
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: masked(x, 2)))(x), [1.0, 3.0, 0.0])
