"""mask: convolutions, pooling, random bits, matrix decompositions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.passes.mapping.mask.proving import marked, prove


def finite(x):
    # XLA may or may not multiply an infinity by the zeros of its own padding.
    return jnp.where(jnp.isfinite(x), x, 1)


def convolved(x, w, strides=(1,), padding="SAME", **options):
    numbers = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(
        finite(x), finite(w), strides, padding, dimension_numbers=numbers, **options
    )


def pooled(x, init, combine, window=(1, 2, 1), strides=(1, 2, 1), padding="SAME"):
    return lax.reduce_window(x, init, combine, window, strides, padding)


#: Functions of x, f32[2,n,3], f32[n,5,3] or f32[2,5,n] by the name, and w: f32[3,3,2].
WINDOWS = {
    "conv": convolved,
    "conv_valid": lambda x, w: convolved(jnp.pad(x, ((0, 0), (2, 0), (0, 0))), w, padding="VALID"),
    "conv_strided": lambda x, w: convolved(x, w, (2,)),
    "conv_explicit": lambda x, w: convolved(x, w, (2,), [(2, 3)]),
    "conv_dilated": lambda x, w: convolved(
        x, w, (1,), [(4, 4)], lhs_dilation=(2,), rhs_dilation=(2,)
    ),
    "conv_cropped": lambda x, w: convolved(x, w, (1,), [(4, -1)]),
    "conv_groups": lambda x, w: convolved(
        x, jnp.sin(w[:, :1, :1] * jnp.ones(3)), feature_group_count=3
    ),
    "conv_transposed": lambda x, w: lax.conv_transpose(
        finite(x), finite(w), (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    ),
    "max_pool": lambda x, w: pooled(x, -jnp.inf, lax.max),
    "max_pool_overlapping": lambda x, w: pooled(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1)),
    "average_pool": lambda x, w: pooled(x, 0.0, lax.add, (1, 3, 1), (1, 2, 1)) / 3,
    "min_pool": lambda x, w: pooled(x, jnp.inf, lax.min, padding=((0, 0), (1, 2), (0, 0))),
    "whole_pool": lambda x, w: pooled(x, 0.0, lax.add, (1, x.shape[1], 1), (1, 1, 1), "VALID"),
}

#: Functions of x: f32[n,4].
OTHERS = {
    "normal": lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
    "normal_by_column": lambda x: jax.random.normal(jax.random.key(0), (4, x.shape[0])).T * x,
    "keys": lambda x: jax.vmap(lambda k, x: jax.random.normal(k, (4,)) * x)(
        jax.random.split(jax.random.key(0), x.shape[0]), x
    ),
    "old_keys": lambda x: jax.random.uniform(
        jax.random.split(jax.random.PRNGKey(0), x.shape[0])[0], x.shape
    ),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0),
    "categorical": lambda x: jax.random.categorical(jax.random.key(1), x),
    "cholesky": lambda x: jnp.linalg.cholesky(
        jnp.tanh(x) @ jnp.tanh(x).T + 5 * jnp.eye(x.shape[0])
    ),
    "solve": lambda x: jax.scipy.linalg.solve_triangular(
        jnp.tril(jnp.tanh(x) @ jnp.tanh(x).T) + 5 * jnp.eye(x.shape[0]), x, lower=True
    ),
    "determinant": lambda x: jnp.linalg.slogdet(x @ x.T + 5 * jnp.eye(x.shape[0]))[1],
    "system": lambda x: jnp.linalg.solve(x @ x.T + 5 * jnp.eye(x.shape[0]), x),
    "inverse": lambda x: jnp.linalg.inv(jnp.tanh(x) @ jnp.tanh(x).T + 5 * jnp.eye(x.shape[0])),
    "solve_columns": lambda x: lax.linalg.triangular_solve(
        5 * jnp.eye(4) + jnp.tril(jnp.ones((4, 4))), x, lower=True
    ),
    "lanes": lambda x: jnp.linalg.eigh(x[:, :, None] * x[:, None] + 5 * jnp.eye(4))[0],
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.int16),
}


@pytest.mark.parametrize("name", marked(WINDOWS, pytest.mark.sweep))
def test_windows_over_masked_axes(name):
    prove(WINDOWS[name], "f32[2,n,3], f32[3,3,2]", least=2)


@pytest.mark.parametrize("name", marked(WINDOWS, pytest.mark.sweep))
def test_windows_over_masked_examples(name):
    prove(WINDOWS[name], "f32[n,5,3], f32[3,3,2]")


@pytest.mark.parametrize("name", marked(OTHERS, pytest.mark.sweep, "normal_by_column"))
def test_random_bits_and_matrices(name):
    prove(OTHERS[name], "f32[n,4]")


def test_the_gradient_of_pooling_whose_windows_leave_rows_over():
    def summed(x, cotangent):
        y, pullback = jax.vjp(lambda x: pooled(x, -jnp.inf, lax.max, (1, 3, 1), padding="VALID"), x)
        return pullback(cotangent * jnp.ones_like(y))

    # Windows of 3 of the 2*n + 4 rows, with stride 2, leave one row over.
    prove(summed, "f32[2,2*n+4,3], f32[2,n+1,3]")


@pytest.mark.sweep
def test_convolutions_over_masked_features():
    prove(convolved, "f32[2,4,n], f32[3,n,m]")


@pytest.mark.sweep
def test_products_of_ragged_groups():
    prove(lax.ragged_dot, "f32[n,4], f32[2,4,3], i32[2]", least=1)
