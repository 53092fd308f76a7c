"""`jaxprtool.mask`: functions of arrays of any length, called with padded ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError, CheckError, StructureError

X = jnp.array([3.0, 1.0, 4.0, jnp.nan, 5.0])

summed = jaxprtool.mask(jnp.sum, "f32[n]", "f32[]")


def layer(x, w, *, b):
    return {"y": jnp.tanh(x @ w) + b, "sums": x.sum(0)}


def test_a_masked_function_takes_padded_arguments_and_their_sizes():
    assert summed([X], {"n": 3}) == summed((X,), {"n": 3}) == summed(X, {"n": jnp.int32(3)}) == 8.0
    assert summed(X, {"n": 0}) == 0.0


def test_logical_types_of_results_are_returned_without_claimed_types_too():
    fun = jaxprtool.mask(layer, "f32[n,d], f32[d,d], b=f32[]")
    x = np.full((4, 3), np.inf, np.float32)
    x[:2] = 1
    result, types = fun((x, np.eye(3, dtype=np.float32)), {"n": 2}, b=1.0)
    assert types == {
        "y": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "sums": jax.ShapeDtypeStruct((3,), jnp.float32),
    }
    assert result["y"].shape == (4, 3)
    np.testing.assert_allclose(result["y"][:2], np.tanh(x[:2]) + 1, rtol=1e-6)
    np.testing.assert_array_equal(result["sums"], [2.0, 2.0, 2.0])
    total, types = jaxprtool.mask(jnp.sum, ["f32[n]"])(X, {"n": 2})
    assert (total, types) == (4.0, jax.ShapeDtypeStruct((), jnp.float32))


def test_logical_types_have_the_structure_of_results():
    def fun(x):
        return [x, (x.sum(), x[:, None])], None, x.mean()

    (nested, nothing, mean), types = jaxprtool.mask(fun, "f32[n]")(X, {"n": 3})
    assert nested[1][1].shape == (5, 1) and nothing is None and mean == 8.0 / 3

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    assert types == ([of(3), (of(), of(3, 1))], None, of())


@pytest.mark.proof
def test_sizes_may_be_traced():
    assert jax.jit(summed)([X], {"n": 3}) == 8.0
    lanes = jax.vmap(summed, (None, 0))([X], {"n": jnp.arange(4)})
    np.testing.assert_array_equal(lanes, [0.0, 3.0, 4.0, 8.0])
    gradient = jax.jit(jax.grad(lambda x, n: summed(x, {"n": n})))(X, 2)
    np.testing.assert_array_equal(gradient, [1.0, 1.0, 0.0, 0.0, 0.0])
    doubled = jaxprtool.mask(lambda x: 2 * x, "f32[n]")
    size = jax.jit(lambda n: doubled(X, {"n": n})[1].shape[0])(3)
    assert size == 3


def test_the_function_is_traced_once_for_all_lengths_and_bounds():
    traced = []

    def fun(x):
        traced.append(x.shape)
        return x.sum()

    masked = jaxprtool.mask(fun, "f32[n]", "f32[]")
    for bound in (5, 5, 8):
        for n in (1, 2):
            assert masked(jnp.ones(bound), {"n": n}) == n
    assert len(traced) == 1


def test_traced_values_may_be_closed_over():
    def outer(scale, n):
        return jaxprtool.mask(lambda x: (x * scale).sum(), "f32[n]", "f32[]")(X, {"n": n})

    assert jax.grad(outer)(2.0, 3) == 8.0
    assert jax.jit(outer)(2.0, 2) == 8.0
    kept = jaxprtool.mask(lambda x: (x * scale).sum(), "f32[n]", "f32[]")
    for value in (1.0, 2.0):

        def inner(given):
            nonlocal scale
            scale = given
            return kept(X, {"n": 2})

        scale = None
        assert jax.jit(inner)(value) == 4 * value


@pytest.mark.proof
def test_symbols_without_a_given_size_have_that_of_the_arguments():
    fun = jaxprtool.mask(lambda x: x.mean(), "f32[n,d]", "f32[]")
    for d in (2, 3):
        assert fun(jnp.ones((4, d)).at[1:].set(jnp.nan), {"n": 1}) == 1.0
    assert fun(jnp.ones((4, 3)).at[1:, 2:].set(jnp.nan), {"n": 1, "d": 2}) == 1.0


@pytest.mark.parametrize(
    ("args", "sizes", "error", "message"),
    [
        (X, {"n": 6}, ArgumentsError, "argument 'n' of sum is 6, but must be a size from 0 to 5"),
        (X, {"n": -1}, ArgumentsError, "argument 'n' of sum is -1, but must be a size from 0 to 5"),
        (X, {"m": 1}, ArgumentsError, "mask: sum: no symbol 'm'"),
        (X, {}, ArgumentsError, "sum takes sizes by symbol, such as {'n': 3}, not {}"),
        (X, 3, ArgumentsError, "sum takes sizes by symbol, such as {'n': 3}, not 3"),
        (
            [],
            {"n": 1},
            StructureError,
            "the program takes 1 positional argument, not 0: a is missing",
        ),
        (X[None], {"n": 1}, ArgumentsError, r"argument 'a' has shape \[1,5\], but sum takes"),
        (X.astype(int), {"n": 1}, ArgumentsError, r"'a' of sum is i32\[5\], but its type is f32"),
    ],
)
def test_invalid_arguments_are_a_one_line_error(args, sizes, error, message):
    with pytest.raises(error, match=message):
        summed(args, sizes)


def test_contradictory_arguments_are_refused():
    fun = jaxprtool.mask(lambda x, y: x.sum() + y.sum(), "f32[n], f32[n]", "f32[]")
    with pytest.raises(ArgumentsError, match=r"between dimension size y.shape\[0\] \(= 3\)"):
        fun([X, X[:3]], {"n": 2})


def test_a_claim_that_fails_is_refused():
    with pytest.raises(CheckError, match=r"result of sum is f32\[\], not f32\[n\]"):
        jaxprtool.mask(jnp.sum, "f32[n]", "f32[n]")(X, {"n": 2})
