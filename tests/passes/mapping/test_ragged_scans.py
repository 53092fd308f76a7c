"""ragged: scans over the rows of examples, which share slots, compared with a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import Ragged
from jaxprtool.ir.equations import equations
from jaxprtool.ir.ragged import unchecked
from jaxprtool.passes.mapping.ragged.rules import _slot_assignment
from tests.passes.mapping.test_ragged import FILLED, LENGTHS, W, examples, ragged, rows
from tests.share import share

START = np.random.default_rng(2).normal(size=4).astype(np.float32)

ALL_LENGTHS = {
    "different": [2, 0, 5, 1, 3],
    "equal": [6, 6, 6, 6],
    "none": [0, 0],
    "one": [1, 1, 1],
    "one example": [9],
    "one long": [70, 1, 2, 0, 1, 3, 1, 2, 1],
}


def recurrent(x, w, start):
    """Two layers, in both directions. Carries are shared, batched, or results."""

    def step(state, row):
        state = jnp.tanh(state @ w + row)
        return state, (state, row.sum())

    last, (states, sums) = lax.scan(step, start, x)
    return lax.scan(step, last + sums.sum(), states, reverse=True)


def counted(x, w, start):
    """Each example has a value of its own, and its length; two are carried, and one is a result."""
    mean = x.sum(0) / (1 + x.shape[0])

    def step(carry, row):
        state, count = carry
        state = jnp.sin(state * mean + row @ w) / (1 + x.shape[0])
        return (state, count + 1), count * state[:2]

    return lax.scan(step, (start, jnp.int32(0)), x)


def unsafe(x, w, start):
    """Return values and derivatives that are NaN if a row is all zeros, as in padding."""

    def step(state, row):
        state = jnp.tanh((state @ w) / jnp.linalg.norm(row) + row / jnp.sqrt(row @ row))
        return state, state

    return lax.scan(step, start, x)


#: The cases in CI, one half on each release. The sweep tries all.
FEW = [(recurrent, "one long"), (counted, "different"), (unsafe, "none"), (unsafe, "one long")]
CASES = [
    pytest.param(fun, kind, marks=() if (fun, kind) in share(FEW) else pytest.mark.sweep)
    for fun in (recurrent, counted, unsafe)
    for kind in ALL_LENGTHS
]


def batched(fun, longest=None):
    """Return the sum of the sines of all results of all examples, without unused rows."""

    def run(values, w, start, lengths):
        batch = unchecked(values, lengths, "n", longest, False)
        outs = jaxprtool.vmap(fun, in_axes=(0, None, None))(batch, w, start)
        real = jnp.arange(len(values)) < lengths.sum()
        total = 0.0
        for out in jax.tree.leaves(outs, is_leaf=lambda out: isinstance(out, Ragged)):
            array = jnp.sin((out.values if isinstance(out, Ragged) else out) * 1.0)
            if isinstance(out, Ragged):
                array = jnp.where(real.reshape(-1, *[1] * (array.ndim - 1)), array, 0)
            total += array.sum()
        return total

    return run


def one_by_one(fun):
    def run(values, w, start, lengths):
        each = [fun(x, w, start) for x in examples(values, lengths)]
        return sum(jnp.sin(out * 1.0).sum() for out in jax.tree.leaves(each))

    return run


@pytest.mark.proof
@pytest.mark.parametrize(("fun", "kind"), CASES)
def test_values_and_derivatives_equal_those_of_a_loop(fun, kind):
    lengths = np.array(ALL_LENGTHS[kind], np.int32)
    x = rows(lengths)
    padded = np.concatenate([x, np.full((4, 4), np.nan, np.float32)])
    gradient = jax.value_and_grad(batched(fun, longest=80), (0, 1, 2))
    value, mine = jax.jit(gradient)(padded, W, START, lengths)
    of_loop = jax.value_and_grad(lambda *args: one_by_one(fun)(*args, lengths), (0, 1, 2))
    expected, theirs = jax.jit(of_loop)(x, W, START)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(mine[0][len(x) :], 0)
    for found, wanted in zip((mine[0][: len(x)], *mine[1:]), theirs, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.proof
def test_other_transformations_of_ragged_scans():
    """Batched, so that no block is skipped; forward derivatives; and without compilation."""
    x = rows(LENGTHS)
    lengths = np.stack([LENGTHS, LENGTHS[::-1]])
    run = batched(recurrent)

    def loop(lengths):
        return jax.jit(lambda *args: one_by_one(recurrent)(*args, lengths))

    found = jax.vmap(run, (None, None, None, 0))(x, W, START, lengths)
    expected = [loop(each)(x, W, START) for each in lengths]
    np.testing.assert_allclose(found, expected, rtol=1e-4)

    args, tangents = (x, W, START), (x * 2, W + 1, START)
    mine = jax.jvp(lambda *args: run(*args, LENGTHS), args, tangents)
    theirs = jax.jvp(loop(LENGTHS), args, tangents)
    np.testing.assert_allclose(mine, theirs, rtol=1e-3)


def widths(program):
    """Return the numbers of slots in the carries of scans."""
    scans = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "scan"]
    return {eqn.outvars[0].aval.shape[0] for eqn in scans}


def test_examples_share_slots():
    def last(x, w):
        return lax.scan(lambda state, row: (jnp.tanh(state @ w + row), None), jnp.ones(4), x)[0]

    program = ragged(last, np.full(12, 2), longest=8)
    assert widths(program) == {4}
    assert widths(program.apply("specialize(N=24)")) == {4}


def test_an_iteration_is_masked_only_at_the_start_of_an_example():
    """A slot without rows repeats a real iteration, which needs no other mask."""
    program = ragged(lambda x, w: recurrent(x, w, START), np.full(12, 2), longest=8)
    scans = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "scan"]
    bodies = [[each.primitive.name for each in equations(eqn.params["jaxpr"])] for eqn in scans]
    innermost = [names for names in bodies if "scan" not in names]
    assert len(innermost) == 2
    for names in innermost:
        assert names.count("select_n") == 1
        assert "stop_gradient" not in names


@pytest.mark.proof
def test_slots_have_nearly_equal_numbers_of_rows():
    """One long example, and as many rows in short ones for each of the other slots."""
    lengths = np.array([1, 2, 1, 12, 1, 1, 4, 1, 1, 2, 6, 4], np.int32)
    assignment = jax.jit(_slot_assignment, static_argnums=1)(lengths, 3)
    rows_of_slots = np.zeros(3, int)
    for lane in np.argsort(assignment.starts, kind="stable"):
        slot = assignment.slots[lane]
        assert assignment.starts[lane] == rows_of_slots[slot]
        rows_of_slots[slot] += lengths[lane]
    assert assignment.iterations == rows_of_slots.max() == 12


@pytest.mark.proof
def test_a_carry_larger_than_a_row_is_stored_once_per_example():
    def outer_sums(x, w):
        def step(total, row):
            return total + jnp.outer(row, jnp.tile(row, 16)), None

        return lax.scan(step, jnp.zeros((4, 64)), x)[0]

    program = ragged(outer_sums, FILLED, longest=8)
    assert widths(program) == {3}
    x = rows(FILLED)
    expected = [outer_sums(each, W) for each in examples(x, FILLED)]
    np.testing.assert_allclose(program(x, W, FILLED), np.stack(expected), rtol=1e-5)
