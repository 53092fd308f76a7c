"""Collectives over the mapped axis, over several axes including it, and over others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import trace
from jaxprtool.passes.mapping.batch import Axis, Batch, BatchUnsupported
from tests.programs.beside import same_derivatives
from tests.programs.mapped import Mapping, flat, ours, prove_mapped, theirs
from tests.share import first_and_proofs

LANES = 4


def lane(*shape):
    return jnp.sin(jnp.arange(1.0, 1 + np.prod(shape))).reshape(shape)


def over(fun, *lanes, in_axes=0, name="i", others=(), derivatives=False):
    """Map a function over its arguments; compare with JAX, which must not be better."""
    program = flat(trace(fun, *lanes, axis_env=[("i", LANES), *others]))
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(lanes)
    mapping = Mapping(axes, (0,) * len(program.out_avals), LANES, name)
    outcome = prove_mapped(program, mapping, lanes)
    assert not outcome.is_worse, f"ours costs {outcome.ours}, JAX's {outcome.theirs}"
    if derivatives:
        reference, _ = theirs(program, mapping)
        same_derivatives(outcome.program, reference, mapping.stack(lanes), 1)
    return outcome


def rotation(x, name):
    return lax.ppermute(x, name, [(i, (i + 1) % LANES) for i in range(LANES)])


ROTATED = np.roll(np.arange(LANES), 1)

#: Each collective, of a value of shape (4, 4) in each batch element.
COLLECTIVES = {
    "psum": lax.psum,
    "pmean": lax.pmean,
    "pmax": lax.pmax,
    "pmin": lax.pmin,
    "all_gather": lax.all_gather,
    "all_gather, last": lambda x, name: lax.all_gather(x, name, axis=2),
    "all_gather, tiled": lambda x, name: lax.all_gather(x, name, axis=1, tiled=True),
    "all_to_all": lambda x, name: lax.all_to_all(x, name, 0, 1),
    "all_to_all, back": lambda x, name: lax.all_to_all(x, name, 1, 0),
    "all_to_all, tiled": lambda x, name: lax.all_to_all(x, name, 1, 0, tiled=True),
    "all_to_all, in place": lambda x, name: lax.all_to_all(x, name, 1, 1, tiled=True),
    "ppermute": rotation,
    "pshuffle": lambda x, name: lax.pshuffle(x, name, [2, 3, 1, 0]),
    "psum_scatter": lax.psum_scatter,
    "psum_scatter, tiled": lambda x, name: lax.psum_scatter(
        x, name, scatter_dimension=1, tiled=True
    ),
    "axis_index": lambda x, name: x * lax.axis_index(name),
    "axis_size": lambda x, name: x * lax.axis_size(name),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_over_the_mapped_axis_is_an_operation_on_it(collective):
    fun = COLLECTIVES[collective]
    for in_axes in (0, 1, 2):
        outcome = over(lambda x: fun(x, "i"), lane(4, 4), in_axes=in_axes)
        assert "'i'" not in str(outcome.program.jaxpr)


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if "all_to_all" not in c])
def test_a_collective_of_unbatched_values_accounts_for_the_axis_size(collective):
    fun = COLLECTIVES[collective]
    over(lambda x, y: (fun(y, "i"), x), lane(4, 4), lane(4, 4), in_axes=(0, None))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_over_another_axis_is_kept(collective):
    fun = COLLECTIVES[collective]
    # JAX 0.12 and earlier mistake the batch dimension of an untiled psum_scatter; see below.
    in_axes = 0 if collective == "psum_scatter" else 1
    outcome = over(lambda x: fun(x, "j"), lane(4, 4), in_axes=in_axes, others=[("j", 4)])
    if collective != "axis_size":
        assert "'j'" in str(outcome.program.jaxpr) or "=j" in str(outcome.program.jaxpr)


@pytest.mark.parametrize("names", [("i", "j"), ("j", "i"), ("i", "k", "j")])
@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax, lax.pmin, lax.pmean])
def test_a_reduction_over_several_axes_keeps_the_others(reduce, names):
    others = [("j", 2), ("k", 3)]
    for in_axes in (0, 1, (1, None)):
        lanes = [lane(4, 3)] * (2 if isinstance(in_axes, tuple) else 1)
        over(lambda x, *y: (x, reduce((*y, x)[0], names)), *lanes, in_axes=in_axes, others=others)


@pytest.mark.proof
def test_two_named_axes_are_mapped_one_after_the_other():
    def fun(x, y):
        both = lax.psum(x, ("i", "j")) + lax.pmax(x, ("j", "i")) + lax.axis_index(("i", "j"))
        return both * lax.psum(x, "i") - lax.pmean(y, "j") + rotation(x, "i")

    def mapped(vmap):
        return vmap(vmap(fun, axis_name="j", in_axes=(1, 0)), axis_name="i", in_axes=(1, None))

    x, y = lane(3, LANES, 2), lane(2, 3)
    got, expected = (jax.jit(mapped(vmap))(x, y) for vmap in (jaxprtool.vmap, jax.vmap))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax, lax.pmin])
def test_batch_elements_are_reduced_along_their_axis(reduce):
    program = Batch(2, None, LANES, "i")(
        trace(lambda x: reduce(x, "i"), lane(4, 4), axis_env=[("i", LANES)])
    )
    (eqn,) = program.jaxpr.eqns
    assert eqn.params["axes"] == (2,)


@pytest.mark.proof
def test_a_reduction_over_the_batch_has_a_derivative():
    program = trace(lambda x: lax.pmax(x, "i"), lane(), axis_env=[("i", LANES)])
    gradient = program.apply(f"batch(0, None, {LANES}, 'i'), grad")
    np.testing.assert_array_equal(gradient(jnp.arange(float(LANES))), jnp.eye(LANES)[-1])


def test_a_permutation_of_batch_elements_is_one_gather():
    outcome = over(lambda x: rotation(x, "i"), lane(3), in_axes=1, derivatives=True)
    assert outcome.program.jaxpr.eqns[0].primitive.name == "gather"
    assert outcome.theirs.equations - outcome.ours.equations >= 5


@pytest.mark.parametrize("in_axes", [0, 1, None])
def test_a_batch_element_that_receives_nothing_has_zeros(in_axes):
    def fun(x):
        return lax.ppermute(x, "i", [(0, 2), (3, 1)])

    program = Batch(in_axes, 0, LANES, "i")(trace(fun, lane(3), axis_env=[("i", LANES)]))
    x = lane(3) if in_axes is None else jnp.stack([lane(3) + k for k in range(LANES)], in_axes)
    lanes = [x if in_axes is None else x.take(k, in_axes) for k in range(LANES)]
    expected = jnp.stack([jnp.zeros(3), lanes[3], lanes[0], jnp.zeros(3)])
    np.testing.assert_array_equal(program(x), expected)


def test_unbatched_parts_are_exchanged():
    def fun(x, y):
        return lax.all_to_all(y, "i", 0, 0, tiled=True) + x

    x, y = jnp.zeros((LANES, 8)), lane(8)
    program = Batch((0, None), 0, LANES, "i")(trace(fun, x[0], y, axis_env=[("i", LANES)]))
    expected = jnp.stack([jnp.tile(y[2 * k : 2 * k + 2], LANES) for k in range(LANES)])
    np.testing.assert_array_equal(program(x, y), expected)


@pytest.mark.parametrize("in_axes", [0, 1, 2])
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_sum_scattered_over_another_axis_loses_its_dimension(in_axes, dimension):
    def fun(x):
        return lax.psum_scatter(x, "j", scatter_dimension=dimension)

    program = Batch(in_axes, 0, LANES)(trace(fun, lane(3, 3), axis_env=[("j", 3)]))
    # axis 0 is "j", axis 1 the batch
    x = jnp.sin(jnp.arange(3.0 * 9 * LANES)).reshape(3, LANES, 3, 3)
    lanes = jnp.moveaxis(x, 1, in_axes + 1)
    got = jax.vmap(jaxprtool.jaxcompat.jaxpr_as_fun(program.jaxpr), axis_name="j")(lanes)[0]
    expected = jnp.moveaxis(x.sum(0), dimension + 1, 0)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("collective", ["psum", "pmax", "all_gather", "psum_scatter", "all_to_all"])
def test_groups_of_batch_elements_are_refused_as_in_jax(collective):
    groups = [[0, 1], [2, 3]]
    calls = {
        "psum": lambda x: lax.psum(x, "i", axis_index_groups=groups),
        "pmax": lambda x: lax.pmax(x, "i", axis_index_groups=groups),
        "all_gather": lambda x: lax.all_gather(x, "i", axis_index_groups=groups),
        "psum_scatter": lambda x: lax.psum_scatter(x, "i", axis_index_groups=groups),
        "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0, axis_index_groups=groups),
    }
    assert over(calls[collective], lane(2, 3)).how == "raises NotImplementedError, as JAX"


def test_groups_of_another_axis_are_kept():
    over(lambda x: lax.psum(x, "j", axis_index_groups=[[0], [1]]), lane(3), others=[("j", 2)])


def test_collectives_that_jax_cannot_batch_are_named_with_their_line():
    program = trace(
        lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]),
        lane(3),
        axis_env=[("i", LANES)],
    )
    with pytest.raises(BatchUnsupported, match=r"psum at .*test_collectives\.py:\d+"):
        Batch(0, 0, LANES, "i")(program)


def test_an_inner_map_with_the_same_axis_name_binds_it():
    def fun(x):
        return jax.vmap(lambda y: lax.psum(y, "i"), axis_name="i")(x) + lax.pmax(x, "i")

    over(fun, lane(3, 2), in_axes=1)


def in_scan(x, y):
    def step(carry, z):
        return lax.psum(carry, "i") * 0.1 + z, rotation(carry, "i")

    return lax.scan(step, y, x)


def in_cond(x, y):
    return lax.cond(x[0, 0] > 0.9, lambda z: lax.psum(z, "i"), lambda z: z + lax.axis_index("i"), y)


def in_while(x, y):
    def step(carry):
        k, z = carry
        return k + 1, lax.pmean(z, "i") + y

    return lax.while_loop(lambda carry: carry[0] < 3, step, (0, x[0]))


def in_remat(x, y):
    return jax.grad(lambda z: jax.checkpoint(lambda v: jnp.sin(lax.psum(v * x[0], "i")))(z).sum())(
        y
    )


@jax.custom_jvp
def summed(x):
    return lax.psum(x, "i")


@summed.defjvp
def _(primals, tangents):
    return summed(*primals), lax.pmean(tangents[0], "i")


BODIES = [in_scan, in_cond, in_while, in_remat, lambda x, y: summed(x[0]) * y]


@pytest.mark.parametrize("fun", first_and_proofs(BODIES), ids=lambda f: f.__name__)
@pytest.mark.parametrize("in_axes", [0, (1, None), (None, 1)])
def test_collectives_in_bodies(fun, in_axes):
    over(
        fun, lane(2, 3), lane(3), in_axes=in_axes, derivatives=in_axes == 0 and fun is not in_while
    )


# --- batch elements sharded over mesh axes --------------------------------------------------------


def constrained(mesh):
    spec = jax.sharding.PartitionSpec("b")
    return lambda x: lax.with_sharding_constraint(
        jnp.sin(x), jax.sharding.NamedSharding(mesh, spec)
    )


@pytest.mark.parametrize("in_axes", [0, 1])
def test_a_constraint_shards_the_batch_dimension(in_axes):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    fun, x = constrained(mesh), lane(4, 4)
    got = Batch(in_axes, in_axes, spmd_axis_name="a", axis_size=4)(trace(fun, lane(4)))
    expected = jax.make_jaxpr(jax.vmap(fun, in_axes, in_axes, spmd_axis_name="a"))(x)
    specs = [
        [e.params["sharding"].spec for e in j.eqns if e.primitive.name == "sharding_constraint"]
        for j in (got.jaxpr, expected)
    ]
    assert specs[0] == specs[1] != []
    np.testing.assert_array_equal(got(x), jax.vmap(fun, in_axes, in_axes)(x))


def test_rules_that_do_not_move_the_batch_dimension_leave_sharded_ones_to_jax():
    program = flat(trace(lambda x, i: lax.dynamic_slice(x, (i,), (2,)), lane(4), jnp.uint32(1)))
    axis = Axis(None, LANES, spmd_name=("a",))
    assert axis.data.spmd_name == ("a",)
    spread = Batch((1, None), 0, LANES, spmd_axis_name="a")(program)
    plain = ours(program, Mapping((1, None), (0,), LANES))
    assert len(spread.jaxpr.eqns) > len(plain.jaxpr.eqns)
    args = lane(4, LANES), jnp.uint32(1)
    np.testing.assert_array_equal(spread(*args)[0], plain(*args)[0])
