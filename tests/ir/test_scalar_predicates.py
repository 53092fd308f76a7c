"""A loop with a batched predicate becomes the loop that JAX lowers it to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.conversions import with_scalar_predicates
from jaxprtool.ir.equations import equations

X = jnp.arange(4.0)


def doubled(x, most):
    """Double a number until it reaches a limit, which is a constant of both bodies."""
    return jax.lax.while_loop(lambda c: c[0] < most, lambda c: (c[0] * 2 + 1, c[1] + most), (x, x))


def batched(function, *args):
    return jaxprtool.trace(jax.vmap(function), *args)


def loops(program):
    return [
        e for e in equations(jaxcompat.open_jaxpr(program.jaxpr)) if e.primitive.name == "while"
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batched_predicate_becomes_a_scalar(depth):
    function, limits = doubled, X * 10
    args = (X, limits)
    for _ in range(depth - 1):
        function, args = jax.vmap(function), tuple(jnp.stack([a, a + 1]) for a in args)
    program = batched(function, *args)
    scalar = with_scalar_predicates(program)
    jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(scalar.jaxpr))
    for loop in loops(scalar):
        (predicate,) = jaxcompat.close_jaxpr(loop.params["cond_jaxpr"]).outvars
        assert predicate.aval.shape == ()
    for found, wanted in zip(scalar(*args), program(*args), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.proof
def test_keys_and_nested_loops_are_supported():
    def function(key, n):
        def inner(c):
            return jax.lax.while_loop(lambda c: c[1] % 3 != 0, lambda c: (c[0], c[1] + 1), c)

        def body(c):
            key, i = inner(c)
            return jax.random.split(key)[0], i + 1

        return jax.lax.while_loop(lambda c: c[1] < n, body, (key, 0))

    args = jax.random.split(jax.random.key(0), 3), jnp.array([2, 9, 5])
    program = batched(function, *args)
    scalar = with_scalar_predicates(program)
    assert len(loops(scalar)) == 2 and scalar is not program
    found, wanted = scalar(*args), program(*args)
    np.testing.assert_array_equal(*(jax.random.key_data(each[0]) for each in (found, wanted)))
    np.testing.assert_array_equal(found[1], wanted[1])


def test_other_programs_are_the_same_object():
    program = jaxprtool.trace(lambda x: doubled(x, 10.0), 1.0)
    assert with_scalar_predicates(program) is program
