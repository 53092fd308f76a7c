"""Loops, branches and calls are rewritten by their edges, also those of plug-ins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.errors import UnsupportedError
from tests.programs.repeat import repeat, repeat_p

SYMBOLIC = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n,3"), np.float32)
X = jnp.arange(15.0).reshape(5, 3) / 7
ROWS = jnp.arange(4.0)


def repeated(x, scale):
    """A loop of a plug-in, with a carry, constants and stacked results of masked length."""

    def body(rows, carry, consts):
        (row,), (state,), (factor, rest) = rows, carry, consts
        state = jnp.tanh(state * factor + row) + rest.sum(0)
        return [state], [state.sum(0), state * 2]

    sums, states, last = repeat(body, [x], [scale, x], [ROWS])
    return sums, states.sum((0, 1)), last.sum(0)


@pytest.mark.parametrize("length", [5, 3])
def test_a_loop_of_a_plug_in_is_masked_by_its_edges(length):
    program = trace(repeated, SYMBOLIC, jnp.float32(0.5)).apply("mask(n=5)")
    padded = np.array(X)
    padded[length:] = np.nan
    got = jax.jit(program)(padded, np.float32(0.5), length)
    want = jax.jit(repeated)(padded[:length], np.float32(0.5))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize("layout", ["None", "'packed'", "'padded'"])
def test_a_loop_of_a_plug_in_runs_for_examples_of_different_length(layout):
    scale = np.float32(0.5)
    passes = f"ragged(axis='n', lanes=3, layout={layout}, longest=3, in_axes=(0, None))"
    program = trace(repeated, SYMBOLIC, scale).apply(passes)
    lengths = np.array([2, 0, 3], np.int32)
    got = jax.jit(program)(X, scale, lengths)
    for lane, (start, stop) in enumerate([(0, 2), (2, 2), (2, 5)]):
        wanted = jax.jit(repeated)(np.asarray(X)[start:stop], scale)
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(mine)[lane], theirs, rtol=1e-5)


@pytest.mark.parametrize("passes", ["mask(n=5)", "ragged(axis='n', lanes=2)"])
def test_a_loop_of_a_plug_in_of_masked_length_is_refused(passes):
    body = jax.make_jaxpr(lambda row, state: [jnp.tanh(state + row)])(X[0], X[0])

    def loop(x):
        return repeat_p.bind(x[0], x, body=body, sizes=(1, 0, 1), times=x.shape[0])

    n = jax.export.symbolic_shape("n", constraints=["n >= 1"])
    program = trace(loop, jax.ShapeDtypeStruct((*n, 3), np.float32))
    with pytest.raises(UnsupportedError, match="no masking rule for 'repeat'"):
        program.apply(passes)


@pytest.mark.parametrize("passes", ["mask(n=5)", "ragged(axis='n', lanes=2)"])
def test_a_body_is_rewritten_once_and_stays_shared(passes):
    shared = jax.jit(lambda x: jnp.sin(x).sum(0))
    program = trace(lambda x: (shared(x), shared(x * 2)), SYMBOLIC).apply(passes)
    first, second = [
        eqn.params["jaxpr"] for eqn in program.jaxpr.eqns if eqn.primitive.name == "jit"
    ]
    assert first is second
