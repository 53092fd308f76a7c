"""Collectives over the mapped axis, and meshes over which the batch is sharded."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxprtool import vmap
from tests.api.functions.vmap.beside import MATRIX, VECTOR, assert_alike, assert_both_raise


@pytest.mark.proof
def test_collectives_over_the_mapped_axis_of_mapped_and_unmapped_values():
    def fun(w, x):
        index = lax.axis_index("i")
        shifted = lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)])
        return index, lax.psum(x, "i"), lax.psum(w, "i"), lax.pmean(x, "i"), shifted

    assert_alike(fun, 2.0, MATRIX, in_axes=(None, 0), axis_name="i")
    assert_alike(lambda x: lax.pmax(x, "i"), MATRIX, axis_name="i", out_axes=None)
    assert_alike(lambda x: lax.all_gather(x, "i"), MATRIX, axis_name="i", around=jax.jit)


def test_results_of_collectives_of_unmapped_values_are_concrete():
    def fun(w, x):
        turned = lax.ppermute(w, "i", [(0, 1), (1, 2), (2, 0)])
        return x if lax.psum(w, "i") > 5 else jax.jit(lambda y: lax.pmax(y, "i"))(turned) * x

    for w in 1.0, 2.0:
        assert_alike(fun, w, VECTOR, in_axes=(None, 0), axis_name="i")


def test_custom_derivatives_may_name_the_mapped_axis():
    @jax.custom_jvp
    def total(y):
        return lax.ppermute(y, "i", [(0, 2), (1, 0), (2, 1)]) + lax.axis_index("i")

    total.defjvp(lambda p, t: (total(*p), t[0] * 3))
    around = [lambda f: f, lambda f: jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1))]
    for transformed in around:
        assert_alike(
            lambda w, x: total(w) * total(x),
            2.0,
            VECTOR,
            in_axes=(None, 0),
            axis_name="i",
            around=transformed,
        )


def test_the_size_of_the_mapped_axis_is_known_inside():
    def fun(x):
        return x * (2 if lax.axis_size("i") == 3 else 1) + jax.jit(lambda: lax.psum(1, "i"))()

    assert_alike(fun, VECTOR, axis_name="i")


def test_an_unmapped_axis_is_jaxs_error():
    assert_both_raise(lambda v: v(lambda x: lax.psum(x, "j"), axis_name="i")(VECTOR))


# --- meshes -------------------------------------------------------------------------------------


def mesh(kind):
    return jax.make_mesh((1, 1), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:1])


def test_arrays_on_an_explicit_mesh():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(MATRIX, PartitionSpec("a", "b"))
        spread = jax.device_put(MATRIX, PartitionSpec(None, "b"))
        seen = []
        for v in jax.vmap, vmap:
            v(lambda y: seen.append(jax.typeof(y)) or y)(x)
        assert seen[0] == seen[1]
        assert_alike(lambda y: (y.sum(), y * 2, 3.0), x, out_axes=(0, 1, 0))
        assert_alike(lambda y, w: y @ w, x, jnp.ones(4), in_axes=(0, None))
        for action in (
            lambda v: v(lambda y, z: y)(x, spread),
            lambda v: v(lambda y, z: y, in_axes=(0, None))(x, x),
            lambda v: v(lambda y: y, spmd_axis_name="b")(x),
        ):
            assert_both_raise(action)


def test_a_batch_sharded_over_a_mesh_axis():
    sharding = jax.sharding.NamedSharding(mesh(AxisType.Auto), PartitionSpec("b"))

    def fun(x):
        return lax.with_sharding_constraint(x * 2, sharding)

    def constraint(v, name):
        jaxpr = jax.make_jaxpr(v(fun, spmd_axis_name=name))(MATRIX)
        return next(e.params["sharding"] for e in jaxpr.eqns if "sharding" in e.params)

    assert constraint(vmap, "a") == constraint(jax.vmap, "a")
    assert constraint(vmap, ("a",)).spec[0] == "a"


def test_shard_map_inside_and_outside():
    grid = mesh(AxisType.Auto)
    part = partial(jax.shard_map, mesh=grid, in_specs=PartitionSpec("b"))

    def inside(x, w):
        whole = part(lambda y: y * 2 + lax.axis_index("b"), out_specs=PartitionSpec("b"))
        return whole(x) + whole(w)

    assert_alike(inside, MATRIX, MATRIX[0], in_axes=(0, None), around=jax.jit)

    def outside(mapped):
        return jax.jit(part(mapped, out_specs=PartitionSpec("b")))

    assert_alike(
        lambda x: x * lax.axis_index("i") + lax.axis_index("b"),
        MATRIX,
        axis_name="i",
        around=outside,
    )
