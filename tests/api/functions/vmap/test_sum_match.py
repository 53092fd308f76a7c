"""`sum_match`: mapped results are summed over the batch where `out_axes` is None."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxprtool import vmap
from tests.api.functions.vmap.beside import MATRIX, VECTOR, assert_alike, assert_both_raise, jvp_of
from tests.share import first_and_proofs

SUMS = {
    "one result": (lambda x: 2.0 * x, (VECTOR,), {"out_axes": None}),
    "another axis": (lambda x: x[::-1], (MATRIX,), {"in_axes": 1, "out_axes": None}),
    "some of a tree": (
        lambda w, x: {"a": [x, x * w], "b": (w, w * 2), "c": x},
        (2.0, MATRIX),
        {"in_axes": (None, 0), "out_axes": {"a": [None, 1], "b": (None, 0), "c": None}},
    ),
    "what is not mapped stays": (
        lambda w, x: (w, 3, w + 1, jnp.zeros_like(x)),
        (2, MATRIX),
        {"in_axes": (None, 0), "out_axes": None},
    ),
    "a position stays a position": (lambda x: x, (MATRIX,), {"out_axes": -1}),
    "a named axis": (
        lambda x: (x * lax.axis_index("i"), lax.psum(x, "i")),
        (MATRIX,),
        {"out_axes": None, "axis_name": "i"},
    ),
    "types that sums widen": (
        lambda x: (x > 3, x.astype(jnp.int8), x.astype(jnp.bfloat16)),
        (MATRIX,),
        {"out_axes": None},
    ),
    "an argument of NumPy's": (lambda x: x, (np.arange(3, dtype=np.int32),), {"out_axes": None}),
    "no lanes": (lambda x: x, (MATRIX[:0],), {"out_axes": None}),
    "mapped in the middle": (
        lambda x, w: lax.dot_general(w, x, (((1,), (0,)), ((), ()))),
        (MATRIX, jnp.ones((2, 4))),
        {"in_axes": (0, None), "out_axes": None},
    ),
    "loops and branches": (
        lambda w, x: (
            lax.scan(lambda c, y: ((c[0] + y, c[1] * 2), c[1]), (0.0, w), x),
            lax.cond(x.sum() > 10, lambda: (w, x), lambda: (w, x * 2)),
            jax.jit(lambda x, w: (x, w))(x, w),
        ),
        (2.0, MATRIX),
        {"in_axes": (None, 0), "out_axes": None},
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_mapped_results_without_an_axis_are_summed(name):
    fun, args, options = SUMS[name]
    assert_alike(fun, *args, sum_match=True, **options)


def loss(w, x):
    return jnp.tanh(x @ w).sum(), w * 2


AROUND = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda *a: f(*a)[0], argnums=(0, 1)),
    "value_and_grad of jit": lambda f: jax.value_and_grad(jax.jit(lambda *a: f(*a)[0] ** 2)),
    "jvp": lambda f: lambda *a: jvp_of(f, *a),
    "jax.vmap": lambda f: jax.vmap(f, in_axes=(None, 1)),
    "vmap": lambda f: vmap(f, in_axes=(None, 1), out_axes=None, sum_match=True),
    "vmap of grad": lambda f: vmap(jax.grad(lambda *a: f(*a)[0]), in_axes=(None, 1)),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, _: (f(c, x)[1], 0), w, length=2),
}


@pytest.mark.parametrize("name", first_and_proofs(AROUND))
def test_transformations_around_sums(name):
    x = jnp.stack([MATRIX, MATRIX - 5], axis=1) if "vmap" in name else MATRIX
    options = {"in_axes": (None, 0), "out_axes": None, "sum_match": True}
    assert_alike(loss, jnp.ones(4) / 4, x, around=AROUND[name], **options)


def test_sums_within_a_mapped_function():
    for inner in jax.vmap, vmap:
        total = inner(jnp.sin, out_axes=None, sum_match=True)
        assert_alike(lambda x, t=total: (t(x), t(x) * x), MATRIX, out_axes=None, sum_match=True)


def test_sums_are_the_transpose_of_broadcasting():
    cotangents = vmap(lambda g: g * 2, out_axes=None, sum_match=True)(VECTOR)
    (transposed,) = jax.linear_transpose(vmap(lambda w: w * 2, None, axis_size=3), 0.0)(VECTOR)
    assert cotangents == transposed == 6


def test_sums_over_an_axis_of_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        x = jax.device_put(MATRIX, PartitionSpec("a"))
        assert_alike(lambda y: (y * 2, y.sum()), x, out_axes=None, sum_match=True)


def test_without_sum_match_such_results_are_an_error_and_so_are_types_without_a_sum():
    for options in {}, {"sum_match": False}:
        theirs, ours = assert_both_raise(
            lambda v, options=options: v(lambda x: x, out_axes=None, **options)(VECTOR)
        )
        assert ours == theirs
    keys = jax.random.split(jax.random.key(0), 3)
    assert_both_raise(lambda v: v(lambda k: k, out_axes=None, sum_match=True)(keys))


@jax.custom_jvp
def constant(x):
    return jnp.float32(1.0)


constant.defjvp(lambda primals, tangents: (constant(*primals), tangents[0] * primals[0]))


@pytest.mark.parametrize("sum_match", [False, True])
def test_unbatched_values_are_not_summed_for_their_derivative(sum_match):
    x = jnp.arange(1.0, 4.0)
    options = {"sum_match": True} if sum_match else {}
    alone = vmap(constant, out_axes=None, **options)(x)
    assert isinstance(alone, jax.Array) and alone == 1.0
    same, mapped = vmap(lambda a: (constant(a), a), out_axes=(None, 0), **options)(x)
    assert same == 1.0 and mapped.shape == (3,)
    np.testing.assert_array_equal(jax.grad(lambda x: vmap(constant)(x).sum())(x), x)
