"""closed: which arguments are bound, to what, and what is left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.errors import ArgumentsError, PipelineError
from jaxprtool.ir.program import type_check
from jaxprtool.passes.transforms.calls import Closed

PARAMS = {"w": jnp.full((3, 4), 0.1), "b": jnp.arange(4.0)}
X = jnp.ones((2, 3))


def model(params, x, *, scale=2.0):
    return scale * jnp.tanh(x @ params["w"] + params["b"])


@pytest.fixture
def program():
    return trace(model, PARAMS, X, scale=3.0)


def test_a_number_becomes_a_literal(program):
    closed = program.apply("closed({'scale': 5.0})")
    type_check(closed)
    assert closed.arg_names == ("params['b']", "params['w']", "x")
    assert closed.jaxpr.consts == program.jaxpr.consts
    assert jnp.array_equal(closed(PARAMS, X), model(PARAMS, X, scale=5.0))


def test_a_positional_argument_is_removed_as_by_partial(program):
    closed = program.apply(Closed({0: PARAMS}))
    type_check(closed)
    assert jnp.array_equal(closed(X, scale=2.0), model(PARAMS, X))
    closed = program.apply(Closed({-1: X}))
    assert jnp.array_equal(closed(PARAMS, scale=2.0), model(PARAMS, X))


def test_a_whole_argument_is_bound_by_its_name(program):
    closed = program.apply(Closed({"params": PARAMS, "x": X}))
    assert closed.arg_names == ("scale",)
    assert jnp.array_equal(closed(scale=2.0), model(PARAMS, X))


def test_a_bound_part_of_an_argument_is_none_in_its_place(program):
    closed = program.apply("closed({\"params['b']\": [0, 1, 2, 3]})")
    type_check(closed)
    assert closed.arg_names == ("params['w']", "x", "scale")
    left = {"w": PARAMS["w"], "b": None}
    assert jnp.array_equal(closed(left, X, scale=2.0), model(PARAMS, X))


def test_a_subtree_is_bound_by_its_path():
    tree = {"a": {"u": 1.0, "v": 2.0}, "c": 3.0}
    program = trace(lambda t: t["a"]["u"] + 10 * t["a"]["v"] + 100 * t["c"], tree)
    closed = program.apply("closed({\"t['a']\": {'u': 5.0, 'v': 6.0}})")
    assert closed({"a": {"u": None, "v": None}, "c": 1.0}) == 165.0


def test_a_path_suffix_is_a_name_if_it_is_unique():
    tree = {"a": {"w": 1.0, "b": 2.0}, "c": {"w": 3.0}}
    program = trace(lambda tree: tree["a"]["w"] * tree["a"]["b"] + tree["c"]["w"], tree)
    assert program.apply(Closed({"b": 2.0})).arg_names == ("tree['a']['w']", "tree['c']['w']")
    assert program.apply(Closed({"c": {"w": 3.0}})).arg_names == (
        "tree['a']['b']",
        "tree['a']['w']",
    )
    with pytest.raises(ArgumentsError, match=r"'w' is the end of 2 names: tree\['a'\]"):
        program.apply(Closed({"w": 1.0}))


def test_values_take_the_type_of_the_argument():
    def fun(x, i, flag, z):
        return x * i, flag, z

    program = trace(fun, jnp.bfloat16(1), jnp.int8(1), True, 1j)
    closed = program.apply("closed({0: 3, 1: True, 2: False, 3: 1.5})")
    type_check(closed)
    assert closed.in_avals == []
    x, flag, z = closed()
    assert (x.dtype, x, flag, z) == (jnp.bfloat16, 3, False, 1.5)


def test_weak_types_are_kept():
    program = trace(lambda x, y: x * y, jnp.bfloat16(2), 3.0)
    closed = program.apply("closed({1: 3.0})")
    assert closed.out_avals == program.out_avals
    type_check(closed)


def test_keys_can_be_bound_from_python_only():
    program = trace(lambda key: jax.random.normal(key, (2,)), jax.random.key(0))
    closed = program.apply(Closed({"key": jax.random.key(1)}))
    assert jnp.array_equal(closed(), jax.random.normal(jax.random.key(1), (2,)))
    with pytest.raises(ArgumentsError, match=r"argument key is key<fry>\[\]"):
        program.apply("closed({'key': 1})")


def test_an_argument_that_is_a_result_is_bound():
    closed = trace(lambda x, y: (x, y), 1.0, jnp.ones(2)).apply("closed({0: 4.0, 1: [5.0, 6.0]})")
    type_check(closed)
    assert closed()[0] == 4.0
    assert np.array_equal(closed()[1], [5.0, 6.0])


def test_binding_nothing_returns_the_same_program(program):
    assert program.apply("closed({})") is program


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ("closed({'y': 1})", "no argument 'y'"),
        ("closed({'params': 1})", "params must be a dict, not an array"),
        ("closed({2: 1})", "no positional argument 2"),
        ("closed({1: [1.0, 2.0]})", r"x is f32\[2,3\], but the value has shape \(2,\)"),
        ("closed({1: [[1.0], [2.0, 3.0]]})", "is not an array"),
        ("closed({'scale': 1j})", "which cannot hold 1j"),
        ("closed({'scale': 'x'})", "which cannot hold 'x'"),
        ("closed({True: 1})", "neither the position nor the name"),
        ("closed({'x': [[1, 2, 3], [4, 5, 6]], 1: [[1, 2, 3], [4, 5, 6]]})", "bound twice"),
    ],
)
def test_mistakes_are_reported(program, pipeline, says):
    with pytest.raises(ArgumentsError, match=says):
        program.apply(pipeline)


def test_a_pipeline_must_name_the_arguments_to_bind(program):
    with pytest.raises(PipelineError, match="needs option 'args'"):
        program.apply("closed")
    with pytest.raises(ArgumentsError, match="cannot hold 300"):
        trace(lambda i: i, jnp.int8(1)).apply("closed({0: 300})")
    with pytest.raises(ArgumentsError, match=r"cannot hold 2\.5"):
        trace(lambda i: i, 1).apply("closed({0: 2.5})")
