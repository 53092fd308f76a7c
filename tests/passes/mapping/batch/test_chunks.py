"""`chunk=k` returns the same as the whole batch at once, with less memory, or is refused."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxprtool import jaxcompat, trace
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.equations import equations, named
from jaxprtool.ir.program import top_jaxpr, type_check
from jaxprtool.passes.mapping.batch import Batch, BatchError, BatchTypeError, BatchUnsupported
from tests.programs.corpus import prove_corpus
from tests.programs.mapped import flat, mappings, ours, same_programs
from tests.share import first_and_proofs
from tests.sweep.corpora import RandomPrograms
from tests.sweep.parts import Part

RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 4)).astype(np.float32)
XS = RNG.standard_normal((10, 3)).astype(np.float32)
AXIS = [("i", 10)]


def batched(fun, args, in_axes, chunk, size=10, **options):
    """Return the batched program of `fun` for arguments of one batch element, type-checked."""
    program = trace(fun, *lane(args, in_axes), axis_env=options.pop("axis_env", None))
    result = Batch(in_axes, axis_size=size, chunk=chunk, **options)(program)
    type_check(result)
    return result


def lane(args, in_axes):
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    return [
        x if axis is None else jax.tree.map(lambda y, a=axis: jnp.take(y, 0, axis=a), x)
        for x, axis in zip(args, axes, strict=True)
    ]


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = jnp.asarray(a), jnp.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def assert_maps(result, fun, args, in_axes=0, out_axes=0):
    """Assert that a batched program returns the same as `jax.vmap` of the function."""
    assert_same(jax.jit(result)(*args), jax.jit(jax.vmap(fun, in_axes, out_axes))(*args))


def primitives(program):
    return [eqn.primitive.name for eqn in top_jaxpr(program).eqns]


def the_scan(program):
    (scan,) = (eqn for eqn in top_jaxpr(program).eqns if eqn.primitive.name == "scan")
    return scan


def layer(w, x):
    return jnp.tanh(x @ w) * jnp.sin(w).sum()


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 11])
def test_any_chunk_size_returns_the_same_as_the_whole_batch(chunk):
    result = batched(layer, (W, XS), (None, 0), chunk)
    assert_maps(result, layer, (W, XS), (None, 0))
    mapped = jax.jit(lambda w, xs: lax.map(lambda x: layer(w, x), xs, batch_size=chunk))(W, XS)
    assert_same(jax.jit(result)(W, XS), mapped)


@pytest.mark.parametrize("chunk", [3, 5])
@pytest.mark.parametrize("in_axis", first_and_proofs([0, 1, -1]))
@pytest.mark.parametrize("out_axis", [0, 1, -1])
def test_batch_dimensions_are_at_the_given_axes(chunk, in_axis, out_axis):
    xs = RNG.standard_normal((10, 2, 10)).astype(np.float32)
    xs = xs if in_axis == 0 else np.moveaxis(xs[:, :, :5], 0, in_axis)

    def fun(x):
        return jnp.cumsum(x, axis=0) * 2, x

    result = batched(fun, (xs,), in_axis, chunk, out_axes=out_axis)
    assert_maps(result, fun, (xs,), in_axis, out_axis)


@pytest.mark.proof
def test_values_of_all_kinds_are_sliced_and_concatenated():
    keys = jax.random.split(jax.random.key(0), 10)
    args = (keys, np.arange(10, dtype=np.int8), XS > 0, jnp.arange(10.0).astype(jnp.bfloat16))

    def fun(key, i, b, h):
        new, other = jax.random.split(key)
        return {"key": new, "n": jax.random.bits(other, (2,)), "i": i + 1, "b": ~b, "h": h * 2}

    assert_maps(batched(fun, args, 0, 4), fun, args)


def test_types_are_those_of_the_whole_batch():
    def fun(w, x, y):
        return x * 2.0, w * 2.0, y + 1, 3, w

    args = 1.0, XS[0], jnp.float32(2)
    program = trace(fun, *args)
    options = {"in_axes": (0, None, 0), "axis_size": 10}
    whole = Batch(**options)(program)
    assert whole.out_avals == Batch(**options, chunk=4)(program).out_avals
    assert whole.in_avals == Batch(**options, chunk=4)(program).in_avals
    assert any(aval.weak_type for aval in whole.out_avals)


def test_an_unmapped_result_of_a_loop_may_be_a_result():
    def fun(x):
        return lax.fori_loop(0, 3, lambda i, c: (c[0] + 1, c[1] * 2), (0, x))

    xs = jnp.arange(10.0)
    for chunk in (3, 5):
        result = batched(fun, (xs,), 0, chunk, out_axes=(None, 0))
        assert_same(jax.jit(result)(xs), (jnp.int32(3), xs * 8))
        assert_maps(batched(fun, (xs,), 0, chunk), fun, (xs,))


def test_arguments_and_constants_may_be_results():
    table = jnp.arange(4.0)

    def fun(w, x):
        return x, w, table, 1.0, jnp.float32(2) * table, x[0] + table

    result = batched(fun, (W, XS), (None, 0), 4)
    assert_maps(result, fun, (W, XS), (None, 0))


def test_no_mapped_argument_and_an_empty_batch_are_allowed():
    assert_same(batched(layer, (W, XS[0]), None, 4)(W, XS[0]), jnp.stack([layer(W, XS[0])] * 10))
    none = np.zeros((0, 3), np.float32)
    program = trace(layer, W, XS[0])
    result = Batch((None, 0), axis_size=0, chunk=4)(program)
    assert result(W, none).shape == (0, 4)


def test_other_dimensions_may_be_symbolic():
    (n,) = jax.export.symbolic_shape("n")
    program = trace(layer, W, jax.ShapeDtypeStruct((n, 3), "float32"))
    result = Batch((None, 1), axis_size=10, chunk=4)(program)
    type_check(result)
    assert str(result.out_avals[0].shape) == "(10, n, 4)"


# --- where values are computed --------------------------------------------------------------------


def test_a_chunk_of_the_whole_batch_needs_no_scan():
    whole = batched(layer, (W, XS), (None, 0), None)
    assert primitives(batched(layer, (W, XS), (None, 0), 10)) == primitives(whole)


@pytest.mark.proof
def test_unbatched_values_are_computed_once_even_in_jits():
    def deep(w, x):
        return jax.jit(jax.jit(layer))(w, x)

    for fun in (layer, jax.jit(layer), deep):
        result = batched(fun, (W, XS), (None, 0), 5)
        scan = the_scan(result)
        inside = [eqn.primitive.name for eqn in equations(scan.params["jaxpr"])]
        assert "sin" not in inside and "dot_general" in inside
        assert "sin" in [eqn.primitive.name for eqn in equations(top_jaxpr(result))]
        assert_maps(result, fun, (W, XS), (None, 0))


def test_a_jit_with_only_constants_to_compute_once_is_not_split():
    def fun(key):
        return jax.random.normal(key, (3,))

    keys = jax.random.split(jax.random.key(0), 10)
    result = batched(fun, (keys,), 0, 5)
    assert primitives(result).count("jit") == 0


def test_a_jit_called_twice_keeps_one_jaxpr():
    inner = jax.jit(layer)

    def fun(w, x):
        return inner(w, x) + inner(w, 2 * x)

    result = batched(fun, (W, XS), (None, 0), 5)
    once = [eqn for eqn in top_jaxpr(result).eqns if eqn.primitive.name == "jit"]
    calls = [e for e in the_scan(result).params["jaxpr"].eqns if e.primitive.name == "jit"]
    for first, second in (once, calls):
        bodies = [jaxcompat.open_jaxpr(eqn.params["jaxpr"]) for eqn in (first, second)]
        assert bodies[0] is bodies[1]


def test_a_donated_argument_is_available_to_all_chunks():
    result = batched(jax.jit(layer, donate_argnums=0), (W, XS), (None, 0), 5)
    assert_same(result(jnp.array(W), XS), jax.vmap(layer, (None, 0))(W, XS))


def test_a_leading_batch_dimension_is_sliced_without_a_transpose():
    assert "transpose" not in primitives(batched(layer, (W, XS), (None, 0), 5))
    assert primitives(batched(layer, (W, XS.T), (None, 1), 5)).count("transpose") == 1


def test_equations_keep_their_source_lines_and_new_ones_have_none():
    result = batched(layer, (W, XS), (None, 0), 4)
    tanh = [e for e in equations(top_jaxpr(result)) if e.primitive.name == "tanh"]
    assert len(tanh) == 2  # of a chunk, and of the remainder
    line = layer.__code__.co_firstlineno + 1
    assert all(
        named(eqn) == f"tanh at tests/passes/mapping/batch/test_chunks.py:{line}" for eqn in tanh
    )
    assert named(the_scan(result)) == "scan"


@pytest.mark.proof
def test_memory_is_bounded_by_the_chunk():
    weights, xs = jnp.ones((64, 4096)), jnp.ones((256, 64))

    def fun(w, x):
        return jnp.sin(x @ w).sort()[:2]

    def peak(chunk):
        program = batched(fun, (weights, xs), (None, 0), chunk, size=256)
        return jax.jit(program).lower(weights, xs).compile().memory_analysis().temp_size_in_bytes

    assert peak(8) < peak(None) / 8


# --- derivatives --------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize("chunk", [4, 5])
def test_gradients_are_those_of_the_whole_batch(chunk):
    result = batched(jax.jit(layer), (W, XS.T), (None, 1), chunk, out_axes=1)
    whole = jax.vmap(layer, (None, 1), 1)

    def total(fun):
        return lambda w, x: jnp.sin(fun(w, x)).sum()

    got = jax.jit(jax.grad(total(result), (0, 1)))(W, XS.T)
    assert_same(got, jax.jit(jax.grad(total(whole), (0, 1)))(W, XS.T))


@pytest.mark.proof
def test_gradients_of_each_batch_element_in_chunks():
    gradient = jax.grad(lambda w, x: layer(w, x).sum())
    assert_maps(batched(gradient, (W, XS), (None, 0), 4), gradient, (W, XS), (None, 0))


@pytest.mark.proof
def test_a_rule_that_would_sum_over_a_chunk_only_fails():
    @jax.custom_vjp
    def fun(x):
        return x * 2

    fun.defvjp(lambda x: (fun(x), None), lambda _, g: (lax.psum(g, "i"),))
    result = batched(fun, (XS,), 0, 4, axis_name="i", axis_env=AXIS)
    np.testing.assert_allclose(result(XS), XS * 2)
    with pytest.raises(NameError, match="unbound axis name"):
        jax.grad(lambda x: result(x).sum())(XS)


# --- effects ------------------------------------------------------------------------------------


@pytest.mark.proof
def test_effects_happen_as_often_as_for_the_whole_batch():
    seen = []

    def fun(w, x):
        jax.debug.callback(lambda w: seen.append("w"), w)
        jax.debug.callback(lambda x: seen.append("x"), x)
        y = io_callback(lambda x: (seen.append("io"), x)[1], jax.ShapeDtypeStruct((), x.dtype), x)
        io_callback(lambda w: seen.append("ordered"), None, w, ordered=True)
        return y + w

    xs = jnp.arange(10.0)
    result = batched(fun, (1.0, xs), (None, 0), 4)
    assert_same(jax.jit(result)(1.0, xs), xs + 1)
    jax.effects_barrier()
    assert {what: seen.count(what) for what in sorted(set(seen))} == {
        "io": 10,
        "ordered": 1,
        "w": 1,
        "x": 10,
    }


def test_an_ordered_effect_of_each_batch_element_is_refused_with_its_line():
    def fun(x):
        io_callback(lambda x: None, None, x, ordered=True)
        return x

    with pytest.raises(JaxprToolError, match=r"io_callback at .*test_chunks.py:\d+"):
        batched(fun, (XS,), 0, 4)


def counting(seen):
    def step(carry, _):
        jax.debug.callback(seen.append, carry[0])
        return (carry[0] + 1, carry[1] * 2), None

    return step


def test_an_effect_that_would_be_repeated_for_each_chunk_is_refused_with_its_line():
    def fun(x):
        return lax.scan(counting([]), (0, x), None, length=3)[0]

    with pytest.raises(BatchUnsupported, match=r"debug_callback at .*test_chunks.py:\d+"):
        batched(fun, (XS,), 0, 4)


def test_an_effect_in_a_data_dependent_branch_happens_for_each_batch_element():
    seen = []

    def fun(w, x):
        def branch(w):
            jax.debug.callback(seen.append, w)
            return w

        return lax.cond(x[0] > 0, branch, lambda w: w + 1, w)

    jax.jit(batched(fun, (3, XS), (None, 0), 4))(3, XS)
    jax.effects_barrier()
    assert len(seen) == len(XS)


def test_a_batched_effect_in_a_loop_happens_as_often_as_for_the_whole_batch():
    seen = []

    def fun(x):
        return lax.scan(counting(seen), (x, x), None, length=3)[0]

    jax.jit(batched(fun, (XS,), 0, 4))(XS)
    jax.effects_barrier()
    assert len(seen) == 3 * len(XS)


# --- errors ---------------------------------------------------------------------------------------

COLLECTIVES = {
    "psum": lambda x: x - lax.psum(x, "i"),
    "psum over two names": lambda x: x - lax.psum(x, ("i", "j")),
    "axis_index": lambda x: x + lax.axis_index("i"),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1)]),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "pmax in a jit": jax.jit(lambda x: lax.pmax(x, "i")),
    "psum in a scan": lambda x: lax.scan(lambda c, _: (lax.psum(c, "i"), None), x, length=2)[0],
    "psum in a branch": lambda x: lax.cond(x[0] > 0, lambda: lax.psum(x, "i"), lambda: x),
    "ppermute in a loop": lambda x: lax.fori_loop(
        0, 2, lambda _, c: lax.ppermute(c, "i", [(0, 1)]), x
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("chunk", [4, 10])
def test_collectives_over_the_axis_are_refused_with_their_line(name, chunk):
    with pytest.raises(UnsupportedError) as refused:
        batched(COLLECTIVES[name], (XS,), 0, chunk, axis_name="i", axis_env=[*AXIS, ("j", 2)])
    primitive = name.split()[0]
    text = str(refused.value)
    assert (
        text.startswith(f"{primitive} at tests/passes/mapping/batch/test_chunks.py:")
        and "chunk" in text
    )
    assert refused.value.hint == "omit chunk"


def test_collectives_over_other_axes_are_allowed():
    def fun(x):
        return x - lax.pmean(x, "other")

    program = trace(fun, XS[0], axis_env=[("other", 2), ("i", 10)])
    result = Batch(axis_size=10, axis_name="i", chunk=4)(program)
    type_check(result)
    xs = jnp.stack([XS, 2 * XS])
    want = jax.jit(jax.vmap(jax.vmap(fun), axis_name="other"))(xs)
    assert_same(jax.jit(jax.vmap(result, axis_name="other"))(xs), want)


@pytest.mark.proof
def test_each_batch_element_has_its_own_refs():
    def alike(w, x):
        ref = jax.new_ref(w)
        return x + ref[x.astype(int)]

    def own(x):
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return ref[...]

    xs = jnp.arange(10.0) % 3
    args = W[:, 0], xs
    assert_same(
        jax.jit(batched(alike, args, (None, 0), 4))(*args), jax.vmap(alike, (None, 0))(*args)
    )
    assert_same(jax.jit(batched(own, (xs,), 0, 4))(xs), xs + 1)


def test_an_invalid_chunk_is_refused():
    program = trace(layer, W, XS[0])
    for chunk in (0, -3):
        with pytest.raises(BatchError, match=f"at least 1, but got {chunk}"):
            Batch((None, 0), axis_size=10, chunk=chunk)(program)
    for chunk in (2.5, "4", True):
        with pytest.raises(BatchTypeError, match="chunk must be an integer"):
            Batch((None, 0), axis_size=10, chunk=chunk)(program)
    with pytest.raises(BatchError, match="chunk and spmd_axis_name cannot be combined"):
        Batch((None, 0), axis_size=10, chunk=4, spmd_axis_name="data")(program)
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(BatchError, match="chunk needs an axis size that is a number, but it is n"):
        Batch((None, 0), axis_size=n, chunk=4)(program)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7])
def test_small_and_large_batches(size):
    def fun(w, x):
        return (x * w).sum(), x[::-1] + w, w

    w, xs = W[:, 0], RNG.standard_normal((size, 3)).astype(np.float32)
    for chunk in (1, 2, 3, 8):
        options = {"in_axes": (None, 0), "out_axes": (0, 1, None), "axis_size": size}
        program = Batch(**options, chunk=chunk)(trace(fun, w, XS[0]))
        assert_same(jax.jit(program)(w, xs), (xs @ w, (xs[:, ::-1] + w).T, w))
        assert ("scan" in primitives(program)) == (size > chunk)


def test_results_of_a_jit_without_arguments_are_the_same_in_all_chunks():
    def f(x):
        jax.debug.callback(seen.append, jax.jit(lambda x: (jnp.zeros(2), x))(x)[0])
        return x

    seen: list = []
    chunked = Batch(axis_size=5, chunk=1)(trace(f, jnp.ones(3)))
    np.testing.assert_array_equal(chunked(jnp.ones((5, 3))), jnp.ones((5, 3)))
    jax.effects_barrier()
    assert len(seen) == 1


def test_a_ref_made_without_arguments_is_created_for_each_chunk():
    def f(x):
        ref = jax.new_ref(jnp.zeros(()))
        ref[...] += x
        return ref[...]

    chunked = Batch(axis_size=5, chunk=2)(trace(f, 1.0))
    np.testing.assert_array_equal(jax.jit(chunked)(jnp.arange(5.0)), jnp.arange(5.0))


# --- random programs ----------------------------------------------------------------------------


def prove(number, case, chunk=None):
    """Batch a program at random axes: chunks must equal the whole batch, events included."""
    with case.setting():
        program = flat(case.program())
        (drawn,) = mappings(program, random.Random(number), 1)
        mapping = replace(drawn, size=5)
        try:
            whole = ours(program, mapping)
        except JaxprToolError:
            return "refused"
        axes = mapping.in_axes, mapping.out_axes, mapping.size, mapping.axis_name
        try:
            chunked = Batch(*axes, chunk=chunk or 1 + number % 3)(program)
        except BatchUnsupported as error:
            assert "happens once for the whole batch" in str(error)
            return "refused for an effect"
        type_check(chunked)
        same_programs(chunked, whole, mapping.stack(case.arguments()))
        return "same"


@pytest.mark.proof
def test_random_programs_in_chunks_compute_the_same():
    outcomes = prove_corpus(20, lambda number, case: prove(number, case, 1 + number % 3))
    assert outcomes["same"] >= 8


SWEEP = [Part("batch in chunks: random programs", RandomPrograms(2000), prove)]
