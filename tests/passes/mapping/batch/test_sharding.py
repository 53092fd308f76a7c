"""Batched shard_map on eight CPU devices: specs, mesh axes of the batch, values, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxprtool import jaxcompat
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import ShardMap, view
from jaxprtool.loading.trace import trace
from jaxprtool.passes.mapping.batch import Batch, BatchError
from tests.programs.beside import batched, prove

RNG = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def mesh(**axes: int) -> jax.sharding.Mesh:
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


X, W = array(4), array(4, 4)
WAYS = [(0, 0), (0, None), (None, 0), (1, 1), (1, 2)]


def specs_of(program):
    (call,) = [v for eqn in program.jaxpr.eqns if isinstance(v := view(eqn), ShardMap)]
    return call.in_specs, call.out_specs


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("in_axes", WAYS)
def test_a_shard_map_is_mapped_over_any_of_its_operands(in_axes, check_vma):
    def summed(x, w):
        return lax.psum(jnp.sin(x) @ w, "m"), w * 2

    specs = (P("m"), P("m", None)), (P(), P("m", None))
    shared = {"mesh": mesh(m=4), "in_specs": specs[0], "out_specs": specs[1]}
    over = jax.shard_map(summed, check_vma=check_vma, **shared)
    prove(over, X, W, in_axes=in_axes, derivatives=check_vma and in_axes == (0, None))


def test_specs_get_an_entry_for_the_batch_dimension_at_any_position():
    over = jax.shard_map(
        lambda w: w * 2, mesh=mesh(m=4, n=2), in_specs=P("m", "n"), out_specs=P("m", "n")
    )
    expected = [P(None, "m", "n"), P("m", None, "n"), P("m", "n", None)]
    for axis, spec in enumerate(expected):
        assert specs_of(batched(over, W, in_axes=axis)) == ((spec,), (spec,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_batch_may_be_sharded_over_its_own_mesh_axis(check_vma):
    devices = mesh(m=4, n=2)

    def summed(x, w):
        return lax.psum(jnp.sin(x) @ w, "m")

    over = jax.shard_map(
        summed, mesh=devices, in_specs=(P("m"), P("m")), out_specs=P(), check_vma=check_vma
    )
    ours = Batch((0, None), 0, 6, spmd_axis_name="n")(trace(over, X, W))
    type_check(ours)
    mapped = jax.vmap(over, (0, None), spmd_axis_name="n")
    xs = array(6, 4)
    theirs = jax.make_jaxpr(mapped)(xs, W)
    assert specs_of(ours) == tuple(theirs.eqns[0].params[k] for k in ("in_specs", "out_specs"))
    got = jax.jit(jaxcompat.jaxpr_as_fun(ours.jaxpr))(xs, W)[0]
    np.testing.assert_allclose(got, mapped(xs, W), rtol=1e-5)


def test_a_mesh_axis_used_in_a_spec_is_refused_for_the_batch():
    over = jax.shard_map(lambda x: x * 2, mesh=mesh(m=4), in_specs=P("m"), out_specs=P("m"))
    with pytest.raises(BatchError, match="spmd_axis_name cannot appear in shard_map in_specs"):
        Batch(0, 0, 4, spmd_axis_name="m")(trace(over, X))


@pytest.mark.proof
def test_shard_maps_over_some_axes_and_in_one_another():
    devices = mesh(m=4, n=2)

    def partly(x):
        return lax.psum(jnp.sin(x), "m")

    over = jax.shard_map(partly, mesh=devices, in_specs=P("m"), out_specs=P(), axis_names={"m"})
    prove(over, X)

    def outer(w):
        inner = jax.shard_map(
            lambda r: lax.psum(r, "n"), in_specs=P(None, "n"), out_specs=P(), axis_names={"n"}
        )
        return inner(jnp.sin(w))

    nested = jax.shard_map(outer, mesh=devices, in_specs=P("m"), out_specs=P("m"), axis_names={"m"})
    prove(jax.jit(nested), W)
    prove(jax.jit(nested), W, in_axes=2, derivatives=0)


@pytest.mark.proof
def test_custom_rules_in_a_shard_map():
    @jax.custom_vjp
    def tripled(x, y):
        return jnp.sin(x) * y

    tripled.defvjp(lambda x, y: (tripled(x, y), (x, y)), lambda r, g: (g * r[1] * 3, g * r[0]))

    def both(x, w):
        return tripled(x, w[0]), jax.nn.relu(x)

    specs = (P("m"), P("m", None)), (P("m"), P("m"))
    over = jax.shard_map(both, mesh=mesh(m=4), in_specs=specs[0], out_specs=specs[1])
    prove(lambda x, w: over(x, w), X, jnp.ones((4, 1)))


def test_a_pmap():
    prove(lambda w: jax.pmap(lambda r: r - lax.psum(r, "i"), "i")(w), W, derivatives=0)


@pytest.mark.parametrize("in_axes", [0, 1])
def test_slices_at_the_same_place_in_all_parts_of_a_mesh(in_axes):
    def updated(x):
        row = lax.dynamic_slice(x, (1, 0), (1, 4))
        return lax.dynamic_update_slice(x, row, (jnp.int32(0), 0))

    for check_vma in (True, False):
        over = jax.shard_map(
            updated, mesh=mesh(m=2), in_specs=P("m"), out_specs=P("m"), check_vma=check_vma
        )
        prove(over, W, in_axes=in_axes, derivatives=0)
