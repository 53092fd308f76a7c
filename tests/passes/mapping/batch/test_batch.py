"""The pass `batch`: its arguments, its result, and its errors."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching

import jaxprtool
from jaxprtool import jaxcompat, trace
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program, type_check
from jaxprtool.passes import Pipeline
from jaxprtool.passes.mapping.batch import Batch, BatchUnsupported, batch_rules


def spec(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def values(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def loss(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]).sum(-1), params["b"]


PARAMS = {"b": values(4), "w": values(3, 4)}


def batched(text: str, fun, *args) -> Program:
    program = trace(fun, *args).apply(text)
    type_check(program)
    return program


def names(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


# --- arguments and result -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [
        "in_axes=(None, 0)",
        "in_axes=(None, -1), out_axes=(0, None)",
        "in_axes=({'b': 0, 'w': None}, 1), out_axes=(-1, 1)",
        "in_axes=({'b': None, 'w': 2}, None), out_axes=(0, None)",
        "in_axes=[0, 0]",
    ],
)
def test_batch_returns_what_vmap_returns(axes):
    options = Pipeline.parse(f"batch({axes}, axis_size=5)").steps[0].transform
    program = batched(f"batch({axes}, axis_size=5)", loss, PARAMS, values(2, 3))
    args = jax.tree.unflatten(program.in_tree, [values(*aval.shape) for aval in program.in_avals])[
        0
    ]
    expected = jax.jit(jax.vmap(loss, options.in_axes, options.out_axes))(*args)
    actual = jax.jit(program)(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)


def test_names_and_trees_are_kept():
    program = batched("batch(axis_size=2)", loss, PARAMS, values(2, 3))
    single = trace(loss, PARAMS, values(2, 3))
    assert program.name == single.name
    assert program.arg_names == single.arg_names
    assert program.in_tree == single.in_tree
    assert program.out_tree == single.out_tree


def test_no_user_code_is_run():
    calls = []

    def counted(x):
        calls.append(x)
        return jnp.sin(x)

    program = trace(counted, values(3))
    Batch(axis_size=4)(program)
    assert len(calls) == 1


def test_a_program_that_was_read_from_a_file(tmp_path):
    program = trace(loss, PARAMS, values(2, 3))
    jaxprtool.write(program, tmp_path / "loss.jaxpr")
    read = jaxprtool.read(tmp_path / "loss.jaxpr")
    text = "batch(in_axes=(None, 0), axis_size=2)"
    assert jaxprtool.equivalent(read.apply(text), program.apply(text))


def test_keyword_arguments_are_mapped_along_their_first_axis():
    def scaled(x, *, scale):
        return x * scale

    program = trace(scaled, values(3), scale=values(3)).apply("batch(in_axes=None, axis_size=2)")
    assert [aval.shape for aval in program.in_avals] == [(3,), (2, 3)]


def test_an_axis_of_size_zero():
    program = batched("batch(axis_size=0)", lambda x: (jnp.sort(x), x.sum()), values(3))
    assert [out.shape for out in program(jnp.zeros((0, 3)))] == [(0, 3), (0,)]


def test_symbolic_shapes_and_sizes():
    n, lanes = jax.export.symbolic_shape("n, lanes")
    program = trace(lambda x: (x * 2).reshape(-1).sum(), jax.ShapeDtypeStruct((n, 3), jnp.float32))
    mapped = Batch(axis_size=lanes)(program)
    type_check(mapped)
    assert mapped.out_avals[0].shape == (lanes,)


@pytest.mark.parametrize("in_axes", [(0, 0), (2, 3), (1, None), (None, 2)])
def test_a_scan_of_symbolic_length(in_axes):
    def f(w, xs):
        return jax.lax.scan(lambda c, x: (c @ w + x, c.T @ x), jnp.zeros((3, 3)), xs)

    (n,) = jax.export.symbolic_shape("n")
    stack = jax.ShapeDtypeStruct((n, 3, 3), jnp.float32)
    mapped = Batch(in_axes, axis_size=4)(trace(f, spec(3, 3), stack))
    type_check(mapped)
    assert mapped.out_avals[1].shape == (4, n, 3, 3)


@pytest.mark.proof
def test_a_named_axis_is_bound():
    def centred(x):
        return x - jax.lax.pmean(x, "i") + jax.lax.axis_index("i")

    program = trace(centred, values(3), axis_env=[("i", 4)])
    mapped = Batch(axis_size=4, axis_name="i")(program)
    type_check(mapped)
    assert mapped.axis_env == ()
    x = values(4, 3)
    expected = jax.vmap(centred, axis_name="i")(x)
    np.testing.assert_allclose(mapped(x), expected, rtol=1e-6)


def test_other_named_axes_stay_free():
    program = trace(lambda x: jax.lax.psum(x, "j"), values(3), axis_env=[("j", 2)])
    assert Batch(axis_size=4)(program).axis_env == (("j", 2),)


# --- what is unchanged ----------------------------------------------------------------------------


def test_equations_of_unmapped_values_are_the_same_objects():
    program = trace(lambda w, x: jnp.sin(w) * 2 + x, values(3), values(3))
    mapped = Batch(in_axes=(None, 0), axis_size=2)(program)
    assert mapped.jaxpr.eqns[0] is program.jaxpr.eqns[0]
    assert mapped.jaxpr.eqns[1] is program.jaxpr.eqns[1]


def test_equations_keep_their_lines_under_the_scope_vmap():
    def scoped(x):
        with jax.named_scope("layer"):
            return jnp.sin(x)

    program = trace(scoped, values(3))
    (eqn,) = Batch(axis_size=2)(program).jaxpr.eqns
    assert jaxcompat.user_frame(eqn) == jaxcompat.user_frame(program.jaxpr.eqns[0])
    assert jaxcompat.name_stack(eqn) == "vmap(layer)"


def test_a_body_shared_by_calls_is_batched_once_and_stays_shared():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def net(x, w):
        return layer(layer(layer(x, w), w), w)

    program = Batch(in_axes=(0, None), axis_size=2)(trace(net, values(3), values(3, 3)))
    bodies = {id(jaxcompat.open_jaxpr(eqn.params["jaxpr"])) for eqn in program.jaxpr.eqns}
    assert names(program) == ["jit"] * 3
    assert len(bodies) == 1


def test_parameters_are_plain_numbers():
    program = Batch(axis_size=2)(trace(lambda x: x.sum(1) + x[0], values(3, 3)))
    assert "int64" not in str(program)


@pytest.mark.proof
def test_large_constants_are_not_copied_for_each_batch_element():
    table = values(50, 4)
    program = trace(lambda i: jnp.asarray(table)[i], spec(dtype=jnp.int32))
    mapped = Batch(axis_size=6)(program)
    assert mapped.jaxpr.consts[0] is program.jaxpr.consts[0]
    np.testing.assert_array_equal(mapped(jnp.arange(6)), table[:6])


def test_two_axes_in_either_order_are_the_same_program():
    program = trace(lambda x, w: jnp.tanh(x * 2) @ w, values(3), values(3))
    one = program.apply(
        "batch(in_axes=(0, None), axis_size=4), batch(in_axes=(1, None), out_axes=1, axis_size=5)"
    )
    other = program.apply(
        "batch(in_axes=(0, None), axis_size=5), batch(in_axes=(0, None), axis_size=4)"
    )
    x, w = values(4, 5, 3), values(3)
    np.testing.assert_allclose(one(x, w), other(x, w), rtol=1e-6)
    assert jaxprtool.equivalent(one, other)


def test_equal_options_of_different_sign_are_distinguished():
    def beyond(zero):
        return lambda x: x.at[7].get(mode="fill", fill_value=zero)

    programs = [Batch(axis_size=1)(trace(beyond(zero), values(3))) for zero in (0.0, -0.0)]
    fills = [e.params["fill_value"] for p in programs for e in p.jaxpr.eqns if e.params.get("mode")]
    assert list(map(repr, fills)) == ["0.0", "-0.0"]


@pytest.mark.parametrize(
    "one, other",
    [
        (2, 2.0),
        (True, 1),
        (0.0, -0.0),
        ((1, 2), (True, 2)),
        (((1,),), ((1.0,),)),
        ((0.0,), (-0.0,)),
    ],
)
def test_equal_parameters_of_different_types_keep_their_types(one, other):
    scaled_by = Primitive("scaled_by")
    scaled_by.def_abstract_eval(lambda x, factor: x)
    batching.defvectorized(scaled_by)
    program = trace(lambda x: [scaled_by.bind(x, factor=each) for each in (one, other)], values(3))
    made = [eqn.params["factor"] for eqn in Batch(axis_size=4)(program).jaxpr.eqns]
    assert repr(made) == repr([one, other])


def test_garbage_collection_is_enabled_again_afterwards():
    thresholds = gc.get_threshold()
    program = trace(lambda x: jax.jit(jnp.sin)(x), values(3))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda size: Batch(axis_size=size)(program), range(1, 40)))
    with pytest.raises(JaxprToolError):
        Batch(axis_size=2, axis_name="i")(trace(lambda x: primitive("none").bind(x), values(3)))
    assert gc.get_threshold() == thresholds


# --- rules of other packages ----------------------------------------------------------------------


def primitive(name: str) -> Primitive:
    p = Primitive(name)
    p.def_abstract_eval(lambda aval: aval)
    p.def_impl(lambda x: x + 1)
    return p


def test_a_third_party_rule_in_jaxs_table_is_used():
    p = primitive("theirs")
    batching.primitive_batchers[p] = lambda args, dims: (p.bind(*args), dims[0])
    assert names(batched("batch(axis_size=2)", p.bind, values(3))) == ["theirs"]


def test_a_plug_ins_rule_in_the_open_table_is_used(monkeypatch):
    p = primitive("plugged")

    def rule(axis, primitive, operands, dims, params):
        return primitive.bind(jnp.negative(*operands), **params), dims[0]

    monkeypatch.setitem(batch_rules, "plugged", rule)
    assert names(batched("batch(axis_size=2)", p.bind, values(3))) == ["neg", "plugged"]


def test_a_primitive_without_a_batching_rule_is_refused_by_name_and_line():
    p = primitive("stubborn")
    program = trace(lambda x: p.bind(x), values(3))
    with pytest.raises(BatchUnsupported, match=r"stubborn at .*test_batch\.py:\d+ cannot be batch"):
        Batch(axis_size=2)(program)
    assert names(Batch(in_axes=None, axis_size=2)(program)) == ["stubborn", "broadcast_in_dim"]


def test_a_rule_that_fails_is_named_with_its_equation(monkeypatch):
    def rule(axis, primitive, operands, dims, params):
        raise ValueError("no luck")

    monkeypatch.setitem(batch_rules, "sin", rule)
    jaxprtool.clear_caches()
    with pytest.raises(ValueError, match=r"sin at .*test_batch\.py:\d+ cannot be batched: no luck"):
        Batch(axis_size=2)(trace(lambda x: jnp.sin(x), values(3)))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "axis_size must be specified"),
        ("axis_size=-1", "not negative"),
        ("in_axes=(0,), axis_size=2", r"len\(in_axes\)=1, len\(args\)=2"),
        ("in_axes=3, axis_size=2", "in_axes has 3 for params"),
        ("in_axes='x', axis_size=2", "must be an int, None, or a tuple"),
        ("out_axes=None, axis_size=2", "vmap"),
        ("out_axes=None, axis_name='i', axis_size=2", r"mapped output \(axis_name=i\)"),
        ("out_axes=7, axis_size=2", "out of bounds"),
        ("out_axes=(0, 0, 0), axis_size=2", "out_axes"),
    ],
)
def test_axes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(JaxprToolError, match=message):
        trace(loss, PARAMS, values(2, 3)).apply(f"batch({options})")


# --- derivatives ------------------------------------------------------------------------------


def test_gradients_of_a_batched_program_are_those_of_vmap():
    def f(w, x):
        return jax.nn.logsumexp(jax.nn.relu(x @ w))

    program = Batch(in_axes=(None, 0), axis_size=5)(trace(f, values(3, 4), values(3)))
    w, x = values(3, 4), values(5, 3)
    expected = jax.jit(jax.grad(lambda w: jax.vmap(f, (None, 0))(w, x).sum()))(w)
    got = jax.jit(jax.grad(lambda w: program(w, x).sum()))(w)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_every_equation_of_a_batched_gradient_is_batched():
    program = trace(jax.grad(lambda w, x: jnp.sin(x @ w).sum()), values(3), values(3))
    mapped = Batch(in_axes=(None, 0), axis_size=5)(program)
    assert mapped.out_avals[0].shape == (5, 3)
    assert len(list(equations(jaxcompat.open_jaxpr(mapped.jaxpr)))) <= len(program.jaxpr.eqns) + 1
