"""Shardings written as specs become options of `jax.jit`. Invalid ones are refused by place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.meshes import Specs


@pytest.fixture
def mesh():
    auto = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(auto):
        yield auto


def step(params, batch):
    return {"w": params["w"] + batch.sum(), "b": params["b"]}


@pytest.fixture
def program():
    return jaxprtool.trace(
        step, {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, jax.ShapeDtypeStruct((8, 4), "float32")
    )


def placements(options):
    return {each.name: each.placement.spec for each in options}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("P()", {"params['b']": P(), "params['w']": P(), "batch": P()}),
        ("(None, P('x'))", {"batch": P("x")}),
        ("batch=P(('x', 'y'))", {"batch": P(("x", "y"))}),
        (
            "({'w': P(None, 'y'), 'b': None}, P('x'))",
            {"params['w']": P(None, "y"), "batch": P("x")},
        ),
        ("None, PartitionSpec('x', P.UNCONSTRAINED)", {"batch": P("x", P.UNCONSTRAINED)}),
    ],
)
def test_a_prefix_tree_of_specs_places_arguments(mesh, program, text, found):
    placed = Specs(text).applied(program)
    assert placements(placed.jit.arguments) == found
    assert all(each.placement.mesh == mesh for each in placed.jit.arguments)


def test_the_options_are_those_of_jit(mesh, program):
    placed = Specs("(P(), P('x'))", "{'w': P('y'), 'b': P()}").applied(program)
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    out = {"w": NamedSharding(mesh, P("y")), "b": whole}
    jitted = jax.jit(step, in_shardings=(whole, rows), out_shardings=out)
    types = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), program.in_avals)
    own = jaxprtool.trace(jitted, {"b": types[0], "w": types[1]}, types[2])
    assert placements(placed.jit.arguments) == placements(own.jit.arguments)
    assert placements(placed.jit.results) == placements(own.jit.results)
    result = placed({"w": np.ones((4, 4), "f4"), "b": np.ones(4, "f4")}, np.ones((8, 4), "f4"))
    assert result["w"].sharding.spec == P("y") and float(result["w"][0, 0]) == 33


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(P(), P('z'))", "the spec of batch names the axis 'z', but the mesh has x, y"),
        ("(P(), P('x', 'x'))", "the spec of batch names the axis 'x' twice"),
        ("(P(), P('x'), P())", "has 3 specs for 2 traced positional arguments"),
        ("({'w': P()}, P())", "argument 0 has 'b', 'w', but its specs have 'w'"),
        ("({'w': P(), 'b': P('x', 'y')}, P())", "P('x', 'y') has 2 dimensions"),
        ("(P(), (P(), P()))", "argument 1 has no parts"),
        ("data=P()", "no traced argument is named 'data'"),
        ("(P(), 'x')", "expected a PartitionSpec in --in-specs, not 'x' (column 7)"),
        ("open('x')", "a call is not allowed in --in-specs"),
        ("P(3)", "expected the name of a mesh axis, not 3"),
    ],
)
def test_invalid_specs_are_named(mesh, program, text, message):
    with pytest.raises(ArgumentsError) as error:
        Specs(text).applied(program)
    assert message in error.value.message


def test_indivisible_sizes_are_named(mesh):
    program = jaxprtool.trace(lambda v: v, jnp.ones(7))
    with pytest.raises(ArgumentsError, match=r"v:f32\[7\] into 2 parts, but its size is 7"):
        Specs("P('x')").applied(program)


def test_a_function_keeps_its_own_shardings(mesh):
    jitted = jax.jit(lambda v: v, in_shardings=NamedSharding(mesh, P("x")))
    program = jaxprtool.trace(jitted, jnp.ones(8))
    assert placements(Specs("P('x')").applied(program).jit.arguments) == {"v": P("x")}
    with pytest.raises(UnsupportedError, match="already has a sharding"):
        Specs("P('y')").applied(program)


def test_specs_need_a_mesh_without_explicit_axes(program):
    with pytest.raises(ArgumentsError, match="need a mesh"):
        Specs("P()").applied(program)
    explicit = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit), pytest.raises(ArgumentsError, match="is explicit"):
        Specs("P()").applied(program)


def test_specs_under_any_name_of_the_class_are_parsed_without_running_code(mesh, program):
    made = Specs("{'w': jax.P('x'), 'b': PartitionSpec()}, P()").applied(program)
    assert placements(made.jit.arguments)["params['w']"] == P("x")
    with pytest.raises(ArgumentsError, match="a call is not allowed in --in-specs"):
        Specs("open('x'), P()").applied(program)
