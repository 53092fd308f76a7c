"""batch_jaxpr: a batched jaxpr, with JAX's three ways to specify the axes of results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat

SIZE = 4


def fun(x, y):
    return x.T @ x + y.sum(), y * 2, lax.psum(x.sum(), "i"), jnp.cumsum(x, axis=1)


X, Y = jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0)
XS = jnp.stack([X + i for i in range(SIZE)])


def jaxpr():
    return jax.make_jaxpr(fun, axis_env=[("i", SIZE)])(X, Y)


def run(mapped, *args):
    return jax.jit(jaxcompat.jaxpr_as_fun(mapped))(*args)


def expected(out_axes, in_axes=(0, None)):
    xs = jnp.moveaxis(XS, 0, in_axes[0])
    return jax.jit(jax.vmap(fun, in_axes, out_axes, axis_name="i"))(xs, Y)


@pytest.mark.proof
def test_results_have_their_natural_axes_by_default():
    for axis in (0, 1, 2):
        mapped, outs = jaxprtool.batch_jaxpr(jaxpr(), SIZE, (axis, None), axis_name="i")
        assert outs[1:3] == (None, None) and None not in (outs[0], outs[3])
        found = run(mapped, jnp.moveaxis(XS, 0, axis), Y)
        for got, wanted in zip(found, expected(outs, (axis, None)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_result_is_moved_or_broadcast_to_the_requested_axis():
    mapped, outs = jaxprtool.batch_jaxpr(jaxpr(), SIZE, (0, None), (1, -1, 0, 2), "i")
    assert outs == (1, 1, 0, 2)
    for got, wanted in zip(run(mapped, XS, Y), expected(outs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.proof
def test_with_zero_if_mapped_a_mapped_result_has_axis_zero():
    options = {"out_axes": "zero_if_mapped", "axis_name": "i"}
    mapped, outs = jaxprtool.batch_jaxpr(jaxpr(), SIZE, (-1, None), **options)
    assert outs == (0, None, None, 0)
    found = run(mapped, jnp.moveaxis(XS, 0, -1), Y)
    for got, wanted in zip(found, expected(outs, (2, None)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_constants_are_not_batched_and_open_jaxprs_have_none():
    held = jax.make_jaxpr(lambda x: x + np.arange(3.0, dtype=np.float32))(Y)
    mapped, outs = jaxprtool.batch_jaxpr(held, 2)
    assert outs == (0,) and mapped.out_avals[0].shape == (2, 3)
    opened = jaxcompat.open_jaxpr(jax.make_jaxpr(jnp.sin)(Y))
    assert jaxprtool.batch_jaxpr(opened, 2, 1)[1] == (1,)


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "message"),
    [
        ((0,), None, "in_axes has 1 entries for the jaxpr's 2"),
        ((3, None), None, "in_axes has 3 for a value with 3 axes"),
        ((0, "zero_if_mapped"), None, "in_axes has 'zero_if_mapped'"),
        ((0, None), (0, 0, 1, 0), "out_axes has 1 for a value with 1 axes"),
        ((0, None), "natural", "out_axes has 'natural'"),
    ],
)
def test_invalid_axes_are_refused(in_axes, out_axes, message):
    with pytest.raises(ValueError, match=message):
        jaxprtool.batch_jaxpr(jaxpr(), SIZE, in_axes, out_axes, "i")
