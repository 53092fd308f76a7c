"""From a value to its definition and its uses, across the boundaries of bodies."""

import jax
import jax.numpy as jnp
from jax import lax

import jaxprtool


def ways(shown, found):
    return [(way.label, shown.text(way.node)) for way in found]


def definitions(shown, start):
    return ways(shown, shown.navigator.definitions(shown.row(start)))


def uses(shown, start):
    return ways(shown, shown.navigator.uses(shown.row(start)))


def test_operands_are_defined_by_equations_and_arguments(model):
    shown = model()
    hidden = "hidden:f32[3] = jit layer x params['w']  … 3 equations"
    assert definitions(shown, "scaled") == [
        ("b", "b:f32[3] = scan hidden  … 2 equations"),
        ("params['scale']", "params['scale']:f32[3]"),
    ]
    assert definitions(shown, "_:f32[3]") == [("hidden", hidden)]
    assert definitions(shown, "result") == [("f", "f:f32[3] = sub scaled hidden")]
    assert definitions(shown, "params['w']") == []


def test_an_argument_of_a_body_is_the_operand_of_the_call(model):
    shown = model()
    assert definitions(shown, "z:f32[3] = mul") == [
        ("h = x", "x:f32[3]"),
        ("w = params['w']", "params['w']:f32[3]"),
    ]


def test_a_carry_comes_from_outside_and_from_the_last_iteration(model):
    shown = model()
    (first, start), (again, body) = definitions(shown, "d:f32[3] = sin")
    assert first.endswith("= hidden") and start.startswith("hidden:f32[3] = jit")
    assert again.endswith("from the previous iteration") and "= mul" in body


def test_a_call_leads_to_the_equations_of_its_results(model):
    shown = model()
    assert ("hidden, computed inside", "a:f32[3] = tanh z_1") in definitions(shown, "hidden")


def test_uses_are_readers_also_in_bodies_and_results(model):
    shown = model()
    labels = [text.partition(" = ")[2].split("  ")[0] for _, text in uses(shown, "hidden")]
    assert labels[:2] == ["cos hidden", "scan hidden"]
    assert "sub scaled hidden" in labels and any(label.startswith("sin") for label in labels)
    assert uses(shown, "f:f32[3]") == [("f", "result:f32[3] = f")]
    assert uses(shown, "_:f32[3]") == []
    assert [text for _, text in uses(shown, "params['w']")] == [
        "hidden:f32[3] = jit layer x params['w']  … 3 equations",
        "z:f32[3] = mul h w",
    ]


def test_the_result_of_a_body_is_used_where_the_calls_result_is(model):
    shown = model()
    found = uses(shown, "a:f32[3] = tanh")
    assert found[0][0] == "a, a result" and found[0][1].startswith("hidden:f32[3] = jit")
    assert ("a = hidden", "_:f32[3] = cos hidden") in found


def test_a_shared_body_belongs_to_the_call_it_was_reached_by(model):
    inner = jax.jit(lambda p: jnp.sin(p))
    program = jaxprtool.trace(lambda a, b: inner(a) + inner(b), jnp.ones(3), jnp.ones(3))
    shown = model(program=program)
    for number, name in ((0, "a"), (1, "b")):
        call = shown.outline.leaf(shown.outline.root, number)
        sine = shown.outline.leaf(call, 0)
        ((_, text),) = ways(shown, shown.navigator.definitions(sine))
        assert text == f"{name}:f32[3]"


def test_a_primitive_without_regions_leads_to_its_bodies(model):
    def fun(a):
        return lax.reduce(a, 0.0, lambda p, q: jnp.maximum(p, q) * 2, (0,))

    shown = model(program=jaxprtool.trace(fun, jnp.ones(3)))
    assert all(node.parent is not None for node in shown.outline.rows)
    shown.outline.open_all()
    for node in list(shown.outline.rows):
        shown.navigator.definitions(node)
        shown.navigator.uses(node)


def test_a_slice_has_the_dependencies_of_a_value(model):
    shown = model()
    text = shown.document.slice_text(shown.row("scaled"))
    assert "tanh" in text and "scan" in text and "cos" not in text and "sub" not in text
    assert [line.strip().partition(" = ")[0] for line in text.splitlines()][-1] == "scaled:f32[3]"
