import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.running.arrays import (
    FilledArguments,
    fill_arguments,
    random_array,
    refitted,
    with_wide_integers,
)
from tests.execute.programs import program

S = jax.ShapeDtypeStruct
ALL_DTYPES = """
    bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 complex64 bfloat16 float16
    float32 float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn
"""


def filled(fun, *args, given=None, seed=0):
    traced = program(fun, *args)
    values = dict(zip(traced.arg_names, jax.tree.leaves(args), strict=True))
    return fill_arguments(traced, {**values, **(given or {})}, seed)


@pytest.mark.parametrize("dtype", ALL_DTYPES.split())
def test_every_dtype_is_filled_with_usable_values(dtype):
    aval = S((50,), jnp.dtype(dtype))
    values = random_array(jax.typeof(np.zeros(aval.shape, aval.dtype)), (0, 0))
    assert values.shape == (50,) and values.dtype == aval.dtype
    wide = np.asarray(values).astype(complex)
    assert np.isfinite(wide).all()
    assert len(np.unique(wide)) > 1
    if jnp.issubdtype(aval.dtype, jnp.integer):
        assert wide.real.min() >= 0 and wide.real.max() < 8


def test_the_same_seed_draws_the_same_values_and_positions_differ():
    arg = S((4,), jnp.float32)
    first = filled(lambda x, y: x + y, arg, arg, seed=3).arguments
    again = filled(lambda x, y: x + y, arg, arg, seed=3).arguments
    other = filled(lambda x, y: x + y, arg, arg, seed=4).arguments
    assert (first[0] == again[0]).all() and (first[1] == again[1]).all()
    assert (first[0] != first[1]).any() and (first[0] != other[0]).any()


def test_given_values_are_kept_and_the_random_ones_are_named():
    x = np.ones(3, np.float32)
    result = filled(lambda x, y: x + y, x, S((3,), jnp.float32))
    assert result.arguments[0] is x
    assert result.random == ("a1",)


@pytest.mark.parametrize("seed", range(8))
def test_booleans_have_both_values_even_in_pairs(seed):
    values = random_array(jax.typeof(np.zeros(2, bool)), (seed, 0))
    assert values.any() and not values.all()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_keys_are_split_in_their_own_implementation(impl, shape):
    dtype = jax.random.key(0, impl=impl).dtype
    keys = random_array(jax.typeof(jax.random.key(0, impl=impl)).update(shape=shape), (0, 0))
    assert keys.dtype == dtype and keys.shape == shape
    data = np.asarray(jax.random.key_data(keys))
    assert len(np.unique(data.reshape(keys.size, data.shape[-1]), axis=0)) == keys.size


def test_zero_size_and_scalar_arrays():
    assert random_array(jax.typeof(np.zeros((0, 3), np.int32)), (0, 0)).shape == (0, 3)
    assert random_array(jax.typeof(np.float32(0)), (0, 0)).shape == ()


def test_a_symbolic_dimension_is_refused_by_name():
    (n,) = export.symbolic_shape("n")
    with pytest.raises(ArgumentsError, match=r"argument 'a0' is f32\[n,2\]: n needs a number"):
        filled(lambda x: x * 2, S((n, 2), jnp.float32))


def test_values_that_no_longer_fit_after_a_pass_are_refused():
    batched = program(lambda x: x, np.ones((8, 3), np.float32))
    with pytest.raises(ArgumentsError, match=r"'a0' has shape \(3,\), but after the passes"):
        fill_arguments(batched, {"a0": np.ones(3, np.float32)})
    assert fill_arguments(batched, {"a0": S((3,), jnp.float32)}).arguments[0].shape == (8, 3)
    with pytest.raises(ArgumentsError, match="an argument 'a0' to"):
        fill_arguments(batched, {})


def test_arguments_added_by_a_pass_have_only_a_type_and_float0_has_one_value():
    types = S((3,), jnp.float32), S((2,), jax.dtypes.float0)
    values, dropped = refitted(program(lambda x, y: (x, y), *types), {})
    assert values == {"a0": types[0], "a1": types[1]} and dropped == ()
    filled = fill_arguments(program(lambda x, y: (x, y), *types), values)
    assert filled.random == ("a0",) and filled.arguments[1].dtype == jax.dtypes.float0


def test_values_that_no_longer_fit_after_a_pass_are_replaced_by_random_ones():
    batched = program(lambda w, x, y: x + y + w, np.ones(3), np.ones((8, 3)), np.ones((8, 3)))
    w, x, y = np.ones(3, np.float32), np.ones(3, np.float32), S((3,), jnp.float32)
    values, dropped = refitted(batched, {"a0": w, "a1": x, "a2": y})
    assert values["a0"] is w and values["a2"] is y and dropped == ("a1",)
    filled = fill_arguments(batched, values)
    assert filled.random == ("a1", "a2") and filled.arguments[1].shape == (8, 3)


# --- integers of both signs and any size ----------------------------------------------------------


def wide(fun, *args, seed=0):
    traced = program(fun, *args)
    values = dict(zip(traced.arg_names, args, strict=True))
    draws = with_wide_integers(traced, fill_arguments(traced, values, seed), seed)
    return [draw.arguments for draw in draws]


@pytest.mark.parametrize("dtype", ["int2", "int8", "int32", "uint2", "uint8", "uint32"])
@pytest.mark.parametrize("shape", [(), (2,), (50,)])
def test_a_check_meets_negative_and_large_integers(dtype, shape):
    info = jnp.iinfo(dtype)
    for seed in range(5):
        draws = wide(lambda x, y: (x, y), S(shape, jnp.dtype(dtype)), S((), jnp.float32), seed=seed)
        values = np.concatenate([np.asarray(x).astype(int).reshape(-1) for x, _ in draws])
        assert info.min <= values.min() and values.max() <= info.max
        assert -1 in values or info.min == 0
        assert values.max() >= 8 or info.max < 8


def test_two_scalars_meet_in_all_pairs_of_signs():
    scalar = S((), jnp.int32)
    draws = wide(lambda x, y: x + y, scalar, scalar)
    assert len({(int(x) < 0, int(y) < 0) for x, y in draws}) == 4


def test_only_random_integers_become_wide():
    assert not wide(lambda x: x, S((3,), jnp.float32))
    assert not wide(lambda x: x, np.int32([3, 4]))
    assert not wide(lambda x: x, S((3,), jnp.bool_))
    assert not wide(lambda x: x, S((0, 3), jnp.int32))


@pytest.mark.parametrize("nested", [False, True])
def test_the_length_of_a_loop_stays_small(nested):
    def loop(n, x):
        return jax.lax.fori_loop(0, n + 1, lambda i, c: c * 0.5, x)

    def fun(n, x, k):
        return jax.jit(loop)(n, x) + k if nested else loop(n, x) + k

    scalar = S((), jnp.int32)
    draws = wide(fun, scalar, S((), jnp.float32), scalar)
    assert all(0 <= n < 8 for n, _, _ in draws)
    assert {k < 0 for _, _, k in draws} == {True, False}


def test_the_domains_of_random_values_are_said_in_a_sentence():
    between = {f"w{number}": (-1.0, 1.0) for number in range(29)}
    filled = FilledArguments((), (), {"v": (0.0, np.inf), **between})
    assert filled.domains_text() == "; v is positive; 29 arguments are between -1 and 1"
