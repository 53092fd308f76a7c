"""Programs that take, return and contain elements of another package's dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import equivalent, errors, jit, to_python, trace, unzip, verify, write
from jaxprtool.execute.running.arrays import summarize
from jaxprtool.ir.equivalence import jaxpr_structure
from jaxprtool.ir.evaluation import FiniteCheck, evaluate
from jaxprtool.sizes.buckets import converted_arguments
from tests.programs.extended import (
    PairArray,
    captured,
    held_variable,
    masked,
    pair_p,
    paired,
    unpair_p,
)

X = jnp.arange(3.0)
PAIRS = PairArray(jnp.arange(6.0).reshape(3, 2))


def numbers(value):
    return np.asarray(unpair_p.bind(value))


def rounds(pairs):
    """Stack pairs in a loop, iterate over a stack of them, and stack none."""
    _, stacked = jax.lax.scan(lambda carry, p: (carry, p), 0, pairs)
    _, none = jax.lax.scan(lambda carry, _: (carry, stacked), 0, None, length=0)
    return stacked, none


@pytest.fixture(scope="module")
def program():
    return trace(captured, PAIRS)


def test_programs_of_pairs_run(program):
    flipped, sums = program(PAIRS)
    np.testing.assert_array_equal(numbers(flipped), numbers(PAIRS)[::-1])
    np.testing.assert_array_equal(sums, 2 * numbers(PAIRS))
    np.testing.assert_array_equal(numbers(jit(captured, passes="-O2")(PAIRS)[0]), numbers(flipped))


def test_stepwise_evaluation_stacks_and_unstacks_pairs():
    closed = jax.make_jaxpr(rounds)(PAIRS)
    stacked, none = evaluate(closed, [PAIRS])
    np.testing.assert_array_equal(numbers(stacked), numbers(PAIRS))
    assert none.shape == (0, 3) and none.dtype == PAIRS.dtype


@pytest.mark.parametrize("fun", [captured, rounds])
def test_programs_with_results_of_pairs_are_verified(fun):
    before = trace(fun, PAIRS)
    verify(before, before.apply("-O2"), [PAIRS])


def test_verifying_finds_pairs_that_differ():
    before, after = trace(lambda p: jnp.flip(p), PAIRS), trace(lambda p: jnp.reshape(p, 3), PAIRS)
    with pytest.raises(errors.CheckError, match="differs in 4 of 6 elements"):
        verify(before, after, [PAIRS])


def test_pairs_are_compared_by_their_numbers(program):
    other = program.jaxpr.replace(consts=[PairArray(jnp.ones((3, 2)))])
    same = program.jaxpr.replace(consts=[PairArray(jnp.arange(6.0).reshape(3, 2))])
    assert equivalent(program.jaxpr, same)
    assert not equivalent(program.jaxpr, other)
    assert jaxpr_structure(program.jaxpr) is not jaxpr_structure(other)


def test_results_of_pairs_do_not_prevent_the_check_for_nans():
    program = trace(lambda p: (p, rounds(p), jnp.log(unpair_p.bind(p) - 1)), PAIRS)
    with pytest.raises(FloatingPointError, match="a NaN, from log"):
        check = FiniteCheck(nans=True, infs=False)
        program.require_finite(check, [PAIRS], jax.tree.leaves(program(PAIRS)))


def test_pairs_are_summarized_as_their_numbers():
    np.testing.assert_array_equal(summarize(PAIRS).value, numbers(PAIRS))
    assert summarize(PairArray(jnp.ones((99, 2)))).statistics == {}


def test_pairs_are_accepted_as_arguments(program):
    assert converted_arguments(program, (PAIRS,), {}) == (PAIRS,)
    for other in (np.ones((3, 2), np.float32), PairArray(jnp.ones((4, 2))), 1.0):
        with pytest.raises(errors.ArgumentsError, match=r"the program takes pair\[3\]"):
            converted_arguments(program, (other,), {})


def test_no_random_values_of_a_foreign_dtype_are_drawn(program):
    with pytest.raises(errors.ArgumentsError, match=r"argument 'x' is pair\[3\], for which rand"):
        verify(program, program)


def test_files_and_python_refuse_a_foreign_dtype_in_one_line(program, tmp_path):
    for fun, of in ((captured, PAIRS), (paired, X), (lambda x: pair_p.bind(x), jnp.ones((3, 2)))):
        with pytest.raises(errors.JaxprToolError, match="pair"):
            write(trace(fun, of), tmp_path / "p.jaxpr")
        with pytest.raises(errors.JaxprToolError, match="pair"):
            to_python(trace(fun, of))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "linearize", "checkpoint", "jit"])
def test_transformations_support_pairs_without_tangents(transform):
    program = trace(masked, jnp.ones((3, 2)))
    program.apply(transform)
    np.testing.assert_array_equal(program.apply("grad")(jnp.ones((3, 2))), numbers(PAIRS))


def test_pairs_may_be_variables():
    key = jax.random.key(0)
    init, apply = unzip(held_variable)(key, X)
    np.testing.assert_allclose(apply(init(key), X), jax.jit(held_variable)(key, X), rtol=1e-6)
