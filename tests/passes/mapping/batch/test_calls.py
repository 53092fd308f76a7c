"""Batched jit, eval_jaxpr and remat: shared bodies stay shared and parameters are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.regions import Call, view
from jaxprtool.loading.trace import trace
from jaxprtool.passes.mapping.batch import Batch, BatchUnsupported
from tests.programs.beside import batched, prove

RNG = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, W = array(4), array(4, 4)


def calls_of(program) -> list[Call]:
    return [v for eqn in program.jaxpr.eqns if isinstance(v := view(eqn), Call)]


# --- jit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (1, 2)])
def test_a_jit_is_mapped_over_any_of_its_operands(in_axes):
    called = jax.jit(lambda x, w: (jnp.sin(x) @ w, x * 2, 3.0, w))
    prove(lambda x, w: called(x, w), X, W, in_axes=in_axes, derivatives=in_axes == (0, 0))


def test_a_body_is_batched_once_for_each_pattern_and_stays_shared():
    shared = jax.jit(lambda x, y: jnp.sin(x) * y)

    def five(x, w):
        ones = jnp.ones(4)
        return shared(x, x), shared(x, w[0]), shared(x, ones), shared(x, ones), shared(ones, ones)

    before = [call.eqn.params["jaxpr"] for call in calls_of(trace(five, X, W))]
    bodies = [call.eqn.params["jaxpr"] for call in calls_of(batched(five, X, W))]
    assert bodies[0] is bodies[1] and bodies[2] is bodies[3]
    assert bodies[0] is not bodies[2]
    assert bodies[4] is before[4]


def test_parameters_of_a_jit_are_kept():
    def called(x, unused):
        return jnp.sin(x)

    inner = jax.jit(called, donate_argnums=0, keep_unused=True, inline=False)
    (call,) = calls_of(batched(lambda x, y: inner(x, y), X, X))
    params = call.eqn.params
    assert (params["name"], params["keep_unused"], params["donated_invars"]) == (
        "called",
        True,
        (True, False),
    )


def test_a_nest_is_kept():
    def inner(x):
        return jnp.sin(x) * 2

    def outer(x):
        return jaxprtool.nest(inner, scope="layer")(x)

    theirs = calls_of(trace(outer, X))[0].eqn.params["name"]
    assert [call.eqn.params["name"] for call in calls_of(batched(outer, X))] == [theirs]


def mesh(names: str = "m", shape: tuple[int, ...] = (4,)) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, tuple(names), axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("spmd", [None, "n"])
@pytest.mark.parametrize("in_axes", [0, 1, 2])
def test_shardings_of_a_jit_get_an_entry_for_the_batch_axis(in_axes, spmd):
    devices = mesh("mn", (4, 2))
    spread = NamedSharding(devices, P("m"))
    called = jax.jit(lambda w: w * 2, in_shardings=spread, out_shardings=spread)
    program = trace(lambda w: called(w), W)
    ours = Batch(in_axes, in_axes, 2, spmd_axis_name=spmd)(program)
    mapped = jax.vmap(called, in_axes, in_axes, spmd_axis_name=spmd)
    theirs = jax.make_jaxpr(mapped)(jnp.zeros(np.insert((4, 4), in_axes, 2)))
    for name in ("in_shardings", "out_shardings"):
        got, expected = (eqns[0].params[name] for eqns in (ours.jaxpr.eqns, theirs.eqns))
        assert got == expected
    w = jnp.arange(32.0).reshape(np.insert((4, 4), in_axes, 2))
    np.testing.assert_array_equal(jax.jit(jaxcompat.jaxpr_as_fun(ours.jaxpr))(w)[0], w * 2)


def test_layouts_are_refused():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    laid_out = Format(Layout((1, 0)), sharding)
    called = jax.jit(lambda w: w * 2, out_shardings=laid_out)
    with pytest.raises(BatchUnsupported, match=r"jit at .*Concrete layouts are not supported"):
        batched(lambda w: called(w), W)


@pytest.mark.proof
def test_a_call_of_a_jaxpr():
    closed = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.arange(4.0)))(X)
    prove(lambda x: jax.checkpoint(jaxcompat.jaxpr_as_fun(closed))(x), X)
    prove(lambda x: jax.linearize(jnp.sin, x)[1](x), X)


# --- remat --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (1, 1)])
def test_a_remat_keeps_its_policy_and_is_differentiated_by_it(in_axes):
    def named(x, w):
        return checkpoint_name(jnp.sin(x), "a") @ w + jnp.arange(4.0)

    policy = jax.checkpoint_policies.save_only_these_names("a")
    saved = jax.checkpoint(named, policy=policy, prevent_cse=False)
    outcome = prove(saved, X, W, in_axes=in_axes, derivatives=1 + (in_axes == (0, 0)))
    (call,) = calls_of(outcome.program)
    assert call.eqn.params["policy"] is policy and call.eqn.params["prevent_cse"] is False
    gradient = jax.grad(lambda x, w: saved(x, w).sum(), (0, 1))
    prove(gradient, X, W, in_axes=in_axes, derivatives=0)


def test_a_remat_with_operands_that_are_not_batched():
    apart = jax.checkpoint(lambda x, w: jnp.sin(x) @ w, prevent_cse=(True, False))
    if not isinstance(trace(apart, X, W).jaxpr.eqns[0].params["prevent_cse"], tuple):
        pytest.skip("this JAX has one flag for all operands")
    prove(apart, X, W, in_axes=(0, None))


def test_a_remat_takes_constants_of_its_mapped_body_as_operands():
    def looked_up(x, i):
        return jnp.sin(x)[i]

    prove(jax.checkpoint(looked_up), X, jnp.int32(2))
