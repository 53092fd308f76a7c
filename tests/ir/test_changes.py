"""The changes of a rewrite: the equations without a counterpart in the other program."""

import time
from collections import Counter

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.differences import changes
from jaxprtool.ir.equations import equations
from tests.programs import random_programs

x = jnp.arange(6.0)


def names(program, ids):
    top = jaxcompat.open_jaxpr(program.jaxpr)
    return Counter(eqn.primitive.name for eqn in equations(top) if id(eqn) in ids)


def changed(before, after):
    """Return the primitives of removed equations, and of added ones."""
    found = changes(before.jaxpr, after.jaxpr)
    return names(before, found.removed), names(after, found.added)


def traced(fun, *args):
    return jaxprtool.trace(fun, *(args or (x,)))


def loop(times, more=lambda c: c):
    def fun(a):
        return lax.fori_loop(0, times, lambda i, c: more(jnp.sin(c) * 2.0), a)

    return fun


def test_two_traces_of_a_program_have_no_changes():
    def fun(a):
        b, _ = lax.scan(lambda c, row: (c + row, jnp.tanh(c)), a[0], a)
        return jnp.where(b > 0, jax.nn.softmax(b), jax.nn.relu(b)) + jax.nn.relu(a[1])

    first = traced(fun, jnp.ones((3, 4)))
    jax.clear_caches()
    assert changed(first, traced(lambda a: fun(a), jnp.ones((3, 4)))) == (Counter(), Counter())


@pytest.mark.parametrize(
    ("before", "after", "removed", "added"),
    [
        (lambda a: jnp.cos(a + 1), lambda a: jnp.cos(a), {"add": 1}, {}),
        (lambda a: a * 2.0, lambda a: a * 3.0, {"mul": 1}, {"mul": 1}),
        (lambda a: a - a[::-1], lambda a: a[::-1] - a, {"sub": 1}, {"sub": 1}),
        (
            lambda a: jnp.sin(a),
            lambda a: jnp.sin(a + 1) * 2,
            {"sin": 1},
            {"add": 1, "sin": 1, "mul": 1},
        ),
        (lambda a: jnp.sin(a), lambda a: jnp.sin(a[:3]), {"sin": 1}, {"slice": 1, "sin": 1}),
        (lambda a: a.sum(), lambda a: a.max(), {"reduce_sum": 1}, {"reduce_max": 1}),
        (loop(3), loop(3, jnp.cos), {}, {"cos": 1}),
        (
            lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.cos, a),
            lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.tan, a),
            {"cos": 1},
            {"tan": 1},
        ),
    ],
)
def test_different_equations_are_removed_and_added(before, after, removed, added):
    assert changed(traced(before), traced(after)) == (removed, added)


def test_a_loop_with_other_operands_is_a_different_one_with_the_same_body():
    def fun(a, b):
        return lax.scan(lambda c, r: ((c[0] + r, c[1] * 2.0), None), (a[0], b), a)[0][0]

    program = traced(fun, jnp.ones((3, 4)), x)
    removed, added = changed(program, program.apply("dce"))
    assert removed == {"scan": 1, "mul": 1} and added == {"scan": 1}


def test_a_call_with_another_name_is_the_same_call():
    def named(name, more):
        def fun(a):
            return more(jnp.sin(a))

        fun.__name__ = name
        return traced(lambda a: jax.jit(fun)(a) + 1)

    changed_inside = changed(named("f", jnp.cos), named("g", jnp.tan))
    assert changed_inside == ({"cos": 1}, {"tan": 1})


def test_of_several_equal_equations_the_missing_one_is_removed():
    def fun(a):
        b, c, d = a * a[0], a * a[1], a * a[2]
        return b + jnp.sin(d), c

    program, shorter = traced(fun), traced(lambda a: fun(a)[0]).apply("dce")
    result = jaxcompat.open_jaxpr(program.jaxpr).outvars[1]
    (gone,) = [eqn for eqn in program.jaxpr.eqns if eqn.outvars[0] is result]
    assert gone.primitive.name == "mul"
    found = changes(program.jaxpr, shorter.jaxpr)
    assert names(program, found.removed)["mul"] == 1 and id(gone) in found.removed


def test_moved_equations_are_not_changes():
    program = traced(lambda a: (jnp.sin(a), jnp.cos(a)))
    swapped = traced(lambda a: (jnp.cos(a), jnp.sin(a))[::-1])
    assert program.jaxpr.eqns[0].primitive.name != swapped.jaxpr.eqns[0].primitive.name
    assert changed(program, swapped) == (Counter(), Counter())


def test_a_shared_body_is_compared_once():
    # Each function calls the previous one twice: there are 2**n paths.
    def doubled(f):
        return jax.jit(lambda a: f(f(a)))

    def tower(bottom):
        f = bottom
        for _ in range(40):
            f = doubled(f)
        return traced(f)

    before, after = tower(jnp.sin), tower(lambda a: jnp.sin(a) + 1)
    assert changed(before, after) == ({"sin": 1}, {"sin": 1, "add": 2})


@pytest.mark.parametrize("passes", ["batch(axis_size=3)", "dce"])
def test_large_programs_are_compared_in_linear_time(passes):
    def fun(a):
        for _ in range(2000):
            a = jnp.sin(a) * 2.0 + a
        return a.sum()

    program = traced(fun)
    rewritten = program.apply(passes)
    start = time.process_time()
    changes(program.jaxpr, rewritten.jaxpr)
    assert time.process_time() - start < 3  # 0.2 s; a quadratic algorithm takes a minute


@pytest.mark.proof
@hypothesis.seed(0)
@settings(max_examples=10)
@given(random_programs())
def test_random_programs_match_themselves(drawn):
    program = drawn.case().program()
    assert changed(program, program) == (Counter(), Counter())
    jax.clear_caches()
    assert changed(program, drawn.case().program()) == (Counter(), Counter())
    removed, added = changed(program, program.apply("dce"))
    # Equations that dce rebuilds have fewer operands or results, or read those of others.
    assert added <= removed
