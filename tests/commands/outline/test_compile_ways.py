"""Pipelines that shorten compilation: roll and outline, before and after transformations."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import Pipeline
from jaxprtool.commands.outline.compile_time import compile_ways
from jaxprtool.passes.loops.outline import Outline


def loss(w, xs):
    h = jnp.zeros(w.shape[0])
    for t in range(xs.shape[0]):
        h = jnp.tanh(w @ h + xs[t])
    return (h**2).sum()


def ways(fun, text, *shapes):
    """Return the pipelines for a function, the given one first."""
    program = jaxprtool.trace(fun, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    pipeline = Pipeline.parse(text) if text else Pipeline()
    found = compile_ways(program, pipeline, pipeline(program), Outline())
    for way, made in found:
        again = Pipeline.parse(way.pipeline)(program) if way.pipeline else program
        assert jaxprtool.equivalent(made, again)
    return [way.pipeline for way, _ in found]


@pytest.mark.proof
def test_passes_are_tried_before_and_after_transformations():
    shapes = (4, 4), (20, 4)
    first, *others = ways(loss, "grad", *shapes)  # the others take about the same time
    assert first == "grad" and set(others) == {"roll, grad", "grad, roll"}
    assert ways(loss, "", *shapes) == ["", "roll"]
    others = ways(loss, "cse, grad, dce", *shapes)[1:]
    assert set(others) == {"roll, cse, grad, dce", "cse, grad, dce, roll"}
    assert ways(jax.grad(loss), "", *shapes) == ["", "roll"]


def test_a_program_that_compiles_fast_has_no_proposals():
    assert ways(loss, "grad", (4, 4), (4, 4)) == ["grad"]


@pytest.mark.proof
def test_equal_layers_have_no_proposals():
    def layers(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    assert ways(lambda w, x: layers([w] * 40, x), "grad", (4, 4), (4, 4)) == ["grad"]
