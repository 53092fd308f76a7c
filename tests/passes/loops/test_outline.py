"""outline turns repeated code into calls, and keeps the results."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.ir.program import Program


def calls(program: Program) -> list[str]:
    """Return the names of the calls at the top of a program, in order."""
    jaxpr = jaxprtool.jaxcompat.open_jaxpr(program.jaxpr)
    return [eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]


def layer(params, x):
    y = x - jnp.mean(x, -1, keepdims=True)
    y = y / jnp.sqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    y = jax.nn.softmax(y @ params["w"] + params["b"])
    return x + jnp.tanh(y @ params["w"])


def stack(layers, x):
    for params in layers:
        x = layer(params, x)
    return jnp.sum(jnp.square(x))


LAYERS = [{"w": np.full((4, 4), 0.1 * i, "f"), "b": np.full(4, 0.2 * i, "f")} for i in range(5)]
X = np.linspace(0, 1, 8, dtype="f").reshape(2, 4)


def test_layers_of_a_loop_are_calls_of_one_body():
    outlined = jaxprtool.trace(stack, LAYERS, X).apply("outline")
    assert calls(outlined) == ["layer"] * 5
    bodies = {id(e.params["jaxpr"]) for e in outlined.jaxpr.eqns if e.primitive.name == "jit"}
    assert len(bodies) == 1


def test_a_scope_of_a_few_equations_does_not_name_a_body():
    def mixer(params, x):
        y = jnp.einsum("bi,ij->bj", x, params["w"])
        return layer(params, x) + jnp.sin(y) * jnp.cos(y) - jnp.exp(-y)

    def stack(layers, x):
        for params in layers:
            x = mixer(params, x)
        return x

    outlined = jaxprtool.trace(stack, LAYERS, X).apply("outline")
    assert calls(outlined) == ["layer"] * 5


@pytest.mark.proof
def test_forward_and_backward_layers_have_bodies_of_their_own():
    program = jaxprtool.trace(jax.value_and_grad(stack), LAYERS, X)
    outlined = program.apply("outline")
    assert calls(outlined).count("layer") >= 4
    assert calls(outlined).count("layer_transpose") >= 4
    jaxprtool.verify(program, outlined, (LAYERS, X))


@pytest.mark.parametrize("name", ["outline", "roll"])
def test_disable_jit_does_not_change_the_result(name):
    program = jaxprtool.trace(stack, LAYERS, X)
    with jax.disable_jit():
        after = program.apply(name)
    assert after is not program
    assert jaxprtool.equivalent(after, program.apply(name))


def test_a_program_without_repetition_is_the_same_object():
    program = jaxprtool.trace(lambda x: jnp.sin(x) + jnp.cos(x), 1.0)
    assert program.apply("outline") is program


def test_repetitions_of_a_short_period_between_longer_copies_are_left_alone():
    ops = jnp.sin, jnp.cos, jnp.tanh, jnp.negative, jnp.abs, jnp.exp
    order = "123244505050123244123244145050"

    def run(x):
        for i in order:
            x = ops[int(i)](x)
        return x

    program = jaxprtool.trace(run, X)
    outlined = program.apply("outline(equations=6)")
    assert calls(outlined) == ["run"] * 3
    assert jaxprtool.equivalent(outlined.apply("inline(force=True)"), program.apply("inline"))


def test_a_donated_value_is_read_before_its_donation():
    consume = jax.jit(lambda a: a * 2.0, donate_argnums=0)

    def updates(state, x):
        for _ in range(3):
            kept = state * 0.9
            x = layer({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, x)
        doubled = consume(state)
        return kept + x, doubled

    program = jaxprtool.trace(updates, X, X)
    outlined = program.apply("outline(equations=8)")
    order = [e.outvars[0] for e in outlined.jaxpr.eqns]
    before = [e.outvars[0] for e in program.apply("inline").jaxpr.eqns]
    assert [v for v in before if v in order] == [v for v in order if v in before]


def test_sown_values_keep_their_order():
    def model(x, y):
        results = []
        for value in (x, y):
            results.append(jaxprtool.sow(value + 1.0, tag="t", name=f"v{len(results)}"))
        for _ in range(3):
            x = layer({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, x)
        return [x + 1.0, *reversed(results)]

    outlined = jaxprtool.trace(model, X, X).apply("outline(equations=8)")
    sown = [e.params["name"] for e in outlined.jaxpr.eqns if e.primitive.name == "sow"]
    assert sown == ["v0", "v1"] and "layer" in calls(outlined)


def test_equations_keep_their_order():
    program = jaxprtool.trace(jax.value_and_grad(stack), LAYERS, X)
    outlined = program.apply("outline(equations=8), inline(force=True)")
    assert jaxprtool.equivalent(outlined, program.apply("inline"))


def test_units_have_no_source_frames():
    """XLA joins those of all units in one table while it compiles them in parallel."""

    def model(key, x):
        for _ in range(3):
            key, used = jax.random.split(key)
            x = layer({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, x) + jax.random.normal(used, (4,))
        return x

    outlined = jaxprtool.jit(model, passes="outline(equations=8)")
    text = outlined.lower(jax.random.key(0), X).as_text(debug_info=True)
    assert "test_outline.py" in text
    name = re.search(r"call @(\w+)\(.*compilation_unit", text)[1]
    body = re.search(rf"func.func private @{name}\(.*?\n  }}", text, re.DOTALL)[0]
    for location in set(re.findall(r"loc\((#loc\d+)\)", body)):
        assert ".py" not in re.search(rf"^{location} = (.*)$", text, re.MULTILINE)[1]


@pytest.mark.proof
def test_transformations_of_an_outlined_function_are_outlined_again():
    """JAX's transformations mark all equations within a call like it, even a loop."""

    def block(params, x):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["w"]), None), x, length=2)
        return layer(params, x)

    def loss(layers, x):
        for params in layers:
            x = block(params, x)
        return jnp.sum(x)

    gradient = jax.grad(jaxprtool.jit(loss, passes="outline(equations=8)"))
    program = jaxprtool.trace(gradient, LAYERS, X)
    jaxprtool.verify(program, program.apply("outline(equations=4)"), (LAYERS, X))
