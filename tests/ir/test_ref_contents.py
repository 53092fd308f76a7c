"""A program of Refs runs as one that takes their contents, and returns them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.conversions import all_contents, contents, with_contents
from jaxprtool.ir.program import type_check

X = jnp.arange(1.0, 4.0)


def held(*shape, dtype="float32"):
    """Return the type of a Ref."""
    return jax.ShapeDtypeStruct(shape, dtype, is_ref=True)


def add(r, x):
    r[...] += x
    r[0] *= 2.0
    return r[...].sum()


def test_arguments_and_additional_results_are_the_contents_of_refs():
    traced = jaxprtool.trace(add, held(3), X)
    program = with_contents(traced)
    type_check(program)
    assert program.arg_names == ("r", "x") and program.out_names == ("result", "r[...]")
    assert [str(aval) for aval in program.in_avals] == ["float32[3]", "float32[3]"]
    assert all(any(eqn is each for each in program.jaxpr.eqns) for eqn in traced.jaxpr.eqns)
    ref = jax.new_ref(X)
    expected = add(ref, X)
    for _ in range(2):  # each run has its own Ref
        result, (after,) = program(X, X)
        assert result == expected
        np.testing.assert_array_equal(after, ref[...])


@pytest.mark.proof
def test_refs_in_trees_loops_branches_and_of_keys():
    def function(state, key, x):
        def body(carry, row):
            state["sum"][...] += row
            return carry + state["sum"][0], state["count"][...]

        total, counts = jax.lax.scan(body, 0.0, x)
        jax.lax.cond(total > 0, lambda: state["count"].__setitem__((), 5), lambda: None)
        key[...], new = jax.random.split(key[...])
        return total, counts, jax.random.normal(new)

    def given():
        return {"sum": jax.new_ref(X), "count": jax.new_ref(jnp.int32(0))}, jax.random.key(0)

    state, key = given()
    ref = jax.new_ref(key)
    x = jnp.ones((2, 3))
    traced = jaxprtool.trace(function, state, ref, x)
    expected = function(state, ref, x)
    program = with_contents(traced)
    assert program.out_names[3:] == ("state['count'][...]", "state['sum'][...]", "key[...]")
    results, after = program(jax.tree.map(contents, given()[0]), key, x)
    expected_after = [state["count"][...], state["sum"][...], ref[...]]
    for old, new in zip(
        jax.tree.leaves((expected, expected_after)), [*results, *after], strict=True
    ):
        assert jnp.array_equal(old, new)


def test_closed_over_refs_are_included():
    counter = jax.new_ref(jnp.zeros(()))

    def count(x):
        counter[...] += x
        return counter[...] * 2

    program = with_contents(jaxprtool.trace(count, 1.0))
    assert program.out_names == ("result", "constant[0][...]")
    assert [program(1.0), program(1.0)] == [(2.0, [1.0])] * 2
    assert counter[...] == 0.0


def test_a_freed_ref_has_no_contents_afterwards():
    program = with_contents(jaxprtool.trace(lambda r: jax.freeze(r) * 2, held(3)))
    assert program.out_names == ("result",)
    np.testing.assert_array_equal(program(X)[0], X * 2)


def test_a_program_without_refs_is_the_same_object():
    program = jaxprtool.trace(jnp.sin, X)
    assert with_contents(program) is program


def test_refs_dropped_by_a_pass_keep_their_contents():
    def function(unused, r):
        r[...] += 1.0

    traced = jaxprtool.trace(function, held(2), held(3))
    before = with_contents(traced)
    after = with_contents(traced.apply("dce(drop_inputs=True)"), before)
    type_check(after)
    assert (after.arg_names, after.out_names) == (("r", "unused"), before.out_names)
    np.testing.assert_array_equal(after(X, X[:2])[1][0], X[:2])


def test_contents_are_values_or_types_and_a_ref_cannot_be_passed_twice():
    ref = jax.new_ref(X)
    assert contents(held(3)) == jax.ShapeDtypeStruct((3,), "float32")
    np.testing.assert_array_equal(contents(ref), X)
    assert contents(X) is X
    program = jaxprtool.trace(lambda a, b: a[...] + b[...], held(3), held(3))
    with pytest.raises(ArgumentsError, match="receives one Ref for two arguments"):
        all_contents(program, [ref, ref])
