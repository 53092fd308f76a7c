"""The traits of JAX's primitives are true, and plug-ins can add traits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import dtype_kind
from jaxprtool.ir.traits import Traits, add_traits, nondefault_options, primitives_with, traits

#: Zeros of both signs, a subnormal number, and numbers whose products and sums are rounded.
REALS = [0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 0.1, 1 / 3, -7.7e5]
DTYPES = [bool, np.int8, np.uint32, jnp.bfloat16, np.float16, np.float32, np.complex64]
COMMUTATIVE = sorted(primitives_with(lambda found: bool(found.commutative)))


def pairs(dtype):
    """Return each pair of some special values."""
    reals = REALS if dtype_kind(np.dtype(dtype)) in "fcV" else [0, 1, 2, 7]
    with np.errstate(over="ignore"):
        values = np.array(reals).astype(dtype)
    if dtype_kind(values.dtype) == "c":
        values = np.array([complex(a, b) for a, b in itertools.product(reals, reals)], dtype)
    return (x.ravel() for x in np.meshgrid(values, values))


def both_orders(name, dtypes):
    """Return the results of a primitive on pairs of values, in both orders, with all NaNs equal."""
    primitive = jaxcompat.registered_primitives()[name]
    xs, ys = zip(*map(pairs, dtypes), strict=True)
    fun = jax.jit(lambda xs, ys: [primitive.bind(x, y) for x, y in zip(xs, ys, strict=True)])
    results = zip(fun(xs, ys), fun(ys, xs), strict=True)
    return [[np.where(np.isnan(z), np.nan, z).astype(z.dtype) for z in both] for both in results]


@pytest.mark.parametrize("name", COMMUTATIVE)
def test_operands_of_commutative_primitives_can_be_swapped(name):
    dtypes = [dtype for dtype in map(np.dtype, DTYPES) if traits(name).commutes(dtype)]
    for dtype, (first, second) in zip(dtypes, both_orders(name, dtypes), strict=True):
        if traits(name).commutes(dtype, to_the_bit=True):
            assert first.tobytes() == second.tobytes(), dtype
        elif dtype_kind(dtype) == "V":
            # Some backends order subnormal numbers by position.
            np.testing.assert_allclose(first.astype(float), second.astype(float), atol=1e-39)
        else:
            np.testing.assert_allclose(first, second, rtol=1e-6)


@pytest.mark.parametrize("name", ["max", "min"])
def test_the_maximum_of_two_complex_numbers_depends_on_their_order(name):
    # The comparison of NaN and 0 fails in both orders.
    nan, zero = np.complex64(np.nan), np.complex64(0)
    fun = jax.jit(jaxcompat.registered_primitives()[name].bind)
    assert np.isnan(fun(nan, zero)) != np.isnan(fun(zero, nan))
    assert not traits(name).commutes(np.dtype(np.complex64))


def test_primitives_that_cannot_be_merged_can_be_neither_hoisted_nor_folded():
    for name in primitives_with(lambda found: not found.may_merge):
        assert not traits(name).may_hoist and not traits(name).may_fold, name


def test_traits_are_added_to_existing_ones():
    assert traits("test_traits") == Traits()
    add_traits("test_traits", gives="layout")
    add_traits("test_traits", may_merge=False)
    expected = Traits(gives="layout", may_merge=False, may_hoist=False, may_fold=False)
    assert traits("test_traits") == expected


def test_an_option_that_is_not_at_its_default_is_named():
    x = jax.ShapeDtypeStruct((3, 2), "int8")

    def options_of(function):
        (eqn,) = jax.make_jaxpr(function)(x).eqns
        return nondefault_options(eqn)

    assert options_of(lambda x: lax.cumsum(x, 1)) == set()
    assert options_of(lambda x: lax.cumsum(x, 1, reverse=True)) == {"reverse"}
    assert options_of(lambda x: lax.mul(x, x, out_dtype="int32")) == {"out_dtype"}
    assert options_of(lambda x: lax.sort(x)) == set()
    assert options_of(lambda x: lax.sort(x, is_stable=False)) == {"is_stable"}


def test_an_unknown_parameter_is_an_option():
    (eqn,) = jax.make_jaxpr(lax.neg)(1.0).eqns
    for value, found in ("set", {"later"}), (0, {"later"}), (None, set()), (False, set()):
        assert nondefault_options(eqn.replace(params={"later": value})) == found
