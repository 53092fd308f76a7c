"""Primitives that are batched (nearly) by JAX's rule, compared with `jax.vmap`.

Linear algebra, random numbers, callbacks, functions with custom rules, solves, refs and kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap

from jaxprtool import trace
from jaxprtool.passes.mapping.batch import Batch, BatchError, BatchUnsupported
from jaxprtool.primitives import sow, variable
from tests.programs.beside import batched, prove
from tests.programs.recorder import record, recording


def array(*shape):
    return jnp.sin(jnp.arange(1.0, 1 + np.prod(shape))).reshape(shape)


MATRIX = array(3, 3) + 3 * jnp.eye(3)
MATRICES = jnp.stack([MATRIX, MATRIX.T])


def every(fun, *args, ways, **options):
    for in_axes in ways:
        prove(fun, *args, in_axes=in_axes, **options)


# --- linear algebra -----------------------------------------------------------------------------

#: For a stack of positive definite matrices.
DECOMPOSITIONS = {
    "cholesky": lambda a: lax.linalg.cholesky(a, symmetrize_input=False),
    "eigh": lambda a: lax.linalg.eigh(a, symmetrize_input=False),
    "lu": lax.linalg.lu,
    "qr": lax.linalg.qr,
    "svd": lambda a: lax.linalg.svd(a, compute_uv=False),
    "tridiagonal": lax.linalg.tridiagonal,
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions(name):
    every(DECOMPOSITIONS[name], MATRICES @ MATRICES.mT, ways=[1, 3], size=2, derivatives=0)


def solve(left_side, transpose_a, conjugate_a):
    def fun(a, b):
        return lax.linalg.triangular_solve(
            a, b, left_side=left_side, transpose_a=transpose_a, conjugate_a=conjugate_a, lower=True
        )

    return fun


@pytest.mark.parametrize("left_side", [True, False])
@pytest.mark.parametrize("transpose_a", [True, False])
@pytest.mark.parametrize("conjugate_a", [True, False])
def test_triangular_solves_with_one_matrix(left_side, transpose_a, conjugate_a):
    matrix = MATRIX * (1 + 0.5j) + jnp.tril(1j * array(3, 3))
    one, several = ((3, 1), (3, 2)) if left_side else ((1, 3), (2, 3))
    for shape, places in (one, [0]), (several, [0, 1]):
        ways = [(None, place) for place in places]
        side = array(*shape) * (1 - 0.25j)
        every(solve(left_side, transpose_a, conjugate_a), matrix, side, ways=ways, derivatives=0)


def test_triangular_solves_with_a_batched_matrix():
    ways = [(0, None), (1, 1), (0, 2)]
    every(solve(True, True, False), MATRICES, array(2, 3, 2), ways=ways, derivatives=0)
    prove(solve(False, False, False), MATRICES, array(2, 2, 3), in_axes=(1, 1), derivatives=0)


@pytest.mark.proof
def test_solves_of_linear_equations():
    every(jnp.linalg.solve, MATRIX, array(3), ways=[0, (2, None), (None, 1)], derivatives=0)

    def by_functions(a, b):
        def direct(_, b):
            return jnp.linalg.inv(a) @ b, {"norm": b.sum()}

        return lax.custom_linear_solve(lambda x: a @ x, b, direct, direct, has_aux=True)

    prove(by_functions, MATRIX, array(3), in_axes=(None, 1))


def test_root_finding_with_functions():
    def root(b):
        def step(f, _):
            return lax.fori_loop(0, 9, lambda _, x: x - f(x) / (3 * x * x), jnp.ones_like(b))

        return lax.custom_root(lambda x: x**3 - b, b, step, lambda g, y: y / g(1.0))

    prove(root, jnp.float32(2.0))


# --- random numbers -----------------------------------------------------------------------------

DRAWS = {
    "normal": lambda key: jax.random.normal(key, (3,)),
    "split": lambda key: jax.random.split(key, (2, 3)),
    "fold_in": lambda key: jax.random.fold_in(key, 7),
    "bits": lambda key: jax.random.bits(key, (5,), "uint16"),
    "categorical": lambda key: jax.random.categorical(key, array(4)),
    "permutation": lambda key: jax.random.permutation(key, 6),
    "choice": lambda key: jax.random.choice(key, 5, (2,), replace=False),
    "gamma": lambda key: jax.random.gamma(key, 2.0),
    "clone": lambda key: jax.random.normal(jax.random.clone(key)),
    "key data": jax.random.key_data,
}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("draw", DRAWS)
def test_batch_elements_draw_the_same_numbers_as_under_vmap(impl, draw):
    key = jax.random.key(3, impl=impl)
    prove(DRAWS[draw], key, derivatives=0)


@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("draw", ["normal", "split", "bits"])
def test_raw_keys_and_both_counter_layouts(partitionable, draw):
    with jax.threefry_partitionable(partitionable):
        every(DRAWS[draw], jax.random.PRNGKey(5), ways=[0, 1], derivatives=0)


@pytest.mark.proof
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_made_and_used_at_the_mapped_axis(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)

    def wrapped(data):
        return jax.vmap(jax.random.uniform)(jax.random.wrap_key_data(data, impl=impl))

    def used(keys, x, which):
        def step(key, x):
            return jax.random.fold_in(key, 1), jax.random.normal(key) * x

        key, drawn = lax.scan(step, keys[0], x)
        other = lax.cond(which, lambda k: k[1], lambda k: jax.random.split(k[2])[0], keys)
        return jnp.where(which, key, other), jnp.stack([key, other]), drawn

    every(wrapped, jax.random.key_data(keys), ways=[0, 1, 2], derivatives=0)
    ways = [(1, 0, 0), (None, None, 0)]
    every(used, keys, array(3), jnp.bool_(1), ways=ways, derivatives=0)


LAYOUTS = {
    "sliced": lambda keys: lax.dynamic_slice(keys, (1,), (2,)),
    "concatenated": lambda keys: jnp.concatenate([keys, keys[:1]]),
    "updated": lambda keys: keys.at[0].set(keys[1]),
    "reshaped": lambda keys: keys.reshape(3, 1)[:, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rbg_keys_drawn_together_equal_those_arranged_by_jax(layout):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    draw = jax.vmap(jax.random.uniform)
    prove(lambda keys: draw(LAYOUTS[layout](keys)), keys, in_axes=1, derivatives=0)


def test_seeds_and_numbers_folded_in_may_be_mapped():
    def fun(seed, number):
        return jax.random.normal(jax.random.fold_in(jax.random.key(seed), number))

    every(fun, jnp.int32(0), jnp.int32(5), ways=[0, (0, None), (None, 0)], derivatives=0)


def test_generated_bits_may_have_mapped_states():
    state = jnp.arange(4, dtype=jnp.uint32)
    every(lambda s: lax.rng_bit_generator(s, (3,)), state, ways=[0, 1], derivatives=0)


# --- callbacks ----------------------------------------------------------------------------------

VMAP_METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"]


@pytest.mark.parametrize("vmap_method", VMAP_METHODS)
def test_pure_callbacks_follow_their_vmap_method(vmap_method):
    seen = []

    def host(x, y):
        seen.append((np.shape(x), np.shape(y)))
        return np.float32(np.sum(x * y, axis=-1))

    def fun(x, y):
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(host, spec, x, y, vmap_method=vmap_method)

    every(fun, array(3), array(3), ways=[(1, None)], derivatives=0)
    calls = []
    for each in (jax.vmap(fun, (0, None)), Batch((0, None), 0, 2)(trace(fun, array(3), array(3)))):
        seen.clear()
        jax.block_until_ready(each(array(2, 3), array(3)))
        calls.append(list(seen))
    assert calls[0] == calls[1] != []


def test_a_pure_callback_without_a_method_is_refused_as_in_jax():
    def fun(x):
        return jax.pure_callback(np.sin, x, x)

    assert prove(fun, array(3)).how == "raises NotImplementedError, as JAX"
    with pytest.raises(BatchUnsupported, match=r"pure_callback at .*test_other_primitives\.py"):
        batched(fun, array(3))


def io_calls(ordered):
    def fun(x, y):
        def host(x, y):
            record(1, ordered, x + y)
            return np.float32(x + y)

        spec = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.experimental.io_callback(host, spec, x, y, ordered=ordered) * 2

    return fun


def test_an_io_callback_is_called_for_each_batch_element():
    program = batched(io_calls(False), jnp.float32(1), jnp.float32(2), in_axes=(0, None), size=3)
    with recording() as seen:
        (result,) = program(jnp.arange(3.0), jnp.float32(10))
    assert sorted(float(e.value) for e in seen.events) == [10, 11, 12]
    np.testing.assert_array_equal(result, [20, 22, 24])


def test_an_unmapped_io_callback_is_called_once():
    def fun(x, y):
        return io_calls(False)(y, y) + x

    program = batched(fun, jnp.float32(1), jnp.float32(2), in_axes=(0, None), size=3)
    with recording() as seen:
        program(jnp.arange(3.0), jnp.float32(10))
    assert [float(e.value) for e in seen.events] == [20]


def test_ordered_io_callbacks_are_refused_as_in_jax():
    outcome = prove(io_calls(True), jnp.float32(1), jnp.float32(2), in_axes=(0, None))
    assert outcome.how == "raises ValueError, as JAX"
    with pytest.raises(BatchError, match="ordered IO callback"):
        batched(io_calls(True), jnp.float32(1), jnp.float32(2))


@pytest.mark.parametrize("ordered", [True, False])
def test_debug_callbacks_receive_batch_elements_in_order(ordered):
    def fun(x, y):
        jax.debug.callback(lambda v: record(1, ordered, v), x * 2, ordered=ordered)
        jax.debug.print("{} {}", x, y, ordered=ordered)
        jax.debug.callback(lambda v: record(2, ordered, v), y, ordered=ordered)
        return x + y

    program = batched(fun, jnp.float32(0), jnp.float32(0), in_axes=(0, None), size=3)
    runs = []
    for each in (program, jax.vmap(fun, (0, None))):
        with recording() as seen:
            jax.block_until_ready(each(jnp.arange(3.0), jnp.float32(7)))
        runs.append(([(e.tag, float(e.value)) for e in seen.events], seen.printed.getvalue()))
    expected = [(1, 0.0), (1, 2.0), (1, 4.0), (2, 7.0)]
    for events, printed in runs:
        assert (events if ordered else sorted(events)) == expected
        lines = printed.splitlines()
        assert (lines if ordered else sorted(lines)) == ["0.0 7.0", "1.0 7.0", "2.0 7.0"]


# --- functions with a rule of their own -----------------------------------------------------------


@custom_vmap
def scaled(x, y):
    return jnp.sin(x) * y, y


@scaled.def_vmap
def _(axis_size, in_batched, x, y):
    x_batched, y_batched = in_batched
    if not x_batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    # Differs from the function, to show which of the two was used.
    return (jnp.cos(x) * y, y), (True, y_batched)


@pytest.mark.parametrize("in_axes", [0, (1, None), (None, 0)])
def test_the_rule_of_a_custom_vmap_function_is_used(in_axes):
    outcome = prove(scaled, array(3), array(3), in_axes=in_axes, derivatives=0)
    assert "cos" in str(outcome.program.jaxpr) and "sin" not in str(outcome.program.jaxpr)


def test_a_custom_vmap_function_may_leave_a_result_unmapped():
    program = Batch((0, None), (0, None), 2)(trace(scaled, array(3), array(3)))
    assert program.out_avals[1].shape == (3,)


def test_custom_vmap_functions_in_bodies_and_under_two_maps():
    def fun(x, y):
        def step(carry, x):
            return scaled(carry, x)[0], jax.jit(scaled)(x, y[0])[0]

        under_two = jax.vmap(scaled, (0, None))(x, y[0])[0]
        return lax.scan(step, y, x), under_two

    every(fun, array(2, 3), array(3), ways=[0, (1, None)], derivatives=0)
    prove(lambda x, y: jax.jvp(scaled, (x, y), (y, x)), array(3), array(3), derivatives=0)


def test_a_sequential_vmap_function_runs_one_batch_element_after_another():
    @sequential_vmap
    def fun(x):
        return jnp.sin(x).sum()

    outcome = prove(fun, array(3), in_axes=1)
    assert "scan" in str(outcome.program.jaxpr)


def test_a_rule_that_returns_another_tree_is_refused_as_in_jax():
    @custom_vmap
    def fun(x):
        return x

    @fun.def_vmap
    def _(axis_size, in_batched, x):
        return (x, x), (True, True)

    assert prove(fun, array(3)).how == "raises ValueError, as JAX"


# --- identities, refs and kernels -----------------------------------------------------------------


def test_identity_primitives_leave_unmapped_values_unmapped():
    def barrier(x, y):
        return lax.optimization_barrier((x, y))

    every(barrier, array(3), array(3), ways=[0, (1, None)])
    program = Batch((0, None), (0, None), 2)(trace(barrier, array(3), array(3)))
    assert program.out_avals[1].shape == (3,)


@pytest.mark.parametrize("in_axes", [0, (1, None), (None, 0)])
def test_sown_values_are_mapped_at_axis_zero(in_axes):
    def fun(x, y):
        a, b = sow((x * 2, y), tag="seen", name="both")
        return variable(a + b, name="sum")

    prove(fun, array(3), array(3), in_axes=in_axes)


def ref_read_and_written(x, i):
    ref = jax.new_ref(x)
    ref[i] += 1.0
    ref[...] = ref[...] * 2
    return ref[i], jax.freeze(ref)


def ref_of_an_unmapped_value(x, i):
    ref = jax.new_ref(jnp.zeros(3))
    ref[0] = x[1]
    return ref[...], ref[i]


def ref_in_a_loop(x, i):
    ref = jax.new_ref(jnp.zeros(()))

    def step(carry, v):
        ref[...] += v
        return carry, ref[...]

    return lax.scan(step, 0.0, x), ref[...] + i


REFS = [ref_read_and_written, ref_of_an_unmapped_value, ref_in_a_loop]


@pytest.mark.parametrize("fun", REFS, ids=lambda f: f.__name__)
def test_refs_created_by_a_function_hold_the_whole_batch(fun):
    ways = [(0, 0), (1, None), (None, 0)]
    every(fun, array(3), jnp.int32(1), ways=ways, derivatives=0)


def test_kernels():
    from jax.experimental import pallas as pl

    def kernel(x, y, out):
        out[...] = x[...] * 2 + y[...] + pl.program_id(0)

    def fun(x, y):
        block = pl.BlockSpec((4, 8), lambda i: (i, 0))
        call = pl.pallas_call(
            kernel,
            grid=(2,),
            in_specs=[block, block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32),
            interpret=True,
        )
        return call(jnp.sin(x), y)

    every(fun, array(8, 8), array(8, 8), ways=[0, (1, None)], derivatives=0)


def test_primitives_without_a_rule_in_jax_are_refused_by_name():
    def fun(x):
        return lax.composite(jnp.sin, name="my.sin")(x)

    assert prove(fun, array(3)).how == "raises NotImplementedError, as JAX"
    with pytest.raises(BatchUnsupported, match=r"composite at .*'composite' not implemented"):
        batched(fun, array(3))
