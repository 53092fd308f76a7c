"""Outlining: what repeats is found and called, and computes what it did."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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


def test_forward_and_backward_layers_have_bodies_of_their_own():
    program = jaxprtool.trace(jax.value_and_grad(stack), LAYERS, X)
    outlined = program.apply("outline")
    assert calls(outlined).count("layer") >= 4
    assert calls(outlined).count("layer_transpose") >= 4
    jaxprtool.verify(program, outlined, (LAYERS, X))


def test_a_program_in_which_nothing_repeats_is_the_same_object():
    program = jaxprtool.trace(lambda x: jnp.sin(x) + jnp.cos(x), 1.0)
    assert program.apply("outline") is program
