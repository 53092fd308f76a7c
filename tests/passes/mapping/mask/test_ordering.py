"""mask: sorts, extrema and their indices, cumulative operations."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import trace
from jaxprtool.errors import UnsupportedError
from tests.passes.mapping.mask.proving import marked, prove

#: Functions of x: f32[n,3] and i: i32[n,3].
CASES = {
    "sorted": lambda x, i: (jnp.sort(x, 0), jnp.sort(i, 0), jnp.sort(x, 1)),
    "argsorted": lambda x, i: (jnp.argsort(x, 0), jnp.argsort(i, 0)),
    "descending": lambda x, i: jnp.sort(x, 0, descending=True),
    "keys": lambda x, i: lax.sort((i, x, jnp.sin(x)), dimension=0, num_keys=2),
    "carried": lambda x, i: lax.sort((i, x * 2), dimension=0, is_stable=False),
    "bools": lambda x, i: lax.sort((x > 0, i), dimension=0),
    "complex": lambda x, i: lax.sort(x + 1j * i, dimension=0),
    "nan": lambda x, i: lax.sort((jnp.where(i == 0, jnp.nan, x), i), dimension=0),
    "largest_ints": lambda x, i: lax.sort((jnp.where(i < 2, 2**31 - 1, i), x), dimension=0),
    "median": lambda x, i: jnp.median(x, 0),
    "quantile": lambda x, i: jnp.quantile(x, 0.3, axis=0),
    "top": lambda x, i: lax.top_k(x.T, 1),
    "top_all": lambda x, i: lax.top_k(jnp.where(i == 0, -jnp.inf, x).T, x.shape[0]),
    "top_ints": lambda x, i: lax.top_k(i.T, 1),
    "top_approximately": lambda x, i: lax.approx_min_k(jnp.nan_to_num(x), 1, reduction_dimension=0),
    "searched": lambda x, i: jnp.digitize(x, jnp.arange(4.0)),
    "interpolated": lambda x, i: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
    "polynomial": lambda x, i: jnp.polyval(x[0], x).sum(0),
    "argmax": lambda x, i: (jnp.argmax(x, 0), jnp.argmax(i, 0), jnp.argmin(x, 0), jnp.argmin(i, 0)),
    "argmax_of_least": lambda x, i: jnp.argmax(jnp.where(x > 0, -jnp.inf, -jnp.inf), 0),
    "argmin_of_nan": lambda x, i: jnp.argmin(jnp.where(i == 1, jnp.nan, x), 0),
    "cumsum": lambda x, i: (jnp.cumsum(x, 0), jnp.cumsum(i, 0), jnp.cumsum(x, 1)),
    "cumsum_reverse": lambda x, i: lax.cumsum(jnp.sin(x), 0, reverse=True).sum(0),
    "cumprod": lambda x, i: (jnp.cumprod(x, 0), lax.cumprod(x, 0, reverse=True)),
    "cummax": lambda x, i: (lax.cummax(x, 0), lax.cummax(x, 0, reverse=True), lax.cummax(i, 0)),
    "cummin": lambda x, i: (lax.cummin(x, 0), lax.cummin(x, 0, reverse=True)),
    "cumlogsumexp": lambda x, i: lax.cumlogsumexp(jnp.nan_to_num(x), 0),
    "cumlogsumexp_reverse": lambda x, i: lax.cumlogsumexp(jnp.nan_to_num(x), 0, reverse=True),
    "maximum_of_least": lambda x, i: jnp.max(jnp.where(i < 4, -jnp.inf, 1) + x, 0),
    "minimum_of_largest": lambda x, i: jnp.min(jnp.where(i < 3, jnp.inf, 1) + x, 0),
    "reduced": lambda x, i: lax.reduce(x, x[0, 0] * 0, lax.add, (0,)),
    "reduced_pairs": lambda x, i: lax.reduce(
        (x, i),
        (jnp.float32(-jnp.inf), jnp.int32(0)),
        lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])),
        (0,),
    ),
    "precision": lambda x, i: lax.reduce_precision(x, 5, 4).sum(0),
    "bincount": lambda x, i: jnp.bincount(i[:, 0], length=4),
    "softmax": lambda x, i: jax.nn.softmax(x, 0).sum(1),
}


@pytest.mark.parametrize("name", marked(CASES, pytest.mark.sweep, "argsorted"))
def test_ordering_elements(name):
    prove(CASES[name], "f32[n,3], i32[n,3]")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "complex64"])
def test_padding_is_no_extreme_of_a_type_without_infinities(name):
    dtype = jnp.dtype(name)

    def fun(x):
        return lax.reduce_max(x, (0,)), lax.reduce_min(x, (0,))

    (n,) = jax.export.symbolic_shape("n")
    masked = trace(fun, jax.ShapeDtypeStruct((n,), dtype)).apply("mask(n=8)")
    x, run = np.array([-3, 2, -1, -1, 5, 7, -8, 0], dtype), jax.jit(masked)
    for size, wanted in (1, (-3, -3)), (2, (2, -3)), (6, (7, -3)):
        found = jax.tree.leaves(run(x, np.int32(size)))
        assert [complex(v) for v in found] == [complex(v) for v in wanted]


def masked(fun, dtype):
    """Return a function of x: dtype[n,2] with `n` masked to at most 4."""
    (n,) = jax.export.symbolic_shape("n")
    return trace(fun, jax.ShapeDtypeStruct((n, 2), jnp.dtype(dtype))).apply("mask(n=4)")


@pytest.mark.parametrize(
    ("fun", "dtype", "reason"),
    {
        "sum": (lambda x: lax.reduce_sum(x, [0]), "float8_e8m0fnu", "float8_e8m0fnu has no 0"),
        "product": (lambda x: lax.reduce_prod(x, [0]), "complex64", "complex infinities"),
        "mul": (lambda x: lax.reduce(x, jnp.complex64(1), lax.mul, (0,)), "complex64", "complex"),
        "reverse": (lambda x: lax.cumprod(x, 0, reverse=True), "complex64", "complex infinities"),
    }.values(),
)
def test_a_type_without_a_neutral_element_is_refused_by_equation(fun, dtype, reason):
    with pytest.raises(UnsupportedError, match=rf"at .*test_ordering\.py:\d+.* masked: .*{reason}"):
        masked(fun, dtype)


def test_complex_products_that_no_padding_reaches_keep_their_infinities():
    def fun(x):
        return lax.cumprod(x, 0), lax.reduce_prod(x, [1])

    x = jnp.array([[jnp.inf, 1], [1j, 2], [5, 5], [5, 5]], "complex64")
    results = jax.tree.leaves(masked(fun, "complex64")(x, jnp.int32(2)))[:2]  # and sizes
    for got, wanted in zip(results, fun(x), strict=True):
        assert str(got[:2]) == str(wanted[:2])
