"""`tile` splits an axis into tiles and maps over them, as `vtile` did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import equivalent, trace
from jaxprtool.ir.program import type_check
from jaxprtool.passes.mapping.batch import BatchError, BatchTypeError, Tile

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 3)).astype(np.float32)


def tiled(fun, args, axis_env=None, **options):
    """Return the tiled program of `fun` for arguments of one tile, type-checked."""
    result = Tile(**options)(trace(fun, *args, axis_env=axis_env))
    type_check(result)
    return result


def test_an_elementwise_function_of_tiles_equals_that_of_the_whole():
    result = tiled(lambda x: jnp.sin(x) + 1, (X[:3],), tile_size=4)
    assert [aval.shape for aval in (*result.in_avals, *result.out_avals)] == [(12, 3)] * 2
    np.testing.assert_allclose(result(X), np.sin(X) + 1, rtol=1e-6)


def test_a_tile_is_a_contiguous_part_of_the_axis():
    result = tiled(lambda x: x[::-1], (X[:4],), tile_size=3)
    np.testing.assert_array_equal(result(X), X.reshape(3, 4, 3)[:, ::-1].reshape(12, 3))


@pytest.mark.parametrize("in_axis", [0, 1, -1])
@pytest.mark.parametrize("out_axis", [0, 1, -2])
def test_any_axis_can_be_split_and_joined(in_axis, out_axis):
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    parts = np.split(x, 2, axis=in_axis)

    def fun(part):
        return jnp.cumsum(part, axis=0) @ part.T

    result = tiled(fun, (parts[0],), tile_size=2, in_axes=in_axis, out_axes=out_axis)
    want = np.concatenate([fun(part) for part in parts], axis=out_axis)
    np.testing.assert_allclose(result(x), want, rtol=1e-5)


def test_axes_are_prefixes_and_none_means_unsplit():
    def fun(params, x):
        return {"y": x @ params["w"] + params["b"], "w": params["w"] * 2}

    params = {"w": X[:3], "b": X[0]}
    options = {"in_axes": (None, 0), "out_axes": {"y": 0, "w": None}}
    result = tiled(fun, (params, X[:4]), tile_size=3, **options)
    want = fun(params, X)
    got = result(params, X)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-6)
    np.testing.assert_array_equal(got["w"], want["w"])


@pytest.mark.proof
def test_collectives_are_over_the_tiles():
    def normalized(x):
        return x / lax.psum(x.sum(axis=0), "tiles"), x[:1] * 0 + lax.axis_index("tiles")

    result = tiled(normalized, (X[:4],), axis_env=[("tiles", 3)], tile_size=3, axis_name="tiles")
    assert result.axis_env == ()
    share, index = result(X)
    np.testing.assert_allclose(share, X / X.sum(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(index[:, 0], [0, 1, 2])


@pytest.mark.proof
def test_one_tile_is_the_whole_and_a_loop_over_tiles_is_a_loop():
    def fun(x):
        return lax.scan(lambda c, row: (c + row, c), jnp.zeros(3), x)[1]

    fun = jax.jit(fun)
    one = jax.jit(tiled(fun, (X,), tile_size=1))
    np.testing.assert_allclose(one(X), fun(X), rtol=1e-6)
    want = np.concatenate([fun(part) for part in np.split(X, 4)])
    result = tiled(fun, (X[:3],), tile_size=4)
    np.testing.assert_allclose(jax.jit(result)(X), want, rtol=1e-6)


def test_gradients_are_computed_through_tiles():
    result = tiled(lambda x: jnp.sin(x), (X[:3],), tile_size=4)
    gradient = jax.grad(lambda x: result(x).sum())(X)
    np.testing.assert_allclose(gradient, np.cos(X), rtol=1e-6)


def test_keys_and_names_are_kept():
    keys = jax.random.split(jax.random.key(0), 4)
    program = trace(lambda keys: keys[::-1], keys[:2])
    result = Tile(2)(program)
    assert (result.name, result.arg_names) == (program.name, program.arg_names)
    swapped = jax.random.key_data(keys)[jnp.array([1, 0, 3, 2])]
    np.testing.assert_array_equal(jax.random.key_data(jax.jit(result)(keys)), swapped)


@pytest.mark.parametrize("rows", [1, 3])
def test_without_tile_size_the_number_of_tiles_is_a_symbol(rows):
    """`vtile(tile_size=None)` made as many tiles of one row as there are rows."""

    def fun(x, scale):
        return x[::-1] * scale, x.sum(axis=0, keepdims=True)

    result = tiled(fun, (X[:rows], 2.0), in_axes=(0, None))
    assert str(result.in_avals[0].shape[0]) == ("tiles" if rows == 1 else "3*tiles")
    for tiles in (1, 4):
        x = X[: rows * tiles]
        parts = [jax.jit(fun)(part, 2.0) for part in np.split(x, tiles)]
        flipped, totals = jax.jit(result)(x, 2.0)
        np.testing.assert_array_equal(flipped, np.concatenate([part for part, _ in parts]))
        np.testing.assert_allclose(totals, np.concatenate([t for _, t in parts]), rtol=1e-6)
    four = result.apply("specialize(tiles=4)")
    assert equivalent(four, tiled(fun, (X[:rows], 2.0), in_axes=(0, None), tile_size=4))


def test_the_symbol_of_the_tiles_is_new_in_the_program():
    (tiles,) = jax.export.symbolic_shape("tiles")
    program = trace(lambda x: x * 2, jax.ShapeDtypeStruct((3, tiles), "float32"))
    result = Tile()(program)
    type_check(result)
    assert list(map(str, result.in_avals[0].shape)) == ["3*tiles_2", "tiles"]
    np.testing.assert_array_equal(result(X), X * 2)


def test_without_tile_size_it_is_the_size_of_the_traced_axis():
    program = trace(lambda x: x / lax.psum(x, "i"), X[:4], axis_env=[("i", 3)])
    result = Tile(axis_name="i")(program)
    assert result.in_avals[0].shape == X.shape
    np.testing.assert_allclose(result(X), Tile(3, "i")(program)(X))


def test_without_tile_size_an_argument_must_be_split():
    with pytest.raises(
        BatchError, match="tile_size must be specified, because no argument is tiled"
    ):
        Tile(in_axes=None, out_axes=None)(trace(jnp.sin, X))


MISTAKES = {
    "a scalar": (lambda x, s: x * s, {}, r"^s is f32\[\], which has no axis 0 to split into tiles"),
    "an axis too far": (
        lambda x, s: x * s,
        {"in_axes": (2, None)},
        r"^x is f32\[4,3\], which has no axis 2 to split",
    ),
    "an axis too far back": (lambda x, s: x, {"in_axes": (-3, None)}, "no axis -3 to split"),
    "a result without the axis": (
        lambda x, s: x.sum() * s,
        {"in_axes": (0, None)},
        r"^result is f32\[\], which has no axis 0 to join tiles along",
    ),
    "a result that differs": (
        lambda x, s: x * s,
        {"in_axes": (0, None), "out_axes": None},
        "out_axes",
    ),
    "no tiles": (lambda x, s: x * s, {"tile_size": 0}, "at least 1, not 0"),
    "axes of another number": (lambda x, s: x, {"in_axes": (0,)}, "in_axes"),
}


@pytest.mark.parametrize("fun, options, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported_with_the_value_and_the_axis(fun, options, message):
    program = trace(fun, X[:4], jax.ShapeDtypeStruct((), "float32"))
    names = ("x", "s")
    with pytest.raises(BatchError, match=message):
        Tile(**{"tile_size": 3, **options})(program.replace(arg_names=names))


def test_a_program_traced_for_another_number_of_tiles_is_refused():
    program = trace(lambda x: lax.pmean(x, "i"), X[:4], axis_env=[("i", 2)])
    with pytest.raises(BatchError, match="traced with an axis 'i' of size 2, not 3"):
        Tile(3, "i")(program)


def test_an_invalid_axis_is_a_type_error():
    with pytest.raises(BatchTypeError, match="in_axes"):
        Tile(3, in_axes="x")(trace(jnp.sin, X))
    with pytest.raises(BatchTypeError, match="tile_size must be an integer, but got 2"):
        Tile(2.5)(trace(jnp.sin, X))
